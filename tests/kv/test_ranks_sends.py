"""One rank of P: what its runner and its engine say may come in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.plan.frames import Area
from xpyd_kv.ranks.sends import RankSends
from xpyd_kv.session import pairs
from xpyd_kv.session.events import SendEnded, SendEvent, SendFlushed
from xpyd_kv.session.outgoing import ReadyArea

KEY = TransferKey(f"{1:032x}", 0)
D0, D1 = Address("127.0.0.2", 21002), Address("127.0.0.2", 21003)
FIRST, SECOND = (ReadyArea(Area(0, 1, at, at + 1), (at,)) for at in range(2))


def flushed(destination: int, areas: int) -> pairs.Flushed:
    return pairs.Flushed(key=KEY, epoch=0, destination=destination, areas=areas)


def ended(destination: int, reason: str) -> pairs.Ended:
    return pairs.Ended(key=KEY, epoch=0, destination=destination, reason=reason)


class Session:
    """A SendSession that notes what it is told."""

    def __init__(self, report: Callable[[SendEvent], None]) -> None:
        self.report, self.said = report, list[Any]()
        self.open_transfers = 0

    def begin(self, request: Any, granted: Any, spill: Any) -> None:
        self.open_transfers = 1
        self.said.append(("begin", request.address, granted.rank, granted.skip_tokens))

    def ready(self, key: TransferKey, epoch: int, areas: Any) -> None:
        self.said.append(("ready", *areas))

    def complete(self, key: TransferKey, epoch: int) -> None:
        self.said.append(("complete",))

    def cancel(self, key: TransferKey, epoch: int, reason: str) -> None:
        self.said.append(("cancel", reason))

    def dial_failed(self, address: Address, reason: str, detail: str = "") -> None:
        self.open_transfers = 0
        self.report(SendEnded(KEY, 0, reason))


class Driver:
    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.reports: list[pairs.FromRank] = []
        self.now = 100.0

        def make(report: Callable[[SendEvent], None]) -> Any:
            self.sessions.append(Session(report))
            return self.sessions[-1]

        self.rank = RankSends(
            make,
            report=self.reports.append,
            tombstone_s=60.0,
            clock=lambda: self.now,
        )

    def send(self, epoch: int = 0) -> None:
        self.rank.do(
            pairs.Send(
                key=KEY, epoch=epoch, tokens=8, skip_tokens=4, mode="put", incarnation="d",
                targets=(pairs.Target(0, D0), pairs.Target(1, D1)),
            )
        )  # fmt: skip


def test_what_stood_before_the_grant_goes_to_every_target_and_so_does_the_rest() -> None:
    driver = Driver()
    driver.rank.ready(KEY, 0, [FIRST])
    driver.send()
    driver.rank.ready(KEY, 0, [SECOND])
    driver.rank.complete(KEY, 0)
    rest = [("ready", FIRST), ("ready", SECOND), ("complete",)]
    assert [s.said for s in driver.sessions] == [
        [("begin", address, rank, 4), *rest] for rank, address in enumerate((D0, D1))
    ]
    driver.sessions[1].report(SendFlushed(KEY, 0, 2))
    driver.sessions[0].report(SendEnded(KEY, 0, ""))
    assert driver.reports == [flushed(1, 2), ended(0, "")]


def test_a_prompt_that_was_computed_before_its_grant_is_complete_at_once() -> None:
    driver = Driver()
    driver.rank.ready(KEY, 0, [FIRST])
    driver.rank.complete(KEY, 0)
    driver.send()
    assert [s.said[-1] for s in driver.sessions] == [("complete",)] * 2


def test_what_a_runner_says_of_a_forgotten_transfer_is_late_and_kept_nowhere() -> None:
    driver = Driver()
    driver.rank.do(pairs.Forget(key=KEY, epoch=0))
    driver.rank.ready(KEY, 0, [FIRST])
    driver.send()
    assert driver.reports == [ended(rank, "cancelled") for rank in (0, 1)]
    assert not driver.sessions
    # Offered anew it is another transfer.
    driver.rank.ready(KEY, 1, [SECOND])
    driver.send(epoch=1)
    assert [s.said[1:] for s in driver.sessions] == [[("ready", SECOND)]] * 2


def test_a_rank_of_d_that_is_not_there_leaves_nothing_behind() -> None:
    driver = Driver()
    driver.send()
    driver.rank.dial_failed(D0, "unreachable")
    assert driver.reports == [ended(0, "unreachable")]
    driver.rank.ready(KEY, 0, [FIRST])
    driver.rank.do(pairs.Cancel(key=KEY, epoch=0, reason="aborted"))
    assert [len(s.said) for s in driver.sessions] == [2, 4]
    # Its session is gone: the next transfer makes another.
    driver.rank.do(pairs.Forget(key=KEY, epoch=0))
    driver.send(epoch=1)
    assert len(driver.sessions) == 3

"""One rank of P: what its runner and its engine say may come in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.plan.frames import Area
from xpyd_kv.ranks.sends import RankSends
from xpyd_kv.session.events import SendEnded, SendEvent, SendFlushed
from xpyd_kv.session.outgoing import ReadyArea
from xpyd_kv.session.pairs import Cancel, Ended, Flushed, Forget, FromRank, Send, Target

KEY = TransferKey(f"{1:032x}", 0)
D0, D1 = Address("127.0.0.2", 21002), Address("127.0.0.2", 21003)
FIRST, SECOND = (ReadyArea(Area(0, 1, at, at + 1), (at,)) for at in range(2))


def flushed(destination: int, areas: int) -> Flushed:
    return Flushed(key=KEY, epoch=0, destination=destination, areas=areas)


def ended(destination: int, reason: str) -> Ended:
    return Ended(key=KEY, epoch=0, destination=destination, reason=reason)


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

    def dial_failed(self, address: Address, reason: str) -> None:
        self.open_transfers = 0
        self.report(SendEnded(KEY, 0, reason))


class Bench:
    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.reports: list[FromRank] = []
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
            Send(
                key=KEY, epoch=epoch, tokens=8, skip_tokens=4, mode="put", incarnation="d",
                targets=(Target(0, D0), Target(1, D1)),
            )
        )  # fmt: skip


def test_what_stood_before_the_grant_goes_to_every_target_and_so_does_the_rest() -> None:
    bench = Bench()
    bench.rank.ready(KEY, 0, [FIRST])
    bench.send()
    bench.rank.ready(KEY, 0, [SECOND])
    bench.rank.complete(KEY, 0)
    rest = [("ready", FIRST), ("ready", SECOND), ("complete",)]
    assert [s.said for s in bench.sessions] == [
        [("begin", address, rank, 4), *rest] for rank, address in enumerate((D0, D1))
    ]
    bench.sessions[1].report(SendFlushed(KEY, 0, 2))
    bench.sessions[0].report(SendEnded(KEY, 0, ""))
    assert bench.reports == [flushed(1, 2), ended(0, "")]


def test_a_prompt_that_was_computed_before_its_grant_is_complete_at_once() -> None:
    bench = Bench()
    bench.rank.ready(KEY, 0, [FIRST])
    bench.rank.complete(KEY, 0)
    bench.send()
    assert [s.said[-1] for s in bench.sessions] == [("complete",)] * 2


def test_what_a_runner_says_of_a_forgotten_transfer_is_late_and_kept_nowhere() -> None:
    bench = Bench()
    bench.rank.do(Forget(key=KEY, epoch=0))
    bench.rank.ready(KEY, 0, [FIRST])
    bench.send()
    assert bench.reports == [ended(rank, "cancelled") for rank in (0, 1)]
    assert not bench.sessions
    # Offered anew it is another transfer.
    bench.rank.ready(KEY, 1, [SECOND])
    bench.send(epoch=1)
    assert [s.said[1:] for s in bench.sessions] == [[("ready", SECOND)]] * 2


def test_a_rank_of_d_that_is_not_there_leaves_nothing_behind() -> None:
    bench = Bench()
    bench.send()
    bench.rank.dial_failed(D0, "unreachable")
    assert bench.reports == [ended(0, "unreachable")]
    bench.rank.ready(KEY, 0, [FIRST])
    bench.rank.do(Cancel(key=KEY, epoch=0, reason="aborted"))
    assert [len(s.said) for s in bench.sessions] == [2, 4]
    # Its session is gone: the next transfer makes another.
    bench.rank.do(Forget(key=KEY, epoch=0))
    bench.send(epoch=1)
    assert len(bench.sessions) == 3

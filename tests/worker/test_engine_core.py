"""The engine's thread: input from others, sleep and wake, failure and stop."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from tests.worker.engine_driver import EngineDriver, make_request
from tests.worker.engine_fakes import BLOCK, FakeExecutor
from tests.worker.transfer_fakes import FakeConsumer
from xpyd_core.request_id import TransferKey
from xpyd_worker.engine.block_manager import BlockManager
from xpyd_worker.engine.core import EngineCore
from xpyd_worker.engine.inbox import Inbox
from xpyd_worker.engine.open_requests import StopRules
from xpyd_worker.engine.request import EngineOutput, ReceiveFrom, SchedulerConfig

WAIT_S = 10.0


class Live:
    """An engine with its thread running."""

    def __init__(self, *, receives: bool = False) -> None:
        limits = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32)
        self.executor = FakeExecutor(64, limits)
        self.pool = BlockManager(64, block_size=BLOCK)
        self.consumer = FakeConsumer(self.pool, self.executor) if receives else None
        self.inbox = Inbox()
        self.threads: set[str] = set()
        self._changed = threading.Condition()
        self._last: dict[str, EngineOutput] = {}
        self.engine = EngineCore(
            self.executor,
            pool=self.pool,
            inbox=self.inbox,
            config=limits,
            rules=StopRules((0,), 200),
            deliver=self._deliver,
            consumer=self.consumer,
        )

    def _deliver(self, outputs: Sequence[EngineOutput]) -> None:
        with self._changed:
            self.threads.add(threading.current_thread().name)
            self._last.update({o.request_id: o for o in outputs if o.finished})
            self._changed.notify_all()

    def last(self, request_id: str) -> EngineOutput:
        """Wait for a request's last output."""
        with self._changed:
            assert self._changed.wait_for(lambda: request_id in self._last, WAIT_S)
            return self._last[request_id]


def test_it_is_an_engine():
    engine = Live().engine
    assert engine.failure is None
    assert engine.is_idle()


def test_requests_from_several_threads_all_end_on_the_engines_thread():
    live = Live()
    live.engine.start()
    names = [f"r{number}" for number in range(12)]
    threads = [
        threading.Thread(target=live.engine.submit, args=(make_request(name, [3, 4, i + 1]),))
        for i, name in enumerate(names)
    ]
    for thread in threads:
        thread.start()
    assert all(not live.last(name).error for name in names)
    for thread in threads:
        thread.join(WAIT_S)
    live.engine.stop(WAIT_S)
    assert live.threads == {"engine"}
    assert live.pool.num_free == 64


def test_kv_that_lands_wakes_the_sleeping_engine():
    live = Live(receives=True)
    assert live.consumer is not None
    key = TransferKey("a" * 32, 0)
    live.consumer.arrive(key, [1, 2, 3], "direct")
    live.engine.start()
    live.engine.submit(make_request("a", [1, 2, 3], transfer=ReceiveFrom(key, wait_s=60.0)))
    live.consumer.land(key)
    live.inbox.wake()
    assert live.last("a").received_tokens == 3
    live.engine.stop(WAIT_S)


def test_stop_gives_every_request_its_last_output():
    live = Live(receives=True)
    live.engine.start()
    key = TransferKey("a" * 32, 0)
    live.engine.submit(make_request("a", [1, 2, 3], n=2, transfer=ReceiveFrom(key, wait_s=60.0)))
    live.engine.stop(WAIT_S)
    assert [c.finish_reason for c in live.last("a").choices] == ["abort", "abort"]
    assert live.engine.failure is None


def test_an_unexpected_error_ends_the_engine_and_every_request():
    live = Live()
    live.executor.fail_with = ZeroDivisionError("a defect")
    live.engine.submit(make_request("a", [1, 2, 3]))
    live.engine.submit(make_request("b", list(range(1, 40))))
    live.engine.start()
    for name in ("a", "b"):
        assert live.last(name).error_kind == "internal"
        assert live.last(name).choices[0].finish_reason == "error"
    live.engine.stop(WAIT_S)
    assert isinstance(live.engine.failure, ZeroDivisionError)
    assert live.pool.num_free == 64


def test_a_request_for_an_engine_that_has_stopped_ends_at_once():
    live = Live()
    live.engine.start()
    live.engine.stop(WAIT_S)
    live.engine.submit(make_request("late", [1, 2]))
    assert live.last("late").error == "the engine has stopped"


def test_a_turn_with_nothing_to_do_says_so_and_a_freed_block_asks_for_another():
    driver = EngineDriver(receives=True)
    assert driver.core.turn() is False
    driver.submit(make_request("a", [1, 2, 3], max_tokens=1))
    assert driver.core.turn() is True
    assert driver.core.turn() is False


def test_an_engine_with_a_request_is_not_idle_from_submit_on():
    driver = EngineDriver()
    driver.submit(make_request("a", [1, 2, 3], max_tokens=2, ignore_eos=True))
    assert not driver.core.is_idle()
    driver.executor.during = lambda step: idle.append(driver.core.is_idle())
    idle: list[bool] = []
    driver.turns(1)
    assert idle == [False]
    assert not driver.core.is_idle()
    assert driver.core.stats().running == 1
    driver.run()
    assert driver.core.is_idle()
    assert driver.core.stats().finished == {"length": 1}
    assert driver.core.stats().blocks_free == driver.core.stats().blocks_total


def _nothing() -> None:
    """An item."""


@pytest.mark.parametrize("wake_first", [True, False])
def test_no_wake_up_is_lost_between_take_and_wait(wake_first: bool):
    inbox = Inbox()
    inbox.take()
    if wake_first:
        inbox.wake()
    else:
        assert inbox.put(_nothing)
    inbox.wait(WAIT_S)
    assert len(inbox.take()) == (0 if wake_first else 1)


def test_a_closed_inbox_takes_nothing():
    inbox = Inbox()
    inbox.put(_nothing)
    assert len(inbox.close()) == 1
    assert not inbox.put(_nothing)


def test_a_wait_ends_by_what_comes_and_not_before():
    inbox = Inbox()
    waiting = threading.Thread(target=inbox.wait, args=(WAIT_S,), daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    inbox.wake()
    waiting.join(WAIT_S / 2)
    assert not waiting.is_alive()

"""Mode put: the engine's thread waits behind a step until D has its KV, and wakes for that."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from tests.worker.engine_driver import make_request, prompt_of
from tests.worker.engine_fakes import BLOCK, FakeExecutor
from tests.worker.transfer_fakes import FakeProducer
from xpyd_worker.engine.block_manager import BlockManager
from xpyd_worker.engine.core import EngineCore
from xpyd_worker.engine.inbox import Inbox
from xpyd_worker.engine.open_requests import StopRules
from xpyd_worker.engine.request import EngineOutput, SchedulerConfig

WAIT_S = 30.0
LATER_S = 600.0


class Holding:
    """An engine whose producer holds every step until `let_go`."""

    def __init__(self) -> None:
        limits = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32)
        executor, pool = FakeExecutor(64, limits), BlockManager(64, block_size=BLOCK)
        self.producer = FakeProducer(pool, executor)
        self.producer.hold = self._held_until
        self.inbox = Inbox()
        self.asked = threading.Semaphore(0)
        self.times_asked = 0
        self.delivered = threading.Semaphore(0)
        self.is_held = True
        self.for_s = LATER_S
        self.engine = EngineCore(
            executor,
            pool=pool,
            inbox=self.inbox,
            config=limits,
            rules=StopRules((0,), 200),
            deliver=self._deliver,
            producer=self.producer,
        )

    def _held_until(self, now: float) -> float | None:
        self.times_asked += 1
        self.asked.release()
        return now + self.for_s if self.is_held else None

    def _deliver(self, outputs: Sequence[EngineOutput]) -> None:
        for _ in outputs:
            self.delivered.release()

    def hold_one(self) -> None:
        """A request whose first step is held."""
        self.engine.start()
        self.engine.submit(make_request("a", prompt_of(5), max_tokens=1))
        assert self.asked.acquire(timeout=WAIT_S)

    def let_go(self) -> None:
        self.is_held = False
        self.inbox.wake()


@pytest.fixture
def holding() -> Iterator[Holding]:
    made = Holding()
    yield made
    made.engine.stop(WAIT_S)


def test_a_held_step_answers_when_it_is_let_go(holding: Holding) -> None:
    holding.hold_one()
    assert not holding.delivered.acquire(timeout=0)
    holding.let_go()
    assert holding.delivered.acquire(timeout=WAIT_S)


def test_what_comes_during_a_hold_is_taken_in_after_it_and_not_before(holding: Holding) -> None:
    holding.hold_one()
    holding.engine.submit(make_request("b", prompt_of(5, 2), max_tokens=1))
    # It asks once more for each wake-up, and does not turn meanwhile.
    assert holding.asked.acquire(timeout=WAIT_S)
    assert holding.times_asked <= 4
    assert not holding.inbox.is_empty
    holding.let_go()
    for _ in range(2):
        assert holding.delivered.acquire(timeout=WAIT_S)


def test_a_hold_ends_at_its_deadline_without_a_wake_up(holding: Holding) -> None:
    holding.for_s = 0.05
    holding.hold_one()
    holding.is_held = False
    assert holding.delivered.acquire(timeout=WAIT_S)


def test_a_stop_ends_a_hold_at_once(holding: Holding) -> None:
    holding.hold_one()
    holding.engine.stop(WAIT_S)
    assert not any(thread.name == "engine" for thread in threading.enumerate())

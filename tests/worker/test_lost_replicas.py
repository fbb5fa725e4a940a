"""Independent replicas that are lost, and come again, or go meanwhile. Over played engines."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.worker.test_replicas import WAIT_S, staged
from xpyd_core.errors import UserError
from xpyd_worker.engine.core import Deliver
from xpyd_worker.engine.executor import LayerExperts
from xpyd_worker.engine.request import EngineStats
from xpyd_worker.load.engine import LoadedEngine
from xpyd_worker.load.replica import pause_s
from xpyd_worker.load.replicas import _beat
from xpyd_worker.ranks.loss import Loss


def test_a_lost_replica_takes_its_own_requests_along_and_comes_back() -> None:
    with staged(2) as stage:
        stage.submit("a", replica=0)
        stage.submit("b", replica=1)
        lost = stage.now(0)
        lost.counted = EngineStats(running=1, forwards=7, finished={"stop": 2})
        lost.loss = Loss("rank 0 was ended by SIGKILL", 11)
        # Before anybody has looked.
        stage.submit("c")
        stage.submit("d", replica=0)
        assert stage.now(1).submitted == ["b", "c"]
        stage.until(lambda: stage.now(0) is not lost and stage.now(0).is_started)
        assert lost.is_closed
        assert stage.outputs == {"a": "replica_lost", "d": "replica_lost"}
        assert (stage.engine.loss, stage.engine.failure) == (None, None)
        stage.submit("e", replica=0)
        assert stage.now(0).submitted == ["e"]
        assert [one.restarts for one in stage.engine.replicas] == [1, 0]
        # Counters do not go down, gauges are of those that are there.
        stats = stage.engine.stats()
        assert (stats.forwards, stats.running, stats.finished) == (7, 0, {"stop": 2})
        # Routers hear of it before it is started again, and then.
        assert stage.changes[0] == (1,)
        stage.until(lambda: stage.changes[-1] == (0, 1))
        first, second = stage.incarnations[0]
        assert first != second
        # The lost one's, the new one's and the other's.
        assert stage.engine.experts_chosen() == [LayerExperts(0, (3, 1))]


def test_a_replica_that_cannot_be_started_is_tried_again_while_the_others_serve() -> None:
    with staged(2) as stage:
        stage.cannot_load = frozenset({0})
        lost = stage.now(0)
        lost.failure = RuntimeError("a step")
        stage.until(lambda: stage.engine.replicas[0].losses == 2)
        assert stage.engine.size == 2, "it comes again"
        stage.submit("a")
        assert stage.now(1).submitted == ["a"]
        stage.cannot_load = frozenset()
        stage.until(lambda: stage.now(0) is not lost)


def test_one_that_is_loaded_and_cannot_listen_is_closed_and_tried_again() -> None:
    with staged(2) as stage:
        stage.cannot_start = frozenset({0})
        lost = stage.now(0)
        lost.failure = RuntimeError("a step")
        stage.until(lambda: stage.engine.replicas[0].losses == 2)
        assert stage.now(0).is_closed
        stage.cannot_start = frozenset()
        stage.until(lambda: stage.now(0).is_started)
        assert lost.kv_s > 0, "else the next one finds its KV port taken"


def test_one_that_was_lost_and_let_go_of_while_it_loads_ends() -> None:
    """Else an engine is loaded that nobody closes."""
    with staged(2) as stage:
        loads, go_on, load = threading.Event(), threading.Event(), stage.engine._load_one

        def held(number: int, deliver: Deliver, incarnation: str) -> LoadedEngine:
            loads.set()
            assert go_on.wait(WAIT_S)
            return load(number, deliver, incarnation)

        stage.engine._load_one = held
        lost = stage.now(1)
        lost.failure = RuntimeError("a step")
        try:
            assert loads.wait(WAIT_S)
            assert stage.scale(1) == 0
        finally:
            go_on.set()
        stage.until(lambda: stage.now(1) is not lost and stage.now(1).is_closed)
        assert not stage.now(1).is_started
        stage.engine._load_one = load
        assert stage.scale(2) == 0
        assert sorted(one.number for one in stage.made if not one.is_closed) == [0, 1]


def test_the_last_that_serves_does_not_go() -> None:
    """An instance without one would end with no reason, or never."""
    with staged(2) as stage:
        stage.submit("a", replica=1)
        stage.cannot_load = frozenset({0})
        stage.routers = Future()
        with ThreadPoolExecutor(1) as pool:
            scaled = pool.submit(stage.scale, 1, WAIT_S)
            stage.until(lambda: stage.leaving == [1])
            stage.now(0).failure = RuntimeError("a step")
            stage.until(lambda: stage.engine.replicas[0].losses >= 2)
            stage.now(1).give("a")
            stage.routers.set_result(None)
            with pytest.raises(UserError, match="none of the replicas that stay serves"):
                scaled.result(WAIT_S)
        assert stage.leaving == []
        stage.submit("b")
        assert stage.now(1).submitted == ["b"]
        stage.cannot_load = frozenset()
        stage.until(lambda: stage.engine.replicas[0].serving is not None)


def test_pauses_grow_between_losses_of_one_that_never_serves_for_long() -> None:
    assert [pause_s(losses) for losses in range(9)] == [0, 0, 1, 2, 4, 8, 16, 30, 30]


def test_one_that_leaves_and_has_ended_is_not_said_to_be_lost() -> None:
    with staged(2) as stage:
        stage.cannot_load = frozenset({0, 1})
        lost, leaves = stage.engine.replicas
        leaves.is_leaving = True
        for number in range(2):
            stage.now(number).failure = RuntimeError("a step")
        beats = [_beat("tcp://10.0.0.1:21001", one) for one in (lost, leaves)]
        assert [(beat.serving, beat.draining) for beat in beats] == [(0, 0), (0, 1)]

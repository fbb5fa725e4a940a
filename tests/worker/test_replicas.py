"""Replicas as one engine: which gets a request, whose requests a lost one takes along, and its
return. The engines are played; tests/ranks/test_replica_processes.py has real ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from xpyd_core.errors import UserError
from xpyd_core.parallel.checks import Shape, check_parallel
from xpyd_core.request_id import TransferKey
from xpyd_kv.connector.build import Connector
from xpyd_kv.memory.api import StoreMetrics
from xpyd_kv.metrics import EndpointCounters, KvMetrics
from xpyd_kv.values import OfferedPrompt
from xpyd_worker.config import WorkerConfig
from xpyd_worker.engine.core import Deliver
from xpyd_worker.engine.executor import LayerExperts
from xpyd_worker.engine.request import (
    ChoiceOutput,
    EngineOutput,
    EngineRequest,
    EngineStats,
    SamplingParams,
)
from xpyd_worker.kv.engine import Kv
from xpyd_worker.load.engine import LoadedEngine
from xpyd_worker.load.replicated_engine import ReplicatedEngine
from xpyd_worker.load.replicated_kv import ReplicatedKv
from xpyd_worker.ranks.loss import Loss
from xpyd_worker.server.telemetry.metrics import Sample

WAIT_S = 20.0


class FakeKv(Kv):
    is_drained = False

    def drain(self) -> None:
        self.is_drained = True


class FakeEngine:
    """A LoadedEngine and its EngineCore in one: runs what it is told to."""

    def __init__(self, number: int, deliver: Deliver) -> None:
        self.number = number
        self.engine = self
        self.ready = self
        self.kv = FakeKv()
        self.leases = 0
        self.loss: Loss | None = None
        self.failure: BaseException | None = None
        self.submitted: list[str] = []
        self.aborted: list[str] = []
        self.counted = EngineStats()
        self.is_started = False
        self.is_closed = False
        self.cannot_start = False
        self.kv_s = -1.0
        self.offers: dict[TransferKey, OfferedPrompt] = {}
        self.released: list[str] = []
        self.has_prefixes = False
        self._deliver = deliver

    def start(self) -> None:
        if self.cannot_start:
            raise UserError("its KV address is taken")
        self.is_started = True

    def close(self, *, engine_s: float, kv_s: float) -> None:
        self.is_closed, self.kv_s = True, kv_s
        self.give(*self.submitted, error="internal")

    def experts_chosen(self) -> list[LayerExperts]:
        return [LayerExperts(0, (1, self.number))]

    def submit(self, request: EngineRequest) -> None:
        self.submitted.append(request.request_id)

    def abort(self, request_id: str, choices: tuple[int, ...] | None = None) -> None:
        self.aborted.append(request_id)
        self.submitted.remove(request_id)

    def give(self, *request_ids: str, error: str = "") -> None:
        outputs = [
            EngineOutput(one, (ChoiceOutput(0),), True, error_kind=cast("Any", error))
            for one in request_ids
        ]
        self.submitted = [one for one in self.submitted if one not in request_ids]
        self._deliver(outputs)

    def kv_offered(self, key: TransferKey) -> OfferedPrompt | None:
        return self.offers.get(key)

    def kv_release(self, uuid: str) -> None:
        self.released.append(uuid)

    def stats(self) -> EngineStats:
        return self.counted

    def is_idle(self) -> bool:
        return not (self.submitted or self.leases)

    def reset_prefix_cache(self, done: Callable[[bool], None]) -> None:
        done(not self.has_prefixes)


class Stage:
    """A ReplicatedEngine over played engines. `made` has all that were loaded."""

    def __init__(self, size: int) -> None:
        self.made: list[FakeEngine] = []
        self.outputs: dict[str, str] = {}
        self.cannot_load: frozenset[int] = frozenset()
        self.cannot_start: frozenset[int] = frozenset()
        self.lock = threading.Lock()
        self.incarnations: dict[int, list[str]] = {}
        self.changes: list[tuple[int, ...]] = []
        """The replicas that served whenever others did than before."""
        self.asked: list[tuple[float, list[int]]] = []
        """How long routers were given to let go of which replicas."""
        self.routers: Future[None] = Future()
        self.routers.set_result(None)
        self.engine = ReplicatedEngine(size, self._load, self._take, changed=self._changed)

    def _load(self, number: int, deliver: Deliver, incarnation: str) -> LoadedEngine:
        with self.lock:
            if number in self.cannot_load:
                raise UserError("no room")
            one = FakeEngine(number, deliver)
            one.cannot_start = number in self.cannot_start
            self.incarnations.setdefault(number, []).append(incarnation)
            self.made.append(one)
        return cast("LoadedEngine", one)

    def _changed(self) -> None:
        serving = (one.number for one in self.engine.replicas if one.serving is not None)
        self.changes.append(tuple(serving))

    def _take(self, outputs: Sequence[EngineOutput]) -> None:
        self.outputs |= {one.request_id: one.error_kind for one in outputs if one.finished}

    def now(self, number: int) -> FakeEngine:
        return next(one for one in reversed(self.made) if one.number == number)

    def submit(self, name: str, replica: int | None = None) -> None:
        sampling = SamplingParams(max_tokens=4, seed=0)
        self.engine.submit(EngineRequest(name, name, (1, 2), sampling, replica=replica))

    def scale(self, size: int, drain_s: float = 0.0) -> int:
        def let_go(timeout_s: float) -> Future[None]:
            self.asked.append((timeout_s, self.leaving))
            return self.routers

        return self.engine.scale(size, drain_s=drain_s, let_go=let_go)

    @property
    def leaving(self) -> list[int]:
        """The replicas that no router is to pick."""
        return [one.number for one in self.engine.replicas if one.is_leaving]

    def until(self, holds: Callable[[], bool]) -> None:
        """The keeper looks ten times a second, and says nothing to tests."""
        ticks = threading.Event()
        for _ in range(round(WAIT_S / 0.01)):
            if holds():
                return
            ticks.wait(0.01)
        raise AssertionError("it did not come to pass")


@contextmanager
def staged(size: int) -> Generator[Stage]:
    stage = Stage(size)
    stage.engine.load()
    stage.engine.start()
    try:
        yield stage
    finally:
        stage.engine.close(engine_s=WAIT_S, kv_s=0.0)


def test_a_request_goes_to_the_replica_with_the_least_to_do() -> None:
    with staged(3) as stage:
        for name in "abcd":
            stage.submit(name)
        assert [stage.now(number).submitted for number in range(3)] == [["a", "d"], ["b"], ["c"]]
        # 4 x waiting + running: one that waits on replica 1, two that run on replica 0.
        stage.now(0).counted = EngineStats(running=2)
        stage.now(2).give("c")
        stage.submit("e")
        stage.submit("f")
        assert stage.now(2).submitted == ["e"]
        assert stage.now(0).submitted == ["a", "d", "f"]


def test_a_client_names_its_replica() -> None:
    with staged(2) as stage:
        for name in "abc":
            stage.submit(name, replica=1)
        assert stage.now(1).submitted == ["a", "b", "c"]


def test_aborts_find_the_replica_and_what_has_ended_is_forgotten() -> None:
    with staged(2) as stage:
        for name in "abcd":
            stage.submit(name)
        stage.engine.abort("b")
        stage.engine.abort("a", (0,))
        stage.engine.abort("unknown")
        assert (stage.now(0).aborted, stage.now(1).aborted) == (["a"], ["b"])
        assert not stage.engine.is_idle()
        stage.now(0).give("a", "c")
        stage.now(1).give("d")
        assert stage.engine.is_idle()
        assert [one.open for one in stage.engine.replicas] == [set(), set()]


def test_an_error_of_a_request_alone_stays_one() -> None:
    with staged(2) as stage:
        stage.submit("a")
        stage.now(0).give("a", error="internal")
        assert stage.outputs == {"a": "internal"}


def test_offers_and_releases_find_the_replica_that_has_the_kv() -> None:
    key = TransferKey("u", 0)
    with staged(2) as stage:
        stage.now(1).offers[key] = offer = OfferedPrompt((1, 2), 2)
        assert stage.engine.kv_offered(key) is offer
        assert stage.engine.kv_offered(TransferKey("v", 0)) is None
        stage.engine.kv_release("u")
        assert [stage.now(number).released for number in range(2)] == [["u"], ["u"]]


def a_kv(sent_bytes: int, probes: int) -> Kv:
    metrics = KvMetrics(sent_bytes=sent_bytes, open_transfers=1)
    metrics.probes.add("moved", probes)
    metrics.transferred("tcp", 0.5)
    metrics.ended("", peer="10.0.0.2:21001")
    store = SimpleNamespace(metrics=lambda: StoreMetrics(pool_bytes=10, pool_fragmentation=0.25))
    connector = Connector(cast("Any", None), metrics, store=cast("Any", store))
    return Kv(connector, EndpointCounters(connections=2, sent_bytes=7))


def test_the_kv_of_replicas_is_shown_as_sums_that_never_go_down() -> None:
    loaded = [a_kv(100, 1), a_kv(20, 2)]
    kv = ReplicatedKv(lambda: loaded)

    def shown() -> dict[str, float]:
        samples = kv.samples(EngineStats())
        return {one.name: one.value for one in samples if isinstance(one, Sample)}

    for lost in (0, 1):
        found = shown()
        assert found["xpyd_kv_sent_bytes"] == 120
        assert found["xpyd_kv_open_transfers"] == found["xpyd_kv_pool_bytes"] / 10 == 2 - lost
        assert found["xpyd_kv_pool_fragmentation"] == 0.25
        (peer,) = kv.peers.latest()
        assert (peer.peer, peer.moved) == ("10.0.0.2:21001", 2)
        kv.retire(loaded.pop())
    assert shown()["xpyd_kv_sent_bytes"] == 120


def test_the_instance_falls_with_its_last_replica() -> None:
    with staged(2) as stage:
        loss = Loss("rank 1 was ended by SIGKILL", 11)
        stage.cannot_load = frozenset({0})
        stage.now(0).failure = RuntimeError("a step")
        stage.until(lambda: stage.now(0).is_closed)
        assert stage.engine.loss is None
        stage.now(1).loss = loss
        stage.until(lambda: all(one.name != "replicas" for one in threading.enumerate()))
        assert stage.engine.loss is loss
        stage.submit("a")
        assert stage.outputs == {"a": "replica_lost"}


def test_where_one_cannot_be_loaded_none_is_left() -> None:
    stage = Stage(3)
    stage.cannot_load = frozenset({1})
    with pytest.raises(UserError, match="no room"):
        stage.engine.load()
    assert [one.is_closed for one in stage.made] == [True, True]


@pytest.mark.parametrize("kept", [None, 0, 1])
def test_prefixes_are_forgotten_when_all_have_forgotten_them(kept: int | None) -> None:
    with staged(2) as stage:
        if kept is not None:
            stage.now(kept).has_prefixes = True
        said: list[bool] = []
        stage.engine.reset_prefix_cache(said.append)
        assert said == [kept is None]


def test_replicas_are_one_world_of_ranks_only_where_they_share_experts() -> None:
    config = WorkerConfig(
        model="m", data_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=2, replica=1
    )
    assert (config.in_lock_step, config.sizes.world, config.sizes.expert) == (False, 4, 1)
    config = replace(config, enable_expert_parallel=True)
    assert (config.in_lock_step, config.sizes.world, config.sizes.expert) == (True, 8, 4)
    assert (config.first_rank, config.pod_ranks(0)) == (4, range(4))
    shape = Shape(layers=4, heads=4, kv_heads=4, experts=3)
    with pytest.raises(UserError, match=r"4 ranks \(2 x 2\) for 3 experts of a layer"):
        check_parallel(shape, config.sizes)
    alone = replace(config, data_parallel_size=1, replica=0)
    assert (alone.in_lock_step, alone.sizes.world, alone.sizes.expert) == (False, 4, 2)


def test_more_replicas_are_loaded_while_the_others_serve() -> None:
    with staged(1) as stage:
        stage.submit("a")
        assert stage.scale(3) == 0
        assert [one.is_started for one in stage.made] == [True] * 3
        for name in "bc":
            stage.submit(name)
        assert [stage.now(number).submitted for number in range(3)] == [["a"], ["b"], ["c"]]
        # They are kept alive like the first.
        lost = stage.now(2)
        lost.loss = Loss("rank 2 was ended by SIGKILL", 11)
        stage.until(lambda: stage.now(2) is not lost and stage.now(2).is_started)


@pytest.mark.parametrize("fails", ["cannot_load", "cannot_start"])
def test_where_one_more_cannot_serve_nothing_changes(fails: str) -> None:
    with staged(1) as stage:
        setattr(stage, fails, frozenset({2}))
        with pytest.raises(UserError, match=r"no room|taken"):
            stage.scale(3)
        assert [one.is_closed for one in stage.made] == [False, *[True] * (len(stage.made) - 1)]
        assert stage.now(1).kv_s > 0, "else the next try finds its KV port taken"
        stage.submit("a")
        stage.submit("b")
        assert stage.now(0).submitted == ["a", "b"]


def test_replicas_that_leave_finish_their_requests_and_get_no_more() -> None:
    with staged(3) as stage:
        for number in range(3):
            stage.submit("abc"[number], replica=number)
        leaving = stage.now(1), stage.now(2)
        leaving[0].counted = EngineStats(running=1, forwards=7)
        with ThreadPoolExecutor(1) as pool:
            scaled = pool.submit(stage.scale, 1, drain_s=WAIT_S)
            stage.until(lambda: stage.engine.replicas[1].is_closed)
            with pytest.raises(UserError, match="come or go just now"):
                stage.scale(3)
            stage.submit("d")
            stage.submit("e", replica=2)
            assert stage.now(0).submitted == ["a", "d"]
            assert stage.outputs == {"e": "replica_lost"}
            # One that dies as it leaves is not started again.
            leaving[1].loss = Loss("rank 2 was ended by SIGKILL", 11)
            leaving[1].give("c", error="internal")
            threading.Event().wait(0.4)  # the keeper has looked several times
            assert len(stage.made) == 3
            assert not leaving[0].is_closed
            leaving[0].give("b")
            assert scaled.result(WAIT_S) == 0
        assert [one.is_closed for one in (stage.now(0), *leaving)] == [False, True, True]
        assert stage.outputs == {"e": "replica_lost", "c": "replica_lost", "b": ""}
        stage.submit("f", replica=1)
        assert stage.outputs["f"] == "replica_lost"
        # What the others counted stays.
        assert stage.engine.stats().forwards == 7
        assert stage.engine.experts_chosen() == [LayerExperts(0, (3, 3))]
        stage.scale(2)
        stage.submit("g", replica=1)
        assert stage.now(1).submitted == ["g"]
        assert len(stage.made) == 4


def test_a_replica_leaves_once_routers_have_let_go_of_it_and_its_kv_is_taken() -> None:
    with staged(2) as stage:
        leaving = stage.now(1)
        stage.routers = Future()
        with ThreadPoolExecutor(1) as pool:
            scaled = pool.submit(stage.scale, 1, drain_s=WAIT_S)
            stage.until(lambda: bool(stage.asked))
            assert stage.asked == [(WAIT_S, [1])], "after the beat can say so"
            assert stage.engine.size == 1
            # What a router picked it for comes later, and is served; others go elsewhere.
            stage.submit("a", replica=1)
            stage.submit("b")
            assert (leaving.submitted, stage.now(0).submitted) == (["a"], ["b"])
            leaving.give("a")
            assert not leaving.kv.is_drained
            leaving.leases = 1
            stage.routers.set_result(None)
            stage.until(lambda: leaving.kv.is_drained)
            stage.submit("c", replica=1)
            assert stage.outputs == {"a": "", "c": "replica_lost"}
            threading.Event().wait(0.3)  # a look or two
            assert not leaving.is_closed, "a decode instance has not taken its KV"
            leaving.leases = 0
            assert scaled.result(WAIT_S) == 0
        assert leaving.is_closed
        assert not stage.now(0).kv.is_drained


def test_an_instance_that_ends_waits_for_no_router() -> None:
    stage = Stage(2)
    stage.engine.load()
    stage.engine.start()
    stage.routers = Future()
    with ThreadPoolExecutor(1) as pool:
        scaled = pool.submit(stage.scale, 1, drain_s=WAIT_S)
        stage.until(lambda: bool(stage.asked))
        stage.engine.close(engine_s=WAIT_S, kv_s=0.0)
        with pytest.raises(UserError, match="the instance ends"):
            scaled.result(WAIT_S)
    assert stage.routers.cancelled()
    assert [one.is_closed for one in stage.made] == [True, True]


def test_requests_that_take_longer_than_a_leaving_replica_has_are_cut() -> None:
    with staged(2) as stage:
        stage.submit("a", replica=0)
        stage.submit("b", replica=1)
        assert stage.scale(1) == 1
        assert stage.outputs == {"b": "replica_lost"}
        assert stage.now(0).submitted == ["a"]

"""From a configuration to replicas of an engine, as an instance serves and shows them (ADR 0117).

Which gets a request and what becomes of one that is lost: replicated_engine.py.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain

from xpyd_core.keys import Keys
from xpyd_core.messages import ReplicaBeat
from xpyd_core.parallel.checks import check_parallel
from xpyd_core.request_id import Address
from xpyd_kv.connector.build import MakeStore
from xpyd_worker.config import WorkerConfig
from xpyd_worker.config_check import check_config
from xpyd_worker.engine.core import Deliver
from xpyd_worker.engine.request import (
    EngineStats,
)
from xpyd_worker.load.engine import LoadedEngine, load, tokenizer_of
from xpyd_worker.load.ready_model import ReadyModel
from xpyd_worker.load.replica import Replica
from xpyd_worker.load.replicated_engine import ReplicatedEngine
from xpyd_worker.model.registry import Checkpoint
from xpyd_worker.ranks.loss import Loss
from xpyd_worker.ranks.pods.handshake import LOOPBACK
from xpyd_worker.ranks.pods.pods import Pods, gather
from xpyd_worker.ranks.start.messages import Logs
from xpyd_worker.ranks.world import World
from xpyd_worker.replicas.lock_step import LockStep, Member
from xpyd_worker.server.service import KvPlace, ServedModel
from xpyd_worker.server.telemetry.expert_metrics import expert_samples
from xpyd_worker.server.telemetry.metrics import (
    AnySample,
    Sample,
    replica_samples,
)


def wave_samples(members: Iterable[Member]) -> Iterable[Sample]:
    """Those of `xpyd_engine_replica_*` that only replicas in lock step have: the state that each
    reported last, and the dummy forwards that it made."""
    for one in members:
        labels = (("engine", str(one.replica)),)
        for name, kind, text, value in (
            ("wave", "gauge", "The wave that it is in, or the next one", one.latest.wave),
            ("in_wave", "gauge", "1 while it makes forwards as others do", one.latest.is_running),
            ("dummy_forwards", "counter", "Forwards made for the others", one.dummy_forwards),
        ):
            yield Sample(f"xpyd_engine_replica_{name}", kind, text, float(value), labels)


class LoadedReplicas:
    """All parts of an instance with replicas, as LoadedEngine has those of one engine."""

    def __init__(
        self, engine: ReplicatedEngine, config: WorkerConfig, pods: Pods | None = None
    ) -> None:
        """The replicas of `engine` are loaded, as `config` says; `pods`: the others that they are
        in. Their owner from now on."""
        first = engine.replicas[0].loaded
        assert first is not None, "loaded before"
        self.engine = engine
        self._config = config
        self._pods = pods
        self.model: ServedModel = first.model
        self.ready: ReadyModel = first.ready
        self.kv = engine.kv
        self.compatibility = first.compatibility

    @property
    def loss(self) -> Loss | None:
        """See ReplicatedEngine."""
        return self.engine.loss

    def start(self) -> None:
        """See ReplicatedEngine."""
        self.engine.start()

    def close(self, *, engine_s: float, kv_s: float) -> None:
        """End all engines and their ranks, and the other pods."""
        self.engine.close(engine_s=engine_s, kv_s=kv_s)
        if self._pods is not None:
            loss = self.loss
            why = "the leader ends" if loss is None else loss.text
            self._pods.close(in_order=loss is None, reason=why)

    def stats(self) -> EngineStats:
        """The counters and gauges of all replicas."""
        return self.engine.stats()

    def samples(self, stats: EngineStats) -> Iterable[AnySample]:
        """What all do, what each replica does, and its ranks, which count through the replicas."""
        replicas = self.engine.replicas
        rows = [(one.counts(), one.restarts) for one in replicas]
        lock_step = self.engine.lock_step
        waves = wave_samples(lock_step.members if lock_step else ())
        ranks = (one.loaded.rank_samples() for one in replicas if one.loaded is not None)
        experts = expert_samples(self.engine.experts_chosen())
        shown = replica_samples(rows, self.engine.scalings)
        return chain(self.kv.samples(stats), experts, shown, waves, *ranks)

    def kv_places(self) -> Sequence[KvPlace]:
        """See Service."""
        if not self._config.moves_kv:
            return ()
        return [
            KvPlace(
                self._address(one),
                one.incarnation,
                loaded.kv.probe if (loaded := one.serving) else None,
            )
            for one in self.engine.replicas
        ]

    def beats(self) -> tuple[ReplicaBeat, ...]:
        """What a heartbeat says of each replica."""
        return tuple(_beat(str(self._address(one)), one) for one in self.engine.replicas)

    def _address(self, replica: Replica) -> Address:
        """As routers write it: the server compares it with that of a pair's id."""
        address = self._config.of_replica(replica.number).kv_address
        return address._replace(host=str(ipaddress.ip_address(address.host)))


def _beat(address: str, replica: Replica) -> ReplicaBeat:
    serving = replica.serving
    if serving is None:
        return ReplicaBeat(zmq_address=address, serving=0, draining=1 if replica.is_leaving else 0)
    stats = serving.engine.stats()
    return ReplicaBeat(
        zmq_address=address,
        running=stats.running,
        waiting=stats.waiting,
        free_blocks=stats.blocks_free,
        total_blocks=stats.blocks_total,
        kv_leases=stats.kv_leases,
        draining=1 if replica.is_leaving else 0,
    )


def _lock_step(replicas: int, world: World, *, may_outlive: bool) -> LockStep:
    """The lock step of engines whose ranks are `world`: each ends with the other. `may_outlive`:
    but for one replica that is lost."""

    def fell(text: str) -> None:
        world.lose(Loss(text, 1))

    def outlives(replica: int) -> int | None:
        return world.without(replica) if may_outlive else None

    lock_step = LockStep(replicas, clock=time.monotonic, fell=fell, outlives=outlives)
    world.tell(lambda loss: lock_step.fail(loss.text))
    world.outlive = lock_step.lose
    return lock_step


def load_replicas(
    config: WorkerConfig,
    *,
    deliver: Deliver,
    keys: Keys,
    changed: Callable[[], None],
    make_store: MakeStore | None,
    logs: Logs,
    checkpoint: Checkpoint,
) -> LoadedReplicas:
    """Load the replicas that `config` names; see `load`. They share one tokenizer. `changed`: as in
    ReplicatedEngine."""
    world, lock_step = None, None

    def check(replicas: int) -> None:
        sizes = replace(config, data_parallel_size=replicas).sizes
        check_parallel(checkpoint.model.shape, sizes, config.layer_partition)

    with ExitStack() as on_error, ExitStack() as stack:
        load_tokenizer = stack.enter_context(tokenizer_of(config, checkpoint.folder))
        pods = gather(config)
        if pods is not None:
            on_error.callback(pods.close, in_order=False, reason="the instance cannot start")
        if config.in_lock_step:
            host = LOOPBACK if pods is None else config.host
            world = World(config.data_parallel_size, host, check)
            stack.callback(world.close)
            may_outlive = config.outlives_replicas
            lock_step = _lock_step(config.data_parallel_size, world, may_outlive=may_outlive)

        def load_one(replica: int, deliver: Deliver, incarnation: str) -> LoadedEngine:
            # As many as there are now, or one of those to come: GPUs and cores are counted by it,
            # and KV ports. Its parts of buffer and pool are as large as those of the first.
            least = max(config.data_parallel_size, replica + 1)
            size = least if world is None else len(world.replicas)
            check_config(replace(config, data_parallel_size=size))
            return load(
                replace(config.of_replica(replica), data_parallel_size=size),
                deliver=deliver,
                keys=keys,
                incarnation=incarnation,
                make_store=make_store,
                logs=logs,
                checkpoint=checkpoint,
                load_tokenizer=load_tokenizer,
                world=world,
                pods=pods,
                lock_step=None if lock_step is None else lock_step.member(replica),
            )

        engine = ReplicatedEngine(
            *(config.data_parallel_size, load_one, deliver, lock_step, changed, world),
            may_outlive=config.outlives_replicas,
        )
        engine.load()
        on_error.pop_all()
        return LoadedReplicas(engine, config, pods)

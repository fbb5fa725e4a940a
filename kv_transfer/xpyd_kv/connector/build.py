"""Puts one half of the transfer together: session, connector, store and endpoint of one role.

The worker's main calls `build` once; nothing else needs to know how the parts fit.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, TypeVar

from xpyd_core.errors import XpydError
from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.connector.consumer import KvConsumer
from xpyd_kv.connector.producer import KvProducer, MakeChunks
from xpyd_kv.connector.prompts import AnnouncedChunks, Prompt
from xpyd_kv.memory.api import KvMemory, Store
from xpyd_kv.memory.space import OwnSpace
from xpyd_kv.memory.store import LandingStore, StoreLimits
from xpyd_kv.metrics import Counters, KvMetrics
from xpyd_kv.ranks.build import send_session
from xpyd_kv.ranks.chunks import StepChunks
from xpyd_kv.ranks.engine import RankedEngine, engine_of
from xpyd_kv.ranks.handler import ComputeGate, LateHandler
from xpyd_kv.ranks.local import LocalReceivingRank, LocalSendingRank
from xpyd_kv.ranks.remote import RankedCopies, RankReports, RemoteReceivingRank, RemoteSendingRank
from xpyd_kv.ranks.store import RankedSpace
from xpyd_kv.session.deadlines import Alarm
from xpyd_kv.session.events import ReceiveEvent, ReceiveOffered, SendEvent
from xpyd_kv.session.fanin import Fanin
from xpyd_kv.session.fanout import Fanout
from xpyd_kv.session.probing import ProbeResult, Probes
from xpyd_kv.session.receiving import ReceiveSession
from xpyd_kv.session.sending import SendSession
from xpyd_kv.session.settings import KvSettings
from xpyd_kv.transport.api import Endpoint, MakeEndpoint
from xpyd_kv.values import BlockPool, OfferedPrompt

_Event = TypeVar("_Event")
MakeStore = Callable[[StoreLimits, KvMemory, BlockPool], Store]
"""D's landings; P's stashes in mode get."""


@dataclass(frozen=True)
class Connector:
    """One role's half. Start and close `endpoint`; give `producer` or `consumer` to the engine."""

    endpoint: Endpoint
    metrics: KvMetrics
    producer: KvProducer | None = None
    probes: Probes | None = None
    consumer: KvConsumer | None = None
    store: Store | None = None
    rank_counters: Counters = field(default_factory=Counters)
    """What the endpoints of the engine's ranks have counted together, where each has its own."""

    def probe(self, address: Address, done: Callable[[ProbeResult], None]) -> None:
        """Any thread, on P only: see Probes.ask. `done` is called on the I/O thread."""
        if self.probes is None:
            raise XpydError("only a P probes")
        self.endpoint.call(partial(self.probes.ask, address, done))

    def drain(self) -> None:
        """Any thread: refuse new OFFERs; what is under way finishes (`has_work` says when)."""
        if self.consumer is not None:
            self.consumer.drain()


def default_store(limits: StoreLimits, memory: KvMemory, pool: BlockPool) -> Store:
    """Own blocks, device buffer, host pool."""
    return LandingStore(limits, pool=pool, space=OwnSpace(memory, limits))


def build(
    role: Literal["P", "D"],
    *,
    make_endpoint: MakeEndpoint,
    memory: KvMemory,
    pool: BlockPool,
    wake: Callable[[], None],
    settings: KvSettings | None = None,
    make_store: MakeStore = default_store,
    clock: Callable[[], float] = time.monotonic,
    ranks: RankedEngine | None = None,
) -> Connector:
    """The parts of a P or a D, endpoint not started.

    `wake` is called on the I/O thread when the engine's loop should poll. `clock` must be the
    engine's and the endpoint's own clock. `ranks`: they have the cache and move it themselves, so
    that `memory` is their BookMemory, and the store is theirs.
    """
    metrics = KvMetrics()
    alarm = Alarm()
    gate = ComputeGate(clock, alarm=alarm)
    handler = LateHandler(gate, alarm)
    half = _Half(
        endpoint=make_endpoint(handler),
        handler=handler,
        gate=gate,
        alarm=alarm,
        metrics=metrics,
        memory=memory,
        pool=pool,
        wake=wake,
        settings=settings or KvSettings(),
        make_store=make_store,
        clock=clock,
        remote=None if ranks is None else _Remote(ranks, RankedCopies(ranks.channels, wake)),
    )
    return half.producer() if role == "P" else half.consumer()


class _Remote(NamedTuple):
    """The ranks of this engine, where each is a process, and the copies on them."""

    engine: RankedEngine
    copies: RankedCopies


@dataclass(frozen=True)
class _Half:
    """What both roles are made of."""

    endpoint: Endpoint
    handler: LateHandler
    gate: ComputeGate
    alarm: Alarm
    metrics: KvMetrics
    memory: KvMemory
    pool: BlockPool
    wake: Callable[[], None]
    settings: KvSettings
    make_store: MakeStore
    clock: Callable[[], float]
    remote: _Remote | None
    rank_counters: Counters = field(default_factory=Counters)

    def producer(self) -> Connector:
        events: deque[SendEvent] = deque()
        session = self._send_session()(
            _reporter(events, self.wake), metrics=self.metrics, fanout=self._fanout()
        )
        self.handler.session = session
        # The other modes have no KV that would wait long for D alone.
        store = self._store() if self.settings.mode == "get" else None
        producer = KvProducer(
            endpoint=self.endpoint,
            session=session,
            events=events,
            memory=self.memory,
            gate=self.gate,
            pool=self.pool,
            mode=self.settings.mode,
            store=store,
            limits=self.settings.limits,
            make_chunks=self._make_chunks(),
            ranks_send=self.remote is not None,
            metrics=self.metrics,
            clock=self.clock,
        )
        return Connector(
            self.endpoint,
            self.metrics,
            producer=producer,
            store=store,
            probes=session.probes,
            rank_counters=self.rank_counters,
        )

    def consumer(self) -> Connector:
        events: deque[ReceiveEvent] = deque()
        prompts: dict[TransferKey, OfferedPrompt] = {}
        post = _reporter(events, self.wake)

        def report(event: ReceiveEvent) -> None:
            if isinstance(event, ReceiveOffered):
                prompts[event.key] = event.prompt
            post(event)

        session = self._receive_session(report, metrics=self.metrics, fanin=self._fanin())
        self.handler.session = session
        store = self._store()
        consumer = KvConsumer(
            endpoint=self.endpoint,
            session=session,
            events=events,
            prompts=prompts,
            store=store,
            pool=self.pool,
            memory=self.memory,
            gate=self.gate,
            limits=self.settings.limits,
            metrics=self.metrics,
        )
        return Connector(
            self.endpoint,
            self.metrics,
            consumer=consumer,
            store=store,
            rank_counters=self.rank_counters,
        )

    def _fanout(self) -> Fanout:
        if self.remote is not None:
            engine = self.remote.engine
            fanout = Fanout([RemoteSendingRank(c) for c in engine.channels], engine.layout)
            self._ears(self.remote)(on_sent=fanout.on_report, on_probed=fanout.on_probed)
            return fanout
        layout = engine_of(self.memory.layout)

        def pair_session(report: Callable[[SendEvent], None], *, metrics: KvMetrics) -> SendSession:
            return self._send_session()(report, metrics=metrics, fanout=Fanout((), layout))

        local = LocalSendingRank(
            pair_session,
            call=self.endpoint.call,
            metrics=self.metrics,
            tombstone_s=self.settings.limits.tombstone_s,
            clock=self.clock,
        )
        fanout = Fanout([local.rank], layout)
        local.on_report = fanout.on_report
        local.on_probed = fanout.on_probed
        self.handler.rank = local.rank
        return fanout

    def _fanin(self) -> Fanin:
        if self.remote is not None:
            engine = self.remote.engine
            fanin = Fanin([RemoteReceivingRank(c) for c in engine.channels], engine.layout)
            self._ears(self.remote)(on_received=fanin.on_report)
            return fanin
        layout = engine_of(self.memory.layout)

        def pair_session(
            report: Callable[[ReceiveEvent], None], *, metrics: KvMetrics
        ) -> ReceiveSession:
            return self._receive_session(report, metrics=metrics, fanin=Fanin((), layout))

        local = LocalReceivingRank(pair_session, call=self.endpoint.call, metrics=self.metrics)
        fanin = Fanin([local], layout)
        local.on_report = fanin.on_report
        self.handler.rank = local.rank
        return fanin

    def _ears(self, remote: _Remote) -> partial[RankReports]:
        return partial(
            RankReports,
            remote.engine.channels,
            call=self.endpoint.call,
            metrics=self.metrics,
            counters=self.rank_counters,
            copies=remote.copies,
        )

    def _send_session(self) -> partial[SendSession]:
        return partial(
            send_session,
            self.endpoint,
            memory=self.memory,
            settings=self.settings,
            clock=self.clock,
            alarm=self.alarm,
        )

    def _receive_session(
        self,
        report: Callable[[ReceiveEvent], None],
        *,
        metrics: KvMetrics,
        fanin: Fanin,
    ) -> ReceiveSession:
        ranks_are_on_device = self.remote is not None and self.remote.engine.on_device
        return ReceiveSession(
            self.endpoint,
            layout=self.memory.layout,
            on_device=self.memory.device is not None or ranks_are_on_device,
            limits=self.settings.limits,
            clock=self.clock,
            report=report,
            metrics=metrics,
            fanin=fanin,
            alarm=self.alarm,
        )

    def _store(self) -> Store:
        if self.remote is None:
            return self.make_store(self.settings.store, self.memory, self.pool)
        space = RankedSpace(self.remote.engine.layout.held_bytes_per_block, self.remote.copies)
        return LandingStore(self.settings.store, pool=self.pool, space=space)

    def _make_chunks(self) -> MakeChunks:
        layout = self.memory.layout
        if self.remote is not None:
            return lambda ready: AnnouncedChunks(layers=len(layout.layers), ready=ready)
        mode, limits = self.settings.mode, self.settings.frames
        return lambda ready: StepChunks[Prompt](layout, mode=mode, limits=limits, ready=ready)


def _reporter(events: deque[_Event], wake: Callable[[], None]) -> Callable[[_Event], None]:
    def report(event: _Event) -> None:
        events.append(event)
        wake()

    return report

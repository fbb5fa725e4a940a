"""Puts one half of the transfer together: session, connector, store and endpoint of one role.

The worker's main calls `build` once; nothing else needs to know how the parts fit.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

from xpyd_core.errors import XpydError
from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.connector.api import BlockPool, KvLayout, KvMemory, OfferedPrompt
from xpyd_kv.connector.compute_gate import ComputeGate
from xpyd_kv.connector.consumer import KvConsumer
from xpyd_kv.connector.producer import KvProducer
from xpyd_kv.device.api import View
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.session.events import ReceiveEvent, ReceiveOffered, SendEvent
from xpyd_kv.session.limits import KvLimits
from xpyd_kv.session.metrics import KvMetrics
from xpyd_kv.session.probing import ProbeResult, Probes
from xpyd_kv.session.receiving import ReceiveSession
from xpyd_kv.session.sending import SendSession
from xpyd_kv.store.api import Store
from xpyd_kv.store.landing_store import LandingStore, StoreLimits
from xpyd_kv.transport.api import Endpoint, Handler, Peer
from xpyd_kv.wire import messages as wire

_Event = TypeVar("_Event")
MakeEndpoint = Callable[[Handler], Endpoint]
"""An Endpoint for this Handler, not started: `lambda handler: TcpEndpoint(handler, ...)`."""
MakeStore = Callable[[StoreLimits, KvMemory, BlockPool], Store]
"""D's landings; P's stashes in mode get."""


@dataclass(frozen=True)
class KvSettings:
    """What an operator may choose, beside the endpoint's own settings."""

    limits: KvLimits = field(default_factory=KvLimits)
    frames: FrameLimits = field(default_factory=FrameLimits)
    store: StoreLimits = field(default_factory=StoreLimits)
    mode: wire.Mode = "put_async"
    """P's. D does what P says."""


@dataclass(frozen=True)
class Connector:
    """One role's half. Start and close `endpoint`; give `producer` or `consumer` to the engine."""

    endpoint: Endpoint
    metrics: KvMetrics
    producer: KvProducer | None = None
    probes: Probes | None = None
    consumer: KvConsumer | None = None
    store: Store | None = None

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
    return LandingStore(limits, memory=memory, pool=pool)


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
) -> Connector:
    """The parts of a P or a D, endpoint not started.

    `wake` is called on the I/O thread when the engine's loop should poll. `clock` must be the
    engine's and the endpoint's own clock.
    """
    settings = settings or KvSettings()
    if role == "P":
        return _build_producer(make_endpoint, memory, pool, wake, settings, clock, make_store)
    return _build_consumer(make_endpoint, memory, pool, wake, settings, clock, make_store)


def wire_layout(
    layout: KvLayout,
    *,
    factors: dict[str, str],
    max_tokens: int,
    max_data_bytes: int = wire.DEFAULT_MAX_DATA_BYTES,
) -> wire.Layout:
    """The LAYOUT frame for a cache: what an endpoint says of it. `max_tokens`: longest prompt;
    `max_data_bytes`: longest frame that it takes."""
    return wire.Layout(
        factors=factors,
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        dtype=layout.dtype,
        block_bytes=layout.block_bytes,
        max_tokens=max_tokens,
        max_data_bytes=max_data_bytes,
    )


def _build_producer(
    make_endpoint: MakeEndpoint,
    memory: KvMemory,
    pool: BlockPool,
    wake: Callable[[], None],
    settings: KvSettings,
    clock: Callable[[], float],
    make_store: MakeStore,
) -> Connector:
    events: deque[SendEvent] = deque()
    metrics = KvMetrics()
    gate = ComputeGate(clock)
    handler = _LateHandler(gate)
    endpoint = make_endpoint(handler)
    session = SendSession(
        endpoint,
        memory=memory,
        limits=settings.limits,
        max_frame_bytes=settings.frames.max_frame_bytes,
        join_bytes=settings.frames.join_bytes,
        clock=clock,
        report=_reporter(events, wake),
        metrics=metrics,
    )
    handler.session = session
    # The other modes have no KV that would wait long for D alone.
    store = make_store(settings.store, memory, pool) if settings.mode == "get" else None
    producer = KvProducer(
        endpoint=endpoint,
        session=session,
        events=events,
        memory=memory,
        gate=gate,
        pool=pool,
        mode=settings.mode,
        store=store,
        limits=settings.limits,
        frame_limits=settings.frames,
        metrics=metrics,
        clock=clock,
    )
    return Connector(endpoint, metrics, producer=producer, store=store, probes=session.probes)


def _build_consumer(
    make_endpoint: MakeEndpoint,
    memory: KvMemory,
    pool: BlockPool,
    wake: Callable[[], None],
    settings: KvSettings,
    clock: Callable[[], float],
    make_store: MakeStore,
) -> Connector:
    events: deque[ReceiveEvent] = deque()
    prompts: dict[TransferKey, OfferedPrompt] = {}
    metrics = KvMetrics()
    gate = ComputeGate(clock)
    handler = _LateHandler(gate)
    endpoint = make_endpoint(handler)
    post = _reporter(events, wake)

    def report(event: ReceiveEvent) -> None:
        if isinstance(event, ReceiveOffered):
            prompts[event.key] = event.prompt
        post(event)

    session = ReceiveSession(
        endpoint,
        layout=memory.layout,
        on_device=memory.device is not None,
        limits=settings.limits,
        clock=clock,
        report=report,
        metrics=metrics,
    )
    handler.session = session
    store = make_store(settings.store, memory, pool)
    consumer = KvConsumer(
        endpoint=endpoint,
        session=session,
        events=events,
        prompts=prompts,
        store=store,
        pool=pool,
        memory=memory,
        gate=gate,
        limits=settings.limits,
        metrics=metrics,
    )
    return Connector(endpoint, metrics, consumer=consumer, store=store)


def _reporter(events: deque[_Event], wake: Callable[[], None]) -> Callable[[_Event], None]:
    def report(event: _Event) -> None:
        events.append(event)
        wake()

    return report


class _LateHandler:
    """Endpoint and session need each other; the session comes second, before `start`."""

    session: SendSession | ReceiveSession

    def __init__(self, gate: ComputeGate) -> None:
        self._gate = gate

    def peer_up(self, peer: Peer) -> None:
        self.session.peer_up(peer)

    def dial_failed(self, address: Address, reason: str) -> None:
        self.session.dial_failed(address, reason)

    def peer_down(self, peer: Peer, reason: str) -> None:
        self.session.peer_down(peer, reason)

    def message(self, peer: Peer, message: wire.Message, body: bytes) -> None:
        self.session.message(peer, message, body)

    def data_begin(self, peer: Peer, header: wire.Data, length: int) -> Sequence[View] | None:
        return self.session.data_begin(peer, header, length)

    def data_end(
        self, peer: Peer, header: wire.Data, checksum: bytes, *, stored: bool, intact: bool
    ) -> None:
        self.session.data_end(peer, header, checksum, stored=stored, intact=intact)

    def tick(self, now: float) -> float | None:
        polls_at = self._gate.poll()
        ticks_at = self.session.tick(now)
        return min((t for t in (polls_at, ticks_at) if t is not None), default=None)

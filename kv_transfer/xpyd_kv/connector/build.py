"""Puts one half of the transfer together: session, connector, store and endpoint of one role.

The worker's main calls `build` once; nothing else needs to know how the parts fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from xpyd_core.errors import XpydError
from xpyd_core.request_id import Address
from xpyd_kv import metrics as counts
from xpyd_kv.connector.consumer import KvConsumer
from xpyd_kv.connector.producer import KvProducer
from xpyd_kv.connector.prompts import AnnouncedChunks, Prompt
from xpyd_kv.memory.api import KvMemory
from xpyd_kv.memory.space import OwnSpace
from xpyd_kv.memory.store import LandingStore, StoreLimits
from xpyd_kv.metrics import EndpointCounters, KvMetrics, MetricsDelta, RankCounters
from xpyd_kv.ranks import remote
from xpyd_kv.ranks.build import Parts
from xpyd_kv.ranks.chunks import StepChunks
from xpyd_kv.ranks.engine import RankedEngine, engine_of
from xpyd_kv.session import pairs
from xpyd_kv.session.outgoing import ReadyArea
from xpyd_kv.session.probing import ProbeResult, Probes
from xpyd_kv.session.receiving import ReceiveSession
from xpyd_kv.session.sending import SendSession
from xpyd_kv.session.settings import KvSettings
from xpyd_kv.transport.api import Endpoint, MakeEndpoint
from xpyd_kv.values import BlockPool

MakeStore = Callable[[StoreLimits, KvMemory, BlockPool], LandingStore]
"""D's landings; P's spills in mode get."""


@dataclass(frozen=True)
class Connector:
    """The connector of one role, P or D. Start and close `endpoint`; give `producer` or `consumer`
    to the engine."""

    endpoint: Endpoint
    metrics: KvMetrics
    producer: KvProducer | None = None
    probes: Probes | None = None
    consumer: KvConsumer | None = None
    store: LandingStore | None = None
    rank_counters: EndpointCounters = field(default_factory=EndpointCounters)
    """The sum of the counters of the ranks' endpoints, where each rank has its own endpoint."""

    def probe(self, address: Address, done: Callable[[ProbeResult], None]) -> None:
        """Any thread, on P only: see Probes.ask. `done` is called on the I/O thread."""
        if self.probes is None:
            raise XpydError("only a P probes")
        self.endpoint.call(partial(self.probes.ask, address, done))

    def peer_gone(self, address: Address) -> None:
        """Any thread: the instance at this KV address is dead; nothing here waits for it."""
        if self.consumer is not None:
            self.consumer.peer_gone(address)
        if self.producer is not None:
            self.producer.peer_gone(address)

    def drain(self) -> None:
        """Any thread: refuse new OFFERs; what is under way finishes (`has_work` says when)."""
        if self.consumer is not None:
            self.consumer.drain()


def default_store(limits: StoreLimits, memory: KvMemory, pool: BlockPool) -> LandingStore:
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
    that `memory` is their RankedMemory, and the store is theirs.
    """
    parts = Parts(
        make_endpoint=make_endpoint,
        memory=memory,
        engine=engine_of(memory.layout) if ranks is None else ranks.layout,
        on_device=memory.device is not None or (ranks is not None and ranks.on_device),
        settings=settings or KvSettings(),
        clock=clock,
    )
    rank_counters = EndpointCounters()

    def hear(rank: int, message: pairs.FromRank) -> None:
        """Handle a message of a rank, on the I/O thread."""
        if isinstance(message, pairs.Counted):
            counts.add(parts.metrics, message.counts)
            counts.add(rank_counters, message.endpoint)
        else:
            session.hear(rank, message)

    def hear_later(rank: int, message: pairs.FromRank) -> None:
        """Pass a message of a rank, from any thread, to the I/O thread's next turn: a session must
        not be called inside one of its own calls."""
        parts.context.endpoint.call(partial(hear, rank, message))

    if ranks is not None:
        copies = remote.RankedCopies(ranks.channels, wake)
        posts = [remote.post_to(channel) for channel in ranks.channels]
        remote.listen(ranks.channels, hear_later, copies.on_copied)
        make_store = partial(_ranked_store, ranks, copies)
    else:
        # The grant has waited for what the model may still read.
        own, heard = MetricsDelta(KvMetrics(), RankCounters), partial(hear_later, 0)
        posts = [parts.rank(role, heard, counts=own, written=lambda: None).do]
    store = None
    # In the other modes a P has no KV that would wait long for D alone.
    if role == "D" or parts.context.settings.mode == "get":
        store = make_store(parts.context.settings.store, memory, pool)
    producer = consumer = None
    session: SendSession | ReceiveSession
    if role == "P":
        producer = KvProducer(
            parts,
            ranks=posts,
            wake=wake,
            pool=pool,
            store=store,
            make_chunks=partial(_chunks, parts, ranks_send=ranks is not None),
            ranks_send=ranks is not None,
        )
        session = producer.session
    else:
        assert store is not None
        consumer = KvConsumer(
            parts,
            ranks=posts,
            wake=wake,
            pool=pool,
            store=store,
        )
        session = consumer.session
    parts.handler.session = session
    return Connector(
        parts.context.endpoint,
        parts.metrics,
        producer=producer,
        probes=producer and producer.session.probes,
        consumer=consumer,
        store=store,
        rank_counters=rank_counters,
    )


def _ranked_store(
    ranks: RankedEngine,
    copies: remote.RankedCopies,
    limits: StoreLimits,
    _: KvMemory,
    pool: BlockPool,
) -> LandingStore:
    """A store whose memory is on the ranks."""
    space = remote.RankedSpace(ranks.layout.held_bytes_per_block, copies)
    return LandingStore(limits, pool=pool, space=space)


def _chunks(
    parts: Parts, ready: Callable[[Prompt, Sequence[ReadyArea]], None], *, ranks_send: bool
) -> AnnouncedChunks | StepChunks[Prompt]:
    layout, settings = parts.context.memory.layout, parts.context.settings
    if ranks_send:
        return AnnouncedChunks(layers=len(layout.layers), ready=ready)
    return StepChunks[Prompt](layout, mode=settings.mode, limits=settings.frames, ready=ready)

"""Makes the sessions of one process, and puts a rank's half of the transfer together.

An engine's half (`connector.build`) and a rank's half are made of the same parts, `Parts`. A rank
in its engine's process shares the engine's endpoint and gets its messages by calls; a rank in a
process of its own is built here: its main calls `build_rank` once, starts `endpoint`, and gives
`sender` to the runner.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from xpyd_kv.memory.api import KvMemory
from xpyd_kv.memory.device import Event
from xpyd_kv.memory.space import OwnSpace
from xpyd_kv.memory.store import StoreLimits
from xpyd_kv.metrics import (
    EndpointCounters,
    KvMetrics,
    MetricsDelta,
    MetricsReporter,
    RankCounters,
)
from xpyd_kv.plan.engine_layout import EngineLayout
from xpyd_kv.ranks.agent import RankAgent, StepSender
from xpyd_kv.ranks.engine import Channel
from xpyd_kv.ranks.handler import ComputeGate, ProcessHandler
from xpyd_kv.ranks.receives import RankReceives
from xpyd_kv.ranks.remote import encode, to_rank_decoder
from xpyd_kv.ranks.sends import RankSends
from xpyd_kv.session import pairs
from xpyd_kv.session.deadlines import Alarm
from xpyd_kv.session.receiving import ReceiveSession
from xpyd_kv.session.sending import SendSession
from xpyd_kv.session.settings import KvSettings, SessionContext
from xpyd_kv.transport.api import Endpoint, MakeEndpoint


class Parts:
    """The parts that the sessions of one process share: see SessionContext. `lost`: the device has
    failed."""

    def __init__(
        self,
        *,
        make_endpoint: MakeEndpoint,
        memory: KvMemory,
        engine: EngineLayout,
        on_device: bool,
        settings: KvSettings,
        clock: Callable[[], float],
        lost: Callable[[str], None] = lambda _: None,
    ) -> None:
        alarm = Alarm()
        self.metrics = KvMetrics()
        self.gate = ComputeGate(clock, alarm=alarm, lost=lost)
        self.handler = ProcessHandler(self.gate, alarm)
        self.context = SessionContext(
            endpoint=make_endpoint(self.handler),
            memory=memory,
            engine=engine,
            on_device=on_device,
            settings=settings,
            clock=clock,
            alarm=alarm,
        )

    def rank(
        self,
        role: Literal["P", "D"],
        post: pairs.Report,
        *,
        counts: MetricsDelta[KvMetrics],
        written: Callable[[], Event | None],
    ) -> RankSends | RankReceives:
        """A rank's half, which the Handler knows from now on. `post` gives its messages to the
        engine, `counts` is of the rank's own metrics; `written`: see RankReceives."""
        report = partial(_report, post, counts)
        half: RankSends | RankReceives
        if role == "P":
            half = RankSends(
                partial(SendSession, self.context, metrics=counts.counters),
                report=report,
                tombstone_s=self.context.settings.limits.tombstone_s,
                clock=self.context.clock,
            )
        else:
            half = RankReceives(
                partial(ReceiveSession, self.context, metrics=counts.counters),
                report=report,
                written=written,
                gate=self.gate,
            )
        self.handler.rank = half
        return half


def _report(post: pairs.Report, counts: MetricsDelta[KvMetrics], message: pairs.FromRank) -> None:
    """Report the counts before each message that ends a pair."""
    if isinstance(message, pairs.Ended | pairs.Landed | pairs.Lost):
        post(pairs.Counted(counts=counts.take()))
    post(message)


@dataclass(frozen=True)
class RankPart:
    """Start and close `endpoint`, then close `space`. `sender` is a P's, for its runner."""

    endpoint: Endpoint
    space: OwnSpace
    metrics: KvMetrics
    sender: StepSender | None = None


def build_rank(
    role: Literal["P", "D"],
    *,
    channel: Channel,
    make_endpoint: MakeEndpoint,
    memory: KvMemory,
    engine: EngineLayout,
    settings: KvSettings,
    give_up: Callable[[str], None],
    counters: EndpointCounters | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> RankPart:
    """The parts of one rank of a P or a D, endpoint not started; it listens to `channel` from now
    on. `memory` is the rank's cache, `engine` all of it; `settings` are the engine's. `give_up`
    ends the rank, with the reason: its device has failed. `counters`: the endpoint's, which the
    engine hears of. UserError when there is less memory than buffer and pool take."""
    # In the other modes a P has no KV that would wait long for D alone.
    has_store = role == "D" or settings.mode == "get"
    space = OwnSpace(
        memory,
        settings.store if has_store else StoreLimits(),
        book_unit_bytes=engine.held_bytes_per_block,
    )
    parts = Parts(
        make_endpoint=make_endpoint,
        memory=memory,
        engine=engine,
        on_device=memory.device is not None,
        settings=settings,
        clock=clock,
        lost=give_up,
    )
    counts = MetricsDelta(parts.metrics, RankCounters)

    def post(message: pairs.FromRank) -> None:
        channel.post(encode(message))

    half = parts.rank(role, post, counts=counts, written=memory.written)
    if counters is not None:
        parts.handler.reporter = MetricsReporter(
            counts,
            counters,
            lambda counted, endpoint: post(pairs.Counted(counts=counted, endpoint=endpoint)),
        )
    agent = RankAgent(half, space=space, gate=parts.gate, post=post, give_up=give_up)
    endpoint = parts.context.endpoint
    call, decode = endpoint.call, to_rank_decoder(space.room)
    channel.listen(lambda message: call(partial(agent.do, decode(message))))
    sender = None
    if isinstance(half, RankSends):
        sender = StepSender(
            half,
            call=call,
            memory=memory,
            gate=parts.gate,
            mode=settings.mode,
            limits=settings.frames,
        )
    return RankPart(endpoint, space, parts.metrics, sender)

"""Puts one rank's half of the transfer together, in the rank's own process.

Its main calls `build_rank` once, starts `endpoint`, and gives `sender` to the runner.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from xpyd_kv.memory.api import KvMemory
from xpyd_kv.memory.space import OwnSpace
from xpyd_kv.memory.store import StoreLimits
from xpyd_kv.metrics import Counters, KvMetrics, MetricsReporter, RankMetricsDelta
from xpyd_kv.plan.engine_layout import EngineLayout
from xpyd_kv.ranks.agent import RankAgent, RankReporter, StepSender
from xpyd_kv.ranks.engine import Channel
from xpyd_kv.ranks.handler import ComputeGate, LateHandler
from xpyd_kv.ranks.receives import RankReceives
from xpyd_kv.ranks.sends import RankSends
from xpyd_kv.session.deadlines import Alarm
from xpyd_kv.session.events import ReceiveEvent, SendEvent
from xpyd_kv.session.fanin import Fanin
from xpyd_kv.session.fanout import Fanout
from xpyd_kv.session.receiving import ReceiveSession
from xpyd_kv.session.sending import SendSession
from xpyd_kv.session.settings import KvSettings
from xpyd_kv.transport.api import Endpoint, MakeEndpoint


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
    counters: Counters | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> RankPart:
    """The parts of one rank of a P or a D, endpoint not started; it listens to `channel` from now
    on. `memory` is the rank's cache, `engine` all of it; `settings` are the engine's. `give_up`
    ends the rank, with the reason: its device has failed. `counters`: the endpoint's, which the
    engine is told of. UserError when there is less memory than buffer and pool take."""
    # In the other modes a P has no KV that would wait long for D alone.
    has_store = role == "D" or settings.mode == "get"
    space = OwnSpace(
        memory,
        settings.store if has_store else StoreLimits(),
        book_unit_bytes=engine.held_bytes_per_block,
    )
    alarm = Alarm()
    gate = ComputeGate(clock, alarm=alarm, lost=give_up)
    handler = LateHandler(gate, alarm)
    endpoint = make_endpoint(handler)
    metrics = KvMetrics()
    figures = RankMetricsDelta(metrics)
    mouth = RankReporter(channel, figures)
    if counters is not None:
        handler.teller = MetricsReporter(figures, counters, mouth.counted)
    agent = partial(
        RankAgent,
        call=endpoint.call,
        memory=memory,
        space=space,
        gate=gate,
        mouth=mouth,
        give_up=give_up,
    )
    if role == "D":

        def receive_session(report: Callable[[ReceiveEvent], None]) -> ReceiveSession:
            return ReceiveSession(
                endpoint,
                layout=memory.layout,
                on_device=memory.device is not None,
                limits=settings.limits,
                clock=clock,
                report=report,
                metrics=metrics,
                alarm=alarm,
                fanin=Fanin((), engine),
            )

        receives = RankReceives(receive_session, report=mouth.received)
        handler.rank = receives
        channel.listen(agent(receives=receives).heard)
        return RankPart(endpoint, space, metrics)

    def pair_session(report: Callable[[SendEvent], None]) -> SendSession:
        return send_session(
            endpoint,
            report,
            memory=memory,
            settings=settings,
            clock=clock,
            metrics=metrics,
            fanout=Fanout((), engine),
            alarm=alarm,
        )

    sends = RankSends(
        pair_session,
        report=mouth.sent,
        on_probed=mouth.probed,
        tombstone_s=settings.limits.tombstone_s,
        clock=clock,
    )
    handler.rank = sends
    channel.listen(agent(sends=sends).heard)
    sender = StepSender(
        sends,
        call=endpoint.call,
        memory=memory,
        gate=gate,
        mode=settings.mode,
        limits=settings.frames,
    )
    return RankPart(endpoint, space, metrics, sender)


def send_session(
    endpoint: Endpoint,
    report: Callable[[SendEvent], None],
    *,
    memory: KvMemory,
    settings: KvSettings,
    clock: Callable[[], float],
    metrics: KvMetrics,
    fanout: Fanout,
    alarm: Alarm | None = None,
) -> SendSession:
    """A SendSession as the settings say."""
    return SendSession(
        endpoint,
        memory=memory,
        limits=settings.limits,
        max_frame_bytes=settings.frames.max_frame_bytes,
        join_bytes=settings.frames.join_bytes,
        clock=clock,
        report=report,
        metrics=metrics,
        fanout=fanout,
        alarm=alarm,
    )

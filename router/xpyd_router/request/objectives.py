"""Learns how fast instances work, forecasts requests, and judges those that have objectives.

`flow` reports what calls took; four times a second it reads what was counted of streams, so that
no token pays for it. One per router, and none where neither a policy nor an objective asks for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from xpyd_router.fleet.instances import InstanceKey
from xpyd_router.fleet.loads import Load, LoadTable
from xpyd_router.fleet.view import FleetView
from xpyd_router.policy.base import Slo, forecast
from xpyd_router.policy.pairs import Alone, Pair
from xpyd_router.request.state import RequestState
from xpyd_router.request_metrics import InstanceTable, ObjectiveTable, word

_SAMPLE_S = 0.25


class _Seen(NamedTuple):
    """A stream's instance at the last sample."""

    gaps: int
    gaps_s: float
    requests: int


class Objectives:
    """See the module. `default` is for requests that name none; `clock` is monotonic seconds."""

    def __init__(
        self,
        default: Slo,
        *,
        fleet: FleetView,
        loads: LoadTable,
        instance_metrics: InstanceTable,
        table: ObjectiveTable,
        clock: Callable[[], float],
    ) -> None:
        self._default = default
        self._fleet = fleet
        self._loads = loads
        self._instance_metrics = instance_metrics
        self._table = table
        self._clock = clock
        self._seen: dict[InstanceKey, _Seen] = {}

    def of(self, asked: Slo) -> Slo:
        """The objectives of a request that asked for these."""
        ttft_s = self._default.ttft_s if asked.ttft_s is None else asked.ttft_s
        return Slo(ttft_s, self._default.itl_s if asked.itl_s is None else asked.itl_s)

    def left(self, state: RequestState) -> Slo:
        """The time left of the request's objectives; none for a first token that was sent."""
        slo = state.slo
        if slo.ttft_s is None:
            return slo
        if state.sent is not None:
            return Slo(None, slo.itl_s)
        return slo._replace(ttft_s=slo.ttft_s - (self._clock() - state.trace.started_s))

    def placed(self, state: RequestState, choice: Pair | Alone, prefill_tokens: int) -> None:
        """The request goes there, and its load is not counted yet. What is expected of its first
        try is what is said of it.
        """
        if state.forecast is None:
            first, last = self._loads.of(choice[0].place), self._loads.of(choice[-1].place)
            state.forecast = forecast(first, last, prefill_tokens)
            state.placed_s = self._clock() - state.trace.started_s

    def streamed(
        self, state: RequestState, load: Load, waiting_tokens: float, call_s: float | None
    ) -> None:
        """An instance alone made a whole stream in `call_s`: note when its first token came."""
        trace = state.trace
        if trace.first_s is None or call_s is None:
            return
        first_s = call_s - (self._clock() - trace.started_s - trace.first_s)
        if first_s >= 0:  # else the client had it from an earlier try
            load.pace.first.observe(waiting_tokens, first_s)

    def answered(
        self,
        state: RequestState,
        load: Load,
        waiting_tokens: float,
        call_s: float | None,
        *,
        is_prefill: bool,
    ) -> None:
        """The last instance of the try made an answer that was not streamed."""
        tokens = state.trace.output_tokens
        if call_s is None or not tokens:
            return
        if is_prefill:
            load.pace.first.observe(waiting_tokens, call_s)
        else:
            load.pace.gap.observe(load.active, call_s * state.request.choices / tokens)

    def judge(self, state: RequestState, *, is_whole: bool) -> None:
        """Count a stream that ended, by itself or before its end."""
        slo, trace, expected = state.slo, state.trace, state.forecast
        if expected is None:
            return
        took_s = self._clock() - trace.started_s
        if slo.ttft_s is not None:
            first_s = took_s if trace.first_s is None else trace.first_s
            # A client that left earlier was not served in time only if that time was over.
            if trace.first_s is not None or first_s > slo.ttft_s:
                ttft_s = expected.ttft_s
                said = word(None if ttft_s is None else state.placed_s + ttft_s, slo.ttft_s)
                self._table.count("ttft", predicted=said, result=word(first_s, slo.ttft_s))
        if slo.itl_s is None or not is_whole or state.was_interrupted or trace.first_s is None:
            return
        gaps = max(map(len, state.sent.token_ids)) - 1 if state.sent else 0
        if gaps > 0:
            said, itl_s = word(expected.itl_s, slo.itl_s), (took_s - trace.first_s) / gaps
            self._table.count("itl", predicted=said, result=word(itl_s, slo.itl_s))

    def sample(self) -> None:
        """Take what streams showed since the last sample: the mean gap between tokens, and the
        requests that the instance had meanwhile.
        """
        seen: dict[InstanceKey, _Seen] = {}
        for instance in self._fleet.instances:
            loads = [self._loads.of(place) for place in instance.places]
            gaps, active = (
                self._instance_metrics.of(instance).itl_s,
                sum(one.active for one in loads),
            )
            now = seen[instance.key] = _Seen(gaps.count, gaps.sum, active)
            before = self._seen.get(instance.key, now)
            if count := now.gaps - before.gaps:
                # Streams are counted by instance: its replicas are taken to share them evenly.
                requests = max((before.requests + now.requests) / 2 / len(loads), 1.0)
                for load in loads:
                    load.pace.gap.observe(requests, (now.gaps_s - before.gaps_s) / count)
        self._seen = seen

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(_SAMPLE_S)

"""Probes of pairs: the router has each P move some bytes to each D, whether requests come or not.

A pair whose KV does not arrive gives right answers all the same, since D computes: nobody sees it.
So each pair that may get requests is probed by `POST /kv/probe` of its P (docs/wire-probe.md): when
both have come, again after each start of one of them, and every 20 s; one that failed soon again.
Of engines with replicas these are the pairs: each has a KV address of its own (docs/adr/0124).
The results are counters by pair, which the operator and `xpyd up` read (KVTransferVerified), and
the registry's: with `--kv-verify strict` a pair is one only while its probes pass. An instance
without any partner, since its pairing key is another, is probed for what differs. One PairProber
per router, in the process that takes heartbeats. See docs/adr/0104 and docs/adr/0110.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice
from typing import Literal, get_args

import msgspec

from xpyd_core.keys import Keys, call_mac
from xpyd_core.kv_outcome import cause_of
from xpyd_router.errors import CallFailed
from xpyd_router.fleet.instances import Instance, InstanceKey
from xpyd_router.fleet.introductions import MAX_PAIRS, PairFound, possible_pairs, unlike_pairs
from xpyd_router.fleet.view import FleetView
from xpyd_router.metrics import RouterMetrics
from xpyd_router.request.releases import post_signed
from xpyd_router.upstream.client import Dialer, UpstreamClient

logger = logging.getLogger(__name__)
PERIOD_S = 20.0
"""Between two probes of a pair that works: what breaks without requests is in the fleet's condition
within a minute, with two failures and the operator's own interval. In a large fleet it is longer:
see _MOST_PER_S."""
_FIRST_PAUSE_S = 2.0
"""After a first failure, then twice as long each time; so long, too, where P was busy."""
_SOON_S = 0.5
"""Where P was busy and the pair waits for its first probe."""
_LONGEST_PAUSE_S = 30.0
_MOST_RUNNING = 8
"""Probes at once; each P has one at a time."""
_MOST_PER_S = 8
"""Probes begun in a second: 64 KiB each, and P takes ten."""
_CALL_S = 30.0
"""Longer than P waits for D, and its ranks for theirs."""
_IDLE_S = 5.0
_MAX_DETAIL = 300
_MAX_ANSWER_BYTES = 1 << 20
"""It has a row for each pair of ranks."""
_UNKNOWN_CALL = (404, 405, 409, 501)
"""An engine without probes, or one that takes none of ours."""


class _Answer(msgspec.Struct, frozen=True):
    """What of P's answer counts."""

    ok: bool
    reason: str = ""
    detail: str = ""
    seconds: float = 0.0


State = Literal["unprobed", "verified", "failed"]
STATES: tuple[State, ...] = get_args(State)


@dataclass(order=True)
class _Pair:
    """A pair that is probed. `failures` in a row. Those that were not asked for yet come first."""

    was_asked: bool
    due_s: float
    number: int
    prefill: Instance = field(compare=False)
    decode: Instance = field(compare=False)
    failures: int = field(default=0, compare=False)
    is_running: bool = field(default=False, compare=False)
    state: State = field(default="unprobed", compare=False)


def _knows_probes(instance: Instance) -> bool:
    """Not engines with vLLM's own connectors, nor those of three fields."""
    return instance.dialect in ("xpyd", "pair-id") and instance.serves_alone


def _text(found: _Answer, d: Instance) -> str:
    """What is wrong, for people: P's word, and more of it. P is not to be trusted with lines."""
    more = "".join(c for c in found.detail[:_MAX_DETAIL] if c.isprintable())
    return f"{found.reason} at {d.kv_text}{more and ': ' + more}"


def _by_turns(instances: Sequence[Instance]) -> Iterator[tuple[Instance, Instance]]:
    """All pairs, so that each instance has had its first when another one gets its second."""
    places = {
        one.place: place
        for kind in ("P", "D")
        for place, one in enumerate(one for one in instances if one.beat.type == kind)
    }
    most = max(places.values(), default=0) + 1
    pairs = islice(possible_pairs(instances), MAX_PAIRS)
    return iter(
        sorted(pairs, key=lambda pair: (places[pair[1].place] - places[pair[0].place]) % most)
    )


class PairProber:
    """See the module. The first of `keys` signs. `random` in [0, 1) spreads the probes of several
    routers."""

    def __init__(
        self,
        fleet: FleetView,
        metrics: RouterMetrics,
        *,
        keys: Keys,
        random: Callable[[], float],
        period_s: float = PERIOD_S,
        dialer: Dialer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._keys = keys
        self._dialer = dialer
        self._random = random
        self._period_s = period_s
        self._clock = clock
        self._pairs: dict[tuple[InstanceKey, InstanceKey], _Pair] = {}
        self._line: list[_Pair] = []
        """A heap: those that no probe runs of, by when they are due."""
        self._numbers = count()
        self._seen: list[tuple[object, ...]] = []
        """What of the routable instances makes them pairs."""
        self._dumb: set[InstanceKey] = set()
        """Ps that know no probe."""
        self._busy: set[InstanceKey] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._next_s = 0.0
        """When the next probe may begin."""

    async def run(self) -> None:
        """Probe until cancelled; then no call is left. Without a period it ends at once."""
        if not self._period_s:
            return
        upstream = UpstreamClient(self._dialer)
        self._fleet.on_lost(upstream.lose)
        try:
            while True:
                wait_s = self._start_due(upstream)
                await self._fleet.wait_change(wait_s)
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            await upstream.close()

    def _start_due(self, upstream: UpstreamClient) -> float:
        """Begin what is due and has a place; after how long to look again."""
        now = self._clock()
        self._learn(now)
        line = self._line
        held: list[_Pair] = []
        wait_s = _IDLE_S
        while line and len(self._running) < _MOST_RUNNING:
            if (wait_s := min(_IDLE_S, max(line[0].due_s, self._next_s) - now)) > 0:
                break
            pair = heapq.heappop(line)
            pair.was_asked = True
            if pair.prefill.key in self._dumb:
                continue
            if pair.prefill.place in self._busy:
                held.append(pair)
                continue
            self._next_s = max(self._next_s, now - 1.0) + 1 / _MOST_PER_S
            self._busy.add(pair.prefill.place)
            pair.is_running = True
            task = asyncio.create_task(self._probe(pair, upstream))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        for pair in held:
            heapq.heappush(line, pair)
        # The end of the probe that they wait for changes nothing in the fleet, so it wakes nobody.
        return max(0.0 if held else wait_s, 1 / _MOST_PER_S)

    def _learn(self, now: float) -> None:
        """The pairs that there are, where the fleet has changed."""
        routable = [
            one
            for each in self._fleet.instances
            if each.is_routable and _knows_probes(each)
            for one in each.each_replica()
        ]
        seen: list[tuple[object, ...]] = [
            (one.place, one.kv_text, one.pairing, one.partners, one.beat.models) for one in routable
        ]
        if seen == self._seen:
            return
        self._seen = seen
        before, self._pairs = self._pairs, {}
        for p, d in chain(_by_turns(routable), unlike_pairs(routable)):
            names = p.place, d.place
            self._pairs[names] = before.get(names) or _Pair(False, now, next(self._numbers), p, d)
        self._count_states()
        self._dumb &= {one.key for one in routable}
        self._line = [one for one in self._pairs.values() if not one.is_running]
        heapq.heapify(self._line)

    def _count_states(self) -> None:
        counted = Counter(pair.state for pair in self._pairs.values())
        for state in STATES:
            self._metrics.kv_pairs.labels(state).set(counted[state])

    def _again(self, pair: _Pair, pause_s: float) -> None:
        """Probe it behind a pause, if it is still a pair."""
        pair.is_running = False
        pair.due_s = self._clock() + pause_s
        if self._pairs.get((pair.prefill.place, pair.decode.place)) is pair:
            heapq.heappush(self._line, pair)

    async def _probe(self, pair: _Pair, upstream: UpstreamClient) -> None:
        p, d = pair.prefill, pair.decode
        found: _Answer | None = None
        try:
            found = await self._ask(p, d, upstream)
        except CallFailed as failure:  # of P itself, whom health looks at
            logger.debug("P %s was not asked for a probe: %s", p.name, failure.cause)
        except Exception:  # the task's edge
            logger.exception("a probe failed")
        finally:
            self._busy.discard(p.place)
            self._again(pair, self._pause_s(pair, found))

    def _pause_s(self, pair: _Pair, found: _Answer | None) -> float:
        """Count what was found; after how long to probe the pair again."""
        p, d = pair.prefill, pair.decode
        if found is None or (not found.ok and found.reason == "busy"):
            pause_s = _SOON_S if pair.state == "unprobed" else _FIRST_PAUSE_S
            return pause_s * (1 + self._random() / 4)
        cause = "" if found.ok else cause_of(found.reason)
        detail = "" if found.ok else _text(found, d)
        self._fleet.pair_found(p.place, d.place, PairFound(cause, detail, found.seconds))
        before, pair.state = pair.state, "verified" if found.ok else "failed"
        if pair.state != before:
            self._count_states()
        if found.ok:
            self._metrics.kv_probes.count((p, d), "moved", "")
            if pair.failures:
                logger.info("probes get from P %s to D %s again", p.name, d.name)
            pair.failures, pause_s = 0, self._period_s
        else:
            self._metrics.kv_probes.count((p, d), "failed", cause_of(found.reason))
            if not pair.failures:
                text = "a probe does not get from P %s to D %s: %s"
                logger.warning(text, p.name, d.name, detail)
            pause_s = min(_FIRST_PAUSE_S * 2**pair.failures, _LONGEST_PAUSE_S)
            pair.failures += 1
        return pause_s * (1 + self._random() / 4)

    async def _ask(self, p: Instance, d: Instance, upstream: UpstreamClient) -> _Answer | None:
        """What P says; None: nothing of the pair. Raises CallFailed."""
        mac = call_mac(self._keys[0], "kv-probe", d.kv_text) if self._keys else ""
        answer = await post_signed(
            upstream,
            p,
            "/kv/probe",
            {"address": d.kv_text},
            mac,
            within_s=_CALL_S,
            most_bytes=_MAX_ANSWER_BYTES,
        )
        if answer.status in _UNKNOWN_CALL:
            self._give_up(p)
        if answer.status != 200:
            return None
        try:
            return msgspec.json.decode(answer.body, type=_Answer)
        except msgspec.DecodeError:
            self._give_up(p)
            return None

    def _give_up(self, p: Instance) -> None:
        """Ask it no more: it knows no probes."""
        self._dumb.add(p.key)
        if self._fleet.only_verified:
            text = "P %s knows no probes: with --kv-verify strict it is in no pair%s"
            is_vllm = p.dialect == "pair-id"
            logger.warning(text, p.name, "; VLLM_PLUGINS=xpyd brings them" if is_vllm else "")

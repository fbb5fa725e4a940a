"""Whether a fleet's KV arrives, by what its routers count. Pure: time is given.

Routers count what became of each request's KV (ADR 0043), and of their own probes of each pair (ADR
0104), which come also where no requests do. A KvWatch takes these counts at intervals
and gives the condition KVTransferVerified; the operator has one for each fleet, the supervisor of a
local fleet one. Answers are right also where no KV arrives, so nothing else shows it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from xpyd_core.kv_outcome import PATH_CAUSES

METRIC = "xpyd_router_kv_outcomes_total"
_PROBES = "xpyd_router_kv_probes_total"
_BEATS = "xpyd_router_heartbeats_total"
_HAS_PAIR = "xpyd_router_has_pair"
_INSTANCES = "xpyd_router_instances"
QUERY = "/metrics?" + "&".join(
    f"name[]={n}" for n in (METRIC, _PROBES, _BEATS, _HAS_PAIR, _INSTANCES)
)
"""What to GET of a router."""
LATELY_S = 300.0
"""How long what was seen counts."""
HOLD_S = 60.0
"""False ends when no KV was lost for so long: else a path that works now and then would flap."""
LEAST = 2
"""Requests that make a verdict: one may be lost to a restart."""
_APART_S = 10.0
"""Looks at forged heartbeats are so far apart at least: two stray ones are seen at one look."""
_SETTLED_S = 30.0
"""A P that left since KV moved is not asked any more: how long ago that has to be."""
_MOST_NAMED = 3
_MOST_NAME = 253
_MOST_PAIRS = 4096

Row = tuple[str, str, str, str]
"""P, D, outcome, cause."""
Counts = Mapping[Row, int]

_FORGED: Row = ("", "", "forged", "")
"""Heartbeats that were signed with another key: engines that the router does not take."""
_PROBED = "probed "
"""Before the outcome of a probe, in a Row."""
_SAMPLE = re.compile(rf"^({METRIC}|{_PROBES}){{(.*)}} (\S+)$", re.M)
_FORGED_BEATS = re.compile(rf'^{_BEATS}{{result="forged"}} (\S+)$', re.M)
_PAIR = re.compile(rf"^{_HAS_PAIR} (\S+)$", re.M)
_KNOWN = re.compile(rf"^{_INSTANCES}{{[^}}\n]*}} (\S+)$", re.M)
# Nothing here may go back: what a pod answers is not to be trusted.
_LABEL = re.compile(r'(?<!\w)(\w{1,64}+)="((?:[^"\\]|\\.)*+)"')
_ESCAPED = re.compile(r"\\(.)")


def read_counts(text: str) -> Counts:
    """The counts in a router's metrics."""
    found: Counter[Row] = Counter()
    for value in _FORGED_BEATS.findall(text):
        found[_FORGED] += _number(value)
    for metric, labels, value in _SAMPLE.findall(text):
        by_name = {name: _ESCAPED.sub(r"\1", raw) for name, raw in _LABEL.findall(labels)}
        names = ("prefill", "decode", "outcome", "cause")
        row = tuple(by_name.get(name, "")[:_MOST_NAME] for name in names)
        outcome = _PROBED + row[2] if metric == _PROBES else row[2]
        found[row[0], row[1], outcome, row[3]] += _number(value)
    return found


def read_has_pair(text: str) -> bool | None:
    """Whether a router has instances that can serve a request (ADR 0041); None: it does not say."""
    values = _PAIR.findall(text)
    return bool(_number(values[0])) if len(values) == 1 else None


def read_instances(text: str) -> int:
    """How many engines a router has, in whatever state."""
    return sum(map(_number, _KNOWN.findall(text)))


def _number(value: str) -> int:
    try:
        return int(float(value))
    except (ValueError, OverflowError):
        return 0


class KvVerdict(NamedTuple):
    """A condition: its status (None: unknown), one CamelCase word, and a sentence."""

    status: bool | None
    reason: str
    message: str


_REASONS = {
    "unreachable": "Unreachable",
    "key": "KeyMismatch",
    "incompatible": "Incompatible",
    "no_offer": "NoOffer",
    "timeout": "Timeout",
    "lost": "ConnectionLost",
    "broken": "DataBroken",
}
_ALONE = frozenset({"no_prefill", "short_prompt"})
"""Causes for which a fleet's P gets no requests."""
_IDLE = "Decode instances served all requests alone lately: no Prefill instance was there"
_SHORT = (
    "all prompts were shorter lately than router.localPrefillTokens: Decode instances served them "
    "alone, as this field wants it, and no KV was to move"
)
_WORKS = "probes get from Prefill to Decode instances; no request moved KV lately"
_TEXT = "D computes those prompts a second time; xpyd kv-probe tests the path of a pair"
_OTHER_KEY = "routers refuse engines whose heartbeats are signed with another key"
NOT_LOOKED = KvVerdict(None, "NoTraffic", "no request showed lately whether KV arrives")
NO_PAIRS = KvVerdict(None, "NoPairs", "no Prefill and Decode instances: no KV moves in this fleet")


@dataclass
class _Pair:
    """A P and a D: when KV moved last, and what was lost since, by cause."""

    moved_s: float = float("-inf")
    lost_s: float = float("-inf")
    lost: Counter[str] = field(default_factory=Counter[str])


@dataclass
class _Forged:
    """Heartbeats of another key, and whether they are an engine's of the fleet.

    Anybody who reaches a router can send some. An engine of the fleet sends them all the time, and
    is a ready pod that no router has: both have to be so at `LEAST` looks one behind the other.
    """

    looks: int = 0
    last_s: float = float("-inf")

    def look(self, now_s: float, *, has_grown: bool, has_stranger: bool | None) -> None:
        """What one look showed; None: not whether a ready engine is unknown. A fleet without a pair
        is looked at often: a look soon after one that counted counts as nothing."""
        if has_stranger is False or now_s - self.last_s > HOLD_S:
            self.looks = 0
        if has_stranger and has_grown and now_s - self.last_s >= _APART_S:
            self.looks += 1
            self.last_s = now_s

    @property
    def is_an_engine(self) -> bool:
        """Whether an engine of the fleet has another key than the routers."""
        return self.looks >= LEAST


class KvWatch:
    """What one fleet's routers counted, and what follows from it. Times are of one steady clock.

    False needs two requests whose KV did not come, of pairs that moved none since, and stays until
    no KV was lost for a minute. What was counted before the first look is of the past, also where
    a router that was there does not answer until later.
    """

    def __init__(self) -> None:
        self._routers: dict[str, Counts] | None = None
        self._past = frozenset[str]()
        """Pods that were there before the first look."""
        self._pairs: dict[tuple[str, str], _Pair] = {}
        self._moved_s = self._lost_s = self._probed_s = float("-inf")
        self._alone: dict[str, tuple[int, float]] = {}
        """By cause the requests that one instance served, and when it was seen last."""
        self._forged = _Forged()
        self._false: KvVerdict | None = None

    def look(
        self, routers: Mapping[str, Counts], now_s: float, *, has_stranger: bool | None = None
    ) -> KvVerdict:
        """The verdict after the counts of all routers that answered, by name. A router that did not
        answer may be left out: its earlier counts are kept. `has_stranger`: whether fewer engines
        are known to each router than are ready; None: that is not known."""
        if self._routers is None:
            if routers:
                self._routers = dict(routers)
            return NOT_LOOKED
        forged = 0
        for name, counts in routers.items():
            first: Counts = counts if name in self._past else {}
            grown = _growth(self._routers.get(name, first), counts)
            forged += grown.get(_FORGED, 0)
            self._add(grown, now_s)
            self._routers[name] = counts
        self._forged.look(now_s, has_grown=forged > 0, has_stranger=has_stranger)
        self._forget(now_s)
        return self._verdict(now_s)

    def keep(self, pods: Iterable[str]) -> None:
        """The fleet's pods as they are: forget the counts of routers that are gone, and pairs of
        engines that are. A P that was killed with KV under way moves none any more."""
        names = frozenset(pods)
        if self._routers is None:
            self._past = names
        else:
            self._routers = {n: c for n, c in self._routers.items() if n in names}
        self._pairs = {k: p for k, p in self._pairs.items() if all(n in names for n in k if n)}

    def _add(self, grown: Counts, now_s: float) -> None:
        moved: list[_Pair] = []
        is_paired = False
        for (prefill, decode, outcome, cause), count in grown.items():
            if outcome.startswith(_PROBED):
                pair = self._pairs.setdefault((prefill, decode), _Pair())
                if outcome == _PROBED + "moved":
                    self._probed_s = now_s
                    pair.moved_s = now_s
                    pair.lost.clear()
                else:
                    pair.lost[cause] += count
                    pair.lost_s = self._lost_s = now_s
                continue
            # Also where KV was not to move, or engines do not say whether it did.
            is_paired = is_paired or bool(prefill)
            is_lost = outcome in ("recomputed", "failed") and cause in PATH_CAUSES
            if outcome == "moved" or is_lost:
                pair = self._pairs.setdefault((prefill, decode), _Pair())
                if is_lost:
                    pair.lost[cause] += count
                    pair.lost_s = self._lost_s = now_s
                else:
                    moved.append(pair)
            elif outcome == "alone" and cause in _ALONE:
                self._alone[cause] = self._alone.get(cause, (0, 0.0))[0] + count, now_s
        for pair in moved:
            # Where both happened between two looks, the order is not known: the path works.
            pair.moved_s = self._moved_s = now_s
            pair.lost.clear()
        if is_paired:
            self._alone.clear()

    def _forget(self, now_s: float) -> None:
        oldest_s = now_s - LATELY_S
        for key, pair in list(self._pairs.items()):
            if max(pair.moved_s, pair.lost_s) < oldest_s or len(self._pairs) > _MOST_PAIRS:
                del self._pairs[key]
        self._alone = {c: row for c, row in self._alone.items() if row[1] >= oldest_s}

    def _verdict(self, now_s: float) -> KvVerdict:
        broken = {key: pair for key, pair in self._pairs.items() if pair.lost}
        if sum(pair.lost.total() for pair in broken.values()) >= LEAST:
            self._false = _lost(broken)
            return self._false
        if self._false is not None and now_s - self._lost_s <= HOLD_S:
            return self._false
        self._false = None
        if self._forged.is_an_engine:
            return KvVerdict(False, "KeyMismatch", _OTHER_KEY)
        is_idle = self._alone.get("no_prefill", (0, 0.0))[0] >= LEAST
        is_without_p = is_idle and now_s - self._moved_s >= _SETTLED_S
        if now_s - self._moved_s <= LATELY_S and not is_without_p:
            return KvVerdict(True, "KVMoved", "KV moved from Prefill to Decode instances lately")
        if is_without_p:
            return KvVerdict(False, "PrefillIdle", _IDLE)
        if now_s - self._probed_s <= LATELY_S:
            return KvVerdict(True, "Probed", _WORKS)
        if "short_prompt" in self._alone:
            return KvVerdict(None, "ShortPrompts", _SHORT)
        return NOT_LOOKED


def _growth(before: Counts, now: Counts) -> Counts:
    """What was counted since; a counter that fell began anew."""
    grown = {
        row: n - before.get(row, 0) if n >= before.get(row, 0) else n for row, n in now.items()
    }
    return {row: n for row, n in grown.items() if n}


def _lost(broken: Mapping[tuple[str, str], _Pair]) -> KvVerdict:
    """False, with some of the pairs. No numbers: the message must not change at each look."""
    causes: Counter[str] = Counter()
    for pair in broken.values():
        causes.update(pair.lost)
    named = [
        f"{prefill} to {decode}: {max(pair.lost, key=pair.lost.__getitem__)}"
        for (prefill, decode), pair in sorted(broken.items())[:_MOST_NAMED]
    ]
    if len(broken) > len(named):
        named.append(f"and {len(broken) - len(named)} more pairs")
    worst = max(sorted(causes), key=causes.__getitem__)
    reason = _REASONS.get(worst, "NotReceived")
    return KvVerdict(False, reason, f"KV did not arrive from {', '.join(named)}. {_TEXT}")

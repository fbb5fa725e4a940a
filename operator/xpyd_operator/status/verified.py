"""Whether a fleet's KV arrives, by what its routers count. Pure: time is given.

Routers count what became of each request's KV (ADR 0043), and of their own probes of each pair (ADR
0104), which come also where no requests do. A KvWatch takes these counts at intervals
and gives the condition KVTransferVerified; the operator has one for each fleet, the supervisor of a
local fleet one. Answers are right also where no KV arrives, so nothing else shows it. What routers
say of instances and of failed probes (`GET /instances`) makes the message: the cause, the pair, the
fix (ADR 0110).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from xpyd_core.kv_outcome import PATH_CAUSES
from xpyd_operator.status.instances import InstanceRow, ProbeRow, read_answer

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


class Seen(NamedTuple):
    """What the fleet's routers say of its instances, by name, and of their last probes."""

    instances: Mapping[str, InstanceRow]
    problems: Mapping[tuple[str, str], str]
    """By P and D what the last probe of the pair shows, where it failed."""
    slowest: ProbeRow | None


def read_seen(bodies: Iterable[bytes]) -> Seen | None:
    """From the answers to GET /instances; None: no router gave one."""
    answers = [one for one in map(read_answer, bodies) if one is not None]
    if not answers:
        return None
    passed = [one.kv_slowest for one in answers if one.kv_slowest is not None]
    return Seen(
        {one.instance: one for answer in answers for one in answer.instances},
        {(one.prefill, one.decode): one.detail for answer in answers for one in answer.kv_problems},
        max(passed, key=lambda one: one.seconds, default=None),
    )


class KvVerdict(NamedTuple):
    """A condition: its status (None: unknown), one CamelCase word, and a sentence."""

    status: bool | None
    reason: str
    message: str


_REASONS = {
    "unreachable": "Unreachable",
    "no_answer": "NoAnswer",
    "no_socket": "NoSharedMemory",
    "key": "KeyMismatch",
    "incompatible": "Incompatible",
    "no_offer": "NoOffer",
    "timeout": "Timeout",
    "lost": "ConnectionLost",
    "broken": "DataBroken",
}
_FIXES = {
    "unreachable": "let D listen where it says (kvTransfer.port, --kv-advertise), and let no "
    "firewall refuse P",
    "no_answer": "a firewall or NetworkPolicy drops what P sends: open kvTransfer.port, and one "
    "port more for each further rank, from Prefill to Decode instances",
    "no_socket": "shared memory and Unix sockets need one folder of one node for both: set "
    "kvTransfer.sameHostPath, or transport: Auto",
    "key": "give both the fleet's key (kvTransfer.keySecretRef)",
    "incompatible": "start both with the same model, tokenizer, dtype and KV layout",
    "no_offer": "P offered nothing within D's wait: see P's log, and kvTransfer.waitSeconds",
    "timeout": "raise kvTransfer.waitSeconds, or mend the network between the two",
}
"""By cause."""
_FACTOR_FIXES = {
    "tokenizer": "give both pools the tokenizer files of one checkpoint",
    "revision": "give both pools one revision of the model (spec.model)",
    "model": "give both pools one model (spec.model)",
    "kv_dtype": "give both pools one dtype of the KV cache (engine.args)",
    "kv_layout": "give both pools one KV layout: the same engine, attention backend and block size",
}
"""By what the handshake names, where it is `incompatible`."""
_FACTOR = re.compile(r"^incompatible:(\w{1,64}+)")
_LATE = frozenset({"timeout", "no_offer"})
"""Causes of requests that say nothing against the way where probes pass: on a slow network, or
behind a P that is busy, the OFFER comes late as well."""
_SHORT_WAIT = (
    "probes of the pair pass, and 64 KiB took up to {seconds:.2f} s: KV of such prompts takes "
    "longer than D waits"
)
_ROLES = {"P": "Prefill", "D": "Decode", "A": "Aggregated"}
_FULL = 2
"""D may be full where less than one in so many blocks is free: a prompt's KV needs many at once."""
_FULL_S = 20.0
"""Requests that wait so long at such a D, and no KV comes there: a busy D gives room meanwhile."""
_ALONE = frozenset({"no_prefill", "short_prompt"})
"""Causes for which a fleet's P gets no requests."""
_IDLE = "Decode instances served all requests alone lately: no Prefill instance was there"
_SHORT = (
    "all prompts were shorter lately than router.localPrefillTokens: Decode instances served them "
    "alone, as this field wants it, and no KV was to move"
)
_WORKS = "probes get from Prefill to Decode instances; no request moved KV lately"
_TEXT = "D computes those prompts a second time; xpyd kv-probe tests the path of a pair"
_SILENT = (
    "routers know nothing of {names}, though ready, and send it no request: let its heartbeats "
    "reach them (XPYD_DISCOVERY, a NetworkPolicy, the discovery port)"
)
_ROOM = "Give D a larger cache, kvTransfer.bufferSize or hostPoolSize, or add Decode instances"
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
        self._measured_s: float | None = None
        self._unknown: dict[str, float] = {}
        """Ready engines that no router knows, and since when."""
        self._full: dict[str, float] = {}
        """Ds without room of which requests wait, and since when no KV has come there."""
        self._named: dict[str, str] = {}
        """The numbers of a D without room as they were at first: the message must not change."""

    def look(
        self,
        routers: Mapping[str, Counts],
        now_s: float,
        *,
        has_stranger: bool | None = None,
        seen: Seen | None = None,
        roles: Mapping[str, str] | None = None,
    ) -> KvVerdict:
        """The verdict after the counts of all routers that answered, by name. A router that did not
        answer may be left out: its earlier counts are kept. `has_stranger`: whether fewer engines
        are known to each router than are ready; None: that is not known. `seen`: what routers say
        of the instances; `roles`: the ready engines and their pools' roles."""
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
        if seen is not None:
            self._compare(seen, roles or {}, now_s, has_stranger=has_stranger)
        return self._verdict(now_s, seen, roles or {})

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
                    self._passed(pair, now_s)
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

    @staticmethod
    def _passed(pair: _Pair, now_s: float) -> None:
        """A probe of it passed: that says nothing against requests whose KV came too late."""
        for cause in list(pair.lost):
            if cause not in _LATE or now_s - pair.lost_s > HOLD_S:
                del pair.lost[cause]

    def _compare(
        self, seen: Seen, roles: Mapping[str, str], now_s: float, *, has_stranger: bool | None
    ) -> None:
        """Note who is unknown to routers, and which Ds have no room. Instances may have names of
        their own: where there are as many as pods, none is unknown."""
        unknown = set[str]() if has_stranger is False else roles.keys() - seen.instances.keys()
        self._unknown = {name: self._unknown.get(name, now_s) for name in unknown}
        came = {d: pair.moved_s for (_, d), pair in self._pairs.items()}
        full: dict[str, float] = {}
        for name, one in seen.instances.items():
            load = one.load
            is_full = load.waiting and load.free_blocks * _FULL < load.total_blocks
            if one.type == "D" and is_full:
                full[name] = max(self._full.get(name, now_s), came.get(name, 0.0))
                self._named.setdefault(
                    name,
                    f"{name} has {load.free_blocks} of {load.total_blocks} blocks free, runs "
                    f"{load.running} requests and lets {load.waiting} wait",
                )
        self._full = full
        self._named = {name: text for name, text in self._named.items() if name in full}

    def _of_instances(
        self, seen: Seen | None, roles: Mapping[str, str], now_s: float
    ) -> KvVerdict | None:
        """What is wrong with instances, by what routers say of them; None: nothing."""
        wrong = sorted(
            (name, role, _ROLES[said])
            for name, role in roles.items()
            if seen is not None
            and (one := seen.instances.get(name)) is not None
            and (said := one.type) in _ROLES
            and _ROLES[said] != role
        )
        if wrong:
            named = "; ".join(
                f"{name} of a {role} pool says to routers that it is {said}, so that it is a pair "
                f"with no {'Decode' if role == 'Prefill' else 'Prefill'} instance"
                for name, role, said in wrong[:_MOST_NAMED]
            )
            fix = "take --role (for vLLM kv_role) out of its arguments and XPYD_ROLE out of its env"
            return KvVerdict(False, "WrongRole", f"{named}: {fix}")
        names = ", ".join(sorted(self._strangers(now_s))[:_MOST_NAMED])
        if self._forged.is_an_engine:
            who = f" (ready, and at no router: {names})" if names else ""
            fix = "give engines and routers one key (kvTransfer.keySecretRef)"
            return KvVerdict(False, "KeyMismatch", f"{_OTHER_KEY}{who}: {fix}")
        if names:
            return KvVerdict(False, "NoHeartbeats", _SILENT.format(names=names))
        full = sorted(name for name, since_s in self._full.items() if now_s - since_s >= _FULL_S)
        if full:
            named = "; ".join(self._named[name] for name in full[:_MOST_NAMED])
            return KvVerdict(False, "NoRoom", f"KV waits at Prefill instances: {named}. {_ROOM}")
        return None

    def _strangers(self, now_s: float) -> list[str]:
        return [name for name, since_s in self._unknown.items() if now_s - since_s >= _APART_S]

    def _forget(self, now_s: float) -> None:
        oldest_s = now_s - LATELY_S
        for key, pair in list(self._pairs.items()):
            if max(pair.moved_s, pair.lost_s) < oldest_s or len(self._pairs) > _MOST_PAIRS:
                del self._pairs[key]
        self._alone = {c: row for c, row in self._alone.items() if row[1] >= oldest_s}

    def _verdict(self, now_s: float, seen: Seen | None, roles: Mapping[str, str]) -> KvVerdict:
        broken = {key: pair for key, pair in self._pairs.items() if pair.lost}
        if sum(pair.lost.total() for pair in broken.values()) >= LEAST:
            if self._measured_s is None and seen is not None and seen.slowest is not None:
                self._measured_s = seen.slowest.seconds
            self._false = _lost(broken, seen, self._measured_s)
            return self._false
        if self._false is not None and now_s - self._lost_s <= HOLD_S:
            return self._false
        self._false = self._measured_s = None
        found = self._of_instances(seen, roles, now_s)
        is_idle = self._alone.get("no_prefill", (0, 0.0))[0] >= LEAST
        is_without_p = is_idle and now_s - self._moved_s >= _SETTLED_S
        if is_without_p and found is not None and found.reason == "NoHeartbeats":
            return KvVerdict(False, "PrefillIdle", f"{_IDLE}. {found.message}")
        if found is not None:
            return found
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


def _failing(seen: Seen | None) -> frozenset[tuple[str, str]]:
    return frozenset() if seen is None else frozenset(seen.problems)


def _lost(
    broken: Mapping[tuple[str, str], _Pair], seen: Seen | None, measured_s: float | None
) -> KvVerdict:
    """False, with some of the pairs. The message must not change at each look: no counts, and
    `measured_s`, the slowest probe that passed, is that of the first."""
    causes: Counter[str] = Counter()
    for pair in broken.values():
        causes.update(pair.lost)
    worst = max(sorted(causes), key=causes.__getitem__)
    named: list[str] = []
    fixes: list[str] = []
    for (prefill, decode), pair in sorted(broken.items())[:_MOST_NAMED]:
        cause = max(pair.lost, key=pair.lost.__getitem__)
        detail = "" if seen is None else seen.problems.get((prefill, decode), "")
        named.append(f"{prefill} to {decode}: {cause}{detail and f' ({detail})'}")
        factor = _FACTOR.match(detail)
        fix = _FACTOR_FIXES.get(factor[1], "") if factor else ""
        fixes.append(fix or _FIXES.get(cause, ""))
    if len(broken) > len(named):
        named.append(f"and {len(broken) - len(named)} more pairs")
    reason = _REASONS.get(worst, "NotReceived")
    if worst in _LATE and measured_s is not None and broken.keys() - _failing(seen):
        reason = "WaitTooShort"
        named.append(_SHORT_WAIT.format(seconds=measured_s))
    fix = "; ".join(dict.fromkeys(one for one in fixes if one))
    return KvVerdict(
        False,
        reason,
        f"KV did not arrive from {', '.join(named)}. {fix and f'Fix: {fix}. '}{_TEXT}",
    )

"""What is known of pairs of a P and a D before they get requests. Pure.

A mixed pair, of different engines, gets no requests until D has compared KV of one prompt with its
own and uses it (docs/adr/0055). `request.introductions` makes that happen; the registry keeps the
verdicts, and `instances.build_snapshot` groups by them. So it is with what probes of each pair show
(`request.pair_probes`), where the fleet wants verified pairs alone (docs/adr/0110).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Literal, NamedTuple

from xpyd_router.fleet.instances import Instance, InstanceKey, Met, Snapshot

Verdict = Literal["met", "refused"]
"""met: D uses P's KV. refused: it never will, as long as both live."""
MAX_VERDICTS = 65_536
"""Pairs with a verdict; further pairs are not introduced, and get no requests."""
_NOBODY: frozenset[InstanceKey] = frozenset()


class Verdicts:
    """The verdicts on the pairs of present instances, at most so many."""

    def __init__(self, most: int = MAX_VERDICTS) -> None:
        self._most = most
        self._met: dict[InstanceKey, frozenset[InstanceKey]] = {}
        self._refused: dict[InstanceKey, frozenset[InstanceKey]] = {}
        self._count = 0
        self.met: Met = MappingProxyType(self._met)
        """By D: the Ps that it has met."""

    @property
    def is_full(self) -> bool:
        """Whether no further pair can have a verdict."""
        return self._count >= self._most

    def of(self, prefill: InstanceKey, decode: InstanceKey) -> Verdict | None:
        """The verdict; None: there is none yet."""
        if prefill in self._met.get(decode, _NOBODY):
            return "met"
        return "refused" if prefill in self._refused.get(decode, _NOBODY) else None

    def put(self, prefill: InstanceKey, decode: InstanceKey, verdict: Verdict) -> bool:
        """Take a verdict; whether it is news. The first one on a pair holds, as D's does."""
        if self.is_full or self.of(prefill, decode) is not None:
            return False
        side = self._met if verdict == "met" else self._refused
        side[decode] = side.get(decode, _NOBODY) | {prefill}
        self._count += 1
        return True

    def forget(self, key: InstanceKey) -> None:
        """The instance left: another start of it is another instance."""
        if not self._count:
            return
        for side in (self._met, self._refused):
            side.pop(key, None)
            for decode, known in list(side.items()):
                if key in known:
                    side[decode] = known - {key}
        self._count = sum(
            len(known) for side in (self._met, self._refused) for known in side.values()
        )

    def known(self) -> Iterator[tuple[InstanceKey, InstanceKey, Verdict]]:
        """All of them: P, D, verdict."""
        for side in (self._met, self._refused):
            verdict: Verdict = "met" if side is self._met else "refused"
            for decode, ps in side.items():
                for prefill in ps:
                    yield prefill, decode, verdict


class PairFound(NamedTuple):
    """What the last probe of a pair has shown. `cause`: one of LOST_CAUSES, empty where the bytes
    arrived; `detail`: what is wrong, in a sentence; `seconds`: what the probe took."""

    cause: str = ""
    detail: str = ""
    seconds: float = 0.0


class WithoutKv(NamedTuple):
    """Names of an instance's partners with which it is no pair, or no good one."""

    unmet: list[str]
    """Of another engine: D has not compared KV of the two yet."""
    refused: list[str]
    """Of another engine: D has, and never uses it."""
    unverified: list[str]
    """The last probe of the pair failed, or there was none yet."""


class PairProblem(NamedTuple):
    """A pair whose last probe failed, by the names of its instances."""

    prefill: str
    decode: str
    found: PairFound


MAX_PAIRS = 65_536
"""Pairs that are probed. Of a larger fleet some are not, and are verified never."""


class Proofs:
    """What probes have shown of the pairs of present instances, at most MAX_PAIRS."""

    def __init__(self) -> None:
        self._found: dict[tuple[InstanceKey, InstanceKey], PairFound] = {}
        self._verified: dict[InstanceKey, frozenset[InstanceKey]] = {}
        self.verified: Met = MappingProxyType(self._verified)
        """By D: the Ps from which the last probe got there."""

    def of(self, prefill: InstanceKey, decode: InstanceKey) -> PairFound | None:
        """What the last probe has shown; None: there was none yet."""
        return self._found.get((prefill, decode))

    def put(self, prefill: InstanceKey, decode: InstanceKey, found: PairFound) -> bool:
        """Take a result; whether the pair is verified by it, or no more."""
        pair = prefill, decode
        before = self._found.get(pair)
        if before is None and len(self._found) >= MAX_PAIRS:
            return False
        self._found[pair] = found
        was_verified = before is not None and not before.cause
        if was_verified == (not found.cause):
            return False
        known = self._verified.get(decode, _NOBODY)
        self._verified[decode] = known - {prefill} if found.cause else known | {prefill}
        return True

    def forget(self, key: InstanceKey) -> None:
        """The instance left: another start of it is another instance."""
        gone = [pair for pair in self._found if key in pair]
        for pair in gone:
            prefill, decode = pair
            del self._found[pair]
            self._verified[decode] = self._verified.get(decode, _NOBODY) - {prefill}
        self._verified.pop(key, None)

    def known(self) -> Iterator[tuple[InstanceKey, InstanceKey, PairFound]]:
        """All of them: P, D, what was found."""
        for (prefill, decode), found in self._found.items():
            yield prefill, decode, found


def common_model(prefill: Instance, decode: Instance) -> str | None:
    """A model that both serve; None: they are no pair for any."""
    return next((name for name in prefill.beat.models if name in decode.beat.models), None)


def possible_pairs(instances: Iterable[Instance]) -> Iterator[tuple[Instance, Instance]]:
    """Each P with each D that would be a pair if engines did not matter."""
    prefill: dict[str, list[Instance]] = {}
    decode: dict[str, list[Instance]] = {}
    for one in instances:
        if one.beat.type != "A":
            side = prefill if one.beat.type == "P" else decode
            side.setdefault(one.pairing, []).append(one)
    for pairing, ds in decode.items():
        for p in prefill.get(pairing, ()):
            for d in ds:
                if not p.is_of_revision(d):
                    continue
                if _share_model(p, d):
                    yield p, d


def unlike_pairs(instances: Iterable[Instance]) -> Iterator[tuple[Instance, Instance]]:
    """For each P and D without any partner the first one of its model, if its key differs: what two
    pools of one document have to be told of each other. Of two revisions of a fleet they may
    differ; there the other pool's instances are on their way."""
    known = [one for one in instances if one.beat.type != "A"]
    paired = {one.place for pair in possible_pairs(known) for one in pair}
    named: set[tuple[InstanceKey, InstanceKey]] = set()
    sides = {kind: [one for one in known if one.beat.type == kind] for kind in ("P", "D")}
    for one in known:
        if one.place in paired:
            continue
        for other in sides["D" if one.beat.type == "P" else "P"]:
            p, d = (one, other) if one.beat.type == "P" else (other, one)
            names = {p.beat.fleet_revision, d.beat.fleet_revision} - {""}
            if p.pairing != d.pairing and common_model(p, d) is not None and len(names) < 2:
                if (p.place, d.place) not in named:
                    named.add((p.place, d.place))
                    yield p, d
                break


def mixed_pairs(instances: Iterable[Instance]) -> Iterator[tuple[Instance, Instance]]:
    """Each P with each D of another engine that would be a pair if engines did not matter."""
    comparing = (one for one in instances if one.engine is not None)
    for p, d in possible_pairs(comparing):
        if p.engine != d.engine and common_model(p, d) is not None:
            yield p, d


def without_pair(
    instances: Iterable[Instance], snapshot: Snapshot
) -> Mapping[InstanceKey, tuple[Instance, Instance]]:
    """The routable Ps and Ds that are in no pair although routable instances of the other type and
    of their revision and model are there; each with the P and the D of the first such pair.

    An instance whose other side is not there is none of them: it waits for that side. Nor is one
    that serves alone, as the model has no pair.
    """
    served = frozenset(_served(snapshot))
    sides: dict[str, dict[tuple[str, tuple[str, ...]], Instance]] = {"P": {}, "D": {}, "A": {}}
    routable = [one for one in instances if one.is_routable]
    for one in routable:  # Those alike are asked once: there may be thousands.
        sides[one.beat.type].setdefault((one.partners, one.beat.models), one)
    found: dict[InstanceKey, tuple[Instance, Instance]] = {}
    for one in routable:
        if one.beat.type == "A" or one.key in served:
            continue
        for other in sides["D" if one.beat.type == "P" else "P"].values():
            if one.is_of_revision(other) and _share_model(one, other):
                found[one.key] = (one, other) if one.beat.type == "P" else (other, one)
                break
    return found


def _share_model(one: Instance, other: Instance) -> bool:
    if not (one.beat.models and other.beat.models):
        return True
    return common_model(one, other) is not None


def _served(snapshot: Snapshot) -> Iterator[InstanceKey]:
    """The Ps and Ds that requests of some model are sent to."""
    for model in (snapshot.any_model, *snapshot.by_model.values()):
        pairs = [group for group in model.groups if group.prefill and group.decode]
        alone = () if pairs else model.alone
        for group in pairs or model.groups:
            for one in chain(group.prefill, group.decode):
                if pairs or (one.serves_alone and one.beat.type in alone):
                    yield one.key

"""Mixed pairs: a P and a D of different engines, and what D says of P's KV. Pure.

Such a pair gets no requests until D has compared KV of one prompt with its own and uses it
(docs/adr/0055). `request.introductions` makes that happen; the registry keeps the verdicts, and
`instances.build_snapshot` groups by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Literal

from xpyd_router.fleet.instances import Instance, InstanceKey, Met

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
                if common_model(p, d) is not None or not (p.beat.models and d.beat.models):
                    yield p, d


def mixed_pairs(instances: Iterable[Instance]) -> Iterator[tuple[Instance, Instance]]:
    """Each P with each D of another engine that would be a pair if engines did not matter."""
    comparing = (one for one in instances if one.engine is not None)
    for p, d in possible_pairs(comparing):
        if p.engine != d.engine and common_model(p, d) is not None:
            yield p, d

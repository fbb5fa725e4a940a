"""Requests that kill instances: which calls broke off because their instance died. Pure.

A request is blamed, never a body: many clients may send the same one while an instance dies of
something else. A request that itself met KILLS deaths is convicted, and from then on its body is
refused for a while, from any client, so that a client that tries again does not kill two more.
`request.state` holds the breaks that one request met, `health` says which of them were deaths:
those after which no process listens at the address any more, or another process does. Silence is
none, it also comes from a machine that is busy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from xpyd_router.fleet.instances import InstanceKey

KILLS = 2
"""Deaths that convict the request that met them."""
REFUSED_S = 300.0
"""How long the body of a convicted request is refused."""
_RESTART_S = 10.0
"""What answered the probe may have been the next process: its first beat comes within this time."""
_KEPT_S = 60.0
"""How long a break is remembered; a request waits seconds for its probe."""
_MAX_BREAKS = 4096
_MAX_REFUSED = 1024

Fate = Literal["open", "dead", "alive"]
"""Open until a probe or a beat decides."""
Verdict = Literal["innocent", "open", "guilty"]
OnFate = Callable[[InstanceKey, Fate], None]
"""Called with an instance whose break is open now, or whose fate is known."""


def fingerprint(body: bytes, key: bytes) -> bytes:
    """A digest of a request's body. `key`, at most 64 random bytes, makes it hard to forge."""
    return blake2b(body, digest_size=16, key=key).digest()


@dataclass(slots=True, eq=False)
class Break:
    """Calls to one instance that broke off together: it died, or only the calls did."""

    at_s: float
    fate: Fate = "open"
    """Written by Poison."""


def judge(breaks: Iterable[Break]) -> Verdict:
    """The rule: a request that met KILLS deaths is guilty; open while a probe is missing."""
    fates = [one.fate for one in breaks]
    if fates.count("dead") >= KILLS:
        return "guilty"
    return "innocent" if len(fates) - fates.count("alive") < KILLS else "open"


class Poison:
    """See the module. `now` is seconds of one monotonic clock. Bounded in all it keeps."""

    def __init__(self) -> None:
        self.refused: OrderedDict[bytes, float] = OrderedDict()
        """Fingerprints of refused bodies, and until when. While it is empty no fingerprint need be
        made.
        """
        self._last: OrderedDict[InstanceKey, Break] = OrderedDict()
        self._on_fate: list[OnFate] = []

    def on_fate(self, listener: OnFate) -> None:
        """Have `listener` called when a break begins, and when its fate turns out."""
        self._on_fate.append(listener)

    def broke(self, key: InstanceKey, now: float) -> Break:
        """A call that had been sent to `key` broke off; all that do so until its fate is known
        share one Break.
        """
        last = self._last.get(key)
        if last is None or last.fate == "alive":
            last = self._add(key, now)
            self._report_fate(key, "open")
        return last

    def death_of(self, key: InstanceKey) -> Break | None:
        """How `key` died lately, if it did."""
        last = self._last.get(key)
        return last if last is not None and last.fate == "dead" else None

    def known(self) -> list[tuple[InstanceKey, Break]]:
        """Breaks of late, the oldest first, without those whose instance is alive."""
        return [(key, one) for key, one in self._last.items() if one.fate != "alive"]

    def died(self, key: InstanceKey, now: float) -> None:
        """`key` is dead: no process listens there, or another took its place."""
        last = self._last.get(key)
        if last is None or (last.fate == "alive" and now - last.at_s > _RESTART_S):
            last = self._add(key, now)
        if last.fate != "dead":
            last.fate = "dead"
            self._report_fate(key, "dead")

    def lives(self, key: InstanceKey) -> None:
        """`key` answered a probe, or said goodbye: what broke off was a call, not an instance."""
        last = self._last.get(key)
        if last is None or last.fate == "alive":
            return
        if last.fate == "open":
            last.fate = "alive"
        else:
            del self._last[key]  # it is there again: what breaks off from now on is another matter
        self._report_fate(key, "alive")

    def convict(self, suspect: bytes, now: float) -> None:
        """Refuse the body of this fingerprint for REFUSED_S."""
        self.refuse(suspect, now + REFUSED_S)

    def refuse(self, suspect: bytes, until_s: float) -> None:
        """Refuse the body of this fingerprint until then."""
        self.refused.pop(suspect, None)
        self.refused[suspect] = until_s
        if len(self.refused) > _MAX_REFUSED:
            self.refused.popitem(last=False)

    def acquit(self, suspect: bytes) -> None:
        """A request with this body, begun before, was served after all: refuse it no more."""
        self.refused.pop(suspect, None)

    def left_s(self, suspect: bytes, now: float) -> float:
        """For how long the body is refused; 0 when it is not."""
        return max(0.0, self.refused.get(suspect, now) - now)

    def tick(self, now: float) -> None:
        """Forget the breaks and refusals that are over."""
        while self._last and next(iter(self._last.values())).at_s <= now - _KEPT_S:
            self._last.popitem(last=False)
        while self.refused and next(iter(self.refused.values())) <= now:
            self.refused.popitem(last=False)

    def _report_fate(self, key: InstanceKey, fate: Fate) -> None:
        for listener in self._on_fate:
            listener(key, fate)

    def _add(self, key: InstanceKey, now: float) -> Break:
        self._last.pop(key, None)
        added = self._last[key] = Break(now)
        if len(self._last) > _MAX_BREAKS:
            self._last.popitem(last=False)
        return added

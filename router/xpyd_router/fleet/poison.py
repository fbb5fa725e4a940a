"""Requests that kill engines: which instances died under which request. Pure.

A call that broke off before its instance answered makes its request a suspect of that instance's
death, if the instance did die: a probe that is answered clears it. Two deaths convict a request,
unless instances also die without it. A convicted one is refused for a while, so that a client that
tries again does not kill two more.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

from xpyd_router.fleet.registry import InstanceKey

KILLS = 2
"""Deaths that convict."""
MEMORY_S = 600.0
"""How long a death counts: a client tries again when its only engine has loaded its model."""
REFUSED_S = 300.0
"""How long a convicted request is refused."""
_BEFORE_S = 30.0
_RESTART_S = 10.0
"""What answered the probe may have been the next process: its first beat tells within this time."""
_MAX_DEATHS = 256
_MAX_SUSPECTS = 1024
_MAX_CONVICTED = 1024

Verdict = Literal["innocent", "open", "guilty"]


def fingerprint(body: bytes, key: bytes) -> bytes:
    """Stands for a request's body. `key`, at most 64 random bytes, makes it hard to forge."""
    return blake2b(body, digest_size=16, key=key).digest()


@dataclass(slots=True)
class _Death:
    at_s: float
    suspects: set[bytes] = field(default_factory=set[bytes])
    is_sure: bool = False
    """Else it is suspected: a call broke off, and no probe has told yet."""
    is_cleared: bool = False
    """A probe was answered."""


class Poison:
    """See the module. `now` is seconds of one monotonic clock. Bounded in all it keeps."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[InstanceKey, _Death] = OrderedDict()
        self._convicted: OrderedDict[bytes, float] = OrderedDict()

    @property
    def is_empty(self) -> bool:
        """Whether no request is refused: then nobody need ask by fingerprint."""
        return not self._convicted

    def blame(self, key: InstanceKey, suspect: bytes, now: float) -> None:
        """A call of `suspect` broke off before `key` answered."""
        death = self._deaths.get(key)
        if death is None or death.is_cleared:
            death = self._add(key, now)
        if len(death.suspects) < _MAX_SUSPECTS:
            death.suspects.add(suspect)

    def died(self, key: InstanceKey, now: float) -> None:
        """`key` is dead: a probe was not answered, its beats ended, or another took its place."""
        death = self._deaths.get(key)
        if death is None or (death.is_cleared and now - death.at_s > _RESTART_S):
            death = self._add(key, now)
        death.is_sure, death.is_cleared = True, False

    def lives(self, key: InstanceKey) -> None:
        """`key` answered a probe: what broke off was a call, not an instance."""
        death = self._deaths.get(key)
        if death is not None and not death.is_sure:
            death.is_cleared = True

    def judge(self, suspect: bytes, now: float) -> Verdict:
        """Whether `suspect` kills instances; open while a probe has still to tell."""
        self._expire(now)
        deaths = [death for death in self._deaths.values() if not death.is_cleared]
        mine = [death for death in deaths if suspect in death.suspects]
        if len(mine) < KILLS:
            return "innocent"
        since_s = min(death.at_s for death in mine) - _BEFORE_S
        others = sum(
            death.is_sure and death.at_s >= since_s and suspect not in death.suspects
            for death in deaths
        )
        # Where instances die anyway a request that met two deaths had bad luck.
        if 2 * others > len(mine):
            return "innocent"
        return "guilty" if sum(death.is_sure for death in mine) >= KILLS else "open"

    def convict(self, suspect: bytes, now: float) -> None:
        """Refuse `suspect` for REFUSED_S."""
        self._convicted.pop(suspect, None)
        self._convicted[suspect] = now + REFUSED_S
        if len(self._convicted) > _MAX_CONVICTED:
            self._convicted.popitem(last=False)

    def left_s(self, suspect: bytes, now: float) -> float:
        """For how long `suspect` is refused; 0 when it is not."""
        return max(0.0, self._convicted.get(suspect, now) - now)

    def tick(self, now: float) -> None:
        """Forget what is over."""
        self._expire(now)

    def _add(self, key: InstanceKey, now: float) -> _Death:
        self._deaths.pop(key, None)
        death = self._deaths[key] = _Death(now)
        if len(self._deaths) > _MAX_DEATHS:
            self._deaths.popitem(last=False)
        return death

    def _expire(self, now: float) -> None:
        while self._deaths and next(iter(self._deaths.values())).at_s <= now - MEMORY_S:
            self._deaths.popitem(last=False)
        while self._convicted and next(iter(self._convicted.values())) <= now:
            self._convicted.popitem(last=False)

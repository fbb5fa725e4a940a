"""The circuit breaker of one instance: failed calls in, open or closed out. Pure.

`health` keeps one per instance that failed. It counts what is the instance's own fault, and opens
only when two different requests failed: one bad request, tried again and again, opens nothing.
While it is open the instance gets no requests; then one trial decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from xpyd_router.fleet.instances import InstanceKey

BreakerState = Literal["Closed", "Open", "HalfOpen"]
WINDOW_S = 60.0
"""Failures are counted together for so long from the first one on."""
CONSECUTIVE = 5
"""This number of failures without a success between them opens the breaker."""
LEAST_CALLS = 10
FAILING_SHARE = 0.5
"""Or this share of at least LEAST_CALLS calls since the first failure."""
_DISTINCT = 2
OPEN_S = 5.0
LONGEST_OPEN_S = 60.0
"""Open for OPEN_S, twice as long after each failed trial, at most this long."""
TRIAL_S = 30.0
"""A trial without an end (its client left, it was refused) holds the next one up for so long."""


@dataclass(slots=True, eq=False)
class Breaker:
    """See the module. `now` is seconds of one monotonic clock; a fingerprint identifies a body."""

    state: BreakerState = "Closed"
    _open_s: float = OPEN_S
    _until_s: float = 0.0
    _trial_ends_s: float = 0.0
    _window_ends_s: float = 0.0
    _failures: int = 0
    _successes: int = 0
    _consecutive: int = 0
    _fingerprints: set[bytes] = field(default_factory=set[bytes])

    @property
    def is_on_trial(self) -> bool:
        """Half-open, and the one request that decides is under way."""
        return self.state == "HalfOpen" and self._trial_ends_s > 0.0

    def left_s(self, now: float) -> float:
        """How long the breaker stays open."""
        return max(0.0, self._until_s - now) if self.state == "Open" else 0.0

    def is_idle(self, now: float) -> bool:
        """Nothing is counted: another breaker would do the same."""
        return self.state == "Closed" and now >= self._window_ends_s

    def failed(self, fingerprint: bytes, now: float) -> None:
        """Count a call that failed by the instance's fault."""
        if self.state == "Open":
            return  # it began before
        if self.state == "HalfOpen":
            self._open_s = min(2 * self._open_s, LONGEST_OPEN_S)
            self._open(now)
            return
        if now >= self._window_ends_s:
            self._forget_calls()
            self._window_ends_s = now + WINDOW_S
        self._failures += 1
        self._consecutive += 1
        if len(self._fingerprints) < _DISTINCT:
            self._fingerprints.add(fingerprint)
        calls = self._failures + self._successes
        is_failing = calls >= LEAST_CALLS and self._failures >= FAILING_SHARE * calls
        if len(self._fingerprints) >= _DISTINCT and (
            is_failing or self._consecutive >= CONSECUTIVE
        ):
            self._open(now)

    def succeeded(self) -> None:
        """Count a call that was served; outside a window the next failure forgets it."""
        if self.state == "HalfOpen":
            self.state = "Closed"
            self._open_s = OPEN_S
            self._trial_ends_s = self._window_ends_s = 0.0
            return
        self._successes += 1
        self._consecutive = 0

    def begin_trial(self, now: float) -> None:
        """A request goes to the half-open instance: no other may before it has ended."""
        self._trial_ends_s = now + TRIAL_S

    def tick(self, now: float) -> None:
        """Let time pass: open becomes half-open, a trial without an end is given up."""
        if self.state == "Open" and now >= self._until_s:
            self.state = "HalfOpen"
            self._trial_ends_s = 0.0
        elif self.is_on_trial and now >= self._trial_ends_s:
            self._trial_ends_s = 0.0

    def _open(self, now: float) -> None:
        self.state = "Open"
        self._until_s = now + self._open_s
        self._trial_ends_s = self._window_ends_s = 0.0

    def _forget_calls(self) -> None:
        self._failures = self._successes = self._consecutive = 0
        self._fingerprints = set()


class Transfers:
    """Transfers of KV that failed: are they P's fault or D's?

    D reports a failed transfer, but P may be the one that is gone, or the path between the two. The
    failure of one pair therefore says nothing about either. An instance that fails with a second
    partner within WINDOW_S is what these failures have in common: for it they count, as any fault
    of its own does. `now` is seconds of one monotonic clock.
    """

    def __init__(self) -> None:
        self._partners: dict[InstanceKey, dict[InstanceKey, float]] = {}
        """By instance: the last two peers with which a transfer failed, and when."""

    def failed(self, prefill: InstanceKey, decode: InstanceKey, now: float) -> list[InstanceKey]:
        """A transfer between the two failed; the instances for which it counts."""
        pairs = ((prefill, decode), (decode, prefill))
        return [key for key, partner in pairs if self._has_several(key, partner, now)]

    def forget(self, key: InstanceKey) -> None:
        """The instance left the fleet."""
        for place in [place for place in self._partners if place.instance == key]:
            del self._partners[place]

    def _has_several(self, key: InstanceKey, partner: InstanceKey, now: float) -> bool:
        partners = self._partners.setdefault(key, {})
        partners.pop(partner, None)
        partners[partner] = now
        if len(partners) > 2:
            del partners[next(iter(partners))]
        return min(partners.values()) > now - WINDOW_S and len(partners) == 2

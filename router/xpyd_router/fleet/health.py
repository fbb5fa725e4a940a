"""The health of every instance that says Ready: is it called, how much, is it probed. Pure.

`view` feeds it with beats, failed calls and probes, and writes each instance's standing into the
registry. Four things act together:

- Ejection: a call that broke off takes the instance out at once; only an answered probe brings it
  back. A beat does not: it comes from another socket than the answers.
- Probes (`ProbePlan`) find instances whose HTTP is dead or frozen though no call shows it.
- The breaker (`breaker`) stops requests to an instance that is reached and yet fails.
- Slow start: an instance that comes back, or joins others that serve, gets few requests at first,
  then more.

`poison` learns which broken calls were deaths: it looks for the request that kills instances.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple

from xpyd_router.errors import FailureCause
from xpyd_router.fleet.breaker import Breaker, BreakerState, Transfers
from xpyd_router.fleet.instances import Instance, InstanceKey, Kind, Standing
from xpyd_router.fleet.poison import Break, Poison

MAX_PROBES_PER_S = 200.0
_REGULAR_PER_S = MAX_PROBES_PER_S / 2
"""Regular probes leave room for those in doubt: with more instances the interval grows."""
_BURST = 16.0


class ProbePlan:
    """Which instance to probe when: a regular probe (each instance once per interval, spread by
    chance) or an early one (an instance in doubt, at once).

    Both stay below one rate: when thousands of instances come into doubt together, they are probed
    one after the other. `draw` gives a random number from 0 to 1; `now` is one monotonic clock's.
    """

    def __init__(self, *, interval_s: float, draw: Callable[[], float]) -> None:
        self._interval_s = interval_s
        self._draw = draw
        self._members: set[InstanceKey] = set()
        self._due: dict[InstanceKey, float] = {}
        self._heap: list[tuple[float, int, InstanceKey]] = []
        self._numbers = count()
        self._hurry: set[InstanceKey] = set()
        self._tokens = _BURST
        self._filled_s = 0.0

    @property
    def interval_s(self) -> float:
        """Between two regular probes of one instance, on average."""
        return max(self._interval_s, len(self._members) / _REGULAR_PER_S)

    def add(self, key: InstanceKey, now: float) -> None:
        """Probe `key` from now on; the first time within one interval."""
        self._members.add(key)
        self._set(key, now + self._draw() * self.interval_s)

    def discard(self, key: InstanceKey) -> None:
        """Probe `key` no more."""
        self._members.discard(key)
        self._due.pop(key, None)
        self._hurry.discard(key)

    def hasten(self, key: InstanceKey, now: float) -> None:
        """Probe `key` at once; once more, if it is being probed: that one may be too early."""
        if key not in self._members:
            return
        due_s = self._due.get(key)
        if due_s is None:
            self._hurry.add(key)
        elif due_s > now:
            self._set(key, now)

    def again(self, key: InstanceKey, now: float, in_s: float | None = None) -> None:
        """A probe of `key` has ended; the next one is `in_s` away, None: an interval."""
        if key not in self._members:
            return
        if key in self._hurry:
            self._hurry.discard(key)
            in_s = 0.0
        elif in_s is None:
            in_s = self.interval_s * (0.75 + 0.5 * self._draw())
        self._set(key, now + in_s)

    def take(self, now: float, limit: int) -> list[InstanceKey]:
        """The instances that are due, at most `limit` and what the rate allows. Each must end in
        `again`.
        """
        self._tokens = min(_BURST, self._tokens + (now - self._filled_s) * MAX_PROBES_PER_S)
        self._filled_s = now
        taken: list[InstanceKey] = []
        while self._skip_stale() <= now and len(taken) < limit and self._tokens >= 1.0:
            _, _, key = heapq.heappop(self._heap)
            del self._due[key]
            self._tokens -= 1.0
            taken.append(key)
        return taken

    def wait_s(self, now: float) -> float:
        """Seconds until `take` may give an instance; infinite where none is due."""
        missing = max(0.0, 1.0 - self._tokens) / MAX_PROBES_PER_S
        return max(missing, self._skip_stale() - now, 0.0)

    def _set(self, key: InstanceKey, due_s: float) -> None:
        self._due[key] = due_s
        heapq.heappush(self._heap, (due_s, next(self._numbers), key))

    def _skip_stale(self) -> float:
        """When the first one is due, without those that were moved or left."""
        while self._heap:
            due_s, _, key = self._heap[0]
            if self._due.get(key) == due_s:
                return due_s
            heapq.heappop(self._heap)
        return float("inf")


ProbeResult = Literal["ok", "connect", "reset", "timeout", "status", "void"]
"""Any answer below 500; no listener; closed without an answer; none in time; an answer of 5xx or
that is not HTTP; a probe that says nothing because of a fault here."""
Parting = Literal["goodbye", "replaced", "silent"]
"""How an instance leaves: it said goodbye; another process took its place; its beats stopped for an
unknown reason."""
EJECTING = frozenset({"connect", "reset", "incomplete"})
"""Causes that take an instance out at once."""
STRIKES = frozenset({"reset", "incomplete", "timeout", "status", "answer"})
"""The instance's own faults. Not: refused (full, draining), lost (seen by its beats), too_large,
transfer (see `breaker.Transfers`)."""
KILLING = frozenset({"reset", "incomplete", "lost"})
"""Causes that an instance's death may have."""
SILENT_AND_LATE = 2
"""Probes without an answer, its beat late as well: the process is frozen or unreachable. With the
defaults that takes 4 to 6 s. A loop that is busy for one probe's deadline does not look so."""
SILENT = 5
"""Probes without an answer though it beats: its HTTP is stuck."""
_UNHEALTHY = 2
"""Probes that were answered by 5xx or reset."""
_PROBE_AGAIN_S = 0.25
_LONGEST_PROBE_AGAIN_S = 10.0
"""An ejected instance is probed at once, then after 0.25 s, 0.5 s, ... up to 10 s."""
_HOLD_S = 1.0
_LONGEST_HOLD_S = 30.0
_CALM_S = 60.0
"""The first ejection ends with the first answered probe. An instance ejected again within a minute
of calls stays out for at least 1 s, then 2 s, ... up to 30 s.
"""
_BRIEF_S = 1.0
"""An instance away for less was not restarted: it does not start slowly."""
WEIGHT_FLOOR = 0.1


@dataclass(frozen=True)
class HealthRules:
    """What the flags say."""

    probe_interval_s: float = 2.0
    """Between two probes of an instance; longer in fleets of more than 200."""
    probe_timeout_s: float = 2.0
    """Deadline of one probe."""
    slow_start_s: float = 10.0
    """Time until an instance that joined others, or came back, has its full share; 0: none."""


class HealthReport(NamedTuple):
    """An instance's health as people see it."""

    cause: str
    """Why it is ejected; empty when it is not."""
    ejected_s: float
    """For how long the instance has been ejected."""
    breaker: BreakerState
    open_s: float
    """How long the breaker stays open."""


@dataclass(slots=True)
class _Record:
    """The health of one Ready instance. Ends with the instance, or when it is no longer Ready."""

    kind: Kind
    came_s: float
    rising_since_s: float = 0.0
    """When the instance's slow start began, if there was one."""
    eject_cause: str = ""
    ejected_s: float = 0.0
    hold_until_s: float = 0.0
    ejections: int = 0
    returned_s: float = 0.0
    blamed: bytes = b""
    """The request that ejected it last; that one says nothing new."""
    failed_probes: int = 0
    """Since the last answer, or since the ejection."""
    silent_probes: int = 0
    """The last ones, in a row."""
    is_dead: bool = False
    """No process listens there."""
    is_frozen: bool = False
    """The instance or its machine does nothing; that is no death."""
    breaker: Breaker | None = None

    @property
    def standing(self) -> Standing:
        if self.eject_cause:
            return "Ejected"
        breaker = self.breaker
        if breaker is None or breaker.state == "Closed":
            return "Good"
        if breaker.state == "Open":
            return "Open"
        return "Trial" if breaker.is_on_trial else "HalfOpen"


class Health:
    """See the module. `draw` gives a random number from 0 to 1; `now` is one monotonic clock's."""

    def __init__(self, rules: HealthRules, draw: Callable[[], float]) -> None:
        self._rules = rules
        self._records: dict[InstanceKey, _Record] = {}
        self._rising: dict[InstanceKey, _Record] = {}
        self.breakers: dict[InstanceKey, Breaker] = {}
        """Breakers of instances that failed lately. Empty: `succeeded` need not be called."""
        self.poison = Poison()
        self._transfers = Transfers()
        self.plan = ProbePlan(interval_s=rules.probe_interval_s, draw=draw)

    def ready(self, key: InstanceKey, kind: Kind, now: float) -> bool:
        """A Ready beat of `key`; whether it is new."""
        record = self._records.get(key)
        if record is None:
            joins = self._has_served(kind, now)
            record = self._records[key] = _Record(kind, now)
            if joins:
                self._rise(key, record, now)
            self.plan.add(key, now)
            return True
        if record.eject_cause and record.silent_probes:
            self.plan.hasten(key, now)  # it was frozen, and goes on
        return False

    def leave(self, key: InstanceKey, now: float, how: Parting) -> None:
        """`key` is gone or takes no requests any more."""
        record = self._records.pop(key, None)
        for table in (self._rising, self.breakers):
            table.pop(key, None)
        self.plan.discard(key)
        self._transfers.forget(key)
        if how == "goodbye":
            self.poison.lives(key)
        elif how == "replaced" and record is not None:
            self.poison.died(key, now)

    def failed(
        self, key: InstanceKey, cause: FailureCause, suspect: bytes, now: float
    ) -> Break | None:
        """Take a failed call of a request whose body has the fingerprint `suspect` (for STRIKES).
        The break that the request met, where the instance may have died under it.
        """
        record = self._records.get(key)
        is_killing = cause in KILLING
        # What fails while it is ejected began before: the same fault once more.
        if record is not None and not record.eject_cause:
            if cause in STRIKES:
                self._breaker(key, record).failed(suspect, now)
            if cause in EJECTING:
                self._eject(record, cause, now, suspect=suspect if is_killing else b"")
                self.plan.hasten(key, now)
        if not is_killing:
            return None
        # An instance that drains is ended by others: only Ready instances have a record, or leave a
        # death.
        return self.poison.death_of(key) if record is None else self.poison.broke(key, now)

    def transfer_failed(
        self, prefill: InstanceKey, decode: InstanceKey, suspect: bytes, now: float
    ) -> list[InstanceKey]:
        """The KV did not come from P to D; the instances for which it counted. Either may be dead:
        both are probed. Of instances with replicas both are places: each has an address of its own.
        """
        counted = [key.instance for key in self._transfers.failed(prefill, decode, now)]
        self.plan.hasten(prefill.instance, now)
        self.plan.hasten(decode.instance, now)
        for key in counted:
            record = self._records.get(key)
            if record is not None and not record.eject_cause:
                self._breaker(key, record).failed(suspect, now)
        return counted

    def succeeded(self, key: InstanceKey, now: float) -> None:
        """A call was served. Need only be called for those in `breakers`."""
        breaker, record = self.breakers.get(key), self._records.get(key)
        if breaker is None or record is None:
            return
        was_closed = breaker.state == "Closed"
        breaker.succeeded()
        if not was_closed and breaker.state == "Closed":
            self._rise(key, record, now)

    def probed(
        self, key: InstanceKey, result: ProbeResult, *, began_s: float, is_late: bool, now: float
    ) -> bool:
        """Take a probe's result; whether the instance is now known to be frozen, so that calls
        to it will not end. `is_late`: its beat is.
        """
        record = self._records.get(key)
        if record is None:
            return False
        if result == "void":
            self.plan.again(key, now, _PROBE_AGAIN_S)
            return False
        if result == "ok":
            self._take_answer(key, record, began_s, now)
            return False
        record.failed_probes += 1
        record.silent_probes = record.silent_probes + 1 if result == "timeout" else 0
        is_frozen = is_late and record.silent_probes >= SILENT_AND_LATE
        is_over = record.failed_probes >= _UNHEALTHY
        if result == "timeout":
            is_over = is_frozen or record.silent_probes >= SILENT
        if (is_over or result == "connect") and not record.eject_cause:
            self._eject(record, result, now)
        if result == "connect" and not record.is_dead:
            record.is_dead = True
            self.poison.died(key, now)
        is_news = is_frozen and not record.is_frozen
        record.is_frozen |= is_frozen
        self.plan.again(key, now, self._wait_s(record))
        return is_news

    def begin_trial(self, key: InstanceKey, now: float) -> None:
        """A request is about to go to `key`; need only be called for those in `breakers`."""
        if (breaker := self.breakers.get(key)) is not None:
            breaker.begin_trial(now)

    def tick(self, now: float) -> tuple[InstanceKey, ...]:
        """Let time pass; those whose standing may have changed."""
        self.poison.tick(now)
        for breaker in self.breakers.values():
            breaker.tick(now)
        seen = tuple(self.breakers)
        for key in seen:
            if self.breakers[key].is_idle(now):
                self._records[key].breaker = None
                del self.breakers[key]
        for key in tuple(self._rising):
            if self.share(key, now) >= 1.0:
                del self._rising[key]
        return seen

    def standing(self, key: InstanceKey) -> Standing:
        """The standing of `key`; Good where nothing is known."""
        record = self._records.get(key)
        return "Good" if record is None else record.standing

    def report(self, key: InstanceKey, now: float) -> HealthReport:
        """The health of `key` as /instances shows it."""
        record = self._records.get(key)
        if record is None:
            return HealthReport("", 0.0, "Closed", 0.0)
        ejected_s = now - record.ejected_s if record.eject_cause else 0.0
        breaker = record.breaker
        state, left_s = (breaker.state, breaker.left_s(now)) if breaker else ("Closed", 0.0)
        return HealthReport(record.eject_cause, ejected_s, state, left_s)

    def share(self, key: InstanceKey, now: float) -> float:
        """How far the instance's slow start is, WEIGHT_FLOOR to 1."""
        record = self._rising.get(key)
        if record is None:
            return 1.0
        risen = (now - record.rising_since_s) / self._rules.slow_start_s
        return min(1.0, WEIGHT_FLOOR + (1.0 - WEIGHT_FLOOR) * risen)

    def weights(self, instances: Iterable[Instance], now: float) -> Mapping[InstanceKey, float]:
        """The shares below 1 of those that start slowly, relative to the best of their kind: where
        all are new, all have the same.
        """
        if not self._rising:
            return {}
        found = [(i.kind, i.key, self.share(i.key, now)) for i in instances if i.is_routable]
        best: dict[Kind, float] = {}
        for kind, _, weight in found:
            best[kind] = max(weight, best.get(kind, 0.0))
        return {key: weight / best[kind] for kind, key, weight in found if weight < best[kind]}

    def _has_served(self, kind: Kind, now: float) -> bool:
        """Whether some of `kind` have been there for long. Those that begin together, with the
        fleet or the router, share its requests alike.
        """
        since_s = now - self._rules.slow_start_s
        return any(one.kind == kind and one.came_s <= since_s for one in self._records.values())

    def _rise(self, key: InstanceKey, record: _Record, now: float) -> None:
        record.rising_since_s = now
        if self._rules.slow_start_s > 0:
            self._rising[key] = record

    def _breaker(self, key: InstanceKey, record: _Record) -> Breaker:
        if record.breaker is None:
            record.breaker = self.breakers[key] = Breaker()
        return record.breaker

    def _eject(self, record: _Record, cause: str, now: float, *, suspect: bytes = b"") -> None:
        if now - record.returned_s > _CALM_S:
            record.ejections = 0
        if not suspect or suspect != record.blamed:
            record.ejections += 1
        record.blamed = suspect
        again = min(record.ejections - 2, 10)
        hold_s = min(_HOLD_S * 2.0**again, _LONGEST_HOLD_S) if again >= 0 else 0.0
        record.eject_cause, record.ejected_s, record.hold_until_s = cause, now, now + hold_s
        record.failed_probes = 0

    def _take_answer(self, key: InstanceKey, record: _Record, began_s: float, now: float) -> None:
        if record.eject_cause and began_s < record.ejected_s:
            self.plan.again(key, now, 0.0)  # it may have been answered before the fault
            return
        record.failed_probes = record.silent_probes = 0
        record.is_dead = record.is_frozen = False
        self.poison.lives(key)
        if record.eject_cause and now < record.hold_until_s:
            self.plan.again(key, now, record.hold_until_s - now)
            return
        if record.eject_cause:
            record.eject_cause = ""
            record.returned_s = now
            if now - record.ejected_s >= _BRIEF_S:
                self._rise(key, record, now)
        self.plan.again(key, now)

    def _wait_s(self, record: _Record) -> float | None:
        """Time until the next probe after one that failed."""
        if not record.eject_cause:
            return 0.0 if record.silent_probes else _PROBE_AGAIN_S
        doublings = min(max(record.failed_probes - 1, 0), 10)
        return min(_PROBE_AGAIN_S * 2.0**doublings, _LONGEST_PROBE_AGAIN_S)

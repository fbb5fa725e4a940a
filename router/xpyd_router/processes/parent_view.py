"""The parent's view of the fleet: takes beats, probes and the workers' calls, publishes changes.

Each change is published once, in the order in which it happened; `present` is the same for a worker
that comes later. Health is decided here alone: workers report what happened to their calls, and get
the standing of instances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from xpyd_core.messages import Heartbeat
from xpyd_router.fleet.health import HealthRules, ProbeResult
from xpyd_router.fleet.instances import Instance, InstanceKey, leaving_places
from xpyd_router.fleet.introductions import PairFound, Verdict
from xpyd_router.fleet.registry import Outcome, Registry, key_of
from xpyd_router.fleet.view import FleetView
from xpyd_router.processes.events import (
    Arrived,
    Beat,
    Began,
    BodyAllowed,
    BodyRefused,
    Cordoned,
    Failed,
    FateChanged,
    Found,
    HealthChanged,
    Introduced,
    Lost,
    PairProbed,
    PoisonCleared,
    PoisonFound,
    Removed,
    Succeeded,
    ToParent,
    ToWorker,
    TransferFailed,
    Weights,
)
from xpyd_router.processes.shared_loads import Slots

_TAKEN = frozenset({"new", "refreshed", "replaced", "gone"})


class Workers(Protocol):
    """The router's other processes, as far as an instance that drains waits for them."""

    def ping(self) -> int:
        """Ask all whether they have what was sent so far; the number for `have_taken`."""
        ...

    def have_taken(self, ping: int) -> bool:
        """Whether all have what was sent before this ping."""
        ...

    def requests_at(self, slot: int) -> int:
        """What all have in flight on the instance of this slot."""
        ...


class ParentView(FleetView):
    """A FleetView whose changes are published."""

    def __init__(
        self,
        registry: Registry,
        clock: Callable[[], float],
        rules: HealthRules,
        publish: Callable[[ToWorker], None],
        workers: Workers,
    ) -> None:
        super().__init__(registry, clock, rules=rules)
        self._publish = publish
        self._workers = workers
        self._leaving: dict[InstanceKey, int] = {}
        """By place that drains: the ping behind the beat that said so."""
        self._slots = Slots()
        self._health_published: dict[InstanceKey, HealthChanged] = {}
        self._weighed: Mapping[InstanceKey, float] = {}
        self._touched: dict[InstanceKey, None] = {}
        self._after: list[ToWorker] = []
        self.on_gone(self._forget)
        # At once: a worker that learns that an instance is gone asks for its fate.
        self._health.poison.on_fate(lambda key, fate: publish(FateChanged(key, fate, self.now_s)))

    @property
    def secret(self) -> bytes:
        """The secret that fingerprints of bodies are made with."""
        return self._secret

    def present(self) -> list[ToWorker]:
        """The events that bring a new worker to the present state."""
        events: list[ToWorker] = []
        for instance in self.instances:
            events.append(self._beat(instance.beat, is_signed=instance.is_signed))
            if instance.is_cordoned:
                events.append(Cordoned(instance.key, True))
        events.append(Arrived(self.arrival))
        events += [Introduced(*known) for known in self._registry.verdicts.known()]
        events += [PairProbed(*known) for known in self._registry.proofs.known()]
        events += self._health_published.values()
        events.append(Lost(tuple(i.key for i in self.instances if self.is_lost(i.key))))
        events.append(Weights(tuple(self._weighed.items())))
        events += [FateChanged(key, one.fate, one.at_s) for key, one in self._health.poison.known()]
        return [*events, *(BodyRefused(*found) for found in self.refused.items())]

    def apply(self, beat: Heartbeat, signed_age_s: float | None = None) -> Outcome:
        outcome = super().apply(beat, signed_age_s)
        if outcome in _TAKEN:
            self._publish(self._beat(beat, is_signed=signed_age_s is not None))
            # One that stays after all, and drains again later, needs another word of the workers.
            key = key_of(beat)
            leaving = leaving_places(key, beat)
            for place in [one for one in self._leaving if one.instance == key]:
                if place not in leaving:
                    del self._leaving[place]
        self._flush()
        return outcome

    def in_flight(self, places: Sequence[InstanceKey]) -> int | None:
        """See FleetView. A worker may pick a place until it has the beat."""
        new = [place for place in places if place not in self._leaving]
        if new:
            self._leaving.update(dict.fromkeys(new, self._workers.ping()))
            return None
        if not all(self._workers.have_taken(self._leaving[place]) for place in places):
            return None
        return sum(self._workers.requests_at(self._slots.of(place)) for place in places)

    def expire(self) -> tuple[InstanceKey, ...]:
        gone = super().expire()
        if gone:
            self._publish(Removed(gone))
        self._flush()
        return gone

    def cordon(self, key: InstanceKey, *, is_cordoned: bool) -> None:
        super().cordon(key, is_cordoned=is_cordoned)
        self._publish(Cordoned(key, is_cordoned))

    def introduced(self, prefill: InstanceKey, decode: InstanceKey, verdict: Verdict) -> bool:
        is_news = super().introduced(prefill, decode, verdict)
        if is_news:
            self._publish(Introduced(prefill, decode, verdict))
        return is_news

    def pair_found(self, prefill: InstanceKey, decode: InstanceKey, found: PairFound) -> None:
        super().pair_found(prefill, decode, found)
        self._publish(PairProbed(prefill, decode, found))

    def probed(self, instance: Instance, result: ProbeResult, began_s: float) -> None:
        was_lost = self.is_lost(instance.key)
        super().probed(instance, result, began_s)
        self._flush()
        if was_lost and not self.is_lost(instance.key):
            self._publish(Found(instance.key))

    def tick(self) -> None:
        super().tick()
        self._flush()
        now = self.weights()
        changed = {key: weight for key, weight in now.items() if self._weighed.get(key) != weight}
        changed |= dict.fromkeys(self._weighed.keys() - now.keys(), 1.0)
        self._weighed = dict(now)
        if changed:
            self._publish(Weights(tuple(changed.items())))

    def take(self, event: ToParent) -> Sequence[HealthChanged]:
        """Apply what happened to a worker's calls. Other events are ignored.

        Returns the health that this worker must get, also where it did not change.
        """
        asked: list[InstanceKey] = []
        match event:
            case Began(keys):  # its request is the trial of these
                found = [one for key in keys if (one := self._registry.get(key)) is not None]
                super().began(found)
                asked = [one.key for one in found]
            case Succeeded(key):
                if (one := self._registry.get(key)) is not None:
                    super().succeeded(one)
            case Failed(key, cause, suspect):
                self._health.failed(key, cause, suspect, self.now_s)
                self._settle(key)
                self._notify()
                asked = [key]
            case TransferFailed(prefill, decode, suspect):
                self._transfer_failed(prefill, decode, suspect)
            case PoisonFound(suspect):  # all refuse the body
                self._health.poison.convict(suspect, self.now_s)
                self._publish(BodyRefused(suspect, self.refused[suspect]))
            case PoisonCleared(suspect):
                self._health.poison.acquit(suspect)
                self._publish(BodyAllowed(suspect))
            case _:
                return ()
        self._flush()
        return [self._health_of(key) for key in asked]

    def _beat(self, beat: Heartbeat, *, is_signed: bool) -> Beat:
        instance = self._registry.get(key_of(beat))
        if instance is None:  # a goodbye
            return Beat(beat, self.now_s, is_signed, ())
        slots = tuple(self._slots.of(place) for place in instance.places)
        return Beat(beat, instance.last_beat_s, is_signed, slots)

    def _settle(self, key: InstanceKey) -> None:
        super()._settle(key)
        self._touched[key] = None

    def _start(self, key: InstanceKey) -> None:
        super()._start(key)
        weight = self._loads.of(key).weight
        self._weighed = {**self._weighed, key: weight}
        self._after.append(Weights(((key, weight),)))

    def _lose(self, keys: Sequence[InstanceKey]) -> None:
        super()._lose(keys)
        if keys:
            self._after.append(Lost(tuple(keys)))

    def _forget(self, key: InstanceKey) -> None:
        self._slots.free(key)
        self._leaving.pop(key, None)
        self._health_published.pop(key, None)

    def _health_of(self, key: InstanceKey) -> HealthChanged:
        now, report = self.now_s, self._health.report(key, self.now_s)
        return HealthChanged(
            key,
            self._health.standing(key),
            report.cause,
            round(now - report.ejected_s, 2) if report.cause else 0.0,
            report.breaker,
            round(now + report.open_s, 2) if report.open_s else 0.0,
            key in self._health.breakers,
        )

    def _flush(self) -> None:
        """Publish what followed from the last change."""
        after, self._after = self._after, []
        for event in after:
            self._publish(event)
        touched, self._touched = self._touched, {}
        for key in touched:
            if self._registry.get(key) is None:
                continue
            health = self._health_of(key)
            if self._health_published.get(key, HealthChanged(key)) != health:
                self._health_published[key] = health
                self._publish(health)

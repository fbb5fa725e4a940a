"""A worker's view of the fleet, which follows the parent's events.

Membership follows by the same rules from the same beats. The parent alone decides health; a call
that broke off takes its instance out here at once, and the parent's answer, a moment later, gives
the instance's standing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from xpyd_router.errors import FailureCause
from xpyd_router.fleet.health import EJECTING, KILLING, STRIKES, HealthReport, HealthRules
from xpyd_router.fleet.instances import Instance, InstanceKey, Snapshot, places_of
from xpyd_router.fleet.loads import Load
from xpyd_router.fleet.poison import Break, fingerprint
from xpyd_router.fleet.registry import Registry, key_of
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
from xpyd_router.processes.shared_loads import SharedLoadTable


class WorkerView(FleetView):
    """A FleetView that the parent's events write. `send` sends to the parent."""

    def __init__(
        self,
        registry: Registry,
        clock: Callable[[], float],
        loads: SharedLoadTable,
        rules: HealthRules,
        *,
        secret: bytes,
        send: Callable[[ToParent], None],
    ) -> None:
        super().__init__(registry, clock, loads, rules)
        self._shared = loads
        self._secret = secret
        self._send = send
        self._reported: dict[InstanceKey, HealthChanged] = {}
        self._counted: set[InstanceKey] = set()
        self._weights: dict[InstanceKey, float] = {}
        self.on_gone(self._forget)

    @property
    def snapshot(self) -> Snapshot:
        """See FleetView. Read for each pick, which sees loads no older than a moment."""
        self._shared.refresh_when_old(self._clock)
        return super().snapshot

    def take(self, event: ToWorker) -> None:
        """Apply an event of the parent about the fleet; other events are ignored."""
        match event:
            case Beat():
                self._beat(event)
            case Arrived(arrival):
                self.arrival = arrival
            case Removed(keys):
                self._lose(self._registry.drop(keys))
            case HealthChanged():
                self._set_health(event)
            case Weights(weights):
                for key, weight in weights:
                    self._weigh(key, weight)
            case Lost(keys):
                self._lose(keys)
            case Found(key):
                self._lost.pop(key, None)
            case FateChanged() | BodyRefused() | BodyAllowed():
                self._learn(event)
            case Cordoned(key, is_cordoned):
                self._registry.cordon(key, is_cordoned=is_cordoned)
            case Introduced() | PairProbed():
                self._learn_of_pair(event)
            case _:
                return
        self._notify()

    def began(self, instances: Iterable[Instance]) -> None:
        """See FleetView. A worker may begin a trial before another worker's trial is known here."""
        if self._counted:
            trials = [one.key for one in instances if self._breaker_is(one.key, "HalfOpen")]
            if trials:
                for key in trials:
                    self._registry.set_standing(key, "Trial")
                self._notify()
                self._send(Began(tuple(trials)))

    def succeeded(self, instance: Instance) -> None:
        if self._counted and instance.key in self._counted:
            self._send(Succeeded(instance.key))

    def failed(self, instance: Instance, cause: FailureCause, body: bytes) -> Break | None:
        """See FleetView. The break is this worker's own; the parent decides its fate."""
        key, poison = instance.key, self._health.poison
        if cause in EJECTING:
            self._registry.set_standing(key, "Ejected")
            self._notify()
        suspect = fingerprint(body, self._secret) if cause in STRIKES else b""
        self._send(Failed(key, cause, suspect))
        if cause not in KILLING:
            return None
        now, known = self.now_s, self._registry.get(key)
        poison.tick(now)
        is_ready = known is not None and known.beat.state == "Ready"
        return poison.broke(key, now) if is_ready else poison.death_of(key)

    def transfer_failed(self, prefill: Instance, decode: Instance, body: bytes) -> None:
        self._send(TransferFailed(prefill.place, decode.place, fingerprint(body, self._secret)))

    async def convicts(self, breaks: Sequence[Break], body: bytes) -> bool:
        """See FleetView; the other workers refuse the body, too."""
        is_guilty = await super().convicts(breaks, body)
        if is_guilty:
            self._send(PoisonFound(fingerprint(body, self._secret)))
        return is_guilty

    def refused_s(self, body: bytes) -> float:
        self._health.poison.tick(self.now_s)
        return super().refused_s(body)

    def acquit(self, body: bytes) -> None:
        suspect = fingerprint(body, self._secret)
        if suspect in self.refused:
            self._health.poison.acquit(suspect)
            self._send(PoisonCleared(suspect))

    def report(self, key: InstanceKey) -> HealthReport:
        known, now = self._reported.get(key), self.now_s
        if known is None:
            return HealthReport("", 0.0, "Closed", 0.0)
        ejected_s = max(0.0, now - known.ejected_at_s) if known.cause else 0.0
        open_s = max(0.0, known.open_until_s - now)
        return HealthReport(known.cause, ejected_s, known.breaker, open_s)

    def weights(self) -> Mapping[InstanceKey, float]:
        return self._weights

    def load(self, key: InstanceKey) -> Load:
        """See FleetView; the load includes what the other workers have there now."""
        self._shared.refresh_one(key)
        return super().load(key)

    def _beat(self, event: Beat) -> None:
        key = key_of(event.beat)
        signed_age_s = 0.0 if event.is_signed else None  # the parent has looked at its age
        outcome, dead = self._registry.apply(event.beat, event.at_s, signed_age_s)
        if outcome == "new":
            self._welcome(key)
        elif outcome == "gone":
            self._part(key)
        if event.beat.state != "Gone":
            for place, slot in zip(places_of(key, event.beat), event.slots, strict=True):
                self._shared.bind(place, slot)
            self._take_load(key, event.beat)
        self._lose(dead)

    def _learn(self, change: FateChanged | BodyRefused | BodyAllowed) -> None:
        """What instances die of."""
        poison = self._health.poison
        match change:
            case BodyRefused(suspect, until_s):
                poison.refuse(suspect, until_s)
            case BodyAllowed(suspect):
                poison.acquit(suspect)
            case FateChanged(key, fate, at_s):
                poison.tick(self.now_s)  # nothing else lets time pass here
                if fate == "open":
                    poison.broke(key, at_s)
                elif fate == "dead":
                    poison.died(key, at_s)
                else:
                    poison.lives(key)

    def _learn_of_pair(self, change: Introduced | PairProbed) -> None:
        """Whether D can use P's KV, and whether it gets there."""
        match change:
            case Introduced(prefill, decode, verdict):
                self._registry.judge(prefill, decode, verdict)
            case PairProbed(prefill, decode, found):
                self._registry.prove(prefill, decode, found)

    def _set_health(self, health: HealthChanged) -> None:
        key = health.key
        if self._registry.get(key) is None:
            return
        self._reported[key] = health
        (self._counted.add if health.is_counted else self._counted.discard)(key)
        self._registry.set_standing(key, health.standing)

    def _weigh(self, key: InstanceKey, weight: float) -> None:
        if self._registry.get(key) is None:
            return
        if weight < 1.0:
            self._weights[key] = weight
        else:
            self._weights.pop(key, None)
        self._set_weight(key, weight)

    def _breaker_is(self, key: InstanceKey, standing: str) -> bool:
        known = self._registry.get(key)
        return known is not None and known.standing == standing

    def _forget(self, key: InstanceKey) -> None:
        self._reported.pop(key, None)
        self._weights.pop(key, None)
        self._counted.discard(key)

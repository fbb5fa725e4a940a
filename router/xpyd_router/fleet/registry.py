"""Who is in the fleet: heartbeats in, an immutable snapshot out. Pure: time is an argument.

`discovery` feeds it, `policy` reads the snapshot. An instance is known by its HTTP address; another
incarnation (process start) at the same address is another instance and replaces it at once. It
leaves by goodbye at once, or when its time to live (missed beats x its period) has passed.

Who claims what another has: of two incarnations at one address the one that was heard of last stays
(its beats are newer), the other never comes back. A KV address belongs to whoever came first, for
as long as it beats. What came signed is touched by signed beats only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

from xpyd_core.errors import ProtocolError
from xpyd_core.messages import Heartbeat, InstanceState
from xpyd_core.request_id import Address
from xpyd_router.fleet.claims import (
    FOR_EVER,
    Belongings,
    Past,
    is_readable,
    usable_http,
    usable_kv,
)

MAX_INSTANCES = 4096
MAX_SKEW_S = 120.0
"""How old the first signed beat of an incarnation may be, or how far ahead: clocks differ, and an
old beat that somebody kept must not bring back who is gone."""
# A period is a stranger's word: within these bounds a wrong one neither flaps nor stays for ever.
_PERIOD_BOUNDS_S = (0.05, 60.0)

# Of a period: a beat this late is not explained by the network.
_LATE_PERIODS = 1.3

Outcome = Literal[
    "new", "refreshed", "replaced", "gone", "repeated", "stale", "skewed", "unsigned", "conflict",
    "full",
]  # fmt: skip
ShownState = Literal[InstanceState, "Ejected", "CircuitOpen", "HalfOpen", "Cordoned"]
"""An instance's state as people see it."""
Standing = Literal["Good", "HalfOpen", "Trial", "Open", "Ejected"]
"""What `health` says of a Ready instance. HalfOpen: one request may try whether it works again;
Trial: that one is under way; Open: its breaker is; Ejected: it cannot be reached."""
Side = tuple[str, str, tuple[str, ...]]
"""Instances that can stand in for each other: type, compatibility key, models."""


def side_of(beat: Heartbeat) -> Side:
    """Whom the instance that beats so can stand in for."""
    return beat.type, beat.compatibility, beat.models


class InstanceKey(NamedTuple):
    """One process start at one HTTP address."""

    http: str
    incarnation: str


@dataclass(frozen=True)
class Instance:
    """One engine as its last beat described it. Times are the caller's clock, in seconds."""

    key: InstanceKey
    beat: Heartbeat
    http: Address
    kv: Address
    last_beat_s: float
    expires_at_s: float
    period_s: float
    kv_text: str = ""
    """`kv` as it stands in request ids; `http` as text is the key's."""
    standing: Standing = "Good"
    is_signed: bool = False
    """Its beats are signed with the fleet's key."""
    is_cordoned: bool = False
    """An operator wants no new requests on this incarnation."""

    @property
    def name(self) -> str:
        """What people call it: the name it gives itself, else its HTTP address."""
        return self.beat.instance or self.key.http

    @property
    def is_routable(self) -> bool:
        """Whether new requests may be sent to it."""
        return self._may_be_asked and self.standing in ("Good", "HalfOpen")

    @property
    def is_spare(self) -> bool:
        """Whether new requests may be sent to it where its side has nobody better."""
        return self._may_be_asked and self.standing in ("Open", "Trial")

    @property
    def _may_be_asked(self) -> bool:
        return self.beat.state == "Ready" and not self.is_cordoned

    @property
    def side(self) -> Side:
        """Those that can stand in for it have the same."""
        return side_of(self.beat)

    def is_late(self, now: float) -> bool:
        """Whether a beat is missing."""
        return now - self.last_beat_s > _LATE_PERIODS * self.period_s

    @property
    def is_continuing(self) -> bool:
        """Whether it understands `continue_from` (DECISIONS: continuation 1 in its beat)."""
        return self.beat.continuation == 1

    def serves(self, model: str) -> bool:
        """Old beats name no model; such an instance takes every name and may answer 404 itself."""
        return not self.beat.models or model in self.beat.models


class Group(NamedTuple):
    """Routable instances of one compatibility key: any P of it may send KV to any D of it."""

    compatibility: str
    prefill: tuple[Instance, ...]
    decode: tuple[Instance, ...]


@dataclass(frozen=True)
class Candidates:
    """Who may serve one model. `groups` holds also those with only P or only D."""

    groups: tuple[Group, ...] = ()
    aggregated: tuple[Instance, ...] = ()
    takes_decode_alone: bool = False
    """Whether a D of ours serves whole requests where there is no pair."""

    @property
    def is_routable(self) -> bool:
        """Whether a request can be served at all."""
        if self.aggregated or any(g.prefill and g.decode for g in self.groups):
            return True
        return self.takes_decode_alone and any(
            d.is_continuing for g in self.groups for d in g.decode
        )


@dataclass(frozen=True)
class Snapshot:
    """What the hot path reads: built once per change of the fleet, never changed."""

    by_model: Mapping[str, Candidates] = field(default_factory=lambda: MappingProxyType({}))
    any_model: Candidates = field(default_factory=Candidates)
    """For names that no instance gives: the instances that give no names."""
    known_models: frozenset[str] = frozenset()
    """Names given by instances in any state."""
    takes_any_model: bool = False
    """Whether an instance in any state gives no names."""
    is_empty: bool = True

    def candidates(self, model: str) -> Candidates:
        """Who may serve `model` now."""
        return self.by_model.get(model, self.any_model)

    def knows(self, model: str) -> bool:
        """Whether an instance, in whatever state, serves `model`."""
        return self.takes_any_model or model in self.known_models

    @property
    def models(self) -> tuple[str, ...]:
        """Names that can be served now, sorted."""
        return tuple(sorted(m for m, found in self.by_model.items() if found.is_routable))

    @property
    def is_ready(self) -> bool:
        """Whether at least one pair or aggregated instance can be picked."""
        return self.any_model.is_routable or any(c.is_routable for c in self.by_model.values())


def _candidates(instances: Iterable[Instance], *, decode_alone: bool) -> Candidates:
    prefill: dict[str, list[Instance]] = {}
    decode: dict[str, list[Instance]] = {}
    aggregated: list[Instance] = []
    for instance in instances:
        if instance.beat.type == "A":
            aggregated.append(instance)
            continue
        side = prefill if instance.beat.type == "P" else decode
        side.setdefault(instance.beat.compatibility, []).append(instance)
    keys = sorted(prefill.keys() | decode.keys())
    groups = (Group(k, tuple(prefill.get(k, ())), tuple(decode.get(k, ()))) for k in keys)
    return Candidates(tuple(groups), tuple(aggregated), decode_alone)


def _routable(everyone: Iterable[Instance]) -> list[Instance]:
    """Those that new requests may be sent to.

    An open breaker keeps requests for the instances that work. A side without such has nothing to
    save: then those whose breaker is open are asked, and their errors are the answer.
    """
    routable = [instance for instance in everyone if instance.is_routable]
    spare = [instance for instance in everyone if instance.is_spare]
    if spare:
        served = {instance.side for instance in routable}
        routable += [instance for instance in spare if instance.side not in served]
        routable.sort(key=lambda instance: instance.key)
    return routable


def build_snapshot(instances: Iterable[Instance], *, decode_alone: bool = False) -> Snapshot:
    """The snapshot of `instances`, in the order of their addresses so that turns are stable.

    `decode_alone`: a D serves whole requests where there is no pair (onNoPrefill).
    """

    def candidates(among: Iterable[Instance]) -> Candidates:
        return _candidates(among, decode_alone=decode_alone)

    everyone = sorted(instances, key=lambda instance: instance.key)
    routable = _routable(everyone)
    unnamed = [instance for instance in routable if not instance.beat.models]
    named: dict[str, list[Instance]] = {}
    for instance in routable:
        for name in dict.fromkeys(instance.beat.models):
            named.setdefault(name, []).append(instance)
    by_model = {
        name: candidates(sorted(found + unnamed, key=lambda i: i.key) if unnamed else found)
        for name, found in sorted(named.items())
    }
    return Snapshot(
        by_model=MappingProxyType(by_model),
        any_model=candidates(unnamed),
        known_models=frozenset(model for i in everyone for model in i.beat.models),
        takes_any_model=any(not i.beat.models for i in everyone),
        is_empty=not everyone,
    )


def _routing_view(beat: Heartbeat) -> tuple[object, ...]:
    """The part of a beat that decides who is picked; loads change with every beat."""
    return (
        *(beat.type, beat.http_address, beat.zmq_address, beat.state, beat.models),
        *(beat.compatibility, beat.continuation, beat.instance),
    )


def key_of(beat: Heartbeat) -> InstanceKey:
    """The instance that `beat` is of. ProtocolError for an unusable address."""
    return InstanceKey(str(usable_http(beat)), beat.incarnation)


class Registry:
    """The one owner of membership. Every method takes `now` in seconds of one monotonic clock."""

    def __init__(self, *, period_s: float, missed_beats: int, decode_alone: bool = False) -> None:
        self._period_s = period_s
        self._missed_beats = missed_beats
        self._instances: dict[str, Instance] = {}
        self._belongings = Belongings()
        self._past = Past()
        self._decode_alone = decode_alone
        self._snapshot: Snapshot | None = build_snapshot(())
        self.version = 0
        """Another number whenever who may be picked has changed."""

    @property
    def snapshot(self) -> Snapshot:
        """The present snapshot: another object for another `version`.

        Built when it is asked for: a burst of changes costs one.
        """
        if self._snapshot is None:
            everyone = self._instances.values()
            self._snapshot = build_snapshot(everyone, decode_alone=self._decode_alone)
        return self._snapshot

    @property
    def instances(self) -> tuple[Instance, ...]:
        """All instances with their latest figures, sorted by address."""
        return tuple(sorted(self._instances.values(), key=lambda instance: instance.key))

    def apply(
        self, beat: Heartbeat, now: float, signed_age_s: float | None = None
    ) -> tuple[Outcome, tuple[InstanceKey, ...]]:
        """Take one beat: what it was, and the instances that died by it (were replaced).

        `signed_age_s`: how long ago a beat was sent whose signature is right; None: it has none.
        Raises ProtocolError for an address or name that cannot stand in a header or a log line.
        """
        instance = self._instance(beat, now, is_signed=signed_age_s is not None)
        key, address = instance.key, instance.key.http
        known = self._instances.get(address)
        if (refusal := self._refusal(instance, known, signed_age_s)) is not None:
            return refusal, ()
        if beat.state == "Gone":
            self._past.put(key, FOR_EVER)
            if known is None or known.key != key:
                return "stale", ()
            self._remove(known)
            return "gone", ()
        if (refusal := self._shortage(instance, known)) is not None:
            return refusal, ()
        self._put(instance, known)
        if known is None:
            self._rebuild()
            return "new", ()
        if known.key != key:
            self._past.put(known.key, FOR_EVER)
            self._rebuild()
            return "replaced", (known.key,)
        if _routing_view(known.beat) != _routing_view(beat):
            self._rebuild()
        # Without incarnations a restart shows only in another KV address.
        return "refreshed" if known.kv == instance.kv else "replaced", ()

    def expire(self, now: float) -> tuple[InstanceKey, ...]:
        """Remove whose time to live has passed; returns them. They may come back."""
        gone = [i.key for i in self._instances.values() if i.expires_at_s <= now]
        return self.drop(gone)

    def drop(self, keys: Iterable[InstanceKey]) -> tuple[InstanceKey, ...]:
        """Remove these, as if their time to live had passed; returns those that were there."""
        gone = [found for key in keys if (found := self.get(key)) is not None]
        for instance in gone:
            self._past.put(instance.key, instance.beat.sent_us)
            self._remove(instance)
        return tuple(instance.key for instance in gone)

    def get(self, key: InstanceKey) -> Instance | None:
        """The instance, if it is still there under this incarnation."""
        known = self._instances.get(key.http)
        return known if known is not None and known.key == key else None

    def stand(self, key: InstanceKey, standing: Standing) -> bool:
        """Take the health of an instance; whether that changed anything."""
        known = self.get(key)
        if known is None or known.standing == standing:
            return False
        self._instances[key.http] = replace(known, standing=standing)
        self._rebuild()
        return True

    def cordon(self, key: InstanceKey, *, is_cordoned: bool) -> bool:
        """Keep new requests from an instance until it leaves, or let them come again; whether that
        changed anything.
        """
        known = self.get(key)
        if known is None or known.is_cordoned == is_cordoned:
            return False
        self._instances[key.http] = replace(known, is_cordoned=is_cordoned)
        self._rebuild()
        return True

    def _instance(self, beat: Heartbeat, now: float, *, is_signed: bool) -> Instance:
        http, kv = usable_http(beat), usable_kv(beat)
        if not is_readable(beat):
            raise ProtocolError("heartbeat: a name in it is not printable")
        least, most = _PERIOD_BOUNDS_S
        period_s = min(max(beat.period_ms / 1000, least), most) if beat.period_ms else 0.0
        period_s = period_s or self._period_s
        key = InstanceKey(str(http), beat.incarnation)
        known = self.get(key)
        return Instance(
            key,
            *(beat, http, kv),
            last_beat_s=now,
            expires_at_s=now + self._missed_beats * period_s,
            period_s=period_s,
            kv_text=str(kv),
            standing=known.standing if known else "Good",
            is_signed=is_signed,
            is_cordoned=known is not None and known.is_cordoned,
        )

    def _refusal(
        self, instance: Instance, known: Instance | None, signed_age_s: float | None
    ) -> Outcome | None:
        """Why what the beat says is not believed; None: it is."""
        sent_us = instance.beat.sent_us
        if known is not None and known.is_signed and not instance.is_signed:
            return "unsigned"
        if self._past.has(instance.key, sent_us):
            return "stale"
        is_known = known is not None and known.key == instance.key
        if signed_age_s is not None and not is_known and abs(signed_age_s) > MAX_SKEW_S:
            return "skewed"
        if known is not None and known.beat.sent_us:
            if is_known and sent_us == known.beat.sent_us:
                return "repeated"
            if sent_us < known.beat.sent_us:
                return "stale"
        return None

    def _shortage(self, instance: Instance, known: Instance | None) -> Outcome | None:
        """Why there is no place for the instance; None: there is."""
        if self._belongings.has_other_holder(instance):
            return "conflict"
        if known is None and len(self._instances) >= MAX_INSTANCES:
            return "full"
        if known is None or known.beat.models != instance.beat.models:
            return None if self._belongings.has_place_for(instance) else "full"
        return None

    def _put(self, instance: Instance, known: Instance | None) -> None:
        if known is not None:
            self._belongings.remove(known)
        self._belongings.add(instance)
        self._instances[instance.key.http] = instance

    def _remove(self, instance: Instance) -> None:
        del self._instances[instance.key.http]
        self._belongings.remove(instance)
        self._rebuild()

    def _rebuild(self) -> None:
        self._snapshot = None
        self.version += 1

"""Instances and the snapshot of those that requests may be sent to: values only. Pure.

`registry` makes them of heartbeats; policies and the request path read the snapshot, which is built
once per change of the fleet and never changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

from xpyd_core.messages import Heartbeat, InstanceState
from xpyd_core.request_id import Address

MAX_INSTANCES = 4096
# Of a period: a beat this late is not explained by the network.
_LATE_PERIODS = 1.3
ShownState = Literal[InstanceState, "Ejected", "CircuitOpen", "HalfOpen", "Cordoned"]
"""An instance's state as people see it."""
Standing = Literal["Good", "HalfOpen", "Trial", "Open", "Ejected"]
"""What `health` says of a Ready instance. HalfOpen: one request may try whether it works again;
Trial: that one is under way; Open: its breaker is; Ejected: it cannot be reached."""
Dialect = Literal["xpyd", "pair-id", "nixl", "nixl-push"]
"""How an engine is told of a transfer; `request.dialects` speaks them."""
Kind = tuple[str, str, tuple[str, ...]]
"""Instances of one kind share requests: type, pairing key, models. Those of another engine are of
it, too, once they have met the same partners (docs/adr/0055)."""


def dialect_of(beat: Heartbeat) -> Dialect:
    """The dialect that an engine speaks by what its beat says."""
    return beat.dialect or ("xpyd" if beat.continuation == 1 else "pair-id")


def pairing_of(beat: Heartbeat) -> str:
    """Instances pair where this is equal: the compatibility key. Those of vLLM's own connectors
    pair only with each other; all engines that go by the pair id understand each other.
    """
    spoken = dialect_of(beat)
    return beat.compatibility if spoken in ("xpyd", "pair-id") else f"{spoken} {beat.compatibility}"


def kind_of(beat: Heartbeat) -> Kind:
    """Which instances share requests with the one with this beat."""
    return beat.type, pairing_of(beat), beat.models


Lost = Literal["prefill", "decode", "both", "pair"]
"""The side of which a model has no instance to pick; pair: it has of both, and none fit."""


class InstanceKey(NamedTuple):
    """One process start at one HTTP address; where loads and policies speak of places for
    requests, one replica of it (docs/adr/0124)."""

    http: str
    incarnation: str
    replica: int = 0

    @property
    def instance(self) -> InstanceKey:
        """The key of the instance that the replica is of: the place of replica 0 is the same."""
        return self if not self.replica else self._replace(replica=0)


def places_of(key: InstanceKey, beat: Heartbeat) -> tuple[InstanceKey, ...]:
    """The places of an instance with this beat: one for each of its replicas."""
    return (key, *(key._replace(replica=number) for number in range(1, len(beat.replicas))))


def leaving_places(key: InstanceKey, beat: Heartbeat) -> tuple[InstanceKey, ...]:
    """Those that work and are to get no more requests: of an instance that drains all, else those
    of its replicas that do."""
    places = places_of(key, beat)
    if beat.state == "Draining":
        return places
    replicas = beat.replicas if beat.state == "Ready" else ()
    return tuple(places[number] for number, one in enumerate(replicas) if one.draining)


@dataclass(frozen=True)
class Instance:
    """One engine as a beat described it. Times are the caller's clock, in seconds.

    In a snapshot, `beat` is the one that last changed how the instance may be picked. Its numbers
    (free blocks, running requests) are old: policies read them from `loads.Load`. Of an engine with
    replicas a snapshot has an Instance for each that serves (`each_replica`), with the same `key`.
    """

    key: InstanceKey
    beat: Heartbeat
    http: Address
    kv: Address
    last_beat_s: float
    expires_at_s: float
    period_s: float
    kv_text: str = ""
    """`kv` as it is written in request ids; `http` as text is the key's."""
    standing: Standing = "Good"
    is_signed: bool = False
    """Whether its beats are signed with the fleet's key."""
    is_cordoned: bool = False
    """An operator wants no new requests on this incarnation."""
    partners: str = ""
    """The fleet revision that a partner must have, if it names one; empty: any."""
    replica_kvs: tuple[Address, ...] = ()
    """The KV addresses of its replicas, by number."""
    replica: int | None = None
    """The replica that this stands for; None: the whole engine."""
    places: tuple[InstanceKey, ...] = ()
    """Of all replicas of the instance, also of those that do not serve."""

    place: InstanceKey = field(init=False)
    """Where its requests count: the load and what policies know are of it."""
    replica_line: str = field(init=False)
    """The header line by which a call names the replica; empty for a whole engine."""
    name: str = field(init=False)
    """What people call it: the name it gives itself, else its HTTP address."""
    is_continuing: bool = field(init=False)
    """Whether it understands `continue_from`: its beat says continuation 1 (docs/adr/0002)."""
    dialect: Dialect = field(init=False)
    pairing: str = field(init=False)
    """Equal for a P and a D that may be a pair."""
    engine: str | None = field(init=False)
    """Which program it is, where a D compares KV of another one before it uses it; None: it goes by
    no compatibility key, or by a connector of vLLM's own, and compares nothing."""
    serves_alone: bool = field(init=False)
    """Whether it serves a request whose id names no pair. vLLM's engines of three fields do not:
    their connector cannot parse such an id."""
    goes_on_as: str | None = field(init=False)
    """What a P and a D have in common that can go on behind tokens which another pair made; None:
    it cannot."""

    def __post_init__(self) -> None:
        # Read for every request: so they are no properties. The value is frozen.
        object.__setattr__(self, "name", self.beat.instance or self.key.http)
        place = self.key._replace(replica=self.replica) if self.replica else self.key
        object.__setattr__(self, "place", place)
        line = "" if self.replica is None else f"X-data-parallel-rank: {self.replica}\r\n"
        object.__setattr__(self, "replica_line", line)
        if not self.places:
            object.__setattr__(self, "places", places_of(self.key, self.beat))
        spoken, pairing = dialect_of(self.beat), pairing_of(self.beat)
        is_continuing = spoken == "xpyd"
        goes_on_as = self.beat.compatibility if is_continuing else None
        takes_ids = self.beat.prompt_ids == 1 and self.beat.dialect in ("pair-id", "nixl")
        if takes_ids and self.beat.type != "A":
            goes_on_as = f"ids {pairing}"
        object.__setattr__(self, "is_continuing", is_continuing)
        object.__setattr__(self, "dialect", spoken)
        object.__setattr__(self, "pairing", pairing)
        compares = bool(self.beat.compatibility) and spoken in ("xpyd", "pair-id")
        object.__setattr__(self, "engine", self.beat.engine if compares else None)
        object.__setattr__(self, "serves_alone", is_continuing or self.beat.dialect != "")
        object.__setattr__(self, "goes_on_as", goes_on_as)

    @property
    def kvs(self) -> tuple[Address, ...]:
        """All its KV addresses, each once."""
        return tuple(dict.fromkeys((self.kv, *self.replica_kvs)))

    def each_replica(self) -> Iterator[Instance]:
        """The replicas that serve and stay, each as an instance; itself where it has none."""
        if not self.beat.replicas:
            yield self
        for number, one in enumerate(self.beat.replicas):
            if one.serving and not one.draining:
                kv, beat = self.replica_kvs[number], self.beat.of_replica(number)
                yield replace(self, beat=beat, kv=kv, kv_text=str(kv), replica=number)

    def is_of_revision(self, other: Instance) -> bool:
        """Whether their fleet revisions let them be a pair. An instance that names none may be
        older than these names, and so a partner of all."""
        return not self.partners or not other.partners or self.partners == other.partners

    @property
    def is_routable(self) -> bool:
        """Whether new requests may be sent to it."""
        return self._may_be_asked and self.standing in ("Good", "HalfOpen")

    @property
    def is_spare(self) -> bool:
        """Whether new requests may be sent to it where its kind has no better one."""
        return self._may_be_asked and self.standing in ("Open", "Trial")

    @property
    def is_staying(self) -> bool:
        """Whether it serves, or will once it has started: it does not leave."""
        return self.beat.state in ("Starting", "Ready")

    @property
    def _may_be_asked(self) -> bool:
        return self.beat.state == "Ready" and not self.is_cordoned

    @property
    def kind(self) -> Kind:
        """Instances that share requests with it have the same."""
        return kind_of(self.beat)

    def is_late(self, now: float) -> bool:
        """Whether a beat is missing."""
        return now - self.last_beat_s > _LATE_PERIODS * self.period_s

    def serves(self, model: str) -> bool:
        """Old beats name no model; such an instance takes every name and may answer 404 itself."""
        return not self.beat.models or model in self.beat.models


class Arrival(NamedTuple):
    """How a router's instances came: what a router that starts waits by (docs/adr/0121)."""

    first_s: float = math.inf
    """When the first of them beat."""
    period_s: float = 0.0
    """The longest period of their beats."""
    has_other_routers: bool = False
    """Whether one of them beats to other routers, too."""

    def with_one(self, instance: Instance) -> Arrival:
        """The same, with an instance that was not there before."""
        return Arrival(
            min(self.first_s, instance.last_beat_s),
            max(self.period_s, instance.period_s),
            self.has_other_routers or instance.beat.routers > 1,
        )


Met = Mapping[InstanceKey, frozenset[InstanceKey]]
"""By D: the Ps of other engines whose KV it has compared with its own, and uses."""
_NOBODY_MET: Met = MappingProxyType({})
_NOBODY: frozenset[InstanceKey] = frozenset()


class _Known(NamedTuple):
    """What is known of pairs. `verified`: by the place of D those of the Ps from which a probe gets
    there; None: a pair needs none (docs/adr/0110)."""

    met: Met
    verified: Met | None

    def of(self, d: Instance) -> tuple[frozenset[InstanceKey], frozenset[InstanceKey]]:
        """The Ps that D has met, and those verified: equal for Ds that have the same partners."""
        verified = _NOBODY if self.verified is None else self.verified.get(d.place, _NOBODY)
        return self.met.get(d.key, _NOBODY), verified

    def is_pair(self, p: Instance, d: Instance) -> bool:
        """Whether a P and a D of one pairing key are a pair."""
        if self.verified is not None and p.place not in self.verified.get(d.place, _NOBODY):
            return False
        knows = p.engine == d.engine or p.key in self.met.get(d.key, _NOBODY)
        return knows and p.is_of_revision(d)


class Group(NamedTuple):
    """Routable instances: any P of it may send KV to any D of it. Those of one pairing key are one
    group, but for Ds of which some do not use the KV of all Ps, as they have not met, are of
    another revision or not verified: then a P may be in several."""

    name: str
    """The pairing key; of several groups of one key, with the address of the first D."""
    prefill: tuple[Instance, ...]
    decode: tuple[Instance, ...]


@dataclass(frozen=True)
class ModelInstances:
    """The instances that may serve one model. `groups` holds also those with only P or only D."""

    groups: tuple[Group, ...] = ()
    aggregated: tuple[Instance, ...] = ()
    alone: frozenset[str] = frozenset()
    """Types of which one instance serves whole requests where there is no pair."""

    @property
    def everyone(self) -> tuple[Instance, ...]:
        """All of them, also those without a partner."""
        paired = (one for group in self.groups for one in (*group.prefill, *group.decode))
        return (*each_once(paired), *self.aggregated)

    @property
    def max_model_len(self) -> int | None:
        """The tokens of context that each of them has; None where none says how many."""
        lengths = (one.beat.max_model_len for one in self.everyone)
        return min((length for length in lengths if length), default=None)

    @property
    def is_routable(self) -> bool:
        """Whether a request can be served at all."""
        if self.aggregated or any(g.prefill and g.decode for g in self.groups):
            return True
        return any(
            one.serves_alone and one.beat.type in self.alone
            for group in self.groups
            for one in (*group.decode, *group.prefill)
        )

    @property
    def lost(self) -> Lost:
        """What a request lacks that finds no pair."""
        has_p = any(group.prefill for group in self.groups)
        has_d = any(group.decode for group in self.groups)
        if has_p:
            return "pair" if has_d else "decode"
        return "prefill" if has_d else "both"


@dataclass(frozen=True)
class Snapshot:
    """What the hot path reads: built once per change of the fleet, never changed."""

    by_model: Mapping[str, ModelInstances] = field(default_factory=lambda: MappingProxyType({}))
    any_model: ModelInstances = field(default_factory=ModelInstances)
    """The instances for names that no instance gives: those that give no names."""
    known_models: frozenset[str] = frozenset()
    """Names given by instances in any state."""
    takes_any_model: bool = False
    """Whether an instance in any state gives no names."""
    is_empty: bool = True

    def of_model(self, model: str) -> ModelInstances:
        """The instances that may serve `model` now."""
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


def each_once(instances: Iterable[Instance]) -> Iterable[Instance]:
    """`instances` in their order: a P may be in several groups."""
    return {one.place: one for one in instances}.values()


def _may_differ(among: Iterable[Instance], known: _Known) -> bool:
    """Whether a P and a D of these, which have one pairing key, may be no pair."""
    if known.verified is not None:
        return True
    engines, revisions = set[str | None](), set[str]()
    for one in among:
        engines.add(one.engine)
        if one.partners:
            revisions.add(one.partners)
    return len(engines) > 1 or len(revisions) > 1


def _groups(
    pairing: str, ps: Sequence[Instance], ds: Sequence[Instance], known: _Known
) -> Iterator[Group]:
    """The groups of one pairing key."""
    if not _may_differ((*ps, *ds), known):
        yield Group(pairing, tuple(ps), tuple(ds))
        return
    # Ds of one engine and revision that know the same Ps share what is found for the first.
    partners: dict[tuple[object, ...], tuple[Instance, ...]] = {}
    split: dict[tuple[InstanceKey, ...], tuple[tuple[Instance, ...], list[Instance]]] = {}
    for d in ds:
        of = d.engine, d.partners, *known.of(d)
        found = partners.get(of)
        if found is None:
            found = tuple(p for p in ps if known.is_pair(p, d))
            partners[of] = found
        split.setdefault(tuple(p.place for p in found), (found, []))[1].append(d)
    paired = {key for keys in split for key in keys}
    left = tuple(p for p in ps if p.place not in paired)
    is_split = len(split) > 1 or bool(left)
    for found, members in split.values():
        name = f"{pairing} {members[0].key.http}" if is_split else pairing
        yield Group(name, found, tuple(members))
    if left:
        yield Group(pairing, left, ())


def _model_instances(
    instances: Iterable[Instance], known: _Known, *, alone: frozenset[str]
) -> ModelInstances:
    prefill: dict[str, list[Instance]] = {}
    decode: dict[str, list[Instance]] = {}
    aggregated: list[Instance] = []
    for instance in instances:
        if instance.beat.type == "A":
            aggregated.append(instance)
            continue
        side = prefill if instance.beat.type == "P" else decode
        side.setdefault(instance.pairing, []).append(instance)
    keys = sorted(prefill.keys() | decode.keys())
    groups = (g for k in keys for g in _groups(k, prefill.get(k, ()), decode.get(k, ()), known))
    return ModelInstances(tuple(groups), tuple(aggregated), alone)


def _has_pair(among: Sequence[Instance], model: str, known: _Known) -> bool:
    """Whether a P and a D of these, which have one pairing key, may serve `model` together."""
    ps = [one for one in among if one.beat.type == "P" and one.serves(model)]
    by_key = {p.place: p for p in ps}
    # Ps alike are asked once: there may be thousands.
    alike = {(p.engine, p.partners): p for p in ps}
    return any(
        one.beat.type == "D"
        and one.serves(model)
        and (
            any(known.is_pair(p, one) for p in alike.values())
            or any(
                known.is_pair(by_key[key], one)
                for keys in known.of(one)
                for key in by_key.keys() & keys
            )
        )
        for one in among
    )


def _missing(
    routable: Sequence[Instance], spare: Sequence[Instance], known: _Known
) -> Iterator[Instance]:
    """Those of `spare` without which a model has no pair, though its kinds have routable instances:
    these are of engines that have not met, of other revisions, or not verified."""
    for pairing in {one.pairing for one in spare if one.beat.type != "A"}:
        more = [one for one in spare if one.pairing == pairing and one.beat.type != "A"]
        there = [one for one in routable if one.pairing == pairing and one.beat.type != "A"]
        both = [*there, *more]
        if _may_differ(both, known):
            models = {name for one in more for name in one.beat.models or ("",)}
            if any(not _has_pair(there, m, known) and _has_pair(both, m, known) for m in models):
                yield from more


def _routable(everyone: Iterable[Instance], known: _Known) -> list[Instance]:
    """Instances that new requests may be sent to.

    An open breaker keeps requests for the instances that work. A kind without such has nothing to
    save: then those whose breaker is open are asked, and their errors are the answer. So are those
    without which there is no pair.
    """
    routable = [instance for instance in everyone if instance.is_routable]
    spare = [instance for instance in everyone if instance.is_spare]
    if spare:
        served = {instance.kind for instance in routable}
        routable += [instance for instance in spare if instance.kind not in served]
        left = [instance for instance in spare if instance.kind in served]
        routable += _missing(tuple(routable), left, known)
        routable.sort(key=lambda instance: instance.place)
    return routable


def build_snapshot(
    instances: Iterable[Instance],
    *,
    alone: frozenset[str] = frozenset(),
    met: Met = _NOBODY_MET,
    verified: Met | None = None,
) -> Snapshot:
    """The snapshot of `instances`, in the order of their addresses so that turns are stable; those
    with replicas as many times as replicas serve.

    `alone`: instances of these types serve whole requests where there is no pair (onNoPrefill,
    onNoDecode). `met`: a P and a D of different engines are a pair only where it says so
    (docs/adr/0055). `verified`: so are all others, where it is given (docs/adr/0110).
    """
    known = _Known(met, verified)

    def serving(among: Iterable[Instance]) -> ModelInstances:
        return _model_instances(among, known, alone=alone)

    everyone = sorted(instances, key=lambda instance: instance.key)
    routable = _routable([one for each in everyone for one in each.each_replica()], known)
    unnamed = [instance for instance in routable if not instance.beat.models]
    named: dict[str, list[Instance]] = {}
    for instance in routable:
        for name in dict.fromkeys(instance.beat.models):
            named.setdefault(name, []).append(instance)
    by_model = {
        name: serving(sorted(found + unnamed, key=lambda i: i.place) if unnamed else found)
        for name, found in sorted(named.items())
    }
    return Snapshot(
        by_model=MappingProxyType(by_model),
        any_model=serving(unnamed),
        known_models=frozenset(model for i in everyone for model in i.beat.models),
        takes_any_model=any(not i.beat.models for i in everyone),
        is_empty=not everyone,
    )

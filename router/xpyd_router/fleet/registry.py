"""The instances of the fleet: heartbeats in, an immutable snapshot out. Pure: time is an argument.

`discovery` feeds it, `policy` reads the snapshot. An instance is known by its HTTP address; another
incarnation (process start) at the same address is another instance and replaces it at once. It
leaves by goodbye at once, or when its time to live (missed beats x its period) has passed.

Conflicting claims: of two incarnations at one address the one with the newer beats stays, the other
never comes back. A KV address belongs to the instance that came first, for as long as it beats. An
instance with signed beats is changed by signed beats only.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from xpyd_core.errors import ProtocolError
from xpyd_core.messages import Heartbeat
from xpyd_core.request_id import Address, is_dialable
from xpyd_router.fleet.instances import (
    MAX_INSTANCES,
    Instance,
    InstanceKey,
    Snapshot,
    Standing,
    build_snapshot,
)
from xpyd_router.fleet.introductions import PairFound, Proofs, Verdict, Verdicts

MAX_MODELS = 1024
"""Names that all instances together may give: the snapshot has an entry for each."""
FOR_EVER = 2**63 - 1
_MAX_PAST = 4096
# Addresses go into headers and URLs; an underscore would end the address in a request id early.
_HOST = re.compile(r"[A-Za-z0-9.:-]{1,255}")


def usable_http(beat: Heartbeat) -> Address:
    """The HTTP address in one spelling. ProtocolError for one that cannot be called."""
    return _usable(beat.http, "http_address")


def usable_kv(beat: Heartbeat) -> Address:
    """The KV address in one spelling. ProtocolError for one that cannot be dialled: engines of ours
    take only literal ips from a request id, others are asked by names, too."""
    found = _usable(beat.kv, "zmq_address")
    is_dialled = beat.continuation == 1 and beat.type != "A"
    if is_dialled and not is_dialable(found):
        raise ProtocolError(
            f"heartbeat: zmq_address {found}: engines dial only a literal ip and ports from 1024 "
            "on; start this one with --kv-advertise IP:PORT"
        )
    return found


def usable_replica_kvs(beat: Heartbeat) -> tuple[Address, ...]:
    """The KV addresses of the replicas, likewise; no two may have the same."""
    each = (usable_kv(beat.of_replica(number)) for number in range(len(beat.replicas)))
    found = tuple(each)
    if len(set(found)) < len(found) and beat.type != "A":
        raise ProtocolError("heartbeat: replicas: two of them have the same zmq_address")
    return found


def _usable(address: Address, field_name: str) -> Address:
    if _HOST.fullmatch(address.host) is None:
        raise ProtocolError(f"heartbeat: {field_name} has characters that no host has")
    try:
        ip = ipaddress.ip_address(address.host)
    except ValueError:
        if ":" in address.host:
            raise ProtocolError(f"heartbeat: {field_name} is no IPv6 address") from None
        return address._replace(host=address.host.lower())
    if ip.is_unspecified or ip.is_multicast:
        raise ProtocolError(
            f"heartbeat: {field_name} {address} is no address of an instance; give the engine its "
            "own with --host"
        )
    return address._replace(host=str(ip))


def is_readable(beat: Heartbeat) -> bool:
    """Whether its texts can be written in a log line."""
    texts = (beat.instance, beat.incarnation, beat.fleet, beat.pool, beat.revision, beat.engine)
    more = (beat.fleet_revision, beat.compatibility, beat.scaling_problem, *beat.models)
    return all(text.isprintable() for text in (*texts, *more))


class Departed:
    """Instances that left, and up to when their beats are old. Bounded: the oldest go."""

    def __init__(self) -> None:
        self._until: OrderedDict[InstanceKey, int] = OrderedDict()

    def put(self, key: InstanceKey, sent_us: int) -> None:
        """Beats of `key` sent up to `sent_us` are of the past."""
        # Without an incarnation a late beat cannot be distinguished from a restart: let it in
        # again. And one that says no time comes back by the beat that it always sends.
        if not key.incarnation or not sent_us:
            return
        self._until[key] = sent_us
        self._until.move_to_end(key)
        if len(self._until) > _MAX_PAST:
            self._until.popitem(last=False)

    def has(self, key: InstanceKey, sent_us: int) -> bool:
        """Whether a beat of `key` sent at `sent_us` is of the past."""
        until = self._until.get(key)
        return until is not None and sent_us <= until


class Claims:
    """What the present instances have: KV addresses, each once, names of models, and engines.

    The KV address of an aggregated instance is never dialled, so it counts for nothing.
    """

    def __init__(self) -> None:
        self._holders: dict[Address, str] = {}
        """KV address -> HTTP address of the P or D that has it."""
        self.places = 0
        """For requests: an instance has one for each of its replicas."""
        self._models: Counter[str] = Counter()
        self._engines: Counter[tuple[str, str]] = Counter()
        """Ps and Ds by pairing key and engine, where one compares the KV of another."""

    @property
    def is_mixed(self) -> bool:
        """Whether engines of one pairing key are different programs."""
        return len({pairing for pairing, _ in self._engines}) < len(self._engines)

    def has_other_holder(self, instance: Instance) -> bool:
        """Whether another instance has its KV address."""
        if instance.beat.type == "A":
            return False
        own = instance.key.http
        return any(self._holders.get(kv, own) != own for kv in instance.kvs)

    def has_place_for(self, instance: Instance) -> bool:
        """Whether its models are known, or not too many."""
        added = set(instance.beat.models) - self._models.keys()
        return not added or len(self._models) + len(added) <= MAX_MODELS

    def add(self, instance: Instance) -> None:
        """Count what `instance` has."""
        self._models.update(instance.beat.models)
        self.places += len(instance.places)
        if instance.beat.type != "A":
            self._holders.update(dict.fromkeys(instance.kvs, instance.key.http))
            if instance.engine is not None:
                self._engines[instance.pairing, instance.engine] += 1

    def remove(self, instance: Instance) -> None:
        """Count it no more; `instance` is exactly what `add` got."""
        for name in instance.beat.models:
            self._models[name] -= 1
            if not self._models[name]:
                del self._models[name]
        self.places -= len(instance.places)
        if instance.beat.type == "A":
            return
        for kv in instance.kvs:
            del self._holders[kv]
        if instance.engine is not None:
            of = (instance.pairing, instance.engine)
            self._engines[of] -= 1
            if not self._engines[of]:
                del self._engines[of]


MAX_SKEW_S = 120.0
"""How old the first signed beat of an incarnation may be, or how far ahead: clocks differ, and an
old beat that was kept must not bring back an instance that is gone."""
# A period may be wrong: within these bounds an instance neither flaps nor stays for ever.
_PERIOD_BOUNDS_S = (0.05, 60.0)
Outcome = Literal[
    "new", "refreshed", "replaced", "gone", "repeated", "stale", "skewed", "unsigned", "conflict",
    "full",
]  # fmt: skip


def _routing_view(beat: Heartbeat) -> tuple[object, ...]:
    """The part of a beat that decides which instance is picked; loads change with every beat."""
    return (
        *(beat.type, beat.http_address, beat.zmq_address, beat.state, beat.models),
        *(beat.compatibility, beat.continuation, beat.instance, beat.max_model_len),
        *(beat.dialect, beat.prompt_ids, beat.engine, beat.fleet_revision),
        *((one.zmq_address, one.serving, one.draining) for one in beat.replicas),
    )


def key_of(beat: Heartbeat) -> InstanceKey:
    """The instance that `beat` is of. ProtocolError for an unusable address."""
    return InstanceKey(str(usable_http(beat)), beat.incarnation)


class Registry:
    """The one owner of membership. Every method takes `now` in seconds of one monotonic clock.

    `same_revision`: a P and a D of different fleet revisions are no pair (docs/adr/0097).
    `only_verified`: nor are those that no probe has verified (docs/adr/0110).
    """

    def __init__(
        self,
        *,
        period_s: float,
        missed_beats: int,
        decode_alone: bool = False,
        prefill_alone: bool = False,
        same_revision: bool = True,
        only_verified: bool = False,
    ) -> None:
        self._period_s = period_s
        self._missed_beats = missed_beats
        self._instances: dict[str, Instance] = {}
        self._belongings = Claims()
        self._past = Departed()
        self.verdicts = Verdicts()
        """What Ds say of the KV of other engines; to be read only."""
        self.proofs = Proofs()
        """What probes have shown of pairs; to be read only."""
        self.only_verified = only_verified
        self._alone: frozenset[str] = frozenset(
            kind for kind, serves in (("D", decode_alone), ("P", prefill_alone)) if serves
        )
        self._same_revision = same_revision
        self.built: Snapshot | None = build_snapshot(())
        """The present snapshot, where it is built; else `snapshot` builds it."""
        self.version = 0
        """Another number whenever the instances that may be picked have changed."""

    @property
    def snapshot(self) -> Snapshot:
        """The present snapshot: another object for another `version`.

        Built when it is asked for: a burst of changes costs one.
        """
        if self.built is None:
            everyone = self._instances.values()
            self.built = build_snapshot(
                everyone,
                alone=self._alone,
                met=self.verdicts.met,
                verified=self.proofs.verified if self.only_verified else None,
            )
        return self.built

    @property
    def instances(self) -> tuple[Instance, ...]:
        """All instances with their latest beats, sorted by address."""
        return tuple(sorted(self._instances.values(), key=lambda instance: instance.key))

    def apply(
        self, beat: Heartbeat, now: float, signed_age_s: float | None = None
    ) -> tuple[Outcome, tuple[InstanceKey, ...]]:
        """Take one beat: what it was, and the instances that died by it (were replaced).

        `signed_age_s`: how long ago a beat was sent whose signature is right; None: it has none.
        Raises ProtocolError for an address or name that cannot be written in a header or a log
        line.
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
            self._forget(known)
            self._rebuild()
            return "replaced", (known.key,)
        if _routing_view(known.beat) != _routing_view(beat):
            self._forget_lost(known, instance)
            self._rebuild()
        if known.kv == instance.kv:
            return "refreshed", ()
        # Without incarnations a restart shows only in another KV address.
        self._forget(known)
        return "replaced", ()

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
        """The instance of this key or place, if it is still there under this incarnation."""
        known = self._instances.get(key.http)
        return known if known is not None and known.key == key.instance else None

    def at(self, place: InstanceKey) -> Instance | None:
        """The replica of this place, if it is there and serves."""
        known = self.get(place)
        among = () if known is None else known.each_replica()
        return next((one for one in among if one.place == place), None)

    def set_standing(self, key: InstanceKey, standing: Standing) -> bool:
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

    @property
    def is_mixed(self) -> bool:
        """Whether there may be a P and a D of different engines."""
        return self._belongings.is_mixed

    def judge(self, prefill: InstanceKey, decode: InstanceKey, verdict: Verdict) -> bool:
        """Take what D says of KV of a P of another engine, until one of them leaves; whether that
        changed anything."""
        if self.get(prefill) is None or self.get(decode) is None:
            return False
        if not self.verdicts.put(prefill, decode, verdict):
            return False
        self._rebuild()
        return True

    def prove(self, prefill: InstanceKey, decode: InstanceKey, found: PairFound) -> bool:
        """Take what a probe has shown of a pair, until one of them leaves; whether it is
        verified by that, or no more."""
        # Of a replica that left meanwhile it would be held against the next one of its number.
        if self.at(prefill) is None or self.at(decode) is None:
            return False
        is_news = self.proofs.put(prefill, decode, found)
        if is_news and self.only_verified:
            self._rebuild()
        return is_news

    def _forget(self, instance: Instance) -> None:
        self.verdicts.forget(instance.key)
        for place in instance.places:
            self.proofs.forget(place)

    def _forget_lost(self, known: Instance, now: Instance) -> None:
        """What a probe has shown of a replica is not true of its next start."""
        present = {one.place for one in now.each_replica()}
        for one in known.each_replica():
            if one.place not in present:
                self.proofs.forget(one.place)

    def _instance(self, beat: Heartbeat, now: float, *, is_signed: bool) -> Instance:
        http, kv, replica_kvs = usable_http(beat), usable_kv(beat), usable_replica_kvs(beat)
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
            partners=beat.fleet_revision if self._same_revision else "",
            replica_kvs=replica_kvs,
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
        more = len(instance.places) - (0 if known is None else len(known.places))
        if more > 0 and self._belongings.places + more > MAX_INSTANCES:
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
        self._forget(instance)
        self._rebuild()

    def _rebuild(self) -> None:
        self.built = None
        self.version += 1

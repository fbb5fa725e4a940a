"""The registry as the asyncio side uses it: changes can be waited for, calls to the dead end.

One object per router, used in one event loop. `discovery` and `prober` write, `flow` reads, and
reports how its calls went.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

from xpyd_core.messages import Heartbeat
from xpyd_router.errors import FailureCause
from xpyd_router.fleet.health import (
    STRIKES,
    Health,
    HealthReport,
    HealthRules,
    Parting,
    ProbeResult,
)
from xpyd_router.fleet.instances import (
    Arrival,
    Instance,
    InstanceKey,
    Snapshot,
    Standing,
    kind_of,
    places_of,
)
from xpyd_router.fleet.introductions import (
    PairFound,
    PairProblem,
    Verdict,
    WithoutKv,
    mixed_pairs,
    possible_pairs,
    without_pair,
)
from xpyd_router.fleet.loads import Load, LoadTable
from xpyd_router.fleet.poison import Break, Fate, fingerprint, judge
from xpyd_router.fleet.registry import Outcome, Registry, key_of

_MAX_LOST = 1024
_VERDICT_SLACK_S = 0.5

OnStanding = Callable[[Instance, Standing, str], None]
"""An instance with its new standing, its standing before, and the cause where it is ejected."""


MAX_NAMED = 16
"""Names in each list of a WithoutKv."""
MAX_PROBLEMS = 64
_MAX_WORDS = 400
"""Letters of why an instance has no pair."""


class FleetView:
    """Owner of the registry and of the instances' health. `clock` is monotonic seconds.

    Beats and health write into `loads`.
    """

    def __init__(
        self,
        registry: Registry,
        clock: Callable[[], float],
        loads: LoadTable | None = None,
        rules: HealthRules | None = None,
    ) -> None:
        self.rules = rules or HealthRules()
        self._registry = registry
        self._told_version = registry.version
        self._clock = clock
        self._loads = LoadTable() if loads is None else loads
        self._slow: set[InstanceKey] = set()
        self._health = Health(self.rules, random.random)
        self._on_standing: list[OnStanding] = []
        self._judged = asyncio.Event()
        self._health.poison.on_fate(self._wake_judges)
        self._secret = os.urandom(16)
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[Iterable[InstanceKey]], None]] = []
        self._forgetting: list[Callable[[InstanceKey], None]] = []
        self._lost: OrderedDict[InstanceKey, None] = OrderedDict()
        self._parted: OrderedDict[InstanceKey, None] = OrderedDict()
        """Those that said goodbye lately."""
        self._strangers: tuple[int, tuple[tuple[Instance, Instance], ...]] = (-1, ())
        self.had_pair = False
        """Whether `has_pair` was true once."""
        self.arrival = Arrival()
        """What the first beats of the instances said."""

    @property
    def snapshot(self) -> Snapshot:
        """The instances that can be picked now."""
        return self._registry.built or self._registry.snapshot

    @property
    def has_pair(self) -> bool:
        """Whether a pair or an aggregated instance can be picked now; else requests wait."""
        return self.snapshot.is_ready

    @property
    def instances(self) -> tuple[Instance, ...]:
        """All instances, each with its last beat."""
        return self._registry.instances

    @property
    def now_s(self) -> float:
        """The clock that beats are measured with."""
        return self._clock()

    def apply(self, beat: Heartbeat, signed_age_s: float | None = None) -> Outcome:
        """Take one beat, see Registry; ProtocolError for one with an unusable address."""
        now = self._clock()
        outcome, dead = self._registry.apply(beat, now, signed_age_s)
        key = key_of(beat)
        if outcome == "new":
            self._welcome(key)
        if outcome in ("new", "refreshed", "replaced"):
            self._take_load(key, beat)
        if outcome in ("new", "refreshed", "replaced", "gone"):
            if beat.state != "Ready":
                self._health.leave(key, now, "goodbye")
            elif self._health.ready(key, kind_of(beat), now):
                self._start(key)
            self._settle(key)
        if outcome == "gone":
            self._part(key)
        self._bury(dead, now, "replaced")
        self._notify()
        return outcome

    def _take_load(self, key: InstanceKey, beat: Heartbeat) -> None:
        for number, place in enumerate(places_of(key, beat)):
            self._loads.take(place, beat.of_replica(number) if beat.replicas else beat)

    def expire(self) -> tuple[InstanceKey, ...]:
        """Remove instances that missed their beats, and end the calls that wait for them."""
        now = self._clock()
        gone = self._registry.expire(now)
        self._bury(gone, now, "silent")
        self._notify()
        return gone

    def began(self, instances: Iterable[Instance]) -> None:
        """`instances` were picked for a request: for a half-open instance it is the trial."""
        if self._health.breakers:
            now = self._clock()
            for instance in instances:
                self._health.begin_trial(instance.key, now)
                self._settle(instance.key)
            self._notify()

    def succeeded(self, instance: Instance) -> None:
        """A call was served: wholly, or its stream has begun."""
        if self._health.breakers:
            self._health.succeeded(instance.key, self._clock())
            self._settle(instance.key)
            self._notify()

    def failed(self, instance: Instance, cause: FailureCause, body: bytes) -> Break | None:
        """A call that carried the client's `body` failed. The break that its request met, where
        the instance may have died of it: ask `convicts` before it is tried again.
        """
        now = self._clock()
        suspect = fingerprint(body, self._secret) if cause in STRIKES else b""
        met = self._health.failed(instance.key, cause, suspect, now)
        self._settle(instance.key)
        self._notify()
        return met

    def transfer_failed(self, prefill: Instance, decode: Instance, body: bytes) -> None:
        """D says that the KV of a request with this `body` did not come from P."""
        self._transfer_failed(prefill.place, decode.place, fingerprint(body, self._secret))

    def _transfer_failed(self, prefill: InstanceKey, decode: InstanceKey, suspect: bytes) -> None:
        now = self._clock()
        for key in self._health.transfer_failed(prefill, decode, suspect, now):
            self._settle(key)
        self._notify()

    async def convicts(self, breaks: Sequence[Break], body: bytes) -> bool:
        """Whether the request that met these is to be tried no more, because instances die of it;
        its `body` is refused from now on. Waits for the probes that show whether they died, but for
        no longer than one: a silent instance may be slow, which is held against no request.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.rules.probe_timeout_s + _VERDICT_SLACK_S):
                while judge(breaks) == "open":
                    await self._judged.wait()
        if judge(breaks) != "guilty":
            return False
        self._health.poison.convict(fingerprint(body, self._secret), self._clock())
        return True

    @property
    def refused(self) -> Mapping[bytes, float]:
        """The fingerprints of bodies that are refused; always the same object. While it is empty
        `refused_s` and `acquit` need not be called.
        """
        return self._health.poison.refused

    def refused_s(self, body: bytes) -> float:
        """For how long this body is refused because instances died of it; 0: it is not."""
        return self._health.poison.left_s(fingerprint(body, self._secret), self._clock())

    def acquit(self, body: bytes) -> None:
        """A request with this body was served."""
        self._health.poison.acquit(fingerprint(body, self._secret))

    def take_probes(self, limit: int) -> list[Instance]:
        """The instances to probe now; each must be reported by `probed`."""
        keys = self._health.plan.take(self._clock(), limit)
        return [found for key in keys if (found := self._registry.get(key)) is not None]

    @property
    def next_probe_s(self) -> float:
        """Seconds until an instance is to be probed."""
        return self._health.plan.wait_s(self._clock())

    def probed(self, instance: Instance, result: ProbeResult, began_s: float) -> None:
        """A probe that began at `began_s` has ended."""
        now, key = self._clock(), instance.key
        known = self._registry.get(key)
        is_late = known is not None and known.is_late(now)
        if self._health.probed(key, result, began_s=began_s, is_late=is_late, now=now):
            self._lose((key,))
        self._settle(key)
        if known is not None and self._health.standing(key) != "Ejected":
            self._lost.pop(key, None)
        self._notify()

    def tick(self) -> None:
        """Let time pass; about four times a second."""
        for key in self._health.tick(self._clock()):
            self._settle(key)
        self._notify()
        weights = self.weights()
        for key in self._slow | weights.keys():
            self._set_weight(key, weights.get(key, 1.0))
        self._slow = set(weights)

    def report(self, key: InstanceKey) -> HealthReport:
        """The health of an instance as people see it."""
        return self._health.report(key, self._clock())

    def weights(self) -> Mapping[InstanceKey, float]:
        """The shares of those that get less than their full one."""
        return self._health.weights(self._registry.instances, self._clock())

    def cordon(self, key: InstanceKey, *, is_cordoned: bool) -> None:
        """See Registry.cordon. What the instance has already is left to finish."""
        self._registry.cordon(key, is_cordoned=is_cordoned)
        self._notify()

    def find(self, key: InstanceKey) -> Instance | None:
        """The instance with its last beat, if it is still there under this incarnation."""
        return self._registry.get(key)

    def strangers(self) -> tuple[tuple[Instance, Instance], ...]:
        """The routable pairs of different engines without a verdict, those first whose D has met
        the fewest Ps. None where no further verdict can be kept."""
        registry = self._registry
        if not registry.is_mixed or registry.verdicts.is_full:
            return ()
        if self._strangers[0] != registry.version:
            routable = (one for one in registry.instances if one.is_routable)
            verdicts = registry.verdicts
            found = [(p, d) for p, d in mixed_pairs(routable) if verdicts.of(p.key, d.key) is None]
            found.sort(key=lambda pair: len(verdicts.met.get(pair[1].key, ())))
            self._strangers = registry.version, tuple(found)
        return self._strangers[1]

    def partners_without_kv(self) -> Mapping[InstanceKey, WithoutKv]:
        """The Ready instances that have partners of another engine with which they are no pair."""
        found: dict[InstanceKey, WithoutKv] = {}
        registry = self._registry
        verdicts, proofs = registry.verdicts, registry.proofs
        ready = [one for one in registry.instances if one.beat.state == "Ready"]

        def note(p: Instance, d: Instance, kind: Callable[[WithoutKv], list[str]]) -> None:
            for one, other in ((p, d), (d, p)):
                names = kind(found.setdefault(one.key, WithoutKv([], [], [])))
                if len(names) < MAX_NAMED and other.name not in names:
                    names.append(other.name)

        for p, d in mixed_pairs(ready) if registry.is_mixed else ():
            verdict = verdicts.of(p.key, d.key)
            if verdict != "met":
                is_refused = verdict == "refused"
                note(p, d, lambda of, refused=is_refused: of.refused if refused else of.unmet)
        # Where pairs need no probe, only those that failed: there may be none at all.
        replicas = chain.from_iterable(one.each_replica() for one in ready)
        for p, d in possible_pairs(replicas) if registry.only_verified else self._failed():
            if p.place not in proofs.verified.get(d.place, ()):
                note(p, d, lambda of: of.unverified)
        return found

    def pair_found(self, prefill: InstanceKey, decode: InstanceKey, found: PairFound) -> None:
        """A probe of the pair has ended."""
        self._registry.prove(prefill, decode, found)
        self._notify()

    @property
    def only_verified(self) -> bool:
        """Whether pairs that no probe has verified get no requests."""
        return self._registry.only_verified

    def _failed(self) -> Iterator[tuple[Instance, Instance]]:
        """The pairs whose last probe failed; of instances with replicas those of these."""
        for prefill, decode, found in self._registry.proofs.known():
            p, d = self._registry.at(prefill), self._registry.at(decode)
            if found.cause and p is not None and d is not None:
                yield p, d

    def pair_problems(self) -> list[PairProblem]:
        """Some of the pairs whose last probe failed."""
        proofs = self._registry.proofs
        return [
            PairProblem(p.name, d.name, found)
            for p, d in islice(self._failed(), MAX_PROBLEMS)
            if (found := proofs.of(p.place, d.place)) is not None
        ]

    def unpaired(self) -> Mapping[InstanceKey, str]:
        """The routable instances in no pair, though the other type is there, and why: what the last
        probe of one of its pairs says, else what is known of the first instance of that type."""
        lonely = without_pair(self._registry.instances, self.snapshot)
        probed: dict[InstanceKey, tuple[Instance, Instance]] = {}
        for pair in self._failed() if lonely else ():
            for one in pair:
                probed.setdefault(one.key, pair)
        return {key: self._why_apart(key, *probed.get(key, pair)) for key, pair in lonely.items()}

    def _why_apart(self, key: InstanceKey, p: Instance, d: Instance) -> str:
        proof = self._registry.proofs.of(p.place, d.place)
        verdict = self._registry.verdicts.of(p.key, d.key)
        if proof is not None and proof.cause:
            what = proof.detail or proof.cause
        elif p.pairing != d.pairing:
            what = f"P's compatibility is {p.pairing}, D's is {d.pairing}"
        elif verdict == "refused":
            what = "D never uses KV of this P, which is of another engine"
        elif p.engine != d.engine and verdict is None:
            what = "D has not compared KV of this P yet, which is of another engine"
        else:
            what = "no probe has got from P to D yet"
        return f"no pair with {(d if key == p.key else p).name}: {what}"[:_MAX_WORDS]

    def slowest_probe(self) -> PairProblem | None:
        """Of the pairs whose last probe passed the one that took the longest."""
        proofs, registry = self._registry.proofs, self._registry
        passed = [known for known in proofs.known() if not known[2].cause]
        if not passed:
            return None
        prefill, decode, found = max(passed, key=lambda known: known[2].seconds)
        p, d = registry.get(prefill), registry.get(decode)
        return None if p is None or d is None else PairProblem(p.name, d.name, found)

    def introduced(self, prefill: InstanceKey, decode: InstanceKey, verdict: Verdict) -> bool:
        """D has said whether it uses the KV of a P of another engine; whether that is news."""
        is_news = self._registry.judge(prefill, decode, verdict)
        self._notify()
        return is_news

    def load(self, key: InstanceKey) -> Load:
        """What there is to do at a place now; to be read only."""
        return self._loads.of(key)

    def requests(self, instance: Instance) -> tuple[int, int]:
        """Requests on all replicas of the instance: this router's, and those of others."""
        loads = [self.load(place) for place in instance.places]
        return sum(one.ours for one in loads), sum(one.foreign_requests for one in loads)

    def in_flight(self, places: Sequence[InstanceKey]) -> int | None:
        """Requests that were given these places and are not over; None where a process of this
        router may still pick one of them, though beats say Draining."""
        return sum(self._loads.of(place).ours for place in places)

    def on_standing(self, listener: OnStanding) -> None:
        """Have `listener` called when an instance's health changes."""
        self._on_standing.append(listener)

    async def wait_change(self, timeout_s: float) -> bool:
        """Wait for another snapshot, or for `wake`; False when `timeout_s` passed first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def is_lost(self, key: InstanceKey) -> bool:
        """Whether the instance died or vanished a while ago."""
        return key in self._lost

    def is_leaving(self, key: InstanceKey) -> bool:
        """Whether the instance drains, or said goodbye a while ago."""
        instance = self._registry.get(key)
        return key in self._parted if instance is None else instance.beat.state == "Draining"

    def on_lost(self, listener: Callable[[Iterable[InstanceKey]], None]) -> None:
        """Have `listener` called with those that die or vanish: calls to them will not end."""
        self._listeners.append(listener)

    def on_gone(self, forget: Callable[[InstanceKey], None]) -> None:
        """Have `forget` called with each instance that leaves the fleet."""
        self._forgetting.append(forget)

    def _wake_judges(self, _key: InstanceKey, _fate: Fate) -> None:
        self._judged.set()
        self._judged = asyncio.Event()

    def _bury(self, keys: Sequence[InstanceKey], now: float, how: Parting) -> None:
        """The instances of `keys` died without a goodbye."""
        for key in keys:
            self._health.leave(key, now, how)
        self._lose(keys)

    def _settle(self, key: InstanceKey) -> None:
        """Write the health of one instance into the registry."""
        known, standing = self._registry.get(key), self._health.standing(key)
        if known is None or not self._registry.set_standing(key, standing):
            return
        now_stands = self._registry.get(key)
        assert now_stands is not None
        cause = self._health.report(key, self._clock()).cause
        if standing == "Good":
            self._start(key)
        for listener in self._on_standing:
            listener(now_stands, known.standing, cause)

    def _welcome(self, key: InstanceKey) -> None:
        """The instance was not there before."""
        self._lost.pop(key, None)
        instance = self._registry.get(key)
        assert instance is not None
        self.arrival = self.arrival.with_one(instance)

    def _start(self, key: InstanceKey) -> None:
        """The instance's own share counts until the next tick compares it with others."""
        self._set_weight(key, self._health.share(key, self._clock()))
        self._slow.add(key)

    def _set_weight(self, key: InstanceKey, weight: float) -> None:
        for place in self._places(key):
            self._loads.of(place).weight = weight

    def _places(self, key: InstanceKey) -> tuple[InstanceKey, ...]:
        known = self._registry.get(key)
        return (key,) if known is None else known.places

    def _part(self, key: InstanceKey) -> None:
        """The instance said goodbye."""
        self._parted[key] = None
        if len(self._parted) > _MAX_LOST:
            self._parted.popitem(last=False)

    def _lose(self, keys: Sequence[InstanceKey]) -> None:
        if not keys:
            return
        for key in keys:
            self._lost[key] = None
            if len(self._lost) > _MAX_LOST:
                self._lost.popitem(last=False)
        for listener in self._listeners:
            listener(keys)

    def _notify(self) -> None:
        """Wake what waits for a change, if there was one since the last time."""
        if self._registry.version == self._told_version:
            return
        self._told_version = self._registry.version
        members = {place for one in self._registry.instances for place in one.places}
        for key in self._loads.keep(members):
            for forget in self._forgetting:
                forget(key)
        self.had_pair = self.had_pair or self.has_pair
        self.wake()

    def wake(self) -> None:
        """Have all who wait for a change look again: also another cause than the fleet's may end
        their wait."""
        self._changed.set()
        self._changed = asyncio.Event()

"""Reads what all fleets' routers say: of KV, for KVTransferVerified, and whether they have a pair.

Every 15 s one GET of each ready router's HTTP port, which is open to the cluster as clients need it
(ADR 0043). A router that does not answer is asked more and more rarely, down to every 4 minutes. A
fleet whose verdict changed is woken; its turn takes the verdict from here. While a fleet's key is
rotated, its routers are asked every 3 s which keys they and the engines have; while instances of
it leave, what those still have; while a revision is on trial, how it does.

A router's pod is ready while it takes requests (ADR 0041), an engine's while it serves: whether
heartbeats reach a router, and whether P and D fit together, no pod's readiness says. So the
condition Available goes by what routers answer, too, and fleets without a pair are asked each 3 s.

Whether a router sends requests to an instance opens and shuts the readiness gate of its pod (ADR
0106): asked with the rest, and each second while a pod waits at its gate, or a router has lost one.

Only pods whose owner has the name of the fleet's own Deployment are asked: any pod can have a
router's labels.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

from xpyd_core.pod_env import ROUTER_ADMIN_PORT
from xpyd_core.request_id import Address
from xpyd_operator.controller.decision.cache import Cache, FleetKey
from xpyd_operator.controller.decision.kinds import CONFIG_MAP, DEPLOYMENT, POD, controller_of
from xpyd_operator.controller.decision.state import key_order, own_children
from xpyd_operator.document.fleet import Heartbeat
from xpyd_operator.manifests.names import LABEL_ROLE, canary_name
from xpyd_operator.plan.values import ROUTER
from xpyd_operator.status.canary import CanaryReport, read_state, routers_known
from xpyd_operator.status.canary_figures import QUERY as CANARY_QUERY
from xpyd_operator.status.canary_figures import Tally, read_word
from xpyd_operator.status.children import (
    WORKER_INDEX,
    Raw,
    count,
    fields,
    is_leaving,
    is_of_workload,
    is_true,
    key_of,
    name_of,
    text,
)
from xpyd_operator.status.drains import RELAYED_QUERY, InstanceLoad, read_loads, read_relayed
from xpyd_operator.status.instances import ReplicaCount, replica_counts
from xpyd_operator.status.rotation import RouterKeys, read_keys
from xpyd_operator.status.routable import (
    Gate,
    GateWatch,
    gated_pods,
    is_due,
    read_states,
    waits_at_gate,
)
from xpyd_operator.status.verified import (
    NOT_LOOKED,
    QUERY,
    Counts,
    KvVerdict,
    KvWatch,
    read_counts,
    read_has_pair,
    read_instances,
    read_seen,
)

logger = logging.getLogger(__name__)
PERIOD_S = 15.0
_SOON_S = 3.0
"""How old it may be at most that a fleet had no pair."""
_LOADS_AGAIN_S = 10.0
"""Between two statuses that differ only in what a busy instance still has."""
_ANSWER_S = 3.0
_WORD_S = 60.0
_MOST_WAIT_S = 240.0
_AT_ONCE = 32
_MOST_ASKED = 2
"""Routers of a fleet that are asked for their instances, which all of them have."""
_MOST_BYTES = 4 << 20
"""4,096 rows of pairs are below 1 MiB."""


class _Answer(NamedTuple):
    """One router's; `has_pair` None: it does not say, as one of an older version."""

    counts: Counts
    has_pair: bool | None
    instances: int
    """Engines that the router has."""


@dataclass
class _Fleet:
    """One fleet's watch and last verdict, and whether a router has a pair; by router, when it may
    be asked next and how long it was left alone before."""

    watch: KvWatch = field(default_factory=KvWatch)
    verdict: KvVerdict = NOT_LOOKED
    has_pair: bool | None = None
    said: dict[str, tuple[float, bool]] = field(default_factory=dict[str, tuple[float, bool]])
    """When each router said last whether it has one."""
    rests: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    keys: dict[str, RouterKeys] = field(default_factory=dict[str, RouterKeys])
    """What each router says of keys, while a rotation is under way."""
    tally: Tally = field(default_factory=Tally)
    canary: CanaryReport = field(default_factory=CanaryReport)
    """What routers say of a canary, while there is one."""
    loads: dict[str, InstanceLoad] = field(default_factory=dict[str, InstanceLoad])
    """What instances have, by their pods, while some of them leave."""
    loads_at_s: float = float("-inf")
    """When that was taken last."""
    replicas: dict[str, ReplicaCount] = field(default_factory=dict[str, ReplicaCount])
    """Of instances that list them, by their pods."""
    gate_watch: GateWatch = field(default_factory=GateWatch)
    gates: dict[str, Gate] = field(default_factory=dict[str, Gate])
    """What the gates of pods should be, by their uid: a pod may come again by its name."""


class RouterReader:
    """See the module. `wake` plans a turn of a fleet; `clock` is monotonic seconds; `port` is the
    admin port of every router."""

    def __init__(
        self,
        cache: Cache,
        wake: Callable[[FleetKey], None],
        *,
        clock: Callable[[], float],
        port: int = ROUTER_ADMIN_PORT,
    ) -> None:
        self._cache = cache
        self._wake = wake
        self._clock = clock
        self._port = port
        self._fleets: dict[FleetKey, _Fleet] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)

    def verdict(self, key: FleetKey) -> KvVerdict:
        """What the counts of the fleet's routers say."""
        found = self._fleets.get(key)
        return NOT_LOOKED if found is None else found.verdict

    def has_pair(self, key: FleetKey) -> bool | None:
        """Whether one of the fleet's routers has instances that can serve a request; None: none of
        them has said."""
        found = self._fleets.get(key)
        return None if found is None else found.has_pair

    def keys(self, key: FleetKey) -> Mapping[str, RouterKeys]:
        """What the fleet's routers say of keys, by their pods, while its key is rotated."""
        found = self._fleets.get(key)
        return {} if found is None else found.keys

    def loads(self, key: FleetKey) -> Mapping[str, InstanceLoad]:
        """What the instances that leave have, by their pods, as the fleet's routers say."""
        found = self._fleets.get(key)
        return {} if found is None else found.loads

    def canary(self, key: FleetKey) -> CanaryReport:
        """What the fleet's routers say of its canary."""
        found = self._fleets.get(key)
        return CanaryReport() if found is None else found.canary

    def replicas(self, key: FleetKey) -> Mapping[str, ReplicaCount]:
        """The replicas of the fleet's instances, by their pods."""
        found = self._fleets.get(key)
        return {} if found is None else found.replicas

    def gates(self, key: FleetKey) -> Mapping[str, Gate]:
        """What the readiness gates of the fleet's pods should be; one left out stays as it is."""
        found = self._fleets.get(key)
        return {} if found is None else found.gates

    async def ask_loads(self, key: FleetKey) -> Mapping[str, InstanceLoad]:
        """What every instance has now; empty where no router answers."""
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            routers = [address for _, address, _ in self._routers(key)]
            return read_loads(body for body in await self._instances(session, routers) if body)

    async def run(self) -> None:
        """Read at intervals, until cancelled."""
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                await self._look_safely(self.look(session))
                await self._look_safely(self.look_at_gates(session))
                for second in range(1, round(PERIOD_S)):
                    await asyncio.sleep(1.0)
                    await self._look_safely(self.look_at_gates(session, only_moving=True))
                    if second % round(_SOON_S) == 0:
                        await self._look_safely(self.look(session, only_without_pair=True))
                        await self._look_safely(self.look_at_keys(session))
                        await self._look_safely(self.look_at_loads(session))
                        await self._look_safely(self.look_at_canaries(session))
                await asyncio.sleep(1.0)

    async def _look_safely(self, looking: Coroutine[Any, Any, None]) -> None:
        try:
            await looking
        except Exception:  # a task's edge: a round that broke must not end all later ones
            logger.exception("what routers say was not read")

    async def look(
        self, session: aiohttp.ClientSession, *, only_without_pair: bool = False
    ) -> None:
        """One round over all fleets, or over those whose routers had no pair."""
        keys = list(self._cache.documents())
        self._fleets = {key: self._fleets.get(key) or _Fleet() for key in keys}
        if only_without_pair:
            keys = [key for key in keys if self._fleets[key].has_pair is False]
        await asyncio.gather(*(self._look_at(session, key) for key in keys))

    async def _look_at(self, session: aiohttp.ClientSession, key: FleetKey) -> None:
        fleet, pods = self._fleets[key], list(self._routers(key))
        fleet.watch.keep(self._cache.children(key).get(POD, {}))
        routers = {name: address for name, address, is_ready in pods if is_ready}
        now_s = self._clock()
        fleet.rests = {name: rest for name, rest in fleet.rests.items() if name in routers}
        asked = [name for name in routers if fleet.rests.get(name, (now_s, 0.0))[0] <= now_s]
        answers = await asyncio.gather(*(self._ask(session, routers[name]) for name in asked))
        for name, answer in zip(asked, answers, strict=True):
            if answer is None:
                rest_s = min(_MOST_WAIT_S, max(PERIOD_S, 2 * fleet.rests.get(name, (0.0, 0.0))[1]))
                fleet.rests[name] = (now_s + rest_s, rest_s)
            else:
                fleet.rests.pop(name, None)
        found = {n: a for n, a in zip(asked, answers, strict=True) if a is not None}
        counts = {name: answer.counts for name, answer in found.items()}
        known = max((answer.instances for answer in found.values()), default=None)
        roles = self._ready_engines(key)
        has_stranger = None if known is None else known < len(roles)
        bodies = await asyncio.gather(
            *(
                self._get(session, routers[name], "/instances")
                for name in sorted(found)[:_MOST_ASKED]
            )
        )
        said = (body for body in bodies if body is not None)
        seen = await asyncio.to_thread(read_seen, list(said))
        replicas = {} if seen is None else replica_counts(seen.instances.values())
        verdict = fleet.watch.look(
            counts, self._clock(), has_stranger=has_stranger, seen=seen, roles=roles
        )
        for name, answer in found.items():
            if answer.has_pair is not None:
                fleet.said[name] = (now_s, answer.has_pair)
        # One that is slow to answer keeps its word for a while.
        fleet.said = {
            name: (at_s, has)
            for name, (at_s, has) in fleet.said.items()
            if name in routers and now_s - at_s <= _WORD_S
        }
        has_pair = any(has for _, has in fleet.said.values()) if fleet.said else None
        now = verdict, has_pair, replicas if found else fleet.replicas
        if now != (fleet.verdict, fleet.has_pair, fleet.replicas):
            fleet.verdict, fleet.has_pair, fleet.replicas = now
            self._wake(key)

    async def look_at_keys(self, session: aiohttp.ClientSession) -> None:
        """Ask all routers of fleets whose key is being rotated which keys they and engines have."""
        await asyncio.gather(
            *(self._look_at_keys(session, key, fleet) for key, fleet in self._fleets.items())
        )

    async def _look_at_keys(
        self, session: aiohttp.ClientSession, key: FleetKey, fleet: _Fleet
    ) -> None:
        document = self._cache.document(key)
        if document is None or not key_order(document, self._cache.children(key)).is_moving:
            fleet.keys = {}
            return
        routers = {name: address for name, address, _ in self._routers(key)}
        bodies = await asyncio.gather(
            *(self._get(session, address, "/instances") for address in routers.values())
        )
        said = {
            name: read_keys(body)
            for name, body in zip(routers, bodies, strict=True)
            if body is not None
        }
        keys = {name: found for name, found in said.items() if found is not None}
        if keys != fleet.keys:
            fleet.keys = keys
            self._wake(key)

    async def look_at_loads(self, session: aiohttp.ClientSession) -> None:
        """Ask the routers of fleets of which instances leave what those have."""
        await asyncio.gather(
            *(self._look_at_loads(session, key, fleet) for key, fleet in self._fleets.items())
        )

    async def _look_at_loads(
        self, session: aiohttp.ClientSession, key: FleetKey, fleet: _Fleet
    ) -> None:
        pods = self._cache.children(key).get(POD, {})
        leaving = {name for name, pod in pods.items() if is_leaving(pod)}
        routers = {name: address for name, address, _ in self._routers(key)} if leaving else {}
        ending = sorted(leaving & routers.keys())
        bodies = await self._instances(session, routers.values() if leaving - {*ending} else ())
        told = await asyncio.gather(
            *(self._get(session, routers[name], RELAYED_QUERY) for name in ending)
        )
        found = read_loads(body for body in bodies if body is not None)
        loads = {name: load for name, load in found.items() if name in leaving}
        for name, body in zip(ending, told, strict=True):
            if (load := read_relayed(body)) is not None:
                loads[name] = load
        # Counts of a busy instance change with every look, and each change is a write.
        is_news = _idle(loads) != _idle(fleet.loads) or loads.keys() != fleet.loads.keys()
        is_due = self._clock() - fleet.loads_at_s >= _LOADS_AGAIN_S
        if loads != fleet.loads and (is_news or is_due):
            fleet.loads, fleet.loads_at_s = loads, self._clock()
            self._wake(key)

    async def look_at_canaries(self, session: aiohttp.ClientSession) -> None:
        """Ask the routers of fleets with a canary how it does."""
        await asyncio.gather(
            *(self._look_at_canary(session, key, fleet) for key, fleet in self._fleets.items())
        )

    async def _look_at_canary(
        self, session: aiohttp.ClientSession, key: FleetKey, fleet: _Fleet
    ) -> None:
        maps = self._cache.children(key).get(CONFIG_MAP, {})
        state = read_state(maps.get(canary_name(key.name)))
        if state is None or not state.is_on_trial:
            fleet.canary, fleet.tally = CanaryReport(), Tally()
            return
        pods = list(self._routers(key))
        bodies = await asyncio.gather(
            *(self._get(session, address, CANARY_QUERY) for _, address, _ in pods)
        )
        words = {
            name: read_word(body.decode("utf-8", "replace"))
            for (name, _, _), body in zip(pods, bodies, strict=True)
            if body is not None
        }
        ready = {name for name, _, is_ready in pods if is_ready}
        counts = fleet.tally.take(state.name, words)
        found = CanaryReport(state.name, routers_known(words, ready), counts)
        if found != fleet.canary:
            fleet.canary = found
            self._wake(key)

    async def look_at_gates(
        self, session: aiohttp.ClientSession, *, only_moving: bool = False
    ) -> None:
        """Ask the ready routers of all fleets with gates which instances they send requests to; or
        of those where a gate may have to change soon."""
        await asyncio.gather(
            *(
                self._look_at_gates(session, key, fleet, only_moving=only_moving)
                for key, fleet in self._fleets.items()
            )
        )

    async def _look_at_gates(
        self, session: aiohttp.ClientSession, key: FleetKey, fleet: _Fleet, *, only_moving: bool
    ) -> None:
        # Looked at each second: what is cheap comes first.
        if only_moving and not (fleet.gate_watch.is_moving or self._has_unready(key)):
            return
        pods = self._gated(key)
        is_moving = fleet.gate_watch.is_moving or any(map(waits_at_gate, pods.values()))
        if not pods or (only_moving and not is_moving):
            return
        ready = {name: address for name, address, is_ready in self._routers(key) if is_ready}
        staying = self._cache.children(key).get(POD, {})
        routers = {name: one for name, one in ready.items() if not is_leaving(staying[name])}
        bodies = await self._instances(session, routers.values())
        said = {
            name: None if body is None else read_states(body)
            for name, body in zip(routers, bodies, strict=True)
        }
        # What became of the pods meanwhile counts.
        pods, document = self._gated(key), self._cache.document(key)
        gates = fleet.gate_watch.look(pods, said, self._clock(), ttl_s=_ttl_s(document or {}))
        fleet.gates = {text(pods[name], "metadata", "uid"): gate for name, gate in gates.items()}
        if any(name in gates and is_due(pod, gates[name]) for name, pod in pods.items()):
            self._wake(key)

    def _has_unready(self, key: FleetKey) -> bool:
        """Whether a pod's containers are ready and the pod is not."""
        return any(
            not is_true(pod, "Ready") and is_true(pod, "ContainersReady")
            for pod in self._cache.children(key).get(POD, {}).values()
        )

    def _gated(self, key: FleetKey) -> dict[str, Raw]:
        """The fleet's pods with a gate, that stay."""
        uid = text(self._cache.document(key), "metadata", "uid")
        own = own_children(uid, self._cache.children(key))
        return {name_of(pod): pod for pod in gated_pods(own)}

    async def _instances(
        self, session: aiohttp.ClientSession, routers: Iterable[str]
    ) -> list[bytes | None]:
        """What each of these addresses answers to GET /instances."""
        asked = (self._get(session, one, "/instances") for one in routers)
        return list(await asyncio.gather(*asked))

    def _routers(self, key: FleetKey) -> Iterator[tuple[str, str, bool]]:
        """Names and addresses of the routers, and whether they are ready."""
        children, fleet = self._cache.children(key), self._cache.document(key)
        uid = text(fleet, "metadata", "uid")
        made = {
            key_of(workload)
            for workload in children.get(DEPLOYMENT, {}).values()
            if controller_of(workload) == uid
        }
        for name, pod in children.get(POD, {}).items():
            address, workload = text(pod, "status", "podIP"), key_of(pod)
            if not address or text(pod, "metadata", "labels", LABEL_ROLE) != ROUTER:
                continue
            if workload and workload in made and is_of_workload(pod, workload):
                yield name, address, is_true(pod, "Ready")

    def _ready_engines(self, key: FleetKey) -> dict[str, str]:
        """The roles of the pods that beat: of an instance of several pods its first one does. Not
        by the pod's own readiness: that of one which no router takes is kept back."""
        return {
            name: role
            for name, pod in self._cache.children(key).get(POD, {}).items()
            if (role := text(pod, "metadata", "labels", LABEL_ROLE)) != ROUTER
            and (workload := key_of(pod)) is not None
            and is_of_workload(pod, workload)
            and text(pod, "metadata", "labels", WORKER_INDEX) in ("", "0")
            and is_true(pod, "ContainersReady")
            and not is_leaving(pod)
        }

    async def _ask(self, session: aiohttp.ClientSession, address: str) -> _Answer | None:
        """What a router says; None where it does not answer."""
        body = await self._get(session, address, QUERY)
        if body is None:
            return None
        said = body.decode("utf-8", "replace")
        counts = await asyncio.to_thread(read_counts, said)
        return _Answer(counts, read_has_pair(said), read_instances(said))

    async def _get(self, session: aiohttp.ClientSession, address: str, path: str) -> bytes | None:
        url = f"http://{Address(address, self._port)}{path}"
        try:
            # A router redirects no request.
            async with self._slots, session.get(url, allow_redirects=False) as answer:
                if answer.status != 200:
                    return None
                return await _read(answer)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.debug("router %s: %s", address, error)
            return None


def _idle(loads: Mapping[str, InstanceLoad]) -> set[str]:
    """Those that have nothing left."""
    return {name for name, load in loads.items() if not load.requests and not load.kv_leases}


def _ttl_s(document: Raw) -> float:
    """After how long without a beat a router drops an instance."""
    usual, given = Heartbeat(), fields(document, "spec", "heartbeat")
    interval_ms = count(given, "intervalMilliseconds") or usual.interval_milliseconds
    return interval_ms / 1000 * (count(given, "missedBeats") or usual.missed_beats)


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    """At most 4 MiB of the body."""
    parts: list[Any] = []
    size = 0
    async for part in answer.content.iter_chunked(1 << 16):
        parts.append(part)
        size += len(part)
        if size >= _MOST_BYTES:
            break
    return b"".join(parts)

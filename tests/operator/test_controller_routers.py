"""The operator reads what routers count, from real HTTP servers, and wakes fleets whose verdict
changed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import aiohttp
from aiohttp import web

from tests.operator.kube_objects import (
    KEY,
    REVISION,
    Obj,
    RoutersWorld,
    canary_map,
    deployment,
    labels_of,
    owned_by,
)
from tests.operator.kube_objects import (
    ready_pod as pod,
)
from xpyd_operator.controller.decision.kinds import CONFIG_MAP, DEPLOYMENT, POD, trim
from xpyd_operator.controller.routers import PERIOD_S
from xpyd_operator.manifests.names import ANNOTATION_KEY_PHASE, ROUTABLE, kv_secret_name
from xpyd_operator.status.canary import CanaryReport
from xpyd_operator.status.canary_figures import QUERY, figures_of
from xpyd_operator.status.drains import InstanceLoad
from xpyd_operator.status.rotation import RouterKeys
from xpyd_operator.status.verified import METRIC


class Router:
    """A router's /metrics: the counts of one pair, or an answer that is none."""

    def __init__(self) -> None:
        self.moved = self.unreachable = 0
        self.has_pair: int | None = None
        self.forged = self.instances = 0
        self.status = 200
        self.asked: list[list[str]] = []
        self.port = 0
        self.key_ids: list[str] = []
        self.type = "D"
        self.problems: list[dict[str, str]] = []
        self.in_flight = self.running = self.kv_leases = self.relayed = self.replicas = 0
        self.state = "Ready"
        self.unpaired = ""
        self.canary = ""
        self.canary_served = 0

    @property
    def figures(self) -> list[list[str]]:
        """The names of each GET /metrics."""
        return [names for names in self.asked if names != ["/instances"]]

    async def instances_of(self, request: web.Request) -> web.Response:
        self.asked.append([request.path])
        load = {"running": self.running, "waiting": 0, "kv_leases": self.kv_leases}
        one = {
            "instance": "d-0",
            "type": self.type,
            "state": self.state,
            "unpaired": self.unpaired,
            "key_ids": self.key_ids,
            "in_flight": self.in_flight,
            "replicas": self.replicas,
        }
        instances = [{**one, "load": load}]
        answer = {"key_ids": self.key_ids, "instances": instances, "kv_problems": self.problems}
        return web.json_response(answer, status=self.status)

    async def metrics(self, request: web.Request) -> web.Response:
        self.asked.append(request.query.getall("name[]"))
        lines = [
            f'{METRIC}{{cause="",decode="d",outcome="moved",prefill="p"}} {self.moved}',
            f'{METRIC}{{cause="unreachable",decode="d",outcome="recomputed",prefill="p"}} '
            f"{self.unreachable}",
        ]
        lines.append(f"xpyd_router_in_flight {self.relayed}")
        lines.append(f'xpyd_router_heartbeats_total{{result="forged"}} {self.forged}.0')
        lines.append(f'xpyd_router_instances{{state="Ready",type="P"}} {self.instances}.0')
        if self.canary:
            known = f'canary="{self.canary}"'
            lines.append(f"xpyd_router_canary{{{known}}} 1")
            served = f'xpyd_router_canary_served_total{{{known},revision="new"}}'
            lines.append(f"{served} {self.canary_served}")
        if self.has_pair is not None:
            lines.append(f"xpyd_router_has_pair {self.has_pair}.0")
        return web.Response(text="\n".join(lines), status=self.status)


@contextlib.asynccontextmanager
async def listening(router: Router) -> AsyncGenerator[None]:
    app = web.Application()
    app.router.add_get("/metrics", router.metrics)
    app.router.add_get("/instances", router.instances_of)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    router.port = runner.addresses[0][1]
    try:
        yield
    finally:
        await runner.cleanup()


def config_map(phase: str) -> Obj:
    metadata = {"name": kv_secret_name("chat", "u"), "namespace": "team", "uid": "c"}
    metadata |= {"labels": labels_of("router"), "resourceVersion": phase}
    metadata |= {"ownerReferences": owned_by("InferenceFleet", "chat", "u")}
    metadata |= {"annotations": {ANNOTATION_KEY_PHASE: phase}}
    return trim(CONFIG_MAP, {"metadata": metadata})


class World(RoutersWorld):
    def __init__(self, router: Router, *pods: Obj) -> None:
        self.now_s = 0.0
        super().__init__(router.port, *pods, clock=lambda: self.now_s)

    async def look(self) -> tuple[bool | None, str]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3)) as session:
            await self.reader.look(session)
        self.now_s += PERIOD_S
        found = self.reader.verdict(KEY)
        return found.status, found.reason


async def test_a_fleet_whose_verdict_changed_is_woken() -> None:
    router = Router()
    async with listening(router):
        world = World(router, pod("r-0"), pod("p-0", role="Prefill"))
        assert await world.look() == (None, "NoTraffic")
        router.moved = 3
        assert await world.look() == (True, "KVMoved")
        assert await world.look() == (True, "KVMoved")
        assert world.woken == [KEY]
        router.unreachable = 2
        assert await world.look() == (False, "Unreachable")
        assert world.woken == [KEY, KEY]
        assert (
            router.figures
            == [
                [
                    METRIC,
                    "xpyd_router_kv_probes_total",
                    "xpyd_router_heartbeats_total",
                    "xpyd_router_has_pair",
                    "xpyd_router_instances",
                ]
            ]
            * 4
        )


async def test_the_message_has_what_a_router_says_of_a_failed_probe_and_the_fix() -> None:
    router = Router()
    async with listening(router):
        world = World(router, pod("r-0"))
        await world.look()
        router.unreachable = 2
        text = "unreachable at 10.0.0.2:21001: Connection refused"
        router.problems = [{"prefill": "p", "decode": "d", "cause": "unreachable", "detail": text}]
        assert await world.look() == (False, "Unreachable")
        message = world.reader.verdict(KEY).message
        assert f"p to d: unreachable ({text})" in message
        assert "Fix: let D listen where it says (kvTransfer.port" in message


async def test_a_pod_that_says_another_role_than_its_pools_is_named() -> None:
    router = Router()
    async with listening(router):
        owner = f"chat-prefill-{REVISION}-5d9c7b8f4d"
        world = World(router, pod("r-0"), pod("d-0", role="Prefill", owner=owner))
        router.instances, router.type = 1, "P"
        await world.look()
        assert await world.look() == (None, "NoTraffic")
        router.type = "D"
        assert await world.look() == (False, "WrongRole")
        assert "d-0 of a Prefill pool says to routers that it is Decode" in (
            world.reader.verdict(KEY).message
        )


async def test_forged_heartbeats_count_while_a_ready_engine_is_at_no_router() -> None:
    router = Router()
    async with listening(router):
        p = f"chat-prefill-{REVISION}-5d9c7b8f4d"
        engines = [pod(f"p-{n}", role="Prefill", owner=p) for n in range(2)]
        # What no router takes has ready containers and is not Ready: its gate is shut.
        engines[1]["status"]["conditions"][0] = {"type": "Ready", "status": "False"}
        others = [pod("p-2", role="Prefill", owner=p, ready="False"), pod("x", role="Prefill")]
        world = World(router, pod("r-0"), *engines, *others)
        router.instances = 2
        for _ in range(6):
            assert await world.look() == (None, "NoTraffic")
            router.forged += 5
        router.instances = 1
        for _ in range(3):
            found = await world.look()
            router.forged += 5
        assert found == (False, "KeyMismatch")


async def test_keys_are_asked_for_while_a_rotation_is_under_way_and_only_then() -> None:
    router = Router()
    async with listening(router), aiohttp.ClientSession() as session:
        world = World(router, pod("r-0"), pod("r-1", ready="False"))
        await world.look()
        router.asked.clear()
        world.woken.clear()
        await world.reader.look_at_keys(session)
        assert (router.asked, world.reader.keys(KEY)) == ([], {})
        world.cache.put(CONFIG_MAP, config_map("Switching"))
        router.key_ids = ["new", "old"]
        for _ in range(2):
            await world.reader.look_at_keys(session)
        said = RouterKeys(("new", "old"), {"d-0": ("new", "old")})
        assert world.reader.keys(KEY) == {"r-0": said, "r-1": said}
        assert world.woken == [KEY]
        router.status = 503
        await world.reader.look_at_keys(session)
        assert world.reader.keys(KEY) == {}
        router.status, router.asked = 200, []
        world.cache.put(CONFIG_MAP, config_map("Done"))
        await world.reader.look_at_keys(session)
        assert router.asked == []


async def test_what_leaving_instances_have_is_asked_of_all_routers_while_some_leave() -> None:
    router = Router()
    async with listening(router), aiohttp.ClientSession() as session:
        owner = f"chat-decode-{REVISION}-5d9c7b8f4d"
        engines = [pod(f"d-{n}", role="Decode", owner=owner) for n in range(2)]
        world = World(router, pod("r-0"), pod("r-1"), *engines)
        await world.look()
        router.asked.clear()
        world.woken.clear()
        await world.reader.look_at_loads(session)
        assert (router.asked, world.reader.loads(KEY), world.woken) == ([], {}, [])
        leaves = {"deletionTimestamp": "2026-01-01T00:05:00Z", "resourceVersion": "2"}
        world.cache.put(POD, {**engines[0], "metadata": {**engines[0]["metadata"], **leaves}})
        router.in_flight, router.running, router.kv_leases = 2, 3, 1
        for _ in range(2):
            await world.reader.look_at_loads(session)
        # Each router's own requests add up; what the engine says is the same at each.
        assert world.reader.loads(KEY) == {"d-0": InstanceLoad(4, 1)}
        assert world.woken == [KEY]
        # A busy instance's counts change all the time: they are taken now and then.
        router.running = 5
        await world.reader.look_at_loads(session)
        assert world.reader.loads(KEY) == {"d-0": InstanceLoad(4, 1)}
        world.now_s += 10.0
        await world.reader.look_at_loads(session)
        assert world.reader.loads(KEY) == {"d-0": InstanceLoad(5, 1)}
        # That it has nothing left is taken at once.
        router.in_flight = router.running = router.kv_leases = 0
        await world.reader.look_at_loads(session)
        assert world.reader.loads(KEY) == {"d-0": InstanceLoad(0, 0)}
        assert world.woken == [KEY] * 3
        router.status = 503
        await world.reader.look_at_loads(session)
        assert world.reader.loads(KEY) == {}


async def test_a_router_that_leaves_says_how_many_requests_it_still_has() -> None:
    router = Router()
    async with listening(router), aiohttp.ClientSession() as session:
        world = World(router, pod("r-0"), pod("r-1"))
        await world.look()
        leaves = {"deletionTimestamp": "2026-01-01T00:05:00Z", "resourceVersion": "2"}
        last = pod("r-1", ready="False")
        world.cache.put(POD, {**last, "metadata": {**last["metadata"], **leaves}})
        router.asked.clear()
        for relayed, expected in ((3, 3), (0, 0)):
            router.relayed = relayed
            await world.reader.look_at_loads(session)
            assert world.reader.loads(KEY) == {"r-1": InstanceLoad(expected, 0)}
        # An older one says no more than that its port is closed.
        router.status = 503
        await world.reader.look_at_loads(session)
        assert world.reader.loads(KEY) == {}
        assert router.asked == [["xpyd_router_in_flight"]] * 3, "no engine leaves"


def gated(name: str, *, gate: str, version: str = "1") -> Obj:
    """A ready engine's pod with its gate, of a Deployment that gives pods one."""
    owner = f"chat-decode-{REVISION}-5d9c7b8f4d"
    made = pod(name, role="Decode", owner=owner)
    said = {"Ready": gate, "ContainersReady": "True", ROUTABLE: gate}
    conditions = [{"type": kind, "status": status} for kind, status in said.items()]
    metadata = {**made["metadata"], "uid": f"uid of {name}", "resourceVersion": version}
    return {**made, "metadata": metadata, "status": {**made["status"], "conditions": conditions}}


def deployment_with_gate() -> Obj:
    made = deployment()
    name = f"chat-decode-{REVISION}"
    metadata = {**made["metadata"], "name": name, "uid": name, "labels": labels_of("Decode")}
    gates = [{"conditionType": ROUTABLE}]
    return {**made, "metadata": metadata, "spec": {"template": {"spec": {"readinessGates": gates}}}}


async def test_gates_follow_what_ready_routers_say_and_a_settled_fleet_is_asked_rarely() -> None:
    router = Router()
    async with listening(router), aiohttp.ClientSession() as session:
        world = World(router, pod("r-0"), gated("d-0", gate="False"))
        world.cache.put(DEPLOYMENT, deployment_with_gate())
        await world.look()
        router.asked.clear()
        router.state = "Starting"
        await world.reader.look_at_gates(session, only_moving=True)
        assert (router.asked, world.reader.gates(KEY)) == ([["/instances"]], {})
        router.state = "Ready"
        await world.reader.look_at_gates(session, only_moving=True)
        assert world.reader.gates(KEY)["uid of d-0"].is_open
        assert world.woken == [KEY]
        world.cache.put(POD, gated("d-0", gate="True", version="2"))
        router.asked.clear()
        await world.reader.look_at_gates(session, only_moving=True)
        assert router.asked == [], "nothing waits: once in a round is enough"
        router.state = "Ejected"
        await world.reader.look_at_gates(session)
        assert world.woken == [KEY]
        world.now_s += 9.0  # three beats of 3 s
        await world.reader.look_at_gates(session, only_moving=True)
        assert not world.reader.gates(KEY)["uid of d-0"].is_open
        assert world.woken == [KEY, KEY]


async def test_a_gate_that_was_never_open_says_why_its_instance_is_in_no_pair() -> None:
    router = Router()
    async with listening(router), aiohttp.ClientSession() as session:
        world = World(router, pod("r-0"), gated("d-0", gate="False"))
        world.cache.put(DEPLOYMENT, deployment_with_gate())
        await world.look()
        world.woken.clear()
        router.unpaired = "no pair with p-0: kv_dtype"
        await world.reader.look_at_gates(session, only_moving=True)
        assert world.woken == [], "it may be that its pair comes"
        world.now_s += 9.0  # three beats of 3 s
        await world.reader.look_at_gates(session, only_moving=True)
        gate = world.reader.gates(KEY)["uid of d-0"]
        assert (gate.is_open, gate.reason) == (False, "NoPair")
        assert world.woken == [KEY], "the words are to be written"


async def test_pods_of_a_revision_without_the_gate_are_let_be() -> None:
    router = Router()
    async with listening(router), aiohttp.ClientSession() as session:
        owner = f"chat-decode-{REVISION}-5d9c7b8f4d"
        world = World(router, pod("r-0"), pod("d-0", role="Decode", owner=owner))
        await world.look()
        router.asked.clear()
        await world.reader.look_at_gates(session)
        assert (router.asked, world.reader.gates(KEY), world.woken) == ([], {}, [])


async def test_routers_are_asked_how_a_canary_does_while_there_is_one() -> None:
    router = Router()
    async with listening(router), aiohttp.ClientSession() as session:
        # The same server: each pod's counts are its.
        world = World(router, pod("r-0"), pod("r-1", ready="False"))
        await world.look()

        async def look() -> tuple[dict[str, str], int, bool]:
            """Which ready router goes by which canary, requests of all, whether the fleet woke."""
            router.asked.clear()
            world.woken.clear()
            await world.reader.look_at_canaries(session)
            found = world.reader.canary(KEY)
            return dict(found.names), figures_of(found.counts).requests, world.woken == [KEY]

        assert (await look(), router.asked) == (({}, 0, False), []), "there is none"
        world.cache.put(CONFIG_MAP, canary_map("abc"))
        assert await look() == ({"r-0": ""}, 0, True)
        names = [part.removeprefix("name[]=") for part in QUERY.partition("?")[2].split("&")]
        assert router.asked == [names, names]
        assert await look() == ({"r-0": ""}, 0, False)
        router.canary, router.canary_served = "abc-0", 3
        assert await look() == ({"r-0": "abc-0"}, 6, True)
        router.canary_served = 1
        assert await look() == ({"r-0": "abc-0"}, 8, True), "they began anew"
        router.status = 503
        assert await look() == ({"r-0": ""}, 8, True), "their counts stay"
        router.status = 200
        world.cache.put(CONFIG_MAP, canary_map("abc", step=1, shown=1))
        assert await look() == ({"r-0": "abc-0"}, 0, True), "the next step counts from 0"
        world.cache.put(CONFIG_MAP, canary_map("abc", phase="Promoted"))
        await look()
        assert (router.asked, world.reader.canary(KEY)) == ([], CanaryReport())


async def test_loads_of_all_instances_are_asked_for_on_demand() -> None:
    router = Router()
    async with listening(router):
        world = World(router, pod("r-0"), gated("d-0", gate="True"))
        router.in_flight = 2
        assert await world.reader.ask_loads(KEY) == {"d-0": InstanceLoad(2, 0)}
        router.status = 503
        assert await world.reader.ask_loads(KEY) == {}


async def test_another_number_of_replicas_of_an_instance_wakes_its_fleet() -> None:
    router = Router()
    async with listening(router):
        world = World(router, pod("r-0"))
        await world.look()
        assert (world.reader.replicas(KEY), world.woken) == ({}, [])
        for router.replicas in (1, 1, 2):
            await world.look()
            assert world.reader.replicas(KEY) == {"d-0": (router.replicas, "")}
        assert world.woken == [KEY] * 2


async def test_a_fleet_has_a_pair_while_one_of_its_ready_routers_says_so() -> None:
    """And one whose routers do not answer, or are of an older version, says nothing."""
    router = Router()
    async with listening(router), aiohttp.ClientSession() as session:
        world = World(router, pod("r-0"))
        reader = world.reader
        seen: list[bool | None] = []
        for has_pair, status in ((None, 200), (1, 200), (0, 200), (0, 503), (0, 200), (1, 200)):
            router.has_pair, router.status = has_pair, status
            await reader.look(session)
            world.now_s += PERIOD_S
            seen.append(reader.has_pair(KEY))
        assert seen == [None, True, False, False, False, True], "it keeps its word for a while"
        assert world.woken == [KEY] * 3
        asked = len(router.asked)
        await reader.look(session, only_without_pair=True)
        assert len(router.asked) == asked, "a fleet with a pair is asked less often"
        router.has_pair = 0
        await reader.look(session)
        router.has_pair = 1
        await reader.look(session, only_without_pair=True)
        assert reader.has_pair(KEY) is True
        router.status = 503
        for _ in range(6):
            await reader.look(session)
            world.now_s += PERIOD_S
        assert reader.has_pair(KEY) is None, "for a while only"


async def test_a_router_that_does_not_answer_is_asked_more_and_more_rarely() -> None:
    router = Router()
    router.status = 503
    async with listening(router):
        world = World(router, pod("r-0"))
        for _ in range(40):
            assert await world.look() == (None, "NoTraffic")
        assert 4 <= len(router.asked) <= 8
        router.status = 200
        for _ in range(20):
            await world.look()
        router.moved = 1
        assert await world.look() == (True, "KVMoved")


async def test_only_ready_routers_are_asked_and_one_that_returns_counts_on() -> None:
    router = Router()
    router.unreachable = 10
    async with listening(router):
        world = World(router, pod("r-0"))
        await world.look()
        asked = len(router.figures)
        world.cache.put(POD, {**pod("r-0", ready="False"), "metadata": _newer("r-0", "2")})
        await world.look()
        assert len(router.figures) == asked
        world.cache.put(POD, {**pod("r-0"), "metadata": _newer("r-0", "3")})
        assert await world.look() == (None, "NoTraffic")
        assert len(router.figures) == asked + 1


def _newer(name: str, version: str) -> Obj:
    return {**pod(name)["metadata"], "resourceVersion": version}


async def test_only_pods_of_the_fleets_own_deployment_are_asked() -> None:
    """A pod that somebody makes with a router's labels must not answer for the fleet."""
    router = Router()
    router.has_pair = 1
    async with listening(router):
        by_hand, of_another = pod("r-1", owner=""), pod("r-2", owner="other-5d9c7b8f4d")
        world = World(router, by_hand, of_another)
        await world.look()
        assert router.figures == []
        assert world.reader.has_pair(KEY) is None
        world.cache.put(POD, pod("r-0"))
        await world.look()
        assert len(router.figures) == 1
        theirs = deployment(fleet="another")
        theirs["metadata"]["resourceVersion"] = "2"
        world.cache.put(DEPLOYMENT, theirs)
        await world.look()
        assert len(router.figures) == 1, "the Deployment is not this fleet's"

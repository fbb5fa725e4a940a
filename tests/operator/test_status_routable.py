"""When a pod's readiness gate opens and shuts, by what routers say; as pure functions."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

from tests.operator.fleets import cpu_pool, parsed, prefill_and_decode
from tests.operator.observed_cluster import Cluster, is_ready, settled
from xpyd_core.messages import Heartbeat, InstanceType
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.manifests.names import ROUTABLE
from xpyd_operator.status.children import is_true
from xpyd_operator.status.routable import SILENT_S, Gate, GateWatch, InstanceState, read_states
from xpyd_router.fleet.introductions import PairFound
from xpyd_router.fleet.registry import Registry
from xpyd_router.fleet.view import FleetView

TTL_S = 9.0
Said = dict[str, tuple[InstanceState, ...] | None]


def pod(*, containers: bool = True, gate: bool = False, ip: str = "10.0.0.1") -> dict[str, Any]:
    conditions = [("ContainersReady", containers), (ROUTABLE, gate)]
    return {
        "metadata": {"name": "d-0", "uid": "u"},
        "status": {
            "podIP": ip,
            "conditions": [{"type": kind, "status": str(holds)} for kind, holds in conditions],
        },
    }


def has(state: str, *, name: str = "d-0", host: str = "10.0.0.1") -> tuple[InstanceState, ...]:
    return (InstanceState(name, host, state),)


class Watched:
    """One pod's gate over time."""

    def __init__(self, **made: Any) -> None:
        self.watch, self.now_s, self.pod = GateWatch(), 0.0, pod(**made)

    def look(self, said: Said, *, after_s: float = 1.0) -> Gate | None:
        self.now_s += after_s
        found = self.watch.look({"d-0": self.pod}, said, self.now_s, ttl_s=TTL_S)
        return found.get("d-0")


def test_it_opens_when_every_ready_router_sends_the_instance_requests() -> None:
    watched = Watched()
    assert watched.look({"r-0": has("Ready"), "r-1": ()}) is None
    found = watched.look({"r-0": has("Ready"), "r-1": has("HalfOpen")})
    assert found is not None
    assert (found.is_open, found.reason) == (True, "Admitted")


@pytest.mark.parametrize(
    "rows",
    [
        (),
        has("Starting"),
        has("Ejected"),
        has("CircuitOpen"),
        has("Ready", name="d-1"),
        has("Ready", host="10.0.0.9"),
    ],
)
def test_it_stays_shut_while_a_router_does_not_and_says_why_after_a_while(
    rows: tuple[InstanceState, ...],
) -> None:
    watched = Watched()
    assert watched.look({"r-0": rows}) is None
    found = watched.look({"r-0": rows}, after_s=TTL_S)
    assert found is not None
    assert (found.is_open, found.reason) == (False, "NotAdmitted")
    assert "r-0" in found.message


def apart(why: str, *, state: str = "Ready") -> tuple[InstanceState, ...]:
    return (InstanceState("d-0", "10.0.0.1", state, why),)


REFUSED = "no pair with p-0: incompatible:kv_dtype: P has float32, D has bfloat16"


@pytest.mark.parametrize("state", ["Ready", "HalfOpen"])
def test_it_stays_shut_while_a_router_has_no_pair_with_it_and_says_that_routers_words(
    state: str,
) -> None:
    watched = Watched()
    said: Said = {"r-0": has("Ready"), "r-1": apart(REFUSED, state=state)}
    assert watched.look(said) is None
    assert watched.look(said, after_s=TTL_S) == Gate(
        False, "NoPair", f"router r-1 sends it no requests: {REFUSED}"
    )
    found = watched.look({"r-0": has("Ready"), "r-1": has("Ready")})
    assert found is not None
    assert found.is_open, "the pair's probe passed, or the other side left"


def test_an_open_gate_stays_open_when_its_pairs_fail() -> None:
    watched = Watched(gate=True)
    for _ in range(3):
        found = watched.look({"r-0": apart(REFUSED)}, after_s=TTL_S)
        assert found is not None
        assert found.is_open
    assert not watched.watch.is_moving


def test_an_open_gate_shuts_when_a_router_has_lost_the_instance_for_a_ttl() -> None:
    watched = Watched(gate=True)
    assert watched.look({"r-0": has("Ready")}) == Gate(
        True, "Admitted", "every ready router sends it requests"
    )
    assert watched.look({"r-0": ()}) is None, "a beat may be late"
    assert watched.watch.is_moving
    assert watched.look({"r-0": ()}, after_s=TTL_S / 2) is None
    lost = watched.look({"r-0": ()}, after_s=TTL_S / 2)
    assert lost is not None
    assert not lost.is_open
    back = watched.look({"r-0": has("Ready")})
    assert back is not None
    assert back.is_open
    assert not watched.watch.is_moving
    assert watched.look({"r-0": ()}, after_s=TTL_S) is None, "another loss has its own time"


@pytest.mark.parametrize("state", ["Draining", "Cordoned"])
def test_an_open_gate_shuts_at_once_when_a_router_drains_the_instance(state: str) -> None:
    found = Watched(gate=True).look({"r-0": has("Ready"), "r-1": has(state)})
    assert found is not None
    assert (found.is_open, found.reason) == (False, state)


def test_an_open_gate_shuts_with_its_containers_and_needs_a_new_admission() -> None:
    watched = Watched(gate=True, containers=False)
    found = watched.look({"r-0": has("Ready")})
    assert found is not None
    assert not found.is_open
    watched.pod = pod(gate=False, containers=False)
    assert watched.look({"r-0": has("Ready")}) is None
    watched.pod = pod(gate=False)
    assert watched.look({"r-0": has("Starting")}) is None


def test_a_router_that_does_not_answer_is_waited_for_and_not_for_ever() -> None:
    watched = Watched()
    said: Said = {"r-0": has("Ready"), "r-1": None}
    assert watched.look(said) is None
    assert watched.look(said, after_s=SILENT_S - 1) is None
    found = watched.look(said)
    assert found is not None
    assert (found.is_open, found.reason) == (True, "Admitted")


@pytest.mark.parametrize("said", [{}, {"r-0": None}])
def test_without_any_router_the_gate_opens_after_a_minute_so_that_nothing_is_stuck(
    said: Said,
) -> None:
    watched = Watched()
    assert watched.look(said) is None
    assert watched.look(said, after_s=SILENT_S - 1) is None
    found = watched.look(said)
    assert found is not None
    assert (found.is_open, found.reason) == (True, "NoRouter")


@pytest.mark.parametrize("said", [{}, {"r-0": None}])
def test_an_open_gate_stays_open_while_no_router_says_anything(said: Said) -> None:
    watched = Watched(gate=True)
    for _ in range(5):
        assert watched.look(said, after_s=SILENT_S) is None


def test_what_routers_answer_is_read_and_what_is_none_says_nothing() -> None:
    row = {"instance": "d-0", "state": "Ready", "http_address": "10.0.0.1:20001"}
    body = json.dumps({"instances": [row, {**row, "http_address": "?"}]}).encode()
    assert read_states(body) == (*has("Ready"), *has("Ready", host=""))
    body = json.dumps({"instances": [{**row, "unpaired": REFUSED}]}).encode()
    assert read_states(body) == apart(REFUSED)
    for wrong in (b"", b"[]", b'{"instances": [{}]}', b"\xff"):
        assert read_states(wrong) is None


SIZE = 4
PAIRED = ("prefill", "decode")
KV_DTYPE = "incompatible:kv_dtype: P has float32, D has bfloat16"


def four_and_four(**spec: Any) -> InferenceFleet:
    return parsed("f", **{"pools": prefill_and_decode(prefill=SIZE, decode=SIZE)} | spec)


OTHER_IMAGE = four_and_four(engine={"image": "example.com/engine:2"})
OTHER_DECODE = four_and_four(
    pools=[
        cpu_pool("prefill", "Prefill", replicas=SIZE),
        cpu_pool("decode", "Decode", replicas=SIZE, resources={"gpus": 0, "sharedMemory": "1Gi"}),
    ]
)


class Rollout:
    """A rollout of 4P4D whose gates go by what a router's registry says of the pods.

    `edit` is of the image, which makes another mark for all, or of D alone; None: the fleet is new,
    and so is each of its instances. While `is_refused` the
    KV of a new instance fits nobody; only probes see that where `is_strict`, else keys differ.
    """

    def __init__(self, edit: InferenceFleet | None, *, is_strict: bool) -> None:
        self.cluster = settled(four_and_four()) if edit else Cluster(four_and_four())
        self.old = {one["metadata"]["name"] for one in self._staying()}
        self.registry = Registry(period_s=3.0, missed_beats=3, only_verified=is_strict)
        self.view = FleetView(self.registry, lambda: 0.0)
        self.watch, self.now_s, self.is_refused = GateWatch(), 0.0, True
        self.is_strict, self.has_other_mark = is_strict, edit is OTHER_IMAGE
        if edit is not None:
            self.cluster.edit(edit)
        else:
            self.cluster.turn()
            self.cluster.running(self.cluster.pods_of("router"), ready=True)

    def _staying(self) -> list[dict[str, Any]]:
        return [pod for pool in PAIRED for pod in self.cluster.living(pool)]

    def ready(self, pool: str) -> tuple[int, int]:
        """How many of the pool's old pods are ready, and of its new ones."""
        pods = [one for one in self.cluster.living(pool) if is_ready(one)]
        olds = sum(one["metadata"]["name"] in self.old for one in pods)
        return olds, len(pods) - olds

    def condition(self, kind: str) -> tuple[str, str, str]:
        assert self.cluster.status is not None
        (one,) = [c for c in self.cluster.status["conditions"] if c["type"] == kind]
        return one["status"], one["reason"], one["message"]

    def go_on(self) -> None:
        """A second: the operator's turn, pods that start and end, the router, gates."""
        self.now_s += 1.0
        self.cluster.turn()
        self.cluster.end_leaving()
        pods = {one["metadata"]["name"]: one for one in self._staying()}
        for name, one in pods.items():
            if not is_true(one, "ContainersReady"):
                self.cluster.running([one], ready=True)
                self.cluster.gate(one, "", is_open=name in self.old)
        said = {"r-0": self._said(pods)}
        for name, gate in self.watch.look(pods, said, self.now_s, ttl_s=TTL_S).items():
            self.cluster.gate(pods[name], gate.message, is_open=gate.is_open, reason=gate.reason)
        self.cluster.turn()

    def _said(self, pods: dict[str, dict[str, Any]]) -> tuple[InstanceState, ...]:
        gone = [one.key for one in self.registry.instances if one.name not in pods]
        self.registry.drop(gone)
        for name in pods:
            self.registry.apply(self._beat(name), 0.0)
        sides = {
            kind: [one for one in self.registry.instances if one.beat.type == kind]
            for kind in ("P", "D")
        }
        for p, d in product(sides["P"], sides["D"]):
            is_bad = self.is_strict and not {p.name, d.name} <= self.old and self.is_refused
            cause = ("incompatible", KV_DTYPE) if is_bad else ("", "")
            self.registry.prove(p.key, d.key, PairFound(*cause))
        unpaired = self.view.unpaired()
        return tuple(
            InstanceState(one.name, "", "Ready", unpaired.get(one.key, ""))
            for one in self.registry.instances
        )

    def _beat(self, name: str) -> Heartbeat:
        side = int("-decode-" in name)
        kind: InstanceType = "D" if side else "P"
        ip = f"10.0.{side}.{name.rpartition(PAIRED[side])[2]}"
        is_new = name not in self.old
        differs = is_new and self.is_refused and not self.is_strict
        return Heartbeat(
            type=kind,
            http_address=f"{ip}:20001",
            zmq_address=f"{ip}:21001",
            instance=name,
            incarnation="i",
            models=("m",),
            continuation=1,
            compatibility=f"key of {kind}" if differs else "key",
            fleet_revision="b" if is_new and self.has_other_mark else "a",
        )


@pytest.mark.parametrize("edit", [OTHER_IMAGE, OTHER_DECODE], ids=["all", "decode"])
@pytest.mark.parametrize("is_strict", [True, False], ids=["strict", "report"])
def test_a_rollout_to_engines_that_refuse_the_others_kv_stops_before_it_takes_capacity_away(
    edit: InferenceFleet, is_strict: bool
) -> None:
    rollout = Rollout(edit, is_strict=is_strict)
    for _ in range(round(3 * TTL_S)):
        rollout.go_on()
        assert [rollout.ready(pool)[0] for pool in PAIRED] == [SIZE, SIZE]
    assert rollout.ready("decode") == (SIZE, 0)
    status, reason, message = rollout.condition("Ready")
    assert (status, reason) == ("False", "NoPair")
    assert "router r-0 sends it no requests: no pair with f-" in message
    assert (KV_DTYPE if is_strict else "D's is key of D") in message
    assert rollout.condition("Available")[:2] == ("True", "Serving")
    rollout.is_refused = False
    for _ in range(6 * SIZE):
        rollout.go_on()
    assert rollout.ready("decode") == (0, SIZE)
    assert rollout.condition("Ready")[0] == "True"


@pytest.mark.parametrize("is_strict", [True, False], ids=["strict", "report"])
def test_a_new_fleet_whose_instances_never_fit_says_so_and_not_that_it_has_no_engines(
    is_strict: bool,
) -> None:
    rollout = Rollout(None, is_strict=is_strict)
    rollout.go_on()
    assert rollout.condition("Available")[:2] == ("False", "NoEngines"), "nobody has said why yet"
    for _ in range(round(2 * TTL_S)):
        rollout.go_on()
    why = KV_DTYPE if is_strict else "D's is key of D"
    for kind in ("Available", "Ready"):
        status, reason, message = rollout.condition(kind)
        assert (status, reason) == ("False", "NoPair")
        assert why in message
        assert "router r-0 sends it no requests: no pair with f-" in message
    assert "no router has a pair: requests wait; prefill: " in rollout.condition("Available")[2]

    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    for (pool, _), workload in rollout.cluster.workloads.items():
        if pool in PAIRED:
            workload["status"]["conditions"] = [late]
    found = [p for p in rollout.cluster.problems() if p.reason == "ProgressDeadlineExceeded"]
    assert {problem.pool for problem in found} == set(PAIRED)
    for problem in found:
        assert problem.message.startswith(f"{problem.pool}: no pod became ready within 3600 s")
        assert why in problem.message

    # What one role lacks besides is named first.
    rollout.cluster.running(rollout.cluster.pods_of("prefill"), ready=False)
    rollout.cluster.turn()
    assert rollout.condition("Available")[:2] == ("False", "NoEngines")
    rollout.is_refused = False
    for _ in range(4):
        rollout.go_on()
    assert rollout.condition("Available")[:2] == ("True", "Serving")

"""Same document, same plan: what `xpyd up` hands to plan(), and what the operator hands to it.

One fleet lives twice: as local mode sees it (workloads as they were put, processes counted) and as
the operator does (a document that the API server filled in, Deployments and pods read back from raw
objects). plan() must say the same to both. Only what each place decides differs and is set alike
here: one router without a surge, and where the model lies.
"""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.operator.fleets import document, prefill_and_decode
from tests.operator.object_samples import SETTINGS, placement_of
from tests.operator.plan_world import Key, Running
from xpyd_operator.document.load import parse_fleet, parse_object
from xpyd_operator.manifests.objects import pool_object, workload_objects
from xpyd_operator.manifests.volumes import model_in_pod
from xpyd_operator.plan.fleet import plan
from xpyd_operator.plan.template import fleet_want
from xpyd_operator.plan.values import (
    ROUTER,
    DeleteWorkload,
    DrainPool,
    FleetProgress,
    FleetSeen,
    FleetWant,
    PoolSeen,
    PutWorkload,
    SetStatus,
    WorkloadSeen,
)
from xpyd_operator.status.children import Children, fleet_seen
from xpyd_operator.up.checks import locate_model

Obj = dict[str, Any]
ROOT = Path(__file__).parents[2]
CRD = yaml.safe_load((ROOT / "crds/xpyd.dev_inferencefleets.yaml").read_text())
SCHEMA = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def filled(value: Any, schema: Obj) -> Any:
    """The value with the schema's defaults, as the API server stores it."""
    if isinstance(value, dict):
        found = dict(value)
        for key, below in schema.get("properties", {}).items():
            if key not in found and "default" in below:
                found[key] = copy.deepcopy(below["default"])
            if key in found:
                found[key] = filled(found[key], below)
        return found
    if isinstance(value, list):
        return [filled(item, schema.get("items", {})) for item in value]
    return value


class Twice:
    """A fleet in both places."""

    def __init__(self, document: Obj, rng: random.Random) -> None:
        self.document = copy.deepcopy(document)
        self.rng = rng
        self.stopping = False
        self.running: dict[Key, Running] = {}
        self.deployments: dict[Key, Obj] = {}
        self.pools: dict[str, PoolSeen] = {}
        self.pool_objects: dict[str, Obj] = {}
        self.status: FleetProgress | None = None
        self.read()

    def read(self) -> None:
        """The document, as `xpyd up` reads it and as the operator does."""
        self.local = parse_fleet(json.dumps(self.document).encode(), source="f")
        stored = filled(self.document, SCHEMA)
        metadata = {**stored["metadata"], "uid": "u", "resourceVersion": "9", "managedFields": []}
        self.cluster = parse_object({**stored, "metadata": metadata, "status": {"conditions": []}})
        self.local_want = fleet_want(self.local, model=model_in_pod(self.local))
        self.cluster_want = fleet_want(self.cluster, model=model_in_pod(self.cluster))

    def local_seen(self) -> FleetSeen:
        """As the supervisor has it."""
        found = tuple(WorkloadSeen(r.workload, r.alive, r.ready) for r in self.running.values())
        return FleetSeen(tuple(self.pools.values()), found, self.status)

    def cluster_seen(self) -> FleetSeen:
        """As the operator reads it; the status is another's there."""
        pods = [pod for key, one in self.running.items() for pod in self.pods(key, one)]
        self.rng.shuffle(pods)
        deployments = list(self.deployments.values())
        self.rng.shuffle(deployments)
        children = Children(
            deployments=tuple(deployments),
            pods=tuple(pods),
            pools=tuple(self.pool_objects.values()),
        )
        known = self.status.pools if self.status else ()
        before = {"pools": [{"name": p.name, "revision": p.revision} for p in known]}
        return replace(fleet_seen(children, before), status=self.status)

    def pods(self, key: Key, one: Running) -> list[Obj]:
        template = self.deployments[key]["spec"]["template"]
        kinds = ["starting"] * one.starting + ["ready"] * one.ready + ["draining"] * one.draining
        return [pod_of(template, f"{'-'.join(key)}-{n}", kind) for n, kind in enumerate(kinds)]

    def turn(self) -> None:
        """Both plans; the common one is carried out."""
        wants = (replace(w, stopping=self.stopping) for w in (self.local_want, self.cluster_want))
        local, cluster = map(plan, wants, (self.local_seen(), self.cluster_seen()), (0.0, 0.0))
        assert known(local.actions) == known(cluster.actions)
        assert local.recheck_after == cluster.recheck_after
        for action in local.actions:
            self.apply(action)

    def apply(self, action: object) -> None:
        fleet, placement = self.cluster, placement_of(self.cluster)
        match action:
            case PutWorkload(workload):
                key = (workload.pool, workload.revision)
                if key not in self.deployments:
                    self.running[key] = Running(replace(workload, replicas=0))
                    (self.deployments[key],) = workload_objects(fleet, workload, placement)
                self.ask(key, workload.replicas)
            case DrainPool(name):
                for key in self.running:
                    if key[0] == name:
                        self.ask(key, 0)
            case DeleteWorkload(name, revision):
                del self.running[name, revision], self.deployments[name, revision]
            case SetStatus(status):
                self.status = status
                self.pools = {
                    p.name: PoolSeen(p.name, p.replicas, p.declared) for p in status.pools
                }
                self.pool_objects = {
                    pool.name: pool_object(fleet, pool, size.replicas, size.declared, placement)
                    for pool in fleet.spec.pools
                    if (size := self.pools.get(pool.name))
                }
            case _:
                pass

    def ask(self, key: Key, replicas: int) -> None:
        self.running[key].ask_for(replicas)
        self.deployments[key]["spec"]["replicas"] = replicas

    def move(self) -> None:
        """Some instances start, become ready, end, or are ready no more."""
        for one in self.running.values():
            ready, started = self.rng.randint(0, one.starting), self.rng.randint(0, one.missing())
            one.ready, one.starting = one.ready + ready, one.starting + started - ready
            one.draining -= self.rng.randint(0, one.draining)
            if self.rng.random() < 0.1 and one.ready:
                one.ready, one.starting = one.ready - 1, one.starting + 1

    def scale(self) -> None:
        pool = self.rng.choice(self.document["spec"]["pools"])
        to = self.rng.randint(0, 4)
        if pool["name"] in self.pools:
            self.pools[pool["name"]] = replace(self.pools[pool["name"]], replicas=to)
            self.pool_objects[pool["name"]]["spec"]["replicas"] = to

    def edit(self) -> None:
        spec, rng = self.document["spec"], self.rng
        match rng.randrange(5):
            case 0:
                spec["engine"] = {"args": [f"--max-num-seqs={rng.randint(1, 3)}"]}
            case 1:
                spec["heartbeat"] = {"missedBeats": rng.randint(2, 4)}
            case 2:
                pool = rng.choice(spec["pools"])
                pool["replicas"] = rng.randint(0, 4)
            case 3:
                spec["pools"][0]["template"] = {
                    "spec": {"priorityClassName": f"p{rng.randint(0, 1)}"}
                }
            case _:
                extra = {"name": "extra", "role": "Decode", "resources": {"gpus": 0}}
                if len(spec["pools"]) > 2:
                    del spec["pools"][2]
                else:
                    spec["pools"].append(extra)
        self.read()


def pod_of(template: Obj, name: str, kind: str) -> Obj:
    """A pod as the API server has it, in one of the three states of an instance."""
    labels = template["metadata"]["labels"]
    names = [labels[f"xpyd.dev/{key}"] for key in ("fleet", "pool", "revision")]
    owner = {"kind": "ReplicaSet", "name": "-".join([*names, "x"]), "uid": "r", "controller": True}
    metadata: Obj = {**template["metadata"], "name": name, "ownerReferences": [owner]}
    if kind == "draining":
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    ready = {"type": "Ready", "status": "True" if kind == "ready" else "False"}
    return {"metadata": metadata, "status": {"phase": "Running", "conditions": [ready]}}


def known(actions: tuple[object, ...]) -> list[object]:
    """The actions without templates: of old revisions a cluster knows the role only."""
    return [
        (a.workload.pool, a.workload.revision, a.workload.replicas, a.workload.template.role)
        if isinstance(a, PutWorkload)
        else a
        for a in actions
    ]


DOCUMENT = document(pools=prefill_and_decode(decode=3))


@pytest.mark.parametrize("seed", range(20))
def test_both_get_the_same_actions_through_the_life_of_a_fleet(seed):
    rng = random.Random(seed)
    fleet = Twice(DOCUMENT, rng)
    for _ in range(30):
        fleet.turn()
        fleet.move()
        roll = rng.random()
        if roll < 0.15:
            fleet.scale()
        elif roll < 0.4:
            fleet.edit()
    fleet.stopping = True
    for _ in range(100):
        fleet.turn()
        fleet.move()
        if not fleet.running:
            return
    raise AssertionError("it does not end")


EXAMPLES = [ROOT / "examples/fleet.yaml", *sorted((ROOT / "examples/fleets").glob("*.yaml"))]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_want_the_same_in_both_places_but_for_the_models_folder(path):
    fleet = Twice(yaml.safe_load(path.read_text()), random.Random(0))
    assert fleet.local_want == fleet.cluster_want
    model, in_pod = locate_model(fleet.local.spec.model, path.parent), model_in_pod(fleet.local)
    local = fleet_want(fleet.local, model=model)
    for here, there in zip(local.pools, fleet.cluster_want.pools, strict=True):
        args = tuple(arg.replace(model, in_pod) for arg in here.template.args)
        # It is of the arguments.
        common = there.template.fleet_revision
        assert replace(here.template, args=args, fleet_revision=common) == there.template


def test_an_image_of_the_operator_makes_other_revisions_and_no_other_plan():
    fleet = Twice(DOCUMENT, random.Random(0))
    with_images = fleet_want(
        fleet.cluster,
        model="hf://org/name",
        image=SETTINGS.worker_image,
        router_image=SETTINGS.router_image,
    )

    def sizes(want: FleetWant) -> list[tuple[str, int]]:
        actions = plan(want, FleetSeen(), 0.0).actions
        puts = [action.workload for action in actions if isinstance(action, PutWorkload)]
        return [(workload.pool, workload.replicas) for workload in puts]

    expected = [(ROUTER, 1), ("prefill", 1), ("decode", 3)]
    assert sizes(fleet.cluster_want) == sizes(with_images) == expected

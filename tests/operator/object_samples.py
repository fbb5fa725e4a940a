"""Fleets and the objects that they become: the golden files in testdata/objects.

`python -m tests.operator.object_samples` writes the objects as they are rendered today; `git diff`
then shows what a change does to the pods of every fleet.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.document.load import load_fleet
from xpyd_operator.manifests.names import Placement, Settings
from xpyd_operator.manifests.objects import pool_object, support_objects, workload_objects
from xpyd_operator.manifests.volumes import model_in_pod
from xpyd_operator.plan.fleet import pools_wanted
from xpyd_operator.plan.template import fleet_want
from xpyd_operator.plan.values import ROUTER, Workload

FOLDER = Path(__file__).parent / "testdata" / "objects"
NAMES = tuple(sorted(file.name.removesuffix(".fleet.yaml") for file in FOLDER.glob("*.fleet.yaml")))
WHOLE = ("cpu", "full", "minimal")
"""Samples of which the golden file has all objects; the others show their engines' alone."""
SETTINGS = Settings("xpyd-worker:1", "xpyd-router:1", image_pull_secrets=("pull",))
UID = "5bd2bd5e-0000-4000-8000-000000000001"

VLLM = yaml.safe_load((FOLDER / "vllm.fleet.yaml").read_text())
VLLM_EDITS: list[tuple[str, Any]] = [
    ("engine", {"type": "Xpyd"}), ("engine.connector", "Xpyd"),
    ("engine.image", "other:1"),
    ("engine.args", ["--seed=1"]), ("engine.env", []), ("model.servedNames", ["a"]),
    ("kvTransfer", {"insecure": True}), ("kvTransfer.mode", "Get"), ("kvTransfer.port", 22001),
    ("kvTransfer.hostPoolSize", "1Gi"), ("kvTransfer.bufferSize", "1Gi"),
    ("kvTransfer.keySecretRef", {"name": "other"}), ("heartbeat.intervalMilliseconds", 1000),
    ("kvTransfer.sameHostPath", "/run/xpyd"),
    ("heartbeat.missedBeats", 5), ("drain.timeoutSeconds", 60), ("router.discoveryPort", 30002),
    ("pools.1.parallelism", {"pipeline": 2}), ("pools.0.resources.sharedMemory", "1Gi"),
    ("pools.0.template", {"spec": {"hostPID": True}}), ("pools.0.replicas", 3),
]  # fmt: skip
"""Changes of the sample: a dotted path below spec, and what is put there."""

SERVICE_EDITS: list[dict[str, Any]] = [
    {"type": "NodePort", "port": 8080}, {"labels": {"tier": "web"}}, {"annotations": {"note": "x"}},
    {"loadBalancerClass": "service.k8s.aws/nlb"}, {"sourceRanges": ["10.0.0.0/8"]},
    {"sessionAffinity": "ClientIP"}, {"ipFamilyPolicy": "PreferDualStack"},
    {"externalTrafficPolicy": "Local"},
]  # fmt: skip
_MORE: list[dict[str, Any]] = [
    {}, {"labels": {"tier": "web"}}, {"annotations": {"note": "x"}}, {"path": "/v1"}
]  # fmt: skip
CANARY_EDITS: list[dict[str, Any]] = [
    {}, {"weightPercent": 5}, {"steps": [50]}, {"analysis": {"errorPercent": 2}},
    {"analysis": {"ttftMilliseconds": 500}}, {"analysis": {"itlMilliseconds": 50}},
    {"analysis": {"minRequests": 5}},
]  # fmt: skip
INGRESS_EDITS: list[dict[str, Any]] = [*_MORE, {"className": "nginx"}, {"tlsSecretName": "cert"}]
ROUTE_EDITS: list[dict[str, Any]] = [
    *_MORE,
    {"hostnames": ["chat.example.com"]},
    {"requestTimeoutSeconds": 600},
    {"parentRefs": [{"name": "web", "namespace": "gateways", "sectionName": "https"}]},
]
"""Values of router.service, ingress and httpRoute, each with another field."""


class _Dumper(yaml.SafeDumper):
    """Writes out what is repeated: an alias hides what an object really says."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def sample_fleet(name: str) -> InferenceFleet:
    """The fleet of that name."""
    return load_fleet(FOLDER / f"{name}.fleet.yaml")


def placement_of(fleet: InferenceFleet) -> Placement:
    """Where the samples' objects go."""
    return Placement(fleet.namespace, UID, SETTINGS)


def workloads_of(fleet: InferenceFleet) -> list[Workload]:
    """The workloads that the plan makes of a new fleet in a cluster."""
    want = fleet_want(
        fleet,
        model=model_in_pod(fleet),
        in_cluster=True,
        image=SETTINGS.worker_image,
        router_image=SETTINGS.router_image,
        gated=SETTINGS.gated,
    )
    sizes = {pool.name: pool.replicas for pool in pools_wanted(want, ())}
    return [Workload(p.name, p.revision, sizes[p.name], p.template) for p in want.pools]


def objects_of(fleet: InferenceFleet, placement: Placement | None = None) -> list[dict[str, Any]]:
    """All objects of a new fleet but its key."""
    placement = placement_of(fleet) if placement is None else placement
    workloads = workloads_of(fleet)
    replicas = {w.pool: w.replicas for w in workloads if w.pool != ROUTER}
    return [
        *support_objects(fleet, placement),
        *(
            pool_object(fleet, pool, replicas[pool.name], pool.replicas, placement)
            for pool in fleet.spec.pools
        ),
        *(obj for workload in workloads for obj in workload_objects(fleet, workload, placement)),
    ]


def pod_templates(fleet: InferenceFleet) -> dict[str, list[Any]]:
    """Pool -> what its workload's spec says of pods, all with one revision. The deadline of a
    Deployment is not of its pods."""
    found: dict[str, list[Any]] = {}
    for workload in workloads_of(fleet):
        same = replace(workload, revision="00000000", replicas=1)
        found[workload.pool] = [
            {key: value for key, value in obj["spec"].items() if key != "progressDeadlineSeconds"}
            for obj in workload_objects(fleet, same, placement_of(fleet))
        ]
    return found


def golden_file(name: str) -> Path:
    """Where the objects of that sample are written down."""
    return FOLDER / f"{name}.objects.yaml"


def golden_text(name: str) -> str:
    """What the golden file should hold."""
    found = objects_of(sample_fleet(name))
    if name not in WHOLE:
        kinds = ("Deployment", "LeaderWorkerSet", "ResourceClaimTemplate")
        found = [o for o in found if o["kind"] in kinds and "router" not in o["metadata"]["name"]]
    return yaml.dump_all(found, Dumper=_Dumper, sort_keys=False, width=100)


if __name__ == "__main__":
    for one in NAMES:
        golden_file(one).write_text(golden_text(one))

"""Rendered objects on a real API server: it takes them, keeps what they say, and makes their pods.

No operator runs: what xpyd_operator.manifests makes of the sample fleets is applied as it is, in a
namespace that enforces the pod security standard "restricted".
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from tests.cluster.fleetkit import find, installed_crds
from tests.cluster.harness import Cluster, wait_for
from tests.operator.object_samples import FOLDER, NAMES, SETTINGS, objects_of
from xpyd_operator.controller.decision.compare import contains
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.document.load import parse_fleet, parse_object
from xpyd_operator.manifests import names
from xpyd_operator.manifests.names import Placement
from xpyd_operator.manifests.objects import kv_order, kv_secret
from xpyd_operator.status.rotation import KeyOrder

RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"


@pytest.fixture(scope="module")
def cluster(control_plane: Cluster) -> Iterator[Cluster]:
    """The cluster with our CRDs and with LeaderWorkerSets, and no operator."""
    with installed_crds(control_plane):
        control_plane.install_lws()
        yield control_plane
    control_plane.uninstall_lws()


def made(cluster: Cluster, namespace: str, name: str) -> tuple[InferenceFleet, Placement]:
    """The sample fleet as an object of the namespace."""
    document = yaml.safe_load((FOLDER / f"{name}.fleet.yaml").read_text())
    document["metadata"]["namespace"] = namespace
    cluster.kubectl("apply", "-f", "-", input=json.dumps(document))
    stored = json.loads(cluster.kubectl("-n", namespace, "get", "fleet", "-o", "json"))["items"][0]
    fleet = parse_object(stored)
    assert objects_of(fleet) == objects_of(parse_fleet(json.dumps(document).encode(), source="f"))
    return fleet, Placement(namespace, stored["metadata"]["uid"], SETTINGS)


def apply(cluster: Cluster, objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Server-side apply; what the API server makes of the objects, in their order."""
    found = cluster.kubectl(
        "apply", "--server-side", f"--field-manager={names.MANAGER}", "-f", "-", "-o", "json",
        input=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}),
    )  # fmt: skip
    return json.loads(found)["items"]


@pytest.mark.parametrize("name", NAMES)
def test_every_object_is_taken_kept_and_the_same_when_it_is_applied_again(
    cluster: Cluster, new_namespace: Callable[[Cluster], str], name: str
) -> None:
    namespace = new_namespace(cluster)
    cluster.kubectl("label", "namespace", namespace, RESTRICTED)
    fleet, placement = made(cluster, namespace, name)
    keys = [kv_secret(fleet, placement, "5e" * 32, slot) for slot in names.KEY_SLOTS]
    order = kv_order(fleet, placement, names.KEY_SLOTS, KeyOrder(phase="Adding").annotations)
    objects = [*objects_of(fleet, placement), *keys, order]

    first = apply(cluster, objects)
    assert [obj["kind"] for obj in first] == [obj["kind"] for obj in objects]
    for stored, obj in zip(first, objects, strict=True):
        assert contains(stored, obj), obj["metadata"]["name"]

    check_pods(cluster, namespace, name)
    again = apply(cluster, objects)
    for before, after in zip(first, again, strict=True):
        kept = ("uid", "generation", "ownerReferences", "labels")
        assert {k: before["metadata"].get(k) for k in kept} == {
            k: after["metadata"].get(k) for k in kept
        }


EXPECTED = {
    # Pool -> pods. LeaderWorkerSet makes the others of a group when its leader is there.
    "minimal": {"router": 2, "prefill": 1, "decode": 1},
    "full": {"router": 3, "prefill": 2, "decode": 4, "model": 1},
    "s3": {"router": 2, "all": 1},
    "cpu": {"router": 2, "all": 1},
    "pvc": {"router": 2, "all": 1},
    "vllm": {"router": 2, "prefill": 1, "decode": 2},
    "vllm-gpu": {"router": 2, "prefill": 1, "decode": 2},
    "vllm-nixl": {"router": 2, "prefill": 1, "decode": 2},
    # A folder of the node is against "restricted".
    "dra": {"router": 2},
    "sockets": {"router": 2},
}


def check_pods(cluster: Cluster, namespace: str, name: str) -> None:
    def pods() -> dict[str, int]:
        found = find(cluster, namespace, "pods")
        # The pod of the Job that downloads a model is of no pool.
        labels = [pod["metadata"]["labels"] for pod in found]
        return dict(Counter(one.get(names.LABEL_POOL, "model") for one in labels))

    wait_for(lambda: pods() == EXPECTED[name], 30, f"the pods are {EXPECTED[name]}")
    if volume := {"dra": "xpyd-models", "sockets": "xpyd-sockets"}.get(name):
        events = cluster.kubectl("-n", namespace, "get", "events", "-o", "json")
        assert f'restricted volume types (volume \\"{volume}\\" uses restricted' in events

"""The fleets that are measured, and the plain objects that they are measured against."""

from __future__ import annotations

import json
from typing import Any

from tests.cluster.harness.kwok import NODE_SELECTOR, TOLERATIONS

FLEETS = "/apis/xpyd.dev/v1alpha1/namespaces/{}/inferencefleets"
ALL_FLEETS = "/apis/xpyd.dev/v1alpha1/inferencefleets"
POOLS = "/apis/xpyd.dev/v1alpha1/namespaces/{}/inferencefleetpools"
DEPLOYMENTS = "/apis/apps/v1/namespaces/{}/deployments"
PODS = "/api/v1/namespaces/{}/pods"
NAMESPACES = "/api/v1/namespaces"
PLAIN_KINDS = {
    "ServiceAccount": ("v1", "/api/v1/namespaces/{}/serviceaccounts"),
    "Service": ("v1", "/api/v1/namespaces/{}/services"),
    "PodDisruptionBudget": ("policy/v1", "/apis/policy/v1/namespaces/{}/poddisruptionbudgets"),
    "NetworkPolicy": (
        "networking.k8s.io/v1",
        "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    ),
    "Deployment": ("apps/v1", DEPLOYMENTS),
}
"""What a fleet consists of that anyone could have applied; in the order in which one would."""
PLAIN_LABEL = "peer.example/fleet"
"""Every copy has it."""
_FAKE_NODES = {"spec": {"nodeSelector": NODE_SELECTOR, "tolerations": TOLERATIONS}}
_GIVEN_BY_THE_SERVER = ("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy")


def fleet(name: str, *, prefill: int, decode: int, routers: int = 2) -> dict[str, Any]:
    """A fleet whose pods run on fake nodes. `routers`: 2 is the default of the API."""
    return {
        "apiVersion": "xpyd.dev/v1alpha1",
        "kind": "InferenceFleet",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": "file://./demo-model"},
            "pools": [_pool("prefill", "Prefill", prefill), _pool("decode", "Decode", decode)],
            "router": {"replicas": routers, "template": _FAKE_NODES},
        },
    }


def _pool(name: str, role: str, replicas: int) -> dict[str, Any]:
    return {
        "name": name,
        "role": role,
        "replicas": replicas,
        "resources": {"gpus": 0},
        "template": _FAKE_NODES,
    }


def plain_copy(obj: dict[str, Any], of: str, name: str) -> dict[str, Any]:
    """An object of the fleet `of` as one would have applied it by hand for something called `name`.

    It has none of the operator's labels, so the operator does not see it, and no owner.
    """
    spec: dict[str, Any] = dict(obj.get("spec", {}))
    if obj["kind"] == "Service" and spec.get("clusterIP") != "None":
        spec = {key: value for key, value in spec.items() if key not in _GIVEN_BY_THE_SERVER}
    made = {
        "apiVersion": obj["apiVersion"],
        "kind": obj["kind"],
        "metadata": {"name": obj["metadata"]["name"], "labels": obj["metadata"]["labels"]},
    }
    if spec:
        made["spec"] = spec
    text = json.dumps(made).replace("xpyd.dev/", "peer.example/").replace(of, name)
    copy: dict[str, Any] = json.loads(text)
    return copy


def plain_deployment(deployment: dict[str, Any], of: str, replicas: int) -> dict[str, Any]:
    """A Deployment of the same pods as one of the fleet `of`, and nothing beside it."""
    made = plain_copy(deployment, of, "plain")
    made["spec"]["replicas"] = replicas
    for field in ("serviceAccount", "serviceAccountName"):
        # The fleet's own; the namespace's default serves.
        made["spec"]["template"]["spec"].pop(field, None)
    return made

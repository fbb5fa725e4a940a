"""The kinds of objects that the operator reads and writes, and their addresses. Pure.

One table, so that the watches, the client, RBAC's tests and the fakes agree on what is touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FLEET_LABEL = "xpyd.dev/fleet"

Obj = dict[str, Any]
"""A Kubernetes object as the API's JSON has it."""


@dataclass(frozen=True)
class Kind:
    """One kind. `labelled`: watched by the label of its fleet; all but the fleet's documents are.

    `optional`: its API may be missing from a cluster.
    """

    api_version: str
    name: str
    plural: str
    labelled: bool = True
    optional: bool = False

    @property
    def group(self) -> str:
        """The API group, "" for the core."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        """The version within the group."""
        return self.api_version.rpartition("/")[2]

    @property
    def base(self) -> str:
        """The path of its group and version."""
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """The path of an object, or of the collection without `name`; None: all namespaces."""
        parts = [self.base]
        if namespace is not None:
            parts.append(f"namespaces/{namespace}")
        return "/".join([*parts, self.plural, *filter(None, (name, subresource))])


FLEET = Kind("xpyd.dev/v1alpha1", "InferenceFleet", "inferencefleets", labelled=False)
POOL = Kind("xpyd.dev/v1alpha1", "InferenceFleetPool", "inferencefleetpools")
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
POD = Kind("v1", "Pod", "pods")
SERVICE = Kind("v1", "Service", "services")
SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts")
BUDGET = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
LEADER_WORKER_SET = Kind(
    "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "leaderworkersets", optional=True
)
CLAIM_TEMPLATE = Kind(
    "resource.k8s.io/v1", "ResourceClaimTemplate", "resourceclaimtemplates", optional=True
)
SECRET = Kind("v1", "Secret", "secrets")
EVENT = Kind("v1", "Event", "events")

WATCHED = (
    FLEET,
    POOL,
    DEPLOYMENT,
    POD,
    SERVICE,
    SERVICE_ACCOUNT,
    BUDGET,
    NETWORK_POLICY,
    LEADER_WORKER_SET,
    CLAIM_TEMPLATE,
)
ALWAYS = tuple(kind for kind in WATCHED if not kind.optional)
OPTIONAL = tuple(kind for kind in WATCHED if kind.optional)

_BY_TYPE: Mapping[tuple[str, str], Kind] = {
    (kind.api_version, kind.name): kind for kind in (*WATCHED, SECRET, EVENT)
}
_BY_PATH: Mapping[tuple[str, str], Kind] = {
    (kind.base, kind.plural): kind for kind in (*WATCHED, SECRET, EVENT)
}


def kind_of(obj: Mapping[str, Any]) -> Kind:
    """The kind of an object of ours; KeyError: it is none of ours."""
    return _BY_TYPE[obj["apiVersion"], obj["kind"]]


@dataclass(frozen=True)
class Address:
    """What a request path points at. `namespace` None: all of them; `name` "": the collection."""

    kind: Kind
    namespace: str | None
    name: str


def address_of(path: str) -> Address | None:
    """The kind, namespace and name behind a request path; None: discovery or another kind."""
    parts = path.strip("/").split("/")
    depth = {"api": 2, "apis": 3}.get(parts[0], len(parts))
    base, rest = "/" + "/".join(parts[:depth]), parts[depth:]
    namespace: str | None = None
    if len(rest) >= 3 and rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    kind = _BY_PATH.get((base, rest[0])) if rest else None
    if kind is None:
        return None
    return Address(kind, namespace, rest[1] if len(rest) > 1 else "")

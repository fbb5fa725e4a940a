"""The API's objects as the operator holds them: kinds and addresses, JSON decoding, trimming.

One table of kinds, so that the watches, the client, RBAC's tests and the fakes agree on what is
touched. The API server accepts JSON of ten thousand levels, which no recursive reader survives:
what lies below MAX_DEPTH is read as null. `trim` keeps what `status` reads; keys and short texts
are interned, which halves a cache of many fleets.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar, cast

from msgspec.json import Decoder

from xpyd_operator.document.load import excess
from xpyd_operator.manifests.names import MANAGER
from xpyd_operator.status.children import Raw, rows

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
CONTROLLER_REVISION = Kind("apps/v1", "ControllerRevision", "controllerrevisions")
POD = Kind("v1", "Pod", "pods")
SERVICE = Kind("v1", "Service", "services")
SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts")
BUDGET = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
INGRESS = Kind("networking.k8s.io/v1", "Ingress", "ingresses")
HTTP_ROUTE = Kind("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes", optional=True)
JOB = Kind("batch/v1", "Job", "jobs")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
LEADER_WORKER_SET = Kind(
    "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "leaderworkersets", optional=True
)
CLAIM_TEMPLATE = Kind(
    "resource.k8s.io/v1", "ResourceClaimTemplate", "resourceclaimtemplates", optional=True
)
SECRET = Kind("v1", "Secret", "secrets")
EVENT = Kind("v1", "Event", "events")
NODE = Kind("v1", "Node", "nodes", labelled=False)
"""Of no namespace; those that are cordoned are listed, not watched."""
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
"""Says which replica of a release works; read and written by name, not watched."""

SUPPORT = (
    SERVICE,
    SERVICE_ACCOUNT,
    BUDGET,
    NETWORK_POLICY,
    INGRESS,
    HTTP_ROUTE,
    JOB,
    CONFIG_MAP,
)
"""Kinds of the support objects."""
WATCHED = (
    FLEET,
    POOL,
    DEPLOYMENT,
    CONTROLLER_REVISION,
    POD,
    *SUPPORT,
    LEADER_WORKER_SET,
    CLAIM_TEMPLATE,
)
ALWAYS = tuple(kind for kind in WATCHED if not kind.optional)
OPTIONAL = tuple(kind for kind in WATCHED if kind.optional)
MISSING_APIS = {
    LEADER_WORKER_SET: (
        "LeaderWorkerSetMissing",
        "an instance of several pods needs the LeaderWorkerSet API, which is not installed "
        "(https://lws.sigs.k8s.io)",
    ),
    CLAIM_TEMPLATE: (
        "ResourceClaimsMissing",
        "resources.deviceClassName needs the API resource.k8s.io/v1 (Kubernetes 1.34)",
    ),
    HTTP_ROUTE: (
        "HTTPRouteMissing",
        "router.httpRoute needs the Gateway API, which is not installed "
        "(https://gateway-api.sigs.k8s.io)",
    ),
}
"""Kind -> the reason and the text of a condition, where a fleet needs it and it is missing."""

_BY_TYPE: Mapping[tuple[str, str], Kind] = {
    (kind.api_version, kind.name): kind for kind in (*WATCHED, SECRET, EVENT, LEASE, NODE)
}
_BY_PATH: Mapping[tuple[str, str], Kind] = {
    (kind.base, kind.plural): kind for kind in (*WATCHED, SECRET, EVENT, LEASE, NODE)
}


def kind_of(obj: Mapping[str, Any]) -> Kind:
    """The kind of an object that the operator makes; KeyError for another one."""
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


class _PodMetadata(TypedDict, total=False):
    """What is kept of it, in lists and in events."""

    name: Any
    namespace: Any
    uid: Any
    resourceVersion: Any
    labels: Any
    annotations: Any
    creationTimestamp: Any
    deletionTimestamp: Any
    deletionGracePeriodSeconds: Any
    finalizers: Any
    ownerReferences: Any


class _PodSpec(TypedDict, total=False):
    nodeName: Any
    volumes: Any
    resourceClaims: Any
    readinessGates: Any
    initContainers: Any
    containers: Any


_SHORT = 64
"""Longer texts are messages, hardly ever the same."""
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_POD_METADATA = tuple(_PodMetadata.__annotations__)
_POD_SPEC = ("nodeName", "volumes", "resourceClaims", "readinessGates")
_CONTAINER_SPEC = ("name", "image")
_POD_STATUS = ("phase", "reason", "message", "conditions", "podIP")
_CONDITION = ("type", "status", "reason", "message", "lastTransitionTime")
_CONTAINER_STATUS = ("name", "image", "ready", "restartCount", "state", "lastState")


def trim(kind: Kind, obj: Obj) -> Obj:
    """The parts of `obj` that are kept; they are shared with `obj`, which must not be used
    again."""
    if kind == POD:
        return _trim_pod(obj)
    metadata = cast("dict[str, Any]", obj.get("metadata") or {})
    entries = _of_other_managers(metadata.pop("managedFields", None))
    if entries and kind not in (FLEET, POOL):
        metadata["managedFields"] = entries
    annotations = metadata.get("annotations")
    if annotations:
        annotations.pop(_LAST_APPLIED, None)
    # Items of a list come without these two, which readers of the cache rely on.
    return _shared({**obj, "apiVersion": kind.api_version, "kind": kind.name})


def _of_other_managers(entries: object) -> list[Obj]:
    """The entries of managedFields by which others than the operator set something in a spec.

    `before-first-apply` stands for fields that no client applied, defaults too.
    """
    found: list[Obj] = []
    for entry in cast("list[object]", entries) if isinstance(entries, list) else []:
        row = cast("Obj", entry) if isinstance(entry, dict) else {}
        if row.get("manager") in (MANAGER, "before-first-apply") or row.get("subresource"):
            continue
        fields: object = row.get("fieldsV1")
        spec: object = cast("Obj", fields).get("f:spec") if isinstance(fields, dict) else None
        if spec:
            found.append({"manager": row.get("manager"), "fieldsV1": {"f:spec": spec}})
    return found


def _trim_pod(pod: Obj) -> Obj:
    metadata = _pick(pod.get("metadata"), _POD_METADATA)
    whole = cast("dict[str, Any]", pod.get("status") or {})
    status = _pick(whole, _POD_STATUS)
    if "conditions" in status:
        status["conditions"] = [_pick(c, _CONDITION) for c in status["conditions"]]
    if _is_serving(metadata, status):
        spec = _pick(pod.get("spec"), ("nodeName",))
    else:
        spec = _spec(cast("dict[str, Any]", pod.get("spec") or {}))
        for name in ("initContainerStatuses", "containerStatuses"):
            if whole.get(name):
                status[name] = [_pick(container, _CONTAINER_STATUS) for container in whole[name]]
    kept = {"metadata": metadata, "spec": spec, "status": status}
    return _shared({"apiVersion": POD.api_version, "kind": POD.name, **kept})


def _is_serving(metadata: dict[str, Any], status: dict[str, Any]) -> bool:
    if "deletionTimestamp" in metadata:
        return False
    conditions = cast("list[dict[str, Any]]", status.get("conditions") or [])
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)


def _spec(spec: dict[str, Any]) -> dict[str, Any]:
    kept = _pick(spec, _POD_SPEC)
    for name in ("initContainers", "containers"):
        if spec.get(name):
            kept[name] = [_container(container) for container in spec[name]]
    return kept


def _container(container: dict[str, Any]) -> dict[str, Any]:
    kept = _pick(container, _CONTAINER_SPEC)
    resources = _pick(container.get("resources"), ("limits",))
    if resources:
        kept["resources"] = resources
    return kept


def _pick(value: object, names: tuple[str, ...]) -> dict[str, Any]:
    """The members `names` of a JSON object that are there and not empty."""
    fields = cast("dict[str, Any]", value or {})
    return {name: fields[name] for name in names if fields.get(name) not in (None, "", [], {})}


def _shared(obj: Obj) -> Obj:
    """A copy in which equal keys and equal short texts are one, with those of other objects."""
    return {sys.intern(key): _shared_value(value) for key, value in obj.items()}


def _shared_value(value: object) -> object:
    # Runs for every field of every event; a match statement takes twice as long.
    if type(value) is str:
        return sys.intern(value) if len(value) <= _SHORT else value
    if type(value) is dict:
        return _shared(cast("Obj", value))
    if type(value) is list:
        return [_shared_value(item) for item in cast("list[object]", value)]
    return value


T = TypeVar("T")

MAX_DEPTH = 100
"""A pod template's deepest field lies at about 20."""
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]', re.DOTALL)


class _Pod(TypedDict, total=False):
    """What `trim` reads. The rest, above all managedFields, is half of each event."""

    metadata: _PodMetadata | None
    spec: _PodSpec | None
    status: Any


class _PodEvent(TypedDict):
    type: str
    object: _Pod


_ANYTHING: Decoder[Any] = Decoder()
_POD_EVENT: Decoder[Any] = Decoder(_PodEvent)


def parse(body: bytes, use: Callable[[Any], T], decoder: Decoder[Any] = _ANYTHING) -> T:
    """The result of `use` on the parsed body; on a shallow form of a body that is too deep.

    `use` may change its argument, and may be called twice. Raises ValueError for what is not JSON.
    """
    try:
        return use(decoder.decode(body))
    except RecursionError:
        return use(decoder.decode(shallow(body)))


def parse_event(kind: Kind, line: bytes, use: Callable[[Any], T]) -> T:
    """As parse, for one line of a watch of `kind`; fields of pods that are not read are skipped."""
    return parse(line, use, _POD_EVENT if kind == POD else _ANYTHING)


def shallow(body: bytes) -> bytes:
    """The JSON text with null in place of maps and lists below MAX_DEPTH."""
    kept: list[bytes] = []
    depth = start = 0
    for token in _TOKEN.finditer(body):
        mark = token[0]
        if mark in (b"{", b"["):
            depth += 1
            if depth == MAX_DEPTH + 1:
                kept += [body[start : token.start()], b"null"]
        elif mark in (b"}", b"]"):
            if depth == MAX_DEPTH + 1:
                start = token.end()
            depth -= 1
    return b"".join((*kept, body[start:]))


def measured(parsed: object) -> object:
    """`parsed` as it is. Raises RecursionError where it is deeper than MAX_DEPTH."""
    if excess(parsed, most_levels=MAX_DEPTH + 1):
        raise RecursionError("deeper than MAX_DEPTH")
    return parsed


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch (RFC 7386) that makes `after` of `before`."""
    patch: dict[str, Any] = {name: None for name in before if name not in after}
    for name, value in after.items():
        old: object = before.get(name)
        if old == value:
            continue
        if isinstance(value, dict) and isinstance(old, dict):
            below = cast("dict[str, Any]", old), cast("dict[str, Any]", value)
            patch[name] = merge_patch(*below)
        else:
            patch[name] = value
    return patch


def _controller(obj: Obj) -> Raw | None:
    owners = rows(obj, "metadata", "ownerReferences")
    return next((owner for owner in owners if owner.get("controller")), None)


def controller_of(obj: Obj) -> str | None:
    """The uid of the owner that controls the object."""
    owner = _controller(obj)
    return owner["uid"] if owner else None


def holder_of(obj: Obj) -> str:
    """An object's owner, for a message."""
    owner = _controller(obj)
    if owner is None:
        return "someone else (it has no owner)"
    return f"{owner.get('kind')} {owner.get('name')} (uid {owner.get('uid')})"

"""Names, labels and metadata of a fleet's objects, and the values that all manifests need.

All names are built here and none is parsed: labels alone lead from an object to its fleet, pool and
revision. A fleet's name has at most 30 characters, a pool's 16 and a revision 8, so that every name
fits into 63.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

from xpyd_core import __version__
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.plan.values import ROUTER

JsonObject = dict[str, Any]
"""A Kubernetes object or a part of one, as JSON has it."""


@dataclass(frozen=True)
class Settings:
    """The operator's own flags that reach the pods."""

    worker_image: str
    """Image of engines whose document names none."""
    router_image: str
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets in the fleet's namespace."""
    admin_namespaces: tuple[str, ...] = ()
    """Whose pods may reach the routers' admin port, as the operator's own: it reads metrics."""
    version: str = __version__
    """Of the operator: another one may make other pods of the same document."""
    gated: bool = True
    """Whether engines' pods have the readiness gate ROUTABLE; a fleet that is older has none."""


@dataclass(frozen=True)
class Placement:
    """Where one fleet's objects go: its namespace, and `uid`, that of the InferenceFleet object."""

    namespace: str
    uid: str
    settings: Settings


MANAGER = "xpyd-operator"
"""Field manager of every server-side apply."""
FINALIZER = "xpyd.dev/fleet"

LABEL_FLEET = "xpyd.dev/fleet"
LABEL_POOL = "xpyd.dev/pool"
LABEL_ROLE = "xpyd.dev/role"
FLEET_REVISION = "XPYD_FLEET_REVISION"
"""Variable of an engine's pod: see plan.template.fleet_revision_of."""
LABEL_REVISION = "xpyd.dev/revision"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_INSTANCE = "app.kubernetes.io/instance"
LABEL_NAME = "app.kubernetes.io/name"
LABEL_SCRAPE = "xpyd.dev/scrape"
"""On a namespace, "true": its pods may read metrics (NetworkPolicy)."""
LABEL_NAMESPACE = "kubernetes.io/metadata.name"
"""On every namespace: its name."""
ANNOTATION_REPLICAS = "xpyd.dev/replicas"
"""On an engine's pod: how many replicas it should have, where these come and go."""
ANNOTATION_MAX_REPLICAS = "xpyd.dev/max-replicas"
"""On the same: how many its devices, ports and memory are for."""
ANNOTATION_SCHEME = "xpyd.dev/scheme"
"""On a pod: what its port `http` speaks, "https"; none: http. Prometheus reads it."""
ANNOTATION_ROTATE = "xpyd.dev/rotate-key"
"""On a fleet: any new text starts a rotation of its key. On its keys' ConfigMap: the last one."""
ANNOTATION_KEY_PHASE = "xpyd.dev/key-phase"
ANNOTATION_KEY_SLOT = "xpyd.dev/key-slot"
ANNOTATION_KEY_ID = "xpyd.dev/key-id"
ANNOTATION_KEY_SINCE = "xpyd.dev/key-since"
"""On that ConfigMap: how far a rotation is (status.rotation.KeyOrder)."""
ANNOTATION_RESTARTED = "xpyd.dev/restarted-at"
"""On a pod: spec.rollout.restartedAt of its revision."""
ANNOTATION_OPERATOR = "xpyd.dev/operator"
"""On a fleet: the release whose operator reconciles it, as NAMESPACE/NAME of its Lease."""
ANNOTATION_UNDO = "xpyd.dev/undo"
"""On a fleet: the record whose images an undo brought back, and behind @ the last restart then."""
ANNOTATION_PROMOTE = "xpyd.dev/promote-canary"
"""On a fleet: the revision on trial that takes the old one's place without further analysis."""
ANNOTATION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""On a pod: of those that are ready, a ReplicaSet gives up the one with the least first."""
ROUTABLE = "xpyd.dev/routable"
"""The readiness gate of engines' pods, and its condition."""
ANNOTATION_APPLIED = "xpyd.dev/applied"
"""Hash of the object as the operator last applied it."""

ENGINE_APP = "xpyd-engine"
ROUTER_APP = "xpyd-router"
MODEL_APP = "xpyd-model"
MODEL_ROLE = "model"
"""Role of the pod that downloads the model; it is of no pool."""
MODEL_CONTAINER = "xpyd-model"
"""The container that downloads the model."""
PROGRESS_PORT = 10080
"""Where it says how far it is."""
ENGINE_CONTAINER = "engine"
ROUTER_CONTAINER = "router"
BEATS_CONTAINER = "xpyd-beats"
"""The container that sends the heartbeats of an engine of type VLLM."""

KV_KEY = "key"
"""The key's name in the fleet's Secret, and the file's name in KV_FOLDER."""
KEY_SLOTS = (KV_KEY, f"{KV_KEY}-b")
"""The files in KV_FOLDER of the two Secrets that have the operator's key by turns."""
KV_ORDER = f"{KV_KEY}.order"
"""The file beside them that names those in use, as xpyd_core.keys reads it."""
CLIENT_KEYS = "keys"
"""The name of the client keys' file in CLIENT_KEYS_FOLDER."""
CLIENT_KEYS_FOLDER = "/run/xpyd/client-keys"
KV_FOLDER = "/run/xpyd/kv"
ADMIN_FOLDER = "/run/xpyd/admin"
ADMIN_KEY = "key"
"""The file in ADMIN_FOLDER with the keys of a router's admin API."""
CANARY_FOLDER = "/run/xpyd/canary"
CANARY_FILE = "canary.json"
"""The file in CANARY_FOLDER that gives a revision on trial its share of requests."""
TLS_FOLDER = "/run/xpyd/tls"
CLIENT_CA_FOLDER = "/run/xpyd/client-ca"
ENGINE_CA_FOLDER = "/run/xpyd/engine-ca"
ROUTER_TLS_FOLDER = "/run/xpyd/router-tls"
ROUTER_CA_FOLDER = "/run/xpyd/router-ca"
SOCKET_FOLDER = "/run/xpyd/sockets"
"""Where a pod has the node's folder of Unix sockets."""
SOCKET_CONTAINER = "xpyd-sockets"
"""The init container that gives the folder to the engine's user."""
DEFAULT_GPU_RESOURCE = "nvidia.com/gpu"

_LONGEST_GROUP = 47
"""A LeaderWorkerSet's StatefulSets are called NAME and NAME-<group>, and Kubernetes puts
`<StatefulSet>-<10 characters>` into a label of 63: 47 leave room for groups up to 1023."""


def fleet_labels(fleet: str, app: str) -> dict[str, str]:
    """Labels of every object of the fleet."""
    return {
        LABEL_MANAGED_BY: "xpyd",
        LABEL_INSTANCE: fleet,
        LABEL_NAME: app,
        LABEL_FLEET: fleet,
    }


def pool_labels(fleet: str, pool: str, role: str) -> dict[str, str]:
    """Labels of an object of one pool, or of the router."""
    app = ROUTER_APP if pool == ROUTER else ENGINE_APP
    return {**fleet_labels(fleet, app), LABEL_POOL: pool, LABEL_ROLE: role}


def pod_annotations(fleet: InferenceFleet, container: str) -> dict[str, str]:
    """Annotations of a pod whose program is in `container`."""
    restarted = fleet.spec.rollout.restarted_at
    found = {"kubectl.kubernetes.io/default-container": container}
    return {**found, ANNOTATION_RESTARTED: restarted} if restarted else found


def workload_labels(fleet: str, pool: str, role: str, revision: str) -> dict[str, str]:
    """Labels of a workload and of its pods."""
    return {**pool_labels(fleet, pool, role), LABEL_REVISION: revision}


def workload_selector(fleet: str, pool: str, revision: str) -> dict[str, str]:
    """What selects the pods of one workload and no other."""
    return {**pool_selector(fleet, pool), LABEL_REVISION: revision}


def pool_selector(fleet: str, pool: str) -> dict[str, str]:
    """What selects the pods of a pool in all its revisions."""
    return {LABEL_FLEET: fleet, LABEL_POOL: pool}


def app_selector(fleet: str, app: str) -> dict[str, str]:
    """What selects all engines, or all routers, of a fleet."""
    return {LABEL_FLEET: fleet, LABEL_NAME: app}


def selector_text(labels: dict[str, str]) -> str:
    """Labels as a selector in text, as status.selector of a pool and list calls have it."""
    return ",".join(f"{key}={value}" for key, value in labels.items())


def workload_name(fleet: str, pool: str, revision: str) -> str:
    """Name of a Deployment and of a ResourceClaimTemplate."""
    return f"{fleet}-{pool}-{revision}"


def group_workload_name(fleet: str, pool: str, revision: str) -> str:
    """Name of a LeaderWorkerSet: as workload_name, cut where its pods' labels would be too long."""
    name = workload_name(fleet, pool, revision)
    if len(name) <= _LONGEST_GROUP:
        return name
    rest = f"-{sha256(f'{fleet}/{pool}'.encode()).hexdigest()[:6]}-{revision}"
    return name[: _LONGEST_GROUP - len(rest)].rstrip("-") + rest


def pool_object_name(fleet: str, pool: str) -> str:
    """Name of an InferenceFleetPool."""
    return f"{fleet}-{pool}"


def disruption_budget_name(fleet: str, pool: str) -> str:
    """Name of a pool's or the router's PodDisruptionBudget."""
    return f"{fleet}-{pool}"


def client_service_name(fleet: str) -> str:
    """Name of the Service that clients use."""
    return f"{fleet}-router"


def discovery_service_name(fleet: str) -> str:
    """Name of the headless Service by which engines find every router."""
    return f"{fleet}-discovery"


def kv_secret_name(fleet: str, uid: str, slot: str = KV_KEY) -> str:
    """Name of the Secret with the fleet's own KV key; `uid`: the InferenceFleet's; `slot`: which of
    the two. The first one's name is also that of the ConfigMap with their order.

    A fleet that is deleted and created again under its name must not take the old one's Secret for
    its own: the operator reads no Secret, and Kubernetes deletes the old one soon.
    """
    return f"{fleet}-kv-{uid[:8]}{slot.removeprefix(KV_KEY)}"


def revision_name(fleet: str, revision: str) -> str:
    """Name of the ControllerRevision that records a revision of the document."""
    return f"{fleet}-{revision}"


def canary_name(fleet: str) -> str:
    """Name of the ConfigMap with how far a canary is, which routers mount."""
    return f"{fleet}-canary"


def service_account_name(fleet: str) -> str:
    """Name of the ServiceAccount of all the fleet's pods."""
    return fleet


def engine_policy_name(fleet: str) -> str:
    """Name of the engines' NetworkPolicy."""
    return f"{fleet}-engines"


def router_policy_name(fleet: str) -> str:
    """Name of the routers' NetworkPolicy."""
    return f"{fleet}-router"


def model_policy_name(fleet: str) -> str:
    """Name of the NetworkPolicy of the pod that downloads the model."""
    return f"{fleet}-model"


def model_job_name(fleet: str, digest: str) -> str:
    """Name of the Job that downloads one revision of the model."""
    return f"{fleet}-model-{digest}"


def discovery_host(fleet: str, namespace: str) -> str:
    """What engines resolve; every A record is a router."""
    return f"{discovery_service_name(fleet)}.{namespace}.svc"


def engine_server_name(fleet: str, namespace: str) -> str:
    """The name in the certificate of every engine, where the document says no other."""
    return f"{fleet}-engines.{namespace}.svc"


def endpoint(fleet: str, namespace: str, port: int, *, is_tls: bool = False) -> str:
    """The fleet's URL for clients in the cluster."""
    scheme = "https" if is_tls else "http"
    return f"{scheme}://{client_service_name(fleet)}.{namespace}.svc:{port}"


def owned_object(
    api_version: str,
    kind: str,
    name: str,
    labels: dict[str, str],
    fleet: InferenceFleet,
    placement: Placement,
    **parts: object,
) -> JsonObject:
    """An object that the fleet owns: the garbage collector deletes it when the fleet is gone.
    `parts`: what follows its metadata, `spec` and so on."""
    owner = {
        "apiVersion": fleet.api_version,
        "kind": fleet.kind,
        "name": fleet.name,
        "uid": placement.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": placement.namespace,
            "labels": labels,
            "ownerReferences": [owner],
        },
        **parts,
    }


def map_in(above: JsonObject, key: str) -> JsonObject:
    """The map `key` of an object whose content is not checked; empty where it is none."""
    value: object = above.get(key)
    return cast("JsonObject", value) if isinstance(value, dict) else {}


def list_in(above: JsonObject, key: str) -> list[Any]:
    """The list `key` of such an object; empty where it is none."""
    value: object = above.get(key)
    return cast("list[Any]", value) if isinstance(value, list) else []

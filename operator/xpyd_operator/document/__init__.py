"""The InferenceFleet document as typed values, the same for the cluster and for local mode.

`load_fleet`, `parse_fleet` and `parse_object` are the only entry points and report all
mistakes at once. Nothing here knows how a fleet is run.
"""

from xpyd_operator.document.engines import (
    Engine,
    EnvSource,
    EnvVar,
    FieldRef,
    KeyRef,
    Model,
    ModelCache,
    Parallelism,
    Pool,
    Resources,
    Scaling,
    SecretRef,
)
from xpyd_operator.document.fleet import (
    Drain,
    Heartbeat,
    InferenceFleet,
    KvKeyRef,
    KvTransfer,
    Limits,
    Metadata,
    NetworkPolicy,
    Queue,
    Router,
    Service,
    Spec,
)
from xpyd_operator.document.fleetpool import InferenceFleetPool, PoolSpec
from xpyd_operator.document.load import load_fleet, parse_fleet, parse_object

__all__ = [
    "Drain",
    "Engine",
    "EnvSource",
    "EnvVar",
    "FieldRef",
    "Heartbeat",
    "InferenceFleet",
    "InferenceFleetPool",
    "KeyRef",
    "KvKeyRef",
    "KvTransfer",
    "Limits",
    "Metadata",
    "Model",
    "ModelCache",
    "NetworkPolicy",
    "Parallelism",
    "Pool",
    "PoolSpec",
    "Queue",
    "Resources",
    "Router",
    "Scaling",
    "SecretRef",
    "Service",
    "Spec",
    "load_fleet",
    "parse_fleet",
    "parse_object",
]

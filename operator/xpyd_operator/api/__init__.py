"""The InferenceFleet document as typed values, the same for the cluster and for local mode.

`load_fleet`, `parse_fleet` and `parse_object` are the only ways in: they report all mistakes at
once. Nothing here knows how a fleet is run.
"""

from xpyd_operator.api.fleet import InferenceFleet, Metadata, Spec
from xpyd_operator.api.fleetpool import InferenceFleetPool, PoolSpec
from xpyd_operator.api.load import load_fleet, parse_fleet, parse_object
from xpyd_operator.api.model import (
    Engine,
    EnvSource,
    EnvVar,
    FieldRef,
    KeyRef,
    Model,
    ModelCache,
    SecretRef,
)
from xpyd_operator.api.pool import Parallelism, Pool, Resources, Scaling
from xpyd_operator.api.router import (
    Drain,
    Heartbeat,
    KvKeyRef,
    KvTransfer,
    Limits,
    NetworkPolicy,
    Queue,
    Router,
    Service,
)

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

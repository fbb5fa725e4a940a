"""The InferenceFleet document as typed values, the same for the cluster and for local mode.

`load_fleet` and `parse_fleet` are the only ways in: they report all mistakes at once. Nothing here
knows how a fleet is run.
"""

from xpyd_operator.api.fleet import (
    Drain,
    Engine,
    EnvVar,
    Heartbeat,
    InferenceFleet,
    KvTransfer,
    Metadata,
    Model,
    Pool,
    Resources,
    Router,
    Spec,
)
from xpyd_operator.api.load import load_fleet, parse_fleet

__all__ = [
    "Drain",
    "Engine",
    "EnvVar",
    "Heartbeat",
    "InferenceFleet",
    "KvTransfer",
    "Metadata",
    "Model",
    "Pool",
    "Resources",
    "Router",
    "Spec",
    "load_fleet",
    "parse_fleet",
]

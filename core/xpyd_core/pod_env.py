"""The environment that a pod gives its program, in Kubernetes and in local mode alike.

Read once at start into a frozen value; flags of the programs take their defaults from it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from xpyd_core.errors import UserError
from xpyd_core.parallel.partition import PARTITION_VARIABLE, parse_override
from xpyd_core.request_id import Address, parse_address
from xpyd_core.sizes import clipped, whole_number

HTTP_PORT = 20001
KV_PORT = 21001
ROUTER_HTTP_PORT = 10001
ROUTER_ADMIN_PORT = 10002
"""Metrics, instances and the admin API of a router: not for clients."""
DISCOVERY_PORT = 30001
ROLES = ("Prefill", "Decode", "Aggregated")
LAST_PORT = 65535


def data_port(kv_port: int, rank: int) -> int:
    """Where rank `rank` of an instance of several listens for KV, on its own pod's address."""
    return kv_port + 1 + rank


def rendezvous_port(kv_port: int) -> int:
    """Where the ranks of an instance of several pods meet: on its first pod's address."""
    return kv_port - 1


@dataclass(frozen=True)
class PodEnv:
    """Values of XPYD_ROLE, XPYD_POD_IP and the others; a default where one is not set.

    `discovery`: where to send heartbeats; a name with several A records means all of them.
    `kv_key_file`: the fleet's secret, one key per line (the first signs, all are accepted).
    """

    role: str = "Aggregated"
    pod_ip: str = "127.0.0.1"
    http_port: int = HTTP_PORT
    kv_port: int = KV_PORT
    discovery: tuple[Address, ...] = ()
    kv_key_file: Path | None = None
    api_key: str = field(default="", repr=False)
    """A key of clients: routers accept it, clients send it."""
    fleet: str = ""
    pool: str = ""
    instance: str = ""
    revision: str = ""
    fleet_revision: str = ""
    """What a P and a D have in common that may be a pair (docs/adr/0097)."""
    layer_partition: tuple[int, ...] = ()
    """VLLM_PP_LAYER_PARTITION: layers of each pipeline stage; () where it is not set."""
    leader_address: str = ""
    """LWS_LEADER_ADDRESS, as LeaderWorkerSet sets it and the next two: the first pod."""
    group_size: int = 1
    """LWS_GROUP_SIZE: pods of the instance."""
    worker_index: int = 0
    """LWS_WORKER_INDEX: this pod's number among them; 0 leads."""


def _port(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    port = whole_number(text)
    if port is None or not 0 < port <= LAST_PORT:
        raise UserError(f"{name}={clipped(text)!r}: expected a port, 1 to {LAST_PORT}")
    return port


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    number = whole_number(text)
    if number is None:
        raise UserError(f"{name}={clipped(text)!r}: expected a number")
    return number


def parse_discovery(text: str) -> tuple[Address, ...]:
    """`host:port,host:port` as addresses; empty text is none."""
    return tuple(parse_address(part.strip()) for part in text.split(",") if part.strip())


def read_pod_env(environ: Mapping[str, str] | None = None) -> PodEnv:
    """The pod's environment; UserError names the variable that is wrong."""
    environ = os.environ if environ is None else environ
    role = environ.get("XPYD_ROLE") or "Aggregated"
    if role not in ROLES:
        raise UserError(f"XPYD_ROLE={clipped(role)!r}: expected one of {', '.join(ROLES)}")
    key_file = environ.get("XPYD_KV_KEY_FILE")
    return PodEnv(
        role=role,
        pod_ip=environ.get("XPYD_POD_IP") or "127.0.0.1",
        http_port=_port(environ, "XPYD_HTTP_PORT", HTTP_PORT),
        kv_port=_port(environ, "XPYD_KV_PORT", KV_PORT),
        discovery=parse_discovery(environ.get("XPYD_DISCOVERY", "")),
        kv_key_file=Path(key_file) if key_file else None,
        api_key=environ.get("XPYD_API_KEY", ""),
        fleet=environ.get("XPYD_FLEET", ""),
        pool=environ.get("XPYD_POOL", ""),
        instance=environ.get("XPYD_INSTANCE", ""),
        revision=environ.get("XPYD_REVISION", ""),
        fleet_revision=environ.get("XPYD_FLEET_REVISION", ""),
        layer_partition=parse_override(environ.get(PARTITION_VARIABLE, "")),
        leader_address=environ.get("LWS_LEADER_ADDRESS", ""),
        group_size=_number(environ, "LWS_GROUP_SIZE", 1),
        worker_index=_number(environ, "LWS_WORKER_INDEX", 0),
    )

"""From a workload's template to one process: its command line and its environment.

What a pod would find in Kubernetes it finds here: the same variables, the same ports, an address of
its own. The program itself is a seam: tests start stand-ins.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from xpyd_core.pod_env import HTTP_PORT, KV_PORT
from xpyd_operator.plan import INSECURE_FLAG, ROUTER, Template
from xpyd_operator.up.memory import MemoryPlan
from xpyd_operator.up.state import DISCOVERY_PORT

ROUTER_NUMBER = 1
"""Last byte of the router's address; engines follow."""
LAST_NUMBER = 254
ROUTER_HOST = "127.0.0.1"
"""Where clients reach the router."""


@dataclass(frozen=True)
class Site:
    """What all pods of one local fleet share."""

    fleet: str
    index: int
    router_port: int
    key_file: Path
    socket_folder: Path
    memory: MemoryPlan
    log_level: str
    log_format: str

    @property
    def endpoint(self) -> str:
        """The router's URL for clients."""
        return f"http://{ROUTER_HOST}:{self.router_port}"

    @property
    def discovery(self) -> str:
        """Where engines send heartbeats."""
        return f"{self.address(ROUTER_NUMBER)}:{DISCOVERY_PORT}"

    def address(self, number: int) -> str:
        """Pod `number`'s loopback address."""
        return f"127.1.{self.index}.{number}"


@dataclass(frozen=True)
class Pod:
    """One instance at its place."""

    name: str
    pool: str
    revision: str
    number: int
    template: Template

    @property
    def kv_port(self) -> int:
        """The engine's KV control port."""
        return int(dict(self.template.env).get("XPYD_KV_PORT", KV_PORT))


Program = Callable[[Pod], list[str]]
"""The program of a pod, without its flags."""


def xpyd_program(pod: Pod) -> list[str]:
    """This Python's own xpyd. -P: a folder named like a module in the working folder is not it."""
    command = "router" if pod.template.role == ROUTER else "worker"
    return [sys.executable, "-P", "-m", "xpyd_core", command]


def pod_arguments(pod: Pod, site: Site) -> list[str]:
    """The flags: the machine's first, then the template's, so that what the document says wins."""
    logging = [f"--log-level={site.log_level}", f"--log-format={site.log_format}"]
    if pod.template.role == ROUTER:
        host, port = site.discovery.split(":")
        place = [
            f"--host={ROUTER_HOST}",
            f"--port={site.router_port}",
            f"--discovery-host={host}",
            f"--discovery-port={port}",
            # No load balancer has to notice anything here.
            "--drain-seconds=0",
        ]
    else:
        place = [f"--threads={site.memory.threads}", *site.memory.of(pod.pool).args]
        if pod.template.role != "Aggregated":
            place.append(f"--kv-socket-dir={site.socket_folder}")
    return [*logging, *place, *pod.template.args]


def pod_environment(pod: Pod, site: Site, inherited: Mapping[str, str]) -> dict[str, str]:
    """The whole environment: the caller's without its XPYD_*, the document's, the pod's own."""
    address = site.address(pod.number)
    environ = {name: value for name, value in inherited.items() if not name.startswith("XPYD_")}
    environ["OMP_NUM_THREADS"] = str(site.memory.threads)
    environ |= {
        "XPYD_POD_IP": address,
        "XPYD_HTTP_PORT": str(HTTP_PORT),
        "XPYD_KV_PORT": str(pod.kv_port),
        "XPYD_DISCOVERY": site.discovery,
        "XPYD_FLEET": site.fleet,
        "XPYD_POOL": pod.pool,
        "XPYD_INSTANCE": pod.name,
        "XPYD_REVISION": pod.revision,
    }
    if INSECURE_FLAG not in pod.template.args:
        environ["XPYD_KV_KEY_FILE"] = str(site.key_file)
    if pod.template.role != ROUTER:
        environ["XPYD_ROLE"] = pod.template.role
    return environ | dict(pod.template.env)

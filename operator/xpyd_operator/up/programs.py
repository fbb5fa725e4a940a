"""What a pod of a local fleet runs: its settings, command line and environment.

A pod finds here what it would find in Kubernetes: the same variables, the same ports, an address of
its own. The program of a pod is a parameter: tests start fakes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xpyd_core.pod_env import HTTP_PORT, KV_PORT
from xpyd_operator.document.engine import NIXL_HOST
from xpyd_operator.plan.template import INSECURE_FLAG
from xpyd_operator.plan.values import ROUTER, Probes, Template, probes_of
from xpyd_operator.plan.vllm import SOCKET_VARIABLE
from xpyd_operator.up.folder import DISCOVERY_PORT
from xpyd_operator.up.logs import LogLimit
from xpyd_operator.up.memory import MemoryPlan

ROUTER_NUMBER = 1
"""Last byte of the router's address; engines follow."""
LAST_NUMBER = 254
ROUTER_HOST = "127.0.0.1"
"""Where clients reach the router."""


@dataclass(frozen=True)
class LocalSettings:
    """Settings that all pods of one local fleet share."""

    fleet: str
    index: int
    router_port: int
    admin_port: int
    """The router's, for metrics, instances and the admin API."""
    key_file: Path
    socket_folder: Path
    memory: MemoryPlan
    log_level: str
    log_format: str
    log_limit: LogLimit = field(default_factory=LogLimit)
    api_key_file: str | None = None
    """Keys that clients of the router need; None: they need none."""
    certificate: str | None = None
    """The router's, which then serves HTTPS; None: HTTP."""
    certificate_key: str | None = None
    """Its key; None: it is in the certificate's file."""
    vllm: str = "vllm"
    """The command of vLLM, for pods of type VLLM."""

    @property
    def endpoint(self) -> str:
        """The router's URL for clients."""
        scheme = "http" if self.certificate is None else "https"
        return f"{scheme}://{ROUTER_HOST}:{self.router_port}"

    @property
    def admin(self) -> str:
        """The URL of the router's admin port."""
        return f"http://{ROUTER_HOST}:{self.admin_port}"

    @property
    def discovery(self) -> str:
        """Where engines send heartbeats."""
        return f"{self.address(ROUTER_NUMBER)}:{DISCOVERY_PORT}"

    def address(self, number: int) -> str:
        """Pod `number`'s loopback address."""
        return f"127.1.{self.index}.{number}"


@dataclass(frozen=True)
class Pod:
    """An instance with its name and number."""

    name: str
    pool: str
    revision: str
    number: int
    template: Template

    @property
    def kv_port(self) -> int:
        """The engine's KV control port."""
        return int(dict(self.template.env).get("XPYD_KV_PORT", KV_PORT))


def xpyd_program(pod: Pod) -> list[str]:
    """This Python's own xpyd. -P ignores a folder of a module's name in the working folder. [] for
    a vLLM that beats itself: pod_arguments has its command, too."""
    command = "router" if pod.template.role == ROUTER else "worker"
    if pod.template.is_vllm and not pod.template.beats:
        return []  # vLLM's, which only the settings name
    if pod.template.beats:
        command = "vllm-beats"
    return [sys.executable, "-P", "-m", "xpyd_core", command]


@dataclass(frozen=True)
class Programs:
    """What pods run, and how the supervisor sees that they are alive. Tests start others."""

    program: Callable[[Pod], list[str]] = xpyd_program
    """The program of a pod, without its flags."""
    probes: Callable[[Template], Probes] = probes_of
    """The probes of a template's instances."""


def pod_arguments(
    pod: Pod, settings: LocalSettings, listeners: Sequence[int] | None = None
) -> list[str]:
    """The flags: the machine's first, then the template's, so that what the document says wins.
    `listeners` are the router's inherited sockets, of clients and of its admin port; None: it opens
    its own.
    """
    logging = [f"--log-level={settings.log_level}", f"--log-format={settings.log_format}"]
    if pod.template.role == ROUTER:
        host, port = settings.discovery.split(":")
        ports = [f"--port={settings.router_port}", f"--admin-port={settings.admin_port}"]
        if listeners is not None:
            ports = [f"--listen-fd={listeners[0]}", f"--admin-listen-fd={listeners[1]}"]
        place = [
            f"--host={ROUTER_HOST}",
            *ports,
            f"--discovery-host={host}",
            f"--discovery-port={port}",
            # No load balancer needs time to notice the drain here.
            "--drain-seconds=0",
        ]
        if settings.api_key_file is not None:
            place.append(f"--api-key-file={settings.api_key_file}")
        if settings.certificate is not None:
            place.append(f"--ssl-certfile={settings.certificate}")
        if settings.certificate_key is not None:
            place.append(f"--ssl-keyfile={settings.certificate_key}")
    elif pod.template.is_vllm:
        # vLLM's own log needs no flag; its arguments name what only the pod knows.
        known = pod_environment(pod, settings, {})
        given = [_with_variables(arg, known) for arg in pod.template.args]
        command = [settings.vllm, "serve", *given]
        beats = pod.template.beats
        return [*logging, *beats, "--", *command] if beats else command
    else:
        place = [f"--threads={settings.memory.threads}", *settings.memory.of(pod.pool).args]
        if pod.template.role != "Aggregated":
            place.append(f"--kv-socket-dir={settings.socket_folder}")
    return [*logging, *place, *pod.template.args]


def _with_variables(text: str, variables: Mapping[str, str]) -> str:
    """`text` with `$(NAME)` as Kubernetes has it: what is not known stays."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), text)


def pod_environment(
    pod: Pod, settings: LocalSettings, inherited: Mapping[str, str]
) -> dict[str, str]:
    """The whole environment: the caller's without its XPYD_*, the document's, the pod's own."""
    address = settings.address(pod.number)
    environ = {name: value for name, value in inherited.items() if not name.startswith("XPYD_")}
    environ["OMP_NUM_THREADS"] = str(settings.memory.threads)
    environ |= {
        "XPYD_POD_IP": address,
        "XPYD_HTTP_PORT": str(HTTP_PORT),
        "XPYD_KV_PORT": str(pod.kv_port),
        "XPYD_DISCOVERY": settings.discovery,
        "XPYD_FLEET": settings.fleet,
        "XPYD_POOL": pod.pool,
        "XPYD_INSTANCE": pod.name,
        "XPYD_REVISION": pod.revision,
    }
    if INSECURE_FLAG not in (*pod.template.args, *pod.template.beats):
        environ["XPYD_KV_KEY_FILE"] = str(settings.key_file)
    if pod.template.fleet_revision:
        environ["XPYD_FLEET_REVISION"] = pod.template.fleet_revision
    if pod.template.role != ROUTER:
        environ["XPYD_ROLE"] = pod.template.role
    if pod.template.is_vllm:
        environ |= {"VLLM_HOST_IP": address, NIXL_HOST: address}
        environ[SOCKET_VARIABLE] = str(settings.socket_folder)
    return environ | dict(pod.template.env)

"""A running cluster as tests and people use it.

`up` starts one, `attach` finds a running one; both give a `Cluster`. What a cluster consists of
belongs to its keeper (`keeper.py`): `down` tells the keeper to end it, and the death of the
process that started it does the same.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.harness import addons, audit, control_plane, explain, kwok
from tests.cluster.harness import node as real_node
from tests.cluster.harness.components import ClusterError, Components
from tests.cluster.harness.control_plane import ControlPlane
from tests.cluster.harness.pki import Pki
from tests.cluster.harness.runs import Process, Run, base_folder, sweep
from tests.cluster.harness.tools import cache_folder, helm_binary, kubectl_binary

_START_DEADLINE_S = 40.0
_DOWN_DEADLINE_S = 60.0
# A proxy of the machine has no way into the cluster.
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")


class Cluster:
    """A Kubernetes cluster in namespaces of its own."""

    def __init__(
        self,
        run: Run,
        plane: ControlPlane,
        components: Components,
        init: Process,
        keeper: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.run_folder = run.folder
        self.plane = plane
        self.components = components
        self._run = run
        self._reader = plane.reader()
        self._init = init
        self._keeper = keeper
        self._clients: list[subprocess.Popen[Any]] = []
        self._loaded: set[tuple[Path, int]] = set()
        """Archives whose images the node got from here, and when they were written."""

    @property
    def name(self) -> str:
        """Unique among the clusters of this machine."""
        return self._run.name

    @property
    def kubeconfig(self) -> Path:
        """The administrator's; it works in the cluster's network and outside of it."""
        return self.plane.kubeconfig

    @property
    def api_url(self) -> str:
        """Where the API server answers, in the cluster's network and outside of it."""
        return self.plane.api_url

    @property
    def cgroup(self) -> str:
        """Below which the node's pods have their cgroups."""
        return self._run.cgroup

    # Clients

    def kubectl(
        self,
        *argv: str,
        input: str | None = None,  # noqa: A002 - as subprocess.run calls it
        check: bool = True,
        timeout_s: float = 60.0,
    ) -> str:
        """What kubectl prints. Raises ClusterError with its words when it fails.

        With check=False a failure is no error, and the text has what kubectl complained about
        after what it printed.
        """
        return self._tool(kubectl_binary(), argv, input=input, check=check, timeout_s=timeout_s)

    def helm(self, *argv: str, check: bool = True, timeout_s: float = 120.0) -> str:
        """What helm prints; otherwise as kubectl()."""
        return self._tool(helm_binary(), argv, input=None, check=check, timeout_s=timeout_s)

    def get(self, path: str) -> dict[str, Any] | None:
        """The object or list at a path of the API ("/api/v1/nodes"); None when there is none.

        Far cheaper than kubectl: what a wait should ask. Raises OSError.
        """
        return self._reader.object(path)

    def refusal(self, path: str, obj: dict[str, Any]) -> str:
        """What the API server says against an object to be created at a path of the API, a dry
        run; empty: it would take it. Far cheaper than kubectl. Raises OSError."""
        return self._reader.refusal(path, obj)

    def read(self, path: str, *, timeout_s: float) -> str:
        """The text at a path of the API that is no object: what a pod answers behind the server's
        proxy. Raises OSError unless it is there.
        """
        status, body = self._reader.get(path, timeout_s)
        if status != 200:
            raise OSError(f"GET {path}: {status} {body[:500].decode(errors='replace')}")
        return body.decode()

    def popen(self, argv: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """Start a program in the cluster's network, with KUBECONFIG set.

        It is an ordinary child of this process with the machine's files, and is killed with
        the cluster if it still runs then. Options are those of subprocess.Popen.
        """
        options["env"] = self.client_environment(options.get("env"))
        child: subprocess.Popen[Any] = subprocess.Popen(self.client_argv(argv), **options)
        self._clients.append(child)
        return child

    def run(
        self, argv: Sequence[str | Path], *, timeout: float = 120.0, **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Run a program in the cluster's network; options are those of subprocess.run."""
        options["env"] = self.client_environment(options.get("env"))
        run: Callable[..., subprocess.CompletedProcess[Any]] = subprocess.run
        return run(self.client_argv(argv), timeout=timeout, **options)

    def client_argv(self, argv: Sequence[str | Path]) -> list[str]:
        """The command line that runs `argv` in the cluster's network, for root on this machine."""
        namespace = f"--net=/proc/{self._init.pid}/ns/net"
        return ["nsenter", namespace, "--", *map(str, argv)]

    def client_environment(self, env: dict[str, str] | None = None) -> dict[str, str]:
        """The environment of a client: KUBECONFIG set, kubectl and helm on the PATH, no proxy."""
        made = dict(os.environ if env is None else env)
        made["KUBECONFIG"] = str(self.kubeconfig)
        made["PATH"] = f"{cache_folder()}:{made.get('PATH', os.defpath)}"
        return {key: value for key, value in made.items() if key.lower() not in _PROXY_VARIABLES}

    def _tool(
        self,
        binary: Path,
        argv: Sequence[str],
        *,
        input: str | None,  # noqa: A002 - as subprocess.run calls it
        check: bool,
        timeout_s: float,
    ) -> str:
        try:
            done = subprocess.run(
                [str(binary), *argv],
                input=input,
                env=self.client_environment(),
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as error:
            command = f"{binary.name} {' '.join(argv)}"
            raise ClusterError(f"{command}: no end within {timeout_s:.0f} s") from error
        if done.returncode == 0:
            return done.stdout
        if check:
            raise ClusterError(f"{binary.name} {' '.join(argv)} failed:\n{done.stderr.strip()}")
        return done.stdout + done.stderr

    # What the cluster has

    def add_kwok_nodes(self, count: int) -> None:
        """Have at least `count` fake nodes; pods on them are ready at once and do nothing.

        A pod gets there only with `kwok.NODE_SELECTOR` and `kwok.TOLERATIONS`.
        """
        kwok.ensure(self, count)

    def install_metrics_server(self) -> None:
        """Have the metrics API, with numbers of the real node's pods; it stays."""
        addons.install_metrics_server(self)

    def install_lws(self) -> None:
        """Have LeaderWorkerSets; they stay until uninstall_lws()."""
        addons.install_lws(self)

    def uninstall_lws(self) -> None:
        """Have no LeaderWorkerSets any more."""
        addons.uninstall_lws(self)

    def load_image(self, archive: Path) -> None:
        """Have the images of a docker-archive or oci-archive on the node. Raises ClusterError.

        An archive that was put there before is not put there again: it takes seconds.
        """
        written = (archive.resolve(), archive.stat().st_mtime_ns)
        if written not in self._loaded:
            real_node.load_image(self, archive)
            self._loaded.add(written)

    def tag_image(self, image: str, other: str) -> None:
        """Have an image of the node under another name besides. Raises ClusterError."""
        real_node.tag_image(self, image, other)

    def images(self) -> list[str]:
        """The references of the images that the node has."""
        return real_node.images(self)

    def set_node_capacity(self, capacity: dict[str, str | int | None]) -> None:
        """Let the real node offer extended resources ("example.com/gpu"); None takes one away."""
        real_node.set_capacity(self, capacity)

    def audit_mark(self) -> int:
        """A place in the log of API calls, for audit_calls()."""
        return audit.mark(self.plane.audit_log)

    def audit_calls(
        self, *, user: str | None = None, user_agent: str | None = None, after: int = 0
    ) -> list[audit.Call]:
        """The API calls since `after` of a user (exact name) or user agent (its beginning).

        Calls of the cluster's own components are not recorded.
        """
        return audit.calls(self.plane.audit_log, user=user, user_agent=user_agent, after=after)

    def explain(self, namespace: str) -> str:
        """What a person would look at first when something in the namespace failed."""
        return explain.namespace_text(self, namespace)

    @property
    def has_node(self) -> bool:
        """Whether it has a node that runs containers."""
        return self.components.running("kubelet")

    def process_memory(self) -> dict[str, int]:
        """The resident memory of its programs, in MiB."""
        return self.components.memory_mib()

    # Its end

    def down(self) -> None:
        """End everything and wait until nothing of it is left. Raises ClusterError."""
        for client in self._clients:
            client.kill()
            client.wait()
        take_down(self._run)
        self.components.reap(5.0)
        if self._keeper is not None:
            self._keeper.wait(5.0)


def up(name: str, *, node: bool = False, stay: bool = False) -> Cluster:
    """Start a cluster, with `node` one that runs containers. Raises ClusterError.

    It ends with the calling process, or with `down`; with `stay` only with `take_down`.
    """
    sweep()
    run = Run(base_folder() / name)
    if run.alive:
        raise ClusterError(f"the cluster {name} is there already")
    run.folder.mkdir(parents=True, mode=0o700)
    try:
        keeper, init = _start_keeper(run, None if stay else os.getpid())
        components = Components(init, run.folder)
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
            plane = control_plane.prepare(run.folder, listening.getsockname()[1])
            (run.folder / "api-port").write_text(str(plane.api_port))
            control_plane.start(plane, components, listening)
        cluster = Cluster(run, plane, components, init, keeper)
        if node:
            real_node.start(cluster)
        return cluster
    except BaseException:
        take_down(run)
        raise


def attach(name: str) -> Cluster:
    """The cluster of this name, which another process started. Raises ClusterError."""
    run = Run(base_folder() / name)
    state = run.state()
    if state is None or not run.alive:
        raise ClusterError(f"no cluster {name} is running")
    port = int((run.folder / "api-port").read_text())
    pki = Pki(run.folder / "pki")
    plane = ControlPlane(run.folder, pki, port, pki.folder / "admin.kubeconfig")
    return Cluster(run, plane, Components(state.init, run.folder), state.init)


def take_down(run: Run) -> None:
    """End the cluster of this folder, dead or alive. Raises ClusterError."""
    keeper = run.keeper()
    if keeper is not None:
        keeper.terminate()
        end = time.monotonic() + _DOWN_DEADLINE_S
        while keeper.alive:
            if time.monotonic() > end:
                keeper.kill()
                break
            time.sleep(0.02)
    run.remove()
    if run.folder.exists():
        raise ClusterError(f"{run.folder} could not be removed")


def _start_keeper(run: Run, owner_pid: int | None) -> tuple[subprocess.Popen[bytes], Process]:
    """Start the keeper and wait for the namespaces; the keeper and their first process."""
    keeper = Path(__file__).with_name("keeper.py")
    log = run.folder / "keeper.log"
    with log.open("wb") as out:
        child = subprocess.Popen(
            [sys.executable, str(keeper), str(run.folder), str(owner_pid or "-")],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    end = time.monotonic() + _START_DEADLINE_S
    while (state := run.state()) is None:
        if child.poll() is not None or time.monotonic() > end:
            words = log.read_text() if log.exists() else ""
            raise ClusterError(f"the cluster's namespaces could not be made:\n{words}")
        time.sleep(0.01)
    return child, state.init

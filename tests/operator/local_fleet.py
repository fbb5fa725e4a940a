"""The kit of local mode: a fleet of stand-in pods, from outside through its socket.

Run as a program, it is the supervisor of such a fleet: `daemon` is what --detach starts, and
`up FILE` is a user's command.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from xpyd_operator.manifests.engine_flags import FLAGS
from xpyd_operator.plan.values import Probe, Probes
from xpyd_operator.up import control, run
from xpyd_operator.up.client import read_view, take_fleet_down
from xpyd_operator.up.control import FleetView, PodView
from xpyd_operator.up.folder import FleetFolder, ProcessId
from xpyd_operator.up.programs import Pod, Programs
from xpyd_operator.up.run import UpOptions, run_up

SUPERVISOR = Path(__file__)
POD = Path(__file__).with_name("stand_in_pod.py")
DAEMON = (sys.executable, str(SUPERVISOR), "daemon")
DEADLINE_S = 20.0


def until(what, deadline_s: float = DEADLINE_S):
    """Poll `what` until it is true; its value."""
    end = time.monotonic() + deadline_s
    while True:
        value = what()
        if value:
            return value
        assert time.monotonic() < end, "not in time"
        time.sleep(0.02)


class LocalFleet:
    """A document, its model folder and the fleet that runs it, all below one temporary folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.file = folder / "fleet.yaml"
        self.state = FleetFolder(folder / "state" / "xpyd" / name)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        self.children: list[subprocess.Popen[bytes]] = []

    def write(self, args=(), *, prefill=1, decode=2, drain=30, layout=None) -> None:
        pools = [("prefill", "Prefill", prefill), ("decode", "Decode", decode)]
        rows = [
            {"name": pool, "role": role, "replicas": replicas, "resources": {"gpus": 0}}
            for pool, role, replicas in pools
        ]
        rows[1]["parallelism"] = layout or {}
        spec = {
            "model": {"uri": "file://model"},
            # An engine's flags are checked before anything starts; these are the stand-in's.
            "engine": {
                "args": [arg for arg in args if arg.partition("=")[0] in FLAGS],
                "env": [{"name": "STAND_IN_ARGS", "value": " ".join(args)}],
            },
            "pools": rows,
            "kvTransfer": {"hostPoolSize": "1Mi"},
            "drain": {"timeoutSeconds": drain},
        }
        document = {
            "apiVersion": "xpyd.dev/v1alpha1",
            "kind": "InferenceFleet",
            "metadata": {"name": self.name},
            "spec": spec,
        }
        self.file.write_text(json.dumps(document))

    def up(self, *, detach=True, timeout_s=DEADLINE_S, **flags: str) -> int:
        options = UpOptions(str(self.file), timeout_s=timeout_s, **flags)
        return run_up(options, detach=detach, daemon=DAEMON)

    def foreground(self) -> subprocess.Popen[bytes]:
        """`xpyd up` as a person runs it, with the pods' lines on its standard output."""
        argv = [sys.executable, str(SUPERVISOR), "up", str(self.file)]
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.children.append(child)
        return child

    def view(self) -> FleetView:
        view = read_view(self.state)
        assert view is not None
        return view

    def settled(self) -> FleetView:
        def ready():
            view = read_view(self.state)
            return view if view is not None and view.ready else None

        return until(ready)

    def pods(self) -> dict[str, PodView]:
        """Name without the fleet's -> pod."""
        return {pod.name.removeprefix(f"{self.name}-"): pod for pod in self.view().pods}

    def pids(self) -> dict[str, int]:
        return {name: pod.pid for name, pod in self.pods().items()}

    def ask(self, request: control.ControlRequest) -> control.ControlResponse:
        return control.send_request(self.state.socket, request)

    def processes(self) -> list[ProcessId]:
        record = self.state.read_record()
        return [pod.process for pod in record.pods] if record else []

    def start_line(self, pod: str) -> dict:
        """What a stand-in was started with."""
        text = self.state.log_of(f"{self.name}-{pod}").read_text()
        return json.loads(text.splitlines()[0].partition("stand-in: ")[2])

    def end(self) -> None:
        """Whatever a test left running."""
        processes = self.processes()
        with contextlib.suppress(Exception):
            take_fleet_down(self.name, 0.0)
        for process in processes:
            process.signal(signal.SIGKILL, group=True)
        for child in self.children:
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def program(pod: Pod) -> list[str]:
    return [sys.executable, "-S", "-E", str(POD), pod.template.role]


QUICK_PROBES = "TESTS_QUICK_PROBES"
"""Set: an instance that does not answer for half a second is taken for hung."""


def programs() -> Programs:
    if QUICK_PROBES not in os.environ:
        return Programs(program)
    probes = Probes(Probe("/live", 0.2, 100, 0.2), Probe("/live", 0.2, 2, 0.3))
    return Programs(program, lambda role: probes)


if __name__ == "__main__":
    mode = sys.argv.pop(1)
    if mode == "daemon":
        sys.exit(run.main(programs()))
    if mode == "up-detached":
        try:
            sys.exit(run_up(UpOptions(sys.argv[1]), detach=True, daemon=DAEMON))
        except KeyboardInterrupt:  # as `cli.main`
            sys.exit(130)
    sys.exit(run_up(UpOptions(sys.argv[1]), detach=False, programs=programs()))

"""What programs used: processor seconds and memory, from /proc; and the operator as one of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path

from tests.cluster.harness import Cluster, ClusterError, wait_for
from tests.cluster.harness.runs import children

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_START_S = 60.0
_STOP_S = 15.0

Sample = tuple[str, tuple[tuple[str, str], ...]]


def cpu_s(pid: int) -> float:
    """Processor time that the process used so far, in seconds; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def memory_mib(pid: int) -> dict[str, float]:
    """Resident memory now and at its most."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = {name: int(kib) / 1024 for name, kib in re.findall(r"^(Vm\w+):\s+(\d+) kB", text, re.M)}
    return {"now": round(found["VmRSS"], 1), "peak": round(found["VmHWM"], 1)}


def cluster_cpu_s(cluster: Cluster) -> dict[str, float]:
    """Processor time of each of the cluster's programs so far."""
    return {
        name: sum(cpu_s(pid) for pid in children(process.pid))
        for name, process in cluster.components.processes().items()
    }


def machine_s() -> tuple[float, float]:
    """Processor time of the whole machine so far: all of it, and what was used of it."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    return sum(ticks) * _TICK_S, (sum(ticks) - idle) * _TICK_S


def since(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What each used in between, in seconds."""
    return {name: round(after[name] - before.get(name, 0.0), 2) for name in sorted(after)}


class Operator:
    """`xpyd operator` as a process beside this one, with a user of its own in the audit log."""

    USER = "bench-operator"

    def __init__(self, cluster: Cluster, log: Path, *flags: str) -> None:
        self._log = log
        self._log_from = log.stat().st_size if log.exists() else 0
        argv = [sys.executable, "-m", "xpyd_core", "operator", *flags]
        argv += ["--http-host=127.0.0.1", "--http-port=0"]
        env = cluster.client_environment()
        env["KUBECONFIG"] = str(_kubeconfig(cluster, self.USER))
        with log.open("ab") as out:
            self.process = subprocess.Popen(argv, env=env, stdout=out, stderr=out)
        self._port = 0
        wait_for(self._is_ready, _START_S, "the operator is ready", explain=self.log)

    def log(self) -> str:
        """What it said."""
        return self._log.read_text()[self._log_from :]

    def cpu_s(self) -> float:
        """Processor time so far."""
        return cpu_s(self.process.pid)

    def memory_mib(self) -> dict[str, float]:
        """Resident memory now and at its most."""
        return memory_mib(self.process.pid)

    def samples(self) -> dict[Sample, float]:
        """Its metrics by name and labels."""
        return {
            (name, tuple(sorted(_LABEL.findall(labels)))): float(value)
            for name, labels, value in _SAMPLE.findall(self._fetch("/metrics"))
        }

    def total(self, name: str, **labels: str) -> int:
        """A counter, all its series together that have these labels."""
        wanted = set(labels.items())
        found = self.samples().items()
        return int(sum(v for (n, pairs), v in found if n == name and wanted <= set(pairs)))

    def heard(self) -> Counter[str]:
        """Watch events so far, by kind."""
        found: Counter[str] = Counter()
        for (name, pairs), value in self.samples().items():
            if name == "xpyd_operator_watch_events_total":
                found[dict(pairs)["kind"]] += int(value)
        return found

    def turns(self) -> int:
        """Turns of fleets that ended."""
        return self.total("xpyd_operator_reconciles_total")

    def stop(self) -> None:
        """SIGTERM, and at last SIGKILL."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(_STOP_S)
            finally:
                self.process.kill()
                self.process.wait()

    def _is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise ClusterError(f"the operator ended: {self.log()[-2000:]}")
        found = re.findall(r"HTTP on port (\d+)", self.log())
        self._port = int(found[-1]) if found else 0
        return bool(self._port) and self._fetch("/readyz") != ""

    def _fetch(self, path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=10) as got:
                return got.read().decode()
        except urllib.error.HTTPError:
            return ""


def _kubeconfig(cluster: Cluster, user: str) -> Path:
    path = cluster.plane.pki.folder / f"{user}.kubeconfig"
    if not path.exists():
        cluster.plane.pki.kubeconfig(user, user, server=cluster.api_url)
        role = ("--clusterrole=cluster-admin", f"--user={user}")
        cluster.kubectl("create", "clusterrolebinding", user, *role)
    return path

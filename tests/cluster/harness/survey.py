"""What a cluster could leave on a machine, as lines: those of before and after must be the same.

Processes, mounts, cgroups and folders are those of the cluster asked for; addresses, packet
filter rules, settings and fixed folders are the machine's own, which no cluster may change.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.harness.runs import Process, Run, base_folder, cgroup_controllers, parent_of

_SETTINGS = (
    "net/ipv4/ip_forward",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
)
_FOLDERS = (
    "/etc/cni/net.d",
    "/opt/containerd",
    "/run/containerd",
    "/run/netns",
    "/var/lib/cni",
    "/var/lib/containerd",
    "/var/lib/kubelet",
    "/var/log/containers",
    "/var/log/pods",
)


def survey(name: str) -> frozenset[str]:
    """What is there now that has to do with the cluster, or that it could have changed."""
    run = Run(base_folder() / name)
    return frozenset([*_cluster(run), *_machine()])


def processes_of(init: Process) -> list[Process]:
    """All processes of the cluster whose first process is `init`: all that descend from it, and
    all that were sent into its mounts. Those of pods have mounts of their own, but ancestors here.
    """
    mounts = _link(init.pid)
    parents = {pid: parent_of(pid) for pid in _pids()}
    found: list[Process] = []
    for pid in parents:
        line = [pid]
        while (parent := parents.get(line[-1])) and len(line) < 100:
            line.append(parent)
        if any(one == init.pid or _link(one) == mounts for one in line):
            # It may have ended meanwhile.
            with contextlib.suppress(ProcessLookupError):
                found.append(Process.of(pid))
    return found


def _cluster(run: Run) -> Iterator[str]:
    folder = str(run.folder)
    if run.folder.exists():
        yield f"folder {folder}"
    for pid in _pids():
        command = _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ")
        if folder in command:
            yield f"process {pid} {command}"
    for line in _read(Path("/proc/self/mounts")).splitlines():
        if folder in line:
            yield f"mount {line}"
    for controller in cgroup_controllers():
        if (controller / run.cgroup).exists():
            yield f"cgroup {controller / run.cgroup}"


def _machine() -> Iterator[str]:
    for argv in (("ip", "-brief", "address"), ("ip", "-o", "route"), ("nft", "list", "ruleset")):
        for line in _output(*argv).splitlines():
            yield f"{' '.join(argv)}: {line.strip()}"
    for name in _SETTINGS:
        yield f"setting {name} {_read(Path('/proc/sys') / name)}"
    for name in _FOLDERS:
        if Path(name).exists():
            yield f"folder {name}"


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _link(pid: int) -> str:
    """The mounts that a process sees; "" when it is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        # It ended, or the kernel has no such setting.
        return ""


def _output(*argv: str) -> str:
    """What a program prints; "" where the machine has no such program."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=20).stdout
    except FileNotFoundError:
        return ""

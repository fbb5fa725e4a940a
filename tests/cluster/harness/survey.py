"""What a cluster could leave on a machine, as lines: those of before and after must be the same.

Processes, mounts, cgroups and folders are those of the cluster asked for; addresses, packet
filter rules, settings and fixed folders are the machine's own, which no cluster may change.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.harness.runs import Run, base_folder, cgroup_controllers

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


def namespace_of(pid: int) -> str:
    """The process-number namespace of a process, for processes_in()."""
    return os.readlink(f"/proc/{pid}/ns/pid")


def processes_in(namespace: str) -> list[int]:
    """The processes of a namespace."""
    found: list[int] = []
    for pid in _pids():
        try:
            if namespace_of(pid) == namespace:
                found.append(pid)
        except OSError:
            # It ended meanwhile.
            continue
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
    for argv in (("ip", "-o", "address"), ("ip", "-o", "route"), ("nft", "list", "ruleset")):
        for line in _output(*argv).splitlines():
            yield f"{' '.join(argv)}: {line.strip()}"
    for name in _SETTINGS:
        yield f"setting {name} {_read(Path('/proc/sys') / name)}"
    for name in _FOLDERS:
        if Path(name).exists():
            yield f"folder {name}"


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


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

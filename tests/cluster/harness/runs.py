"""Run folders: where a cluster lives on disk, who keeps it alive, and what a dead one leaves.

One folder per cluster below the temporary folder. `keeper.py` owns the folder and everything
the cluster consists of; this module is what others know about it: it finds clusters, says which
are alive, and removes what a killed keeper could not. Standard library only: the keeper is
started as a file and imports it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
_GONE_DEADLINE_S = 20.0


@dataclass(frozen=True)
class Process:
    """A process that cannot be confused with a later one of the same number."""

    pid: int
    started: int
    """Field 22 of /proc/PID/stat: clock ticks from boot to its start."""

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has this number now. Raises ProcessLookupError."""
        started = _started(pid)
        if started is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid, started)

    @property
    def alive(self) -> bool:
        """Whether it still runs (a zombie does not)."""
        return _started(self.pid) == self.started

    def kill(self) -> None:
        """End it now; nothing happens when it is gone."""
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to end; nothing happens when it is gone."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        if self.alive:
            # It may end between the two.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass(frozen=True)
class State:
    """What a keeper writes down about its cluster."""

    keeper: Process
    init: Process
    """The first process of the cluster's namespaces: all others end with it."""
    owner: Process | None
    """The process for which the cluster exists; None: it stays until `cluster-down`."""


@dataclass(frozen=True)
class Run:
    """A cluster's folder."""

    folder: Path

    @property
    def name(self) -> str:
        """The cluster's name, unique among those of this machine."""
        return self.folder.name

    @property
    def cgroup(self) -> str:
        """The cgroup (below each controller) that holds the node's pods."""
        return f"xpyd-cluster-{self.name}"

    def state(self) -> State | None:
        """What its keeper wrote; None before that."""
        try:
            data = json.loads((self.folder / "state.json").read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        owner = data["owner"]
        return State(
            keeper=Process(**data["keeper"]),
            init=Process(**data["init"]),
            owner=None if owner is None else Process(**owner),
        )

    def write_state(self, state: State) -> None:
        """Publish the state, whole or not at all."""
        new = self.folder / "state.json.new"
        new.write_text(json.dumps(asdict(state)))
        new.rename(self.folder / "state.json")

    @property
    def alive(self) -> bool:
        """Whether the keeper is there; it is what removes the rest."""
        keeper = self.keeper()
        return keeper is not None and keeper.alive

    def keeper(self) -> Process | None:
        """The keeper; known before the rest of the state, which takes it a moment to make."""
        try:
            pid, started = (self.folder / "keeper").read_text().split()
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        return Process(int(pid), int(started))

    def remove(self) -> None:
        """Kill what still runs, remove the cgroups and the folder.

        All mounts are in the cluster's own mount namespace, so they are gone with its last
        process and nothing outside can be reached through the folder.
        """
        state = self.state()
        if state is not None:
            state.init.kill()
            _until_gone(state.init)
        remove_cgroups(self.cgroup)
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            # Other clusters may be in it.
            self.folder.parent.rmdir()


def base_folder() -> Path:
    """Where the run folders are: short, because a socket's path may have 107 bytes."""
    return Path(tempfile.gettempdir()) / f"xpyd-cluster-{os.getuid()}"


def runs() -> list[Run]:
    """All clusters of this user, dead ones included."""
    base = base_folder()
    if not base.is_dir():
        return []
    return [Run(folder) for folder in sorted(base.iterdir()) if folder.is_dir()]


def sweep() -> list[str]:
    """Remove what clusters without a keeper left; their names.

    A folder younger than a minute without a keeper belongs to a start that is under way.
    """
    swept: list[str] = []
    for run in runs():
        young = run.keeper() is None and time.time() - run.folder.stat().st_mtime < 60
        if not run.alive and not young:
            run.remove()
            swept.append(run.name)
    return swept


def cgroup_controllers() -> list[Path]:
    """The roots of the cgroup hierarchies: one per controller, or the one of v2, or both."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [entry for entry in sorted(CGROUPS.iterdir()) if (entry / "cgroup.procs").exists()]


def remove_cgroups(name: str) -> None:
    """Remove the cgroup and all below it in every hierarchy; processes in it must be gone."""
    for controller in cgroup_controllers():
        top = controller / name
        for folder, _, _ in os.walk(top, topdown=False):
            _remove_cgroup(Path(folder))


def _remove_cgroup(folder: Path) -> None:
    """A cgroup is busy for a moment after its last process died."""
    end = time.monotonic() + _GONE_DEADLINE_S
    while True:
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _until_gone(process: Process) -> None:
    end = time.monotonic() + _GONE_DEADLINE_S
    while process.alive and time.monotonic() < end:
        time.sleep(0.02)


def children(parent: int) -> list[int]:
    """The processes whose parent is `parent`."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if parent_of(pid) == parent]


def parent_of(pid: int) -> int:
    """The process's parent; 0 when it has none here or is gone."""
    fields = _stat(pid)
    return 0 if fields is None else int(fields[1])


def rss_mib(pid: int) -> int:
    """The memory that is resident for a process; 0 when it is gone."""
    fields = _stat(pid)
    return 0 if fields is None else int(fields[21]) * os.sysconf("SC_PAGE_SIZE") >> 20


def _started(pid: int) -> int | None:
    """When the process started, in clock ticks after boot; None when it is gone or a zombie."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third on: its state. None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name before them is in brackets and may hold anything, spaces and brackets included.
    return text.rpartition(")")[2].split()

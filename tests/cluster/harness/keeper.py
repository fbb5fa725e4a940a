"""The process that owns a cluster: started once per cluster, outside of its namespaces.

It makes the namespaces (network, mounts, process numbers) through `unshare` with `inside.py` as
their first process, writes down who is who, and then waits. When it is told to stop, or the
process that the cluster is for dies, or the inside dies, it kills the first process of the
namespaces - the kernel then ends every other one in them, containers included, and their mounts
and network go with them - and removes the cgroups and the run folder. If the keeper itself is
killed, the inside ends too (it watches the keeper), and the next start sweeps up the rest.

    python keeper.py RUN_FOLDER OWNER_PID|-
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from runs import Process, Run, State, children

_START_DEADLINE_S = 30.0


def main(folder: Path, owner_pid: int | None) -> int:
    """Keep the cluster of `folder` until something ends it."""
    run = Run(folder)
    myself = Process.of(os.getpid())
    (folder / "keeper").write_text(f"{myself.pid} {myself.started}")
    stop_read, stop_write = os.pipe()
    os.set_blocking(stop_write, False)
    signal.set_wakeup_fd(stop_write)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, _wake)
    watched = {stop_read}
    try:
        owner = None
        if owner_pid is not None:
            # The owner may be gone by now: then there is nothing to keep.
            owner = Process.of(owner_pid)
            watched.add(os.pidfd_open(owner_pid))
        unshare = _start_inside(folder, myself)
        try:
            init = _first_process(unshare, folder)
            run.write_state(State(keeper=myself, init=init, owner=owner))
            select.select(list(watched), [], [])
        finally:
            # With --kill-child the namespaces' first process ends with it.
            unshare.kill()
            unshare.wait()
    finally:
        run.remove()
    return 0


def _wake(number: int, frame: FrameType | None) -> None:
    """Nothing: that there is a handler makes the signal wake the wait above."""


def _start_inside(folder: Path, myself: Process) -> subprocess.Popen[bytes]:
    keeper = os.pidfd_open(myself.pid)
    inside = Path(__file__).with_name("inside.py")
    argv = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    # -I: nothing of the environment decides what the first process imports.
    argv += [sys.executable, "-I", str(inside), str(folder), str(keeper)]
    return subprocess.Popen(argv, pass_fds=(keeper,), start_new_session=True)


def _first_process(unshare: subprocess.Popen[bytes], folder: Path) -> Process:
    """The namespaces' first process, as this side numbers it, once it has set everything up."""
    end = time.monotonic() + _START_DEADLINE_S
    while not (folder / "inside-ready").exists():
        if unshare.poll() is not None:
            raise RuntimeError(f"the namespaces' first process ended with {unshare.returncode}")
        if time.monotonic() > end:
            raise RuntimeError(f"the namespaces were not set up in {_START_DEADLINE_S:.0f} s")
        time.sleep(0.01)
    (first,) = children(unshare.pid)
    return Process.of(first)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), None if sys.argv[2] == "-" else int(sys.argv[2])))

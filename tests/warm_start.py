"""Starts the project's programs as forks of one process that has imported what they import.

An engine's imports (torch's most of all) take seconds of a core; a fork takes milliseconds. A
program started here runs as with `python -m MODULE`: its own session, environment, descriptors and
exit status, but no interpreter's start. So do the ranks of an engine (tests/warm_ranks.py). What
others start (`xpyd up`, pods) starts cold, so that the whole of a start is tested there.

    test --Popen--> this module as a program: imports, then waits, with one thread
      |--- a request, and the descriptors of its output --->  fork --> the program
      |<-- process id ----------------------------------------|
      |<-- exit status, on a pipe of its own -----------------|

What all programs of one test process share, and cold ones do not: the seed of `hash()`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from tests import warm_ranks
from xpyd_core.cli import build_parser

ROOT = Path(__file__).parents[1]
# The programs' front modules and what these import late. tests/repo/test_warm_start.py has a look
# whether they exist: without one of them a start is slow, and nothing else.
PRELOADED = (
    "xpyd_worker.main",
    "xpyd_worker.load.engine",
    "xpyd_worker.kernels.cpu.kernels",
    "xpyd_worker.kv.rank",
    "xpyd_worker.ranks.start.program",
    "xpyd_router.router",
    "huggingface_hub.hf_api",
    "tokenizers",
    "jinja2",
)
_STATUS = struct.Struct("i")
_START_S = 120.0
_MAX_REQUEST = 1 << 17


class WarmProcess:
    """A started program. As subprocess.Popen's, as far as tests use that."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def __del__(self) -> None:
        if self._status >= 0:
            os.close(self._status)

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended; subprocess.TimeoutExpired when that takes longer."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            data = os.read(self._status, _STATUS.size)
            assert data, "the server of warm starts ended"
            self.returncode = os.waitstatus_to_exitcode(_STATUS.unpack(data)[0])
            os.close(self._status)
            self._status = -1
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Server:
    """The process that forks."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_START_S)
        self._lock = threading.Lock()
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        atexit.register(self._end)

    def _end(self) -> None:
        self._socket.close()
        self._popen.wait(10)

    def start(
        self, argv: Sequence[str], *, env: dict[str, str], outputs: tuple[BinaryIO, BinaryIO]
    ) -> WarmProcess:
        ours, theirs = os.pipe()
        request = json.dumps({"argv": list(argv), "env": env}).encode()
        assert len(request) < _MAX_REQUEST
        with self._lock:
            try:
                descriptors = [theirs, *(file.fileno() for file in outputs)]
                socket.send_fds(self._socket, [request], descriptors)
            finally:
                os.close(theirs)
            pid = self._socket.recv(16)
        assert pid, "the server of warm starts ended"
        return WarmProcess(int(pid), ours)


@functools.cache
def _server() -> _Server:
    return _Server()


def start_warm(
    argv: Sequence[str],
    *,
    stderr: BinaryIO,
    stdout: BinaryIO | None = None,
    env: dict[str, str] | None = None,
) -> WarmProcess:
    """What `python -m *argv` does, in the repository's folder, in a session of its own."""
    return _server().start(
        argv, env=dict(os.environ if env is None else env), outputs=(stdout or stderr, stderr)
    )


def _serve(descriptor: int) -> None:
    """Fork what is asked for, until the test process ends."""
    _preload()
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    statuses: dict[int, int] = {}
    with socket.socket(fileno=descriptor) as requests:
        while True:
            readable, _, _ = select.select([requests, woken], [], [])
            if woken in readable:
                os.read(woken, 4096)
                _report(statuses)
            if requests in readable:
                request, descriptors, _, _ = socket.recv_fds(requests, _MAX_REQUEST, 3)
                if not request:
                    return
                status, *outputs = descriptors
                pid = os.fork()
                if not pid:
                    requests.detach()
                    _become(
                        request, outputs, mine=(descriptor, woken, wake, status, *statuses.values())
                    )
                statuses[pid] = status
                for output in outputs:
                    os.close(output)
                requests.send(str(pid).encode())


def _preload() -> None:
    """One thread must be left: what another holds would be held for ever behind a fork."""
    from xpyd_worker.system import prepare_for_torch

    prepare_for_torch()
    for name in PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    build_parser()  # imports each sub-command's front module
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads after the imports"
    gc.collect()
    gc.freeze()


def _report(statuses: dict[int, int]) -> None:
    """How those who have ended did."""
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with contextlib.suppress(BrokenPipeError), os.fdopen(statuses.pop(pid), "wb") as pipe:
            pipe.write(_STATUS.pack(status))


def _become(request: bytes, outputs: Sequence[int], *, mine: Sequence[int]) -> None:
    """Be the program. Does not return."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for number, output in enumerate(outputs, start=1):
            os.dup2(output, number)
        for descriptor in {*mine, *outputs}:
            os.close(descriptor)
        asked = json.loads(request)
        module, *arguments = asked["argv"]
        os.environ.clear()
        os.environ.update(asked["env"])
        sys.orig_argv[:] = [sys.executable, "-m", module, *arguments]
        sys.argv[:] = [module, *arguments]
        if warm_ranks.may_need_ranks(arguments):
            warm_ranks.keep_waiting(_run)
        code = _run(module)
    finally:
        # Unloading torch module by module would take a second.
        os._exit(code)


def _run(module: str) -> int:
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException:  # the edge of this process
        traceback.print_exc()
        code = 1
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    sys.stderr.write(f"{end.code}\n")
    return 1


if __name__ == "__main__":
    _serve(int(sys.argv[1]))

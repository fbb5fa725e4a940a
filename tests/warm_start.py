"""Starts the project's programs as forks of one process that has imported what they import.

An engine's imports (torch's most of all) take seconds of a core; a fork takes milliseconds. The
fork server is the product's (xpyd_core.children), with routers preloaded, too: a program started
here is a child as `python -m MODULE` is, in a session of its own. So are the ranks of an engine
(tests/warm_ranks.py). What others start (pods, `LLM()`) starts as it does for users.

What all programs of one test process share, and cold ones do not: the seed of `hash()`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from tests import warm_ranks
from xpyd_core.children import Child, ForkServer, Start
from xpyd_core.cli import build_parser
from xpyd_core.fork_server import PYTHON

ROOT = Path(__file__).parents[1]
# Beside an engine's modules. tests/repo/test_warm_start.py has a look whether they exist: without
# one of them a start is slow, and nothing else.
PRELOADED = ("xpyd_router.router", "huggingface_hub.hf_api", "tokenizers", "jinja2")
_START_S = 120.0


class WarmProcess:
    """A started program. As subprocess.Popen's, as far as tests use that."""

    def __init__(self, child: Child) -> None:
        assert child.pid is not None, "start_warm waits for it"
        self.pid = child.pid
        self._child = child
        self._ended = os.pidfd_open(child.pid)

    def __del__(self) -> None:
        os.close(self._ended)

    @property
    def returncode(self) -> int | None:
        return self._child.returncode

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended; subprocess.TimeoutExpired when that takes longer."""
        ended = select.poll()
        ended.register(self._ended, select.POLLIN)
        if not ended.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return self._child.wait()

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            self._child.signal(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def _forks() -> tuple[ForkServer, threading.Lock]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    forks = ForkServer([f"{__name__}:preload"], environ)
    atexit.register(forks.close)
    return forks, threading.Lock()


def start_warm(
    argv: Sequence[str],
    *,
    stderr: BinaryIO,
    env: dict[str, str] | None = None,
) -> WarmProcess:
    """What `python -m *argv` does, in the repository's folder, in a session of its own."""
    if warm_ranks.may_need_ranks(argv[1:]):
        argv = [warm_ranks.__name__, *argv]
    environ = dict(os.environ if env is None else env)
    forks, lock = _forks()
    with lock:
        child = forks.start(Start([*PYTHON, *argv], environ, stderr.fileno()))
        deadline_s = time.monotonic() + _START_S
        while child.pid is None:
            assert child.returncode is None, f"it could not be started: {child.returncode}"
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, "the fork server does not answer"
            select.select([forks], [], [], left_s)
            forks.take()
    return WarmProcess(child)


def preload() -> None:
    """What programs import, in the fork server."""
    from xpyd_worker.preload import preload as preload_engine

    preload_engine()
    for name in PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    build_parser()  # imports each sub-command's front module

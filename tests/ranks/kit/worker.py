"""`xpyd worker` as a process, alone or with several ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx

from tests.ranks.kit.instances import WAIT_S
from tests.warm_start import WarmProcess, start_warm

HOST = f"127.{46 + os.getpid() % 200}.{os.getpid() // 200 % 250}.1"
FLAGS = ["--model", "examples/demo-model", "--dtype", "float32", "--kv-cache-memory", "8Mi"]
PLACE = ["--threads", "1", "--host", HOST, "--port", "20001", "--drain-timeout", "60"]
Program = WarmProcess | subprocess.Popen[bytes]
LONG = {"prompt": "The", "max_tokens": 1000, "ignore_eos": True, "stream": True}


@dataclass
class Worker:
    """Its process and its log; `client` asks it."""

    process: Program
    client: httpx.Client
    log: Path

    def tree(self) -> list[int]:
        """All processes below the main one."""
        found: list[int] = []
        left = [self.process.pid]
        while left:
            # One that has just ended has none.
            with suppress(OSError):
                for one in Path(f"/proc/{left.pop()}/task").iterdir():
                    below = [int(pid) for pid in (one / "children").read_text().split()]
                    found += below
                    left += below
        return found

    def ranks(self) -> list[int]:
        """Process ids, rank 0 first."""
        named = {Path(f"/proc/{pid}/comm").read_text().strip(): pid for pid in self.tree()}
        places = sorted(int(name[10:]) for name in named if name.startswith("xpyd-rank-"))
        return [named[f"xpyd-rank-{rank}"] for rank in places]


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it holds."""
    ticks = threading.Event()
    for _ in range(round(3 * WAIT_S / 0.05)):
        if condition():
            return
        ticks.wait(0.05)
    raise AssertionError("it did not come to pass")


def start_cold(argv: Sequence[str], *, stderr: BinaryIO) -> subprocess.Popen[bytes]:
    """As users start it."""
    return subprocess.Popen([sys.executable, "-m", *argv], stderr=stderr, start_new_session=True)


@contextmanager
def loading(
    folder: Path,
    *flags: str,
    program: Sequence[str] = ("xpyd_core",),
    start: Callable[..., Program] = start_warm,
) -> Iterator[Worker]:
    """Just started; killed on leaving. `program`: the module that has the command, and what comes
    before it."""
    log = folder / "log"
    with log.open("wb") as file:
        process = start([*program, "worker", *FLAGS, *PLACE, *flags], stderr=file)
    try:
        with httpx.Client(base_url=f"http://{HOST}:20001", timeout=30, verify=False) as client:
            yield Worker(process, client, log)
    finally:
        process.kill()
        process.wait()


@contextmanager
def started(
    folder: Path, *flags: str, start: Callable[..., Program] = start_warm
) -> Iterator[Worker]:
    """Ready to be asked."""
    with loading(folder, *flags, start=start) as worker:

        def is_ready() -> bool:
            assert worker.process.poll() is None, worker.log.read_text()
            with suppress(httpx.TransportError):
                return worker.client.get("/health").status_code == 200
            return False

        wait_for(is_ready)
        yield worker

"""`xpyd worker` with two ranks, as a process: whatever is killed, all of it ends, and says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.ranks.kit import WAIT_S, is_alive
from xpyd_worker.ranks.loss import EXIT_RANK_ENDED, EXIT_RANK_SILENT

ROOT = Path(__file__).parents[2]
HOST = f"127.{46 + os.getpid() % 200}.{os.getpid() // 200 % 250}.1"
pytestmark = pytest.mark.slow  # torch is imported twice
FLAGS = ["--model", "examples/demo-model", "--dtype", "float32", "--kv-cache-memory", "8Mi"]
PLACE = ["--threads", "1", "--host", HOST, "--port", "20001", "--drain-timeout", "60"]
LONG = {"prompt": "The", "max_tokens": 1000, "ignore_eos": True, "stream": True}


@dataclass
class Worker:
    process: subprocess.Popen[bytes]
    client: httpx.Client
    log: Path

    def ranks(self) -> list[int]:
        """Process ids, rank 0 first."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sorted(int(pid) for task in tasks for pid in (task / "children").read_text().split())


def wait_for(condition: Callable[[], bool]) -> None:
    ticks = threading.Event()
    for _ in range(round(3 * WAIT_S / 0.05)):
        if condition():
            return
        ticks.wait(0.05)
    raise AssertionError("it did not come to pass")


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    with _started(tmp_path, "-tp", "2") as found:
        yield found


@contextmanager
def _loading(tmp_path: Path, *flags: str) -> Iterator[Worker]:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "xpyd_core", "worker", *FLAGS, *PLACE, *flags]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, cwd=ROOT)
    try:
        with httpx.Client(base_url=f"http://{HOST}:20001", timeout=30, verify=False) as client:
            yield Worker(process, client, log)
    finally:
        process.kill()
        process.wait()


@contextmanager
def _started(tmp_path: Path, *flags: str) -> Iterator[Worker]:
    with _loading(tmp_path, *flags) as worker:

        def is_ready() -> bool:
            assert worker.process.poll() is None, worker.log.read_text()
            with suppress(httpx.TransportError):
                return worker.client.get("/health").status_code == 200
            return False

        wait_for(is_ready)
        yield worker


@pytest.mark.parametrize(
    ("number", "status", "says"),
    [
        (signal.SIGKILL, EXIT_RANK_ENDED, "was ended by SIGKILL"),
        (signal.SIGSTOP, EXIT_RANK_SILENT, "has given no sign of life for 5 s"),
    ],
)
def test_a_rank_that_goes_ends_all_and_is_named_in_the_last_line(
    worker: Worker, number: signal.Signals, status: int, says: str
) -> None:
    ranks = worker.ranks()
    assert len(ranks) == 2
    with worker.client.stream("POST", "/v1/completions", json=LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(ranks[1], number)
        rest = [line for line in lines if line]
    assert '"type": "server_error"' in rest[-1]
    assert worker.process.wait(WAIT_S) == status
    last = worker.log.read_text().splitlines()[-1]
    assert f"the instance ended: rank 1 (stage 0, tensor share 1, pid {ranks[1]}) {says}" in last
    assert not any(map(is_alive, ranks))


def test_a_rank_that_is_killed_while_it_loads_gives_the_same_status(tmp_path: Path) -> None:
    with _loading(tmp_path, "-tp", "2") as worker:
        wait_for(lambda: bool(worker.ranks()))
        os.kill(worker.ranks()[-1], signal.SIGKILL)
        assert worker.process.wait(WAIT_S) == EXIT_RANK_ENDED
        last = worker.log.read_text().splitlines()[-1]
        assert "the instance cannot start: rank" in last
        assert "was ended by SIGKILL" in last


def test_ranks_end_with_a_main_process_that_is_killed(worker: Worker) -> None:
    ranks = worker.ranks()
    os.kill(ranks[0], signal.SIGSTOP)
    worker.process.kill()
    wait_for(lambda: not any(map(is_alive, ranks)))


def test_sigterm_to_all_of_them_drains(worker: Worker) -> None:
    """As a terminal or a container's end may deliver it."""
    ranks = worker.ranks()
    with worker.client.stream("POST", "/v1/completions", json=LONG | {"max_tokens": 50}) as answer:
        lines = answer.iter_lines()
        next(lines)
        for pid in (*ranks, worker.process.pid):
            os.kill(pid, signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert worker.process.wait(WAIT_S) == 0
    assert not any(map(is_alive, ranks))

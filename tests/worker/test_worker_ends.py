"""How the process ends: POST /drain, the engine's thread or the HTTP server dying by itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.warm_start import WarmProcess, start_warm

HOST = f"127.41.{os.getpid() % 250}.1"
WAIT_S = 180.0  # torch is imported, on whatever else this machine does
pytestmark = pytest.mark.slow  # each starts a worker
# Long enough that it still runs when the next thing happens, short enough to finish.
LONG = {"prompt": "The", "max_tokens": 400, "ignore_eos": True, "stream": True}
PATH = "/v1/completions"


@dataclass
class Worker:
    process: WarmProcess
    client: httpx.Client
    log: Path
    fault: Path


@contextmanager
def started(tmp_path: Path) -> Iterator[Worker]:
    """A worker whose process is there; its HTTP may not be yet."""
    log, fault = tmp_path / "log", tmp_path / "fault"
    fault.write_text("none")
    flags = ["--model", "examples/demo-model", "--dtype", "float32", "--kv-cache-memory", "32Mi"]
    place = ["--threads", "1", "--host", HOST, "--port", "20001", "--drain-timeout", "60"]
    start = ["tests.worker.dying_worker", str(fault), "worker"]
    with log.open("wb") as file:
        process = start_warm([*start, *flags, *place], stderr=file)
    try:
        with httpx.Client(base_url=f"http://{HOST}:20001", timeout=30, verify=False) as client:
            yield Worker(process, client, log, fault)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    with started(tmp_path) as found:
        wait_for(found, lambda: _is_ok(found, "/health"))
        yield found


def wait_for(worker: Worker, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert worker.process.poll() is None, worker.log.read_text()
        assert time.monotonic() < deadline, worker.log.read_text()
        time.sleep(0.05)


def _is_ok(worker: Worker, path: str) -> bool:
    try:
        return worker.client.get(path).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("sigterm", [False, True])
def test_post_drain_finishes_the_rest_and_exits_0(worker: Worker, sigterm: bool) -> None:
    with worker.client.stream("POST", PATH, json=LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
        left = worker.client.post("/drain")
        assert left.status_code == 202, left.text
        assert left.json()["state"] == "Draining"
        assert worker.client.post(PATH, json={"prompt": "a"}).status_code == 503
        if sigterm:
            # What Kubernetes sends after it is the first signal, and cuts nothing.
            worker.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert worker.process.wait(WAIT_S) == 0
    log = worker.log.read_text()
    assert "asked to drain" in log
    assert "are cut" not in log


def test_a_worker_that_is_asked_to_drain_while_it_loads_ends_at_once(tmp_path: Path) -> None:
    with started(tmp_path) as worker:
        wait_for(worker, lambda: _is_ok(worker, "/live"))
        assert worker.client.post("/drain").json()["state"] == "Starting"
        assert worker.process.wait(WAIT_S) == 0
        assert "serving demo-model" not in worker.log.read_text()


def test_when_the_engine_dies_its_requests_get_500_and_the_process_exits_1(worker: Worker) -> None:
    with worker.client.stream("POST", PATH, json=LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
        worker.fault.write_text("engine")
        rest = [line for line in lines if line]
    assert '"type": "server_error"' in rest[-1]
    assert worker.process.wait(WAIT_S) == 1
    log = worker.log.read_text()
    assert "CRITICAL xpyd_worker.main: the engine failed: ZeroDivisionError('told to')" in log


def test_when_the_http_server_dies_the_process_exits_1(worker: Worker) -> None:
    worker.fault.write_text("server")
    assert worker.process.wait(WAIT_S) == 1
    log = worker.log.read_text()
    assert "the HTTP server ended: ZeroDivisionError('told to')" in log

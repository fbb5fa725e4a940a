"""How the process ends: POST /drain, the engine's thread or the HTTP server dying by itself."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.ranks.kit.worker import Worker, loading

FAULT = "fault"
WAIT_S = 180.0  # torch is imported, on whatever else this machine does
pytestmark = pytest.mark.slow  # each starts a worker
# Long enough that it still runs when the next thing happens, short enough to finish.
LONG = {"prompt": "The", "max_tokens": 400, "ignore_eos": True, "stream": True}
PATH = "/v1/completions"


@contextmanager
def started(tmp_path: Path, fault: str = "none") -> Iterator[Worker]:
    """A worker whose process is there; its HTTP may not be yet."""
    file = tmp_path / FAULT
    file.write_text(fault)
    program = ("tests.worker.dying_worker", str(file))
    with loading(tmp_path, "--kv-cache-memory", "32Mi", program=program) as found:
        yield found


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
    with started(tmp_path, "load") as worker:
        wait_for(worker, lambda: _is_ok(worker, "/live"))
        assert worker.client.post("/drain").json()["state"] in ("Starting", "Draining")
        assert worker.process.wait(WAIT_S) == 0
        assert "serving demo-model" not in worker.log.read_text()


def test_when_the_engine_dies_its_requests_get_500_and_the_process_exits_1(worker: Worker) -> None:
    with worker.client.stream("POST", PATH, json=LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
        worker.log.with_name(FAULT).write_text("engine")
        rest = [line for line in lines if line]
    assert '"type": "server_error"' in rest[-1]
    assert worker.process.wait(WAIT_S) == 1
    log = worker.log.read_text()
    assert "CRITICAL xpyd_worker.main: the engine failed: ZeroDivisionError('told to')" in log


def test_when_the_http_server_dies_the_process_exits_1(worker: Worker) -> None:
    worker.log.with_name(FAULT).write_text("server")
    assert worker.process.wait(WAIT_S) == 1
    log = worker.log.read_text()
    assert "the HTTP server ended: ZeroDivisionError('told to')" in log

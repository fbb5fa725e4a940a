"""A replica of an engine dies behind a router: no client sees it, and the instance stays."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.harness import Fleet, empty_fleet, ranks_of, wait_for

pytestmark = pytest.mark.slow  # torch is imported four times
STREAMS = 8
BODY = {"model": "demo", "prompt": "The", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with empty_fleet(tmp_path) as running:
        running.start_router()
        running.start_engine("Aggregated", "-dp", "2", name="two")
        running.start_engine("Aggregated", name="one")
        running.wait_ready(*running.engines)
        yield running


def streamed(client: httpx.Client) -> Iterator[str]:
    """The texts of a stream's events, as they come."""
    with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
        assert answer.status_code == 200
        last = ""
        for line in answer.iter_lines():
            if not line:
                continue
            last = line.removeprefix("data: ")
            if last != "[DONE]":
                event: dict[str, Any] = json.loads(last)
                assert "error" not in event, event
                yield "".join(choice["text"] for choice in event["choices"])
        assert last == "[DONE]"


def test_a_replica_that_dies_fails_no_request(fleet: Fleet) -> None:
    two, one = fleet.engines
    expected = fleet.complete(**BODY)["choices"][0]["text"]
    limits = httpx.Limits(max_connections=STREAMS)
    with httpx.Client(base_url=fleet.router.url, timeout=120, limits=limits) as client:
        streams = [streamed(client) for _ in range(STREAMS)]
        begun = [next(stream) for stream in streams]
        # Before they end by themselves: the streams wait for their readers' turn.
        running = two.metrics()
        assert all(running[f"xpyd_engine_replica_requests_running{{engine={n}}}"] for n in (0, 1))
        os.kill(ranks_of(two)[0], signal.SIGKILL)
        with ThreadPoolExecutor(STREAMS) as pool:
            rest = list(pool.map("".join, streams))
    assert [first + more for first, more in zip(begun, rest, strict=True)] == [expected] * STREAMS
    assert "request failed" in two.log
    assert one.popen.poll() is None
    up = [f"xpyd_engine_replica_up{{engine={number}}}" for number in (0, 1)]
    wait_for("both replicas", lambda: all(two.metrics()[name] == 1 for name in up), 60)
    assert two.metrics()["xpyd_engine_replica_restarts_total{engine=0}"] == 1
    assert fleet.states()["two"] == "Ready"
    assert fleet.complete(**BODY)["choices"][0]["text"] == expected

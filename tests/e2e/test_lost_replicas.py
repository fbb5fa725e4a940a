"""Replicas of an engine die, come and go behind a router: no client sees it; the instance stays."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.train_demo_model.random_checkpoint import DEMO_MODEL
from tests.e2e.harness import Fleet, Process, empty_fleet, http, rank_steps, ranks_of, wait_for
from tests.e2e.test_parallel import EXPERT, make_model
from xpyd_core.keys import call_mac, fleet_keys

pytestmark = [pytest.mark.slow, pytest.mark.long]  # torch is imported four times
_log = logging.getLogger(__name__)
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


def scale(engine: Process, fleet: Fleet, replicas: int) -> float:
    """Ask the engine to have so many; the seconds that it took."""
    mine = json.loads(http(f"{engine.url}/load")[1])["incarnation"]
    keys = fleet_keys(fleet.key_file, insecure=False)
    mac = {"X-Xpyd-Mac": call_mac(keys[0], "scale", f"{mine}/{replicas}")}
    body = {"incarnation": mine, "new_data_parallel_size": replicas}
    begun_s = time.monotonic()
    status, answer = http(f"{engine.url}/scale_elastic_ep", body, headers=mac, timeout_s=120)
    assert status == 200, answer
    assert json.loads(answer)["cut"] == 0
    return time.monotonic() - begun_s


def all_run(engine: Process, replicas: int) -> bool:
    running = engine.metrics()
    names = [f"xpyd_engine_replica_requests_running{{engine={n}}}" for n in range(replicas)]
    return all(running[name] for name in names)


@contextmanager
def under_load(
    fleet: Fleet, bodies: Sequence[dict[str, Any]], crowd: threading.Event | None = None
) -> Iterator[list[str]]:
    """Within, clients come in an open loop, with one body after the other; where `crowd` is set, 20
    at once. Behind it each has had the answer that there was before. Yields what was asked."""
    expected = [fleet.complete(**body)["choices"][0]["text"] for body in bodies]
    asked: list[tuple[str, Future[dict[str, Any]]]] = []
    texts: list[str] = []
    over = threading.Event()
    with ThreadPoolExecutor(64) as pool:

        def load() -> None:
            """Each 0.1 s a request on its own connection, whatever became of those before."""
            turns = itertools.cycle(zip(bodies, expected, strict=True))
            while not over.wait(0.1):
                is_crowd = crowd is not None and crowd.is_set()
                for body, text in itertools.islice(turns, 20 if is_crowd else 1):
                    asked.append((text, pool.submit(fleet.complete, **body)))
                if crowd is not None and is_crowd:
                    crowd.clear()

        loading = pool.submit(load)
        try:
            yield texts
        finally:
            over.set()
            loading.result(60)
        for text, answer in asked:
            assert answer.result(120)["choices"][0]["text"] == text
            texts.append(text)
    assert len(texts) > 2


@pytest.mark.parametrize(
    "sizes", [(2, 1), pytest.param((2, 4, 1, 3, 2), marks=pytest.mark.soak)], ids=str
)
def test_replicas_come_and_go_under_load(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    body = {**BODY, "max_tokens": 60}
    with empty_fleet(tmp_path) as running:
        running.start_router()
        engine = running.start_engine("Aggregated", "--enable-elastic-ep", name="elastic")
        running.wait_ready(engine)
        with under_load(running, [body]):
            for size in sizes:
                took_s = scale(engine, running, size)
                _log.info("%d replicas after %.1f s", size, took_s)
                assert len(ranks_of(engine)) == size
                wait_for("each has requests", lambda n=size: all_run(engine, n), 30)


def all_work(engine: Process, replicas: int) -> None:
    """Wait until each of its replicas has had steps since now."""
    before = rank_steps(engine)
    assert len(before) == replicas

    def more() -> bool:
        now = rank_steps(engine)
        return len(now) == replicas and all(b < n for b, n in zip(before, now, strict=True))

    wait_for(f"{replicas} replicas of {engine.name} work", more, 60)


@pytest.mark.parametrize(
    ("times", "shares"),
    [
        (1, False),
        pytest.param(1, True, marks=pytest.mark.long),
        pytest.param(4, False, marks=pytest.mark.soak),
        pytest.param(4, True, marks=pytest.mark.soak),
    ],
    ids=["once", "once, experts", "4 times", "4 times, experts"],
)
def test_replicas_of_p_and_d_come_and_go_and_no_request_is_even_tried_again(
    tmp_path: Path, times: int, shares: bool
) -> None:
    """Independent ones, and ones that share experts."""
    model = make_model(tmp_path / "model", "mixtral") if shares else DEMO_MODEL
    prompts = [f"{word} " + "one two three four five " * 20 for word in ("alpha", "beta", "gamma")]
    bodies = [{**BODY, "prompt": prompt, "max_tokens": 24} for prompt in prompts]
    with empty_fleet(tmp_path) as running:
        # Ranks that start take the cores: on a busy machine beats are seconds late.
        running.heartbeat_ms = 3000
        router = running.start_router("--processes", "2")
        own = (EXPERT,) if shares else ()
        flags = ("--enable-elastic-ep", "--no-enable-prefix-caching", *own)
        p = running.start_engine("Prefill", *flags, model=model, name="p")
        d = running.start_engine("Decode", *flags, model=model, name="d")
        running.wait_ready(p, d)
        crowd = threading.Event()
        with under_load(running, bodies, crowd) as asked:
            for _ in range(times):
                for engine, size in ((p, 2), (d, 2), (p, 1), (d, 1)):
                    # What leaves has much to do then, and P has what D has not heard of.
                    crowd.set()
                    wait_for("the crowd", lambda: not crowd.is_set())
                    took_s = scale(engine, running, size)
                    _log.info("%s: %d replicas after %.1f s", engine.name, size, took_s)
                    assert len(ranks_of(engine)) == size
                    all_work(engine, size)

        def lines() -> list[str]:
            return [line for line in router.log.splitlines() if " xpyd_router.access: " in line]

        wait_for("the access log", lambda: len(lines()) == len(asked) + len(bodies))
        disturbed = [one for one in lines() if " tries=1 " not in one or " kv=moved" not in one]
        assert disturbed == []
        wait_for("nothing is held for a replica that left", running.holds_nothing)
        assert "no word of" not in p.log + d.log

"""`xpyd worker --data-parallel-size 2` as a process: answers, loss of a replica, drain, metrics."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.kit.instances import WAIT_S, is_alive
from tests.ranks.kit.worker import LONG, Worker, started, wait_for
from xpyd_worker.ranks.loss import EXIT_RANK_ENDED

pytestmark = pytest.mark.slow  # torch is imported in each replica
PATH = "/v1/completions"
GREEDY = {"prompt": "The capital of", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def worker(tmp_path: Path) -> Generator[Worker]:
    with started(tmp_path, "-dp", "2") as found:
        yield found


def on(replica: int) -> dict[str, str]:
    return {"X-data-parallel-rank": str(replica)}


def numbers(worker: Worker, name: str) -> dict[str, float]:
    """The series of a metric, by their labels."""
    text = worker.client.get("/metrics").text
    found = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def all_up(worker: Worker) -> bool:
    return set(numbers(worker, "xpyd_engine_replica_up").values()) == {1.0}


def rest_of(lines: Any) -> list[str]:
    return [line for line in lines if line]


@pytest.mark.parametrize("layout", ["1", "2"])
def test_each_replica_answers_as_an_engine_alone_does(layout: str, tmp_path: Path) -> None:
    with started(tmp_path, "-tp", layout) as alone:
        answer = alone.client.post(PATH, json=GREEDY).json()["choices"]
    with started(tmp_path, "-dp", "2", "-tp", layout) as worker:
        assert len(worker.ranks()) == 2 * int(layout)
        for replica in range(2):
            one = worker.client.post(PATH, json=GREEDY, headers=on(replica))
            assert one.json()["choices"] == answer
        refused = worker.client.post(PATH, json=GREEDY, headers=on(2))
        assert refused.status_code == 400
        assert "X-data-parallel-rank: must be 0 to 1" in refused.text
        assert numbers(worker, "xpyd_engine_requests_total")['finish_reason="length"'] == 2
        assert len(numbers(worker, "xpyd_engine_rank_up")) == 2 * int(layout)


# Killed behind a router in each run: tests/e2e/test_lost_replicas.py.
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGKILL, marks=pytest.mark.soak), signal.SIGSTOP]
)
def test_a_lost_replica_takes_its_own_requests_along_and_comes_back(
    worker: Worker, number: signal.Signals
) -> None:
    ranks = worker.ranks()
    with ExitStack() as stack:
        streams = [
            stack.enter_context(
                worker.client.stream(
                    "POST", PATH, json=LONG | {"max_tokens": 1900}, headers=on(replica)
                )
            ).iter_lines()
            for replica in range(2)
        ]
        for lines in streams:
            next(lines)
        os.kill(ranks[0], number)
        lost, kept = (rest_of(lines) for lines in streams)
    assert '"code": "replica_lost"' in lost[-1]
    assert kept[-1] == "data: [DONE]"
    assert worker.client.get("/health").status_code == 200
    assert worker.client.post(PATH, json=GREEDY).status_code == 200
    wait_for(lambda: all_up(worker))
    assert worker.client.post(PATH, json=GREEDY, headers=on(0)).status_code == 200
    assert numbers(worker, "xpyd_engine_replica_restarts_total") == {
        'engine="0"': 1.0,
        'engine="1"': 0.0,
    }
    assert not is_alive(ranks[0])
    assert worker.process.poll() is None


def test_the_instance_falls_with_its_last_replica(worker: Worker) -> None:
    ranks = worker.ranks()
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    assert worker.process.wait(WAIT_S) == EXIT_RANK_ENDED
    last = worker.log.read_text().splitlines()[-1]
    assert re.search(r"the instance ended: rank [01] \(.*\) was ended by SIGKILL", last)
    assert not any(map(is_alive, ranks))


def test_a_drain_waits_for_the_requests_of_all_replicas(worker: Worker) -> None:
    ranks = worker.ranks()
    body = LONG | {"max_tokens": 50}
    with ExitStack() as stack:
        streams = [
            stack.enter_context(
                worker.client.stream("POST", PATH, json=body, headers=on(replica))
            ).iter_lines()
            for replica in range(2)
        ]
        for lines in streams:
            next(lines)
        worker.process.terminate()
        assert [rest_of(lines)[-1] for lines in streams] == ["data: [DONE]"] * 2
    assert worker.process.wait(WAIT_S) == 0
    assert not any(map(is_alive, ranks))


def test_replicas_end_with_a_main_process_that_is_killed(worker: Worker) -> None:
    ranks = worker.ranks()
    worker.process.kill()
    wait_for(lambda: not any(map(is_alive, ranks)))

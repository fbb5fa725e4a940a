"""`xpyd worker` with two ranks, as a process: whatever is killed, all of it ends, and says why."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks.kit.instances import WAIT_S, is_alive
from tests.ranks.kit.worker import LONG, Worker, loading, started, wait_for
from xpyd_worker.ranks.loss import EXIT_RANK_ENDED, EXIT_RANK_SILENT

pytestmark = pytest.mark.slow  # torch is imported twice


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    with started(tmp_path, "-tp", "2") as found:
        yield found


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
    with loading(tmp_path, "-tp", "2") as worker:
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

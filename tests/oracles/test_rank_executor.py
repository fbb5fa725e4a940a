"""Article facts 44, 45, 48, 50 and 53: ranks as processes, and the steps that reach them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ranks.kit.instances import executor_of, make, step
from tests.worker.test_engine_pipeline import submit
from tests.worker.timed_pipeline import timed
from xpyd_core.errors import UserError
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.config import WorkerConfig
from xpyd_worker.ranks.instance import Instance
from xpyd_worker.ranks.start.messages import RankReady

FOUR = Sizes(pipeline=2, tensor=2)


@dataclass(frozen=True)
class Four:
    """An instance of fake ranks, and what each has said of itself."""

    instance: Instance
    ready: tuple[RankReady, ...]

    def pids(self) -> list[int]:
        return [self.instance.rank_identity(rank).pid for rank in range(4)]


@pytest.fixture(scope="module")
def four() -> Iterator[Four]:
    instance = make(FOUR, blocks=[9, 5, 8, 7])
    try:
        yield Four(instance, instance.start())
    finally:
        instance.close(in_order=instance.loss is None)


def test_the_first_batch_leaves_while_the_fourth_enters() -> None:
    """Article fact 44."""
    driver, executor = timed(4, budget=8, blocks=64)
    submit(driver, length=8 * 7, max_tokens=1)
    driver.run()
    first, last = executor.spans[0], executor.spans[-1]
    assert last[0] == first[3] == (30, 40), "A's last stage and D's first one are the fourth step"
    assert last[-1][1] == 10 * (4 + 7 - 1)
    # A fifth batch enters when the first has left: four are under way at once, never more.
    assert executor.waited_with == [4, 4, 4, 4, 3, 2, 1]


def test_the_queue_is_as_deep_as_there_are_stages() -> None:
    """Article fact 44."""
    assert [Sizes(pipeline=stages).depth(2) for stages in (2, 3, 4)] == [2, 3, 4]
    # One stage: two where the host schedules ahead of its device, else one.
    assert [Sizes(tensor=4).depth(of_device) for of_device in (1, 2)] == [1, 2]


def test_the_first_rank_of_the_last_stage_answers(four: Four) -> None:
    """Article fact 45."""
    assert FOUR.output_rank == 2
    assert step(executor_of(four.instance), {"say": 1})["rank"] == 2


def test_all_ranks_make_as_many_blocks_as_fit_on_the_smallest(four: Four) -> None:
    """Article fact 48."""
    assert [one.blocks for one in four.ready] == [5] * 4


def test_two_pods_of_two_ranks_count_their_own_from_nought() -> None:
    """Article fact 50."""
    config = WorkerConfig(
        model="m", tensor_parallel_size=2, pipeline_parallel_size=2, pods=2, leader_address="first"
    )
    ranks = [(rank, rank - pod.start) for pod in map(config.pod_ranks, (0, 1)) for rank in pod]
    assert ranks == [(0, 0), (1, 1), (2, 0), (3, 1)]


@dataclass(frozen=True)
class Held:
    """What a process has open of what processes share: inodes."""

    rings: frozenset[int]
    sockets: frozenset[str]


def held_by(pid: int) -> Held:
    rings: set[int] = set()
    sockets: set[str] = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        to = os.readlink(path)
        if to.startswith("/memfd:xpyd-ring"):
            rings.add(path.stat().st_ino)
        elif to.startswith("socket:"):
            sockets.add(to)
    return Held(frozenset(rings), frozenset(sockets))


def test_each_rank_has_a_pipe_and_a_response_queue_of_its_own(four: Four) -> None:
    """Article fact 53."""
    held = [held_by(pid) for pid in four.pids()]
    (of_all,) = frozenset.intersection(*(one.rings for one in held))
    own = [one.rings - {of_all} for one in held]
    assert [len(one) for one in own] == [1] * 4
    assert len(frozenset.union(*own)) == 4
    # Rank 0 has the socket that the others would meet at, too.
    pipes = [one.sockets for one in held[1:]]
    assert [len(one) for one in pipes] == [1] * 3
    assert len(frozenset.union(*pipes)) == 3


def test_a_step_is_written_once_for_all_ranks(four: Four) -> None:
    """Article fact 53."""
    mark = f"only once {os.getpid()}"
    step(executor_of(four.instance), {"say": mark})
    memory: dict[int, bytes] = {}
    for pid in four.pids():
        for path in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(path).startswith("/memfd:xpyd-ring"):
                memory[path.stat().st_ino] = path.read_bytes()
    # In the ring that all read; and in the one response.
    assert sorted(content.count(mark.encode()) for content in memory.values()) == [0, 0, 0, 1, 1]


def test_no_rank_loads_before_all_have_opened_their_queues() -> None:
    """Article fact 53."""
    instance = make(FOUR, **{"open 3": "user:came last", "load *": "exit:9"})
    try:
        with pytest.raises(UserError, match=r"came last \(rank 3"):
            instance.start()
    finally:
        instance.close()

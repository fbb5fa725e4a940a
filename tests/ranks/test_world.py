"""Instances whose ranks are one world: the first loss is the loss of all. The ranks are fakes in
processes of their own; tests/e2e/test_lock_step.py has real ones."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.ranks.kit.instances import COMMAND, WAIT_S
from xpyd_worker.config import WorkerConfig
from xpyd_worker.ranks.instance import Instance
from xpyd_worker.ranks.loss import EXIT_RANK_ENDED, Loss
from xpyd_worker.ranks.start.messages import Logs
from xpyd_worker.ranks.world import World


def make(world: World, replica: int, **told: Any) -> Instance:
    """Of one rank; `told`: see tests.ranks.kit.instances.make."""
    config = WorkerConfig(
        model=json.dumps(told),
        data_parallel_size=2,
        enable_expert_parallel=True,
        replica=replica,
    )
    return Instance(config, logs=Logs("warning"), command=COMMAND, world=world)


@contextmanager
def two(*told: dict[str, Any]) -> Iterator[tuple[World, list[Instance]]]:
    world = World(2)
    instances = [make(world, replica, **one) for replica, one in enumerate(told)]
    try:
        yield world, instances
    finally:
        for one in instances:
            one.close()
        world.close()


def start(instances: list[Instance]) -> list[BaseException | None]:
    """What each raises."""
    with ThreadPoolExecutor(2) as pool:
        return [each.exception(WAIT_S) for each in [pool.submit(one.start) for one in instances]]


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_loss_is_the_loss_of_all(first: int) -> None:
    with two({}, {}) as (world, instances):
        said: list[Loss] = []
        fell = threading.Event()
        world.tell(lambda loss: (said.append(loss), fell.set()))
        assert start(instances) == [None, None]
        assert {one.first_rank for one in instances} == {0, 1}
        os.kill(instances[first].rank_identity(0).pid, signal.SIGKILL)
        assert all(one.settled.wait(WAIT_S) for one in instances)
        assert fell.wait(WAIT_S)
        loss = said[0]
        assert f"rank {first} (" in loss.text
        assert loss.text.endswith("was ended by SIGKILL; was it short of memory?")
        assert loss.status == EXIT_RANK_ENDED
        assert [one.loss for one in instances] == [loss, loss]
        assert said == [loss]


def test_replicas_that_load_end_with_one_that_cannot() -> None:
    """They wait for its ranks, else as long as a rendezvous may take."""
    with two({}, {"load 0": "exit:3"}) as (_, instances):
        errors = [str(error) for error in start(instances)]
        assert "ended with status 3" in errors[0]
        assert errors[0] == errors[1]


def test_the_others_go_on_where_they_outlive_a_replica() -> None:
    """But without the first replica, whose rank has the store, none can."""
    with two({}, {}) as (world, instances):
        outlived, fell = threading.Event(), threading.Event()
        world.tell(lambda _: fell.set())

        def outlive(replica: int) -> bool:
            goes_on = world.without(replica) is not None
            if goes_on:
                outlived.set()
            return goes_on

        world.outlive = outlive
        assert start(instances) == [None, None]
        os.kill(instances[1].rank_identity(0).pid, signal.SIGKILL)
        assert outlived.wait(WAIT_S)
        assert (world.loss, instances[0].loss, world.replicas) == (None, None, (0,))
        os.kill(instances[0].rank_identity(0).pid, signal.SIGKILL)
        assert fell.wait(WAIT_S)
        assert world.loss is not None
        assert world.loss == instances[0].loss

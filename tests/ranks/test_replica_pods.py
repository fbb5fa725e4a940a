"""Replicas of an instance in two pods, as two processes with an address each. The ranks are fakes;
tests/e2e/test_replica_pods.py has real ones."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.kit.instances import COMMAND, WAIT_S, executor_of, loss_of, step
from tests.ranks.test_pods import LEADER, POD, leader_config, other_pod
from xpyd_core.errors import ProtocolError
from xpyd_core.keys import fleet_keys
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.config import WorkerConfig
from xpyd_worker.ranks.instance import Instance
from xpyd_worker.ranks.loss import EXIT_POD_LOST, EXIT_RANK_ENDED, RankLostError
from xpyd_worker.ranks.pods.handshake import greet_pod, join_leader
from xpyd_worker.ranks.pods.messages import Numbers
from xpyd_worker.ranks.pods.pods import Pods, gather
from xpyd_worker.ranks.start.messages import Logs
from xpyd_worker.ranks.world import World

TWO = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 2}
Make = Callable[[int], Instance]


def made(config: WorkerConfig, pods: Pods | None, world: World | None = None) -> Make:
    def make(replica: int) -> Instance:
        of_replica = config.of_replica(replica)
        return Instance(of_replica, logs=Logs("warning"), command=COMMAND, pods=pods, world=world)

    return make


def start(instances: Sequence[Instance]) -> list[BaseException | None]:
    """What each raises."""
    with ThreadPoolExecutor(len(instances)) as pool:
        return [each.exception(WAIT_S) for each in [pool.submit(one.start) for one in instances]]


def where(instance: Instance) -> list[str]:
    """Where its ranks' store is, where a rank listens for others, and for peers."""
    return step(executor_of(instance), {"where": True})["where"]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Make, int, Path]]:
    """What makes an instance of a replica, the other pod's process id, and its log."""
    with other_pod(tmp_path, **TWO) as (process, log):
        config = leader_config(tmp_path, **TWO)
        pods = gather(config)
        assert pods is not None
        try:
            yield made(config, pods), process.pid, log
        finally:
            pods.close(in_order=True, reason="the test is over")
            process.wait(WAIT_S)


@contextmanager
def closing(*instances: Instance) -> Iterator[None]:
    try:
        yield
    finally:
        for one in instances:
            one.close(in_order=one.loss is None)


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def test_each_pod_has_a_replica_that_meets_nobody_else(two: tuple[Make, int, Path]) -> None:
    make, _, _ = two
    instances = [make(replica) for replica in range(2)]
    with closing(*instances):
        assert start(instances) == [None, None]
        assert [where(one) for one in instances] == [
            ["127.0.0.1", "127.0.0.1", LEADER],
            ["127.0.0.1", "127.0.0.1", POD],
        ]
        assert [str(one.rank_identity(0)).partition(",")[0] for one in instances] == [
            "rank 0 (pod 0",
            "rank 1 (pod 1",
        ]


def test_a_replica_of_the_other_pod_is_started_again_and_no_other_hears_of_it(
    two: tuple[Make, int, Path],
) -> None:
    make, pid, log = two
    kept, lost = make(0), make(1)
    with closing(kept):
        with closing(lost):
            assert start([kept, lost]) == [None, None]
            (rank,) = children(pid)
            os.kill(rank, signal.SIGKILL)
            loss = loss_of(lost)
            assert loss.status == EXIT_RANK_ENDED
            assert loss.text.startswith("rank 1 (pod 1, ")
        again = make(1)
        with closing(again):
            assert start([again]) == [None]
            assert children(pid) != [rank]
            assert step(executor_of(again), {"say": 3})["say"] == 3
        assert step(executor_of(kept), {"say": 4})["say"] == 4
        assert kept.loss is None
    assert "Traceback" not in log.read_text()


def test_a_pod_that_is_killed_loses_its_replicas_alone(two: tuple[Make, int, Path]) -> None:
    make, pid, _ = two
    kept, lost = make(0), make(1)
    with closing(kept):
        with closing(lost):
            assert start([kept, lost]) == [None, None]
            os.kill(pid, signal.SIGKILL)
            loss = loss_of(lost)
            assert loss.status == EXIT_POD_LOST
            assert "pod 1 of the instance is gone" in loss.text
        assert step(executor_of(kept), {"say": 1})["say"] == 1
        again = make(1)
        with closing(again):
            (error,) = start([again])
        assert isinstance(error, RankLostError)
        assert "pod 1 of the instance is gone" in str(error)


def test_ranks_that_share_experts_meet_at_the_first_pods_address(tmp_path: Path) -> None:
    fields = TWO | {"enable_expert_parallel": True}
    with other_pod(tmp_path, **fields) as (process, _):
        config = leader_config(tmp_path, **fields)
        pods = gather(config)
        assert pods is not None
        world = World(2, LEADER)
        instances = [made(config, pods, world)(replica) for replica in range(2)]
        with closing(*instances):
            assert start(instances) == [None, None]
            assert [where(one)[:2] for one in instances] == [[LEADER, LEADER], [LEADER, POD]]
            process.kill()
            losses = [loss_of(one) for one in instances]
            assert losses[0] == losses[1]
            assert losses[0].status == EXIT_POD_LOST
        world.close()
        pods.close(in_order=False, reason="the test is over")


def test_a_pod_with_other_numbers_does_not_join(tmp_path: Path) -> None:
    """Both say which: the pod ends, the leader waits for the right one."""
    config = leader_config(tmp_path, **TWO)
    keys = fleet_keys(config.kv_key_file, insecure=False)
    right = Numbers.of(config)
    wrong = Numbers(right.pods, 4, 2, right.pipeline, right.has_whole_experts)
    here, there = socket.socketpair()
    with here, there, ThreadPoolExecutor(1) as pool:
        leader = pool.submit(greet_pod, here, right, keys)
        text = (
            "--data-parallel-size 4, at the leader 2; --tensor-parallel-size 2, at the leader 1: "
            "give all pods of an instance the same"
        )
        with pytest.raises(Exception, match=text):
            join_leader(there, 1, wrong, keys)
        with pytest.raises(ProtocolError, match="pod 1 has --data-parallel-size 4, at the leader"):
            leader.result(WAIT_S)


@pytest.mark.slow
def test_four_replicas_of_four_ranks_are_ready_when_all_have_met_and_told_their_blocks(
    tmp_path: Path,
) -> None:
    """ORACLES 60: DP 4 x TP 4 on two nodes of 8. Local size 2, start ranks 0 and 2, one node
    headless; four engines, each with its number of KV blocks."""
    fields: dict[str, Any] = {
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 4,
        "rpc_port": 13345,
    }
    config = leader_config(tmp_path, **fields)
    assert config.sizes == Sizes(tensor=4)
    assert config.pod_replicas == 2
    firsts = [next(r for r in range(4) if config.of_replica(r).pod_ranks(pod)) for pod in range(2)]
    assert firsts == [0, 2]
    with ThreadPoolExecutor(1) as pool:
        gathering = pool.submit(gather, config)
        assert not gathering.done()
        with other_pod(tmp_path, **fields):
            pods = gathering.result(WAIT_S)
            assert pods is not None
            instances = [made(config, pods)(replica) for replica in range(4)]
            with closing(*instances):
                assert start(instances) == [None] * 4
                assert [one.fits for one in instances] == [(7, 7, 7, 7)] * 4
                found = [str(one.rank_identity(3)).partition(",")[0] for one in instances]
                assert found == [f"rank {4 * n + 3} (pod {n // 2}" for n in range(4)]
            pods.close(in_order=True, reason="the test is over")

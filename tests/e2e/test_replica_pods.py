"""Replicas of an instance in two pods, each a process with an address: tokens are those of one
rank, KV goes to and from ranks of either pod, and a lost pod loses its replicas or the instance."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.harness import Fleet, Process, empty_fleet, fleet, ranks_of, wait_for
from tests.e2e.oracle import Case
from tests.e2e.test_parallel import EXPERT, check, flags, make_model, written_by
from xpyd_worker.ranks.loss import EXIT_POD_LOST

CASES = 4
TWO = ("--data-parallel-size", "2")


def start_pods(
    running: Fleet, role: str, *more: str, host: int, by_hand: bool = False, **given: Path
) -> list[Process]:
    """Both pods of an instance of two replicas, by LeaderWorkerSet's variables or by flags."""
    leader = f"{running.subnet}.{host}"
    found: list[Process] = []
    for pod in range(2):
        group = {
            "LWS_LEADER_ADDRESS": leader,
            "LWS_GROUP_SIZE": "2",
            "LWS_WORKER_INDEX": str(pod),
        }
        hand = ("-dpl", "1", "-dpa", leader, "--data-parallel-rpc-port", "13345")
        hand += ("-dpr", "1", "--headless") if pod else ()
        found.append(
            running.start_engine(
                *(role, *TWO, *more, *(hand if by_hand else ())),
                name=f"{role.lower()}-0-{pod}",
                ip=f"{running.subnet}.{host + pod}",
                env={} if by_hand else group,
                **given,
            )
        )
    return found


@pytest.mark.slow
@pytest.mark.long
def test_kv_moves_between_replicas_of_any_pod_and_a_killed_pod_fails_no_request(
    tmp_path: Path, cases: list[Case]
) -> None:
    with fleet(tmp_path) as running:
        p, p_other = start_pods(running, "Prefill", host=50, by_hand=True)
        d, d_other = start_pods(running, "Decode", "--kv-transport", "tcp", host=60)
        running.wait_ready(p, d)
        for one in (p, p_other, d, d_other):
            assert len(ranks_of(one)) == 1
        for case in cases[:CASES] * 2:
            assert running.answer(case) == case.ids
        assert d.metric("xpyd_kv_recomputed_requests_total") == 0
        assert d.metric("xpyd_engine_prompt_tokens_computed_total") == 0
        steps = "xpyd_engine_rank_steps_total"
        for one in (p, d):
            assert all(n for name, n in one.metrics().items() if name.startswith(steps))
        # A rank there is started again, by its pod.
        os.kill(ranks_of(d_other)[0], signal.SIGKILL)
        back = "xpyd_engine_replica_restarts_total{engine=1}"
        wait_for("the replica's return", lambda: d.metrics()[back] == 1, 120)
        assert len(ranks_of(d_other)) == 1
        os.kill(d_other.popen.pid, signal.SIGKILL)
        for case in cases[:CASES]:
            assert running.answer(case) == case.ids
        assert p.stop() == 0
        assert p_other.popen.wait(60) == 0


@pytest.mark.slow
@pytest.mark.long
def test_replicas_that_share_experts_between_pods_write_as_transformers_and_fall_together(
    tmp_path: Path,
) -> None:
    model = make_model(tmp_path / "model", "mixtral", experts=7)
    with empty_fleet(tmp_path) as running:
        pods = start_pods(running, "Aggregated", *flags((1, 1)), EXPERT, host=50, model=model)
        running.wait_healthy(pods[0])
        written = written_by(pods[0])
        assert pods[0].metric("xpyd_engine_replica_dummy_forwards_total") > 0
        os.kill(pods[1].popen.pid, signal.SIGKILL)
        assert pods[0].popen.wait(60) == EXIT_POD_LOST
        assert "pod 1 of the instance is gone" in pods[0].log
    check(model, written)

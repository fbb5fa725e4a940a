"""P and D whose models are divided over ranks, each in its own way: KV goes from rank to rank."""

from pathlib import Path

import pytest

from tests.e2e.harness import Process, fleet
from tests.e2e.oracle import Case

CASES = 4
# (tensor, pipeline) of P and of D.
PAIRS = [
    ((2, 1), (1, 2)),
    ((2, 2), (1, 1)),
    ((1, 1), (4, 1)),
    ((1, 2), (2, 1)),
    ((1, 1), (2, 2)),
    ((4, 1), (2, 1)),
    ((4, 1), (1, 1)),
    ((2, 1), (4, 1)),
    ((2, 1), (2, 1)),
    ((1, 2), (1, 1)),
    ((1, 1), (1, 2)),
    ((2, 2), (4, 1)),
]
# The first of these have each layout as P's and as D's: they are in each run, all in the soak.
IN_EACH_RUN = 6


def _ranks(sizes: tuple[int, int]) -> tuple[str, ...]:
    tensor, pipeline = map(str, sizes)
    return ("--tensor-parallel-size", tensor, "--pipeline-parallel-size", pipeline)


@pytest.mark.parametrize(
    ("of_p", "of_d"),
    [
        pytest.param(*pair, marks=pytest.mark.slow if number < IN_EACH_RUN else pytest.mark.soak)
        for number, pair in enumerate(PAIRS)
    ],
)
def test_greedy_tokens_are_those_of_one_process_and_d_computes_no_prompt(
    tmp_path: Path, cases: list[Case], of_p: tuple[int, int], of_d: tuple[int, int]
) -> None:
    # Half of the pairs over shared memory, the others over TCP.
    transport = "shm" if PAIRS.index((of_p, of_d)) % 4 > 1 else "tcp"
    flags = ("--kv-socket-dir", str(tmp_path / "kv"), "--kv-transport", transport)
    small = ("--max-num-batched-tokens", "72", "--max-num-seqs", "8", "--kv-group-bytes", "1")
    with fleet(tmp_path) as running:
        p = running.start_engine("Prefill", *flags, *small, "--threads", "1", *_ranks(of_p))
        failing = ("--kv-on-failure", "fail", "--threads", "1")
        d = running.start_engine("Decode", *flags, *failing, *_ranks(of_d))
        running.wait_ready(p, d)
        for case in cases[:CASES]:
            assert running.answer(case) == case.ids
        received = d.metric("xpyd_kv_received_bytes_total")
        assert received == p.metric("xpyd_kv_sent_bytes_total") > 0
        assert d.metric("xpyd_engine_prompt_tokens_computed_total") == 0
        assert d.metric("xpyd_kv_recomputed_requests_total") == 0


@pytest.mark.slow
def test_ranks_of_several_pods_are_their_engines_to_the_other_side(
    tmp_path: Path, cases: list[Case]
) -> None:
    by = ("--kv-transport", "tcp", "--pipeline-parallel-size", "2")
    with fleet(tmp_path) as running:
        pods: dict[str, list[Process]] = {}
        for role, host in (("Prefill", 50), ("Decode", 60)):
            flags = (*by, "--kv-on-failure", "fail") if role == "Decode" else by
            leader = f"{running.subnet}.{host}"
            pods[role] = [
                running.start_engine(
                    role,
                    *flags,
                    name=f"{role.lower()}-0-{pod}",
                    ip=f"{running.subnet}.{host + pod}",
                    env={
                        "LWS_LEADER_ADDRESS": leader,
                        "LWS_GROUP_SIZE": "2",
                        "LWS_WORKER_INDEX": str(pod),
                    },
                )
                for pod in range(2)
            ]
        p, d = pods["Prefill"][0], pods["Decode"][0]
        running.wait_ready(p, d)
        for case in cases[:CASES]:
            assert running.answer(case) == case.ids
        assert d.metric("xpyd_kv_recomputed_requests_total") == 0
        assert d.metric("xpyd_engine_prompt_tokens_computed_total") == 0

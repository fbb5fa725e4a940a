"""P and D with replicas: the router picks one of each, and KV goes from the one to the other."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.harness import empty_fleet, fleet, rank_steps, ranks_of, wait_for
from tests.e2e.oracle import Case
from tests.e2e.test_lost_replicas import all_work, under_load
from tests.e2e.test_parallel import EXPERT, make_model

CASES = 4
Layout = tuple[int, int]
"""Replicas, and ranks that share each layer of one."""
# P, D, and when KV moves. The first ones are in each run, all in the soak.
PAIRS: list[tuple[Layout, Layout, str]] = [
    ((2, 1), (1, 1), "put-async"),
    ((1, 2), (2, 1), "put"),
    ((2, 1), (2, 1), "get"),
    ((2, 1), (2, 1), "put-async"),
    ((2, 2), (2, 1), "get"),
    ((1, 1), (3, 2), "put"),
    ((2, 2), (1, 2), "put-async"),
    ((1, 2), (2, 2), "put"),
    ((3, 1), (3, 1), "put-async"),
    ((2, 2), (1, 4), "get"),
]
IN_EACH_RUN = 3
SMALL = ("--max-num-batched-tokens", "72", "--max-num-seqs", "8", "--kv-group-bytes", "1")


def of(layout: Layout) -> tuple[str, ...]:
    replicas, tensor = map(str, layout)
    return ("-dp", replicas, "-tp", tensor, "--threads", "1")


@pytest.mark.parametrize(
    ("of_p", "of_d", "mode"),
    [
        pytest.param(*pair, marks=pytest.mark.slow if number < IN_EACH_RUN else pytest.mark.soak)
        for number, pair in enumerate(PAIRS)
    ],
)
def test_greedy_tokens_are_those_of_one_process_and_each_replica_is_used(
    tmp_path: Path, cases: list[Case], of_p: Layout, of_d: Layout, mode: str
) -> None:
    # In mode put over shared memory, else over TCP.
    way = ("--kv-socket-dir", str(tmp_path / "kv")) if mode == "put" else ()
    with fleet(tmp_path) as running:
        p = running.start_engine("Prefill", "--kv-mode", mode, *way, *SMALL, *of(of_p))
        d = running.start_engine("Decode", "--kv-on-failure", "fail", *way, *of(of_d))
        running.wait_ready(p, d)
        for case in cases[:CASES] * 2:
            assert running.answer(case) == case.ids
        received = d.metric("xpyd_kv_received_bytes_total")
        assert received == p.metric("xpyd_kv_sent_bytes_total") > 0
        assert d.metric("xpyd_engine_prompt_tokens_computed_total") == 0
        assert d.metric("xpyd_kv_recomputed_requests_total") == 0
        for engine, layout in ((p, of_p), (d, of_d)):
            if layout != (1, 1):
                assert len(rank_steps(engine)) == layout[0] * layout[1]
                assert all(rank_steps(engine))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_replicas_of_d_that_share_experts_go_on_without_one(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Its requests are done again, the others' KV and texts are as they were; then it comes again,
    and takes KV."""
    model = make_model(tmp_path / "model", "mixtral")
    bodies = [
        {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        for prompt in ("The capital of France is", "Once upon a time there was a")
    ]
    with empty_fleet(tmp_path) as running:
        # Their default: on a busy machine the start of the replica holds beats up.
        running.heartbeat_ms = 3000
        running.start_router()
        p = running.start_engine("Prefill", *SMALL, "--threads", "1", model=model)
        go_on = (EXPERT, "--on-rank-loss", "continue")
        d = running.start_engine("Decode", *of((3, 1)), *go_on, model=model)
        running.wait_ready(p, d)
        ranks = ranks_of(d)
        with under_load(running, bodies) as texts:
            all_work(d, 3)
            os.kill(ranks[1], number)
            back = "xpyd_engine_replica_restarts_total{engine=1}"
            wait_for("the replica's return", lambda: d.metrics()[back] == 1, 120)
            all_work(d, 3)
        assert len(texts) > 20
        now = ranks_of(d)
        assert {ranks[0], ranks[2]} < {*now}
        assert ranks[1] not in now
        before = d.metric("xpyd_kv_recomputed_requests_total")
        for _ in range(6):
            assert running.complete(**bodies[0])["choices"][0]["text"]
        assert d.metric("xpyd_kv_recomputed_requests_total") == before


@pytest.mark.slow
@pytest.mark.long
def test_a_killed_replica_of_d_fails_no_request_and_moves_kv_again(
    tmp_path: Path, cases: list[Case]
) -> None:
    """Its prompts are computed or go to the other one: no answer is another."""
    case, stop = cases[0], threading.Event()
    with empty_fleet(tmp_path) as running:
        # Their default: on a busy machine the start of the replica holds beats up.
        running.heartbeat_ms = 3000
        running.start_router()
        p = running.start_engine("Prefill", *SMALL, "--threads", "1")
        d = running.start_engine("Decode", *of((2, 1)))
        running.wait_ready(p, d)

        def ask_on() -> int:
            asked = 0
            while not stop.is_set():
                assert running.answer(case) == case.ids
                asked += 1
            return asked

        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(ask_on) for _ in range(4)]
            try:
                wait_for("both replicas at work", lambda: all(rank_steps(d)), 60)
                os.kill(ranks_of(d)[1], signal.SIGKILL)
                back = "xpyd_engine_replica_restarts_total{engine=1}"
                wait_for("the replica's return", lambda: d.metrics()[back] == 1, 90)
                wait_for("its use", lambda: all(rank_steps(d)), 60)
            finally:
                stop.set()
            assert all(one.result() for one in asked)
        assert running.states() == {p.name: "Ready", d.name: "Ready"}
        before = d.metric("xpyd_kv_recomputed_requests_total")
        for _ in range(4):
            assert running.answer(case) == case.ids
        assert d.metric("xpyd_kv_recomputed_requests_total") == before

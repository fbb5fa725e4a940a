"""P and D whose KV blocks have different sizes."""

from pathlib import Path

import pytest

from tests.e2e.harness import fleet
from tests.e2e.oracle import Case

pytestmark = [pytest.mark.slow, pytest.mark.long]
CASES = 8


@pytest.mark.parametrize(("of_p", "of_d", "transport"), [(16, 32, "shm"), (32, 16, "tcp")])
def test_greedy_tokens_are_those_of_one_process_and_d_computes_no_prompt(
    tmp_path: Path, cases: list[Case], of_p: int, of_d: int, transport: str
) -> None:
    flags = ("--kv-socket-dir", str(tmp_path / "kv"), "--kv-transport", transport)
    with fleet(tmp_path) as running:
        # Small chunks: their ends lie within blocks of both sides.
        small = ("--max-num-batched-tokens", "72", "--max-num-seqs", "8", "--kv-group-bytes", "1")
        p = running.start_engine("Prefill", *flags, *small, "--block-size", str(of_p))
        failing = ("--kv-on-failure", "fail")
        d = running.start_engine("Decode", *flags, *failing, "--block-size", str(of_d))
        running.wait_ready(p, d)
        for case in cases[:CASES]:
            assert running.answer(case) == case.ids
        received = d.metric("xpyd_kv_received_bytes_total")
        assert received == p.metric("xpyd_kv_sent_bytes_total") > 0
        skipped = d.metric("xpyd_kv_skipped_tokens_total")
        # Again: what D has cached is skipped, up to where blocks of both sides begin.
        for case in cases[:CASES]:
            assert running.answer(case) == case.ids
        step = max(of_p, of_d)
        again = sum((len(case.prompt) - 1) // step * step for case in cases[:CASES])
        assert d.metric("xpyd_kv_skipped_tokens_total") - skipped == again > 0
        assert d.metric("xpyd_engine_prompt_tokens_computed_total") == 0
        assert d.metric("xpyd_kv_recomputed_requests_total") == 0
        assert p.metrics()[f"xpyd_kv_peers_total{{transport={transport}}}"] == 1

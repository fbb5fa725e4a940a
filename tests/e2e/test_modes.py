"""Fleets that move KV in each mode: the tokens are those of one process, and nothing stays held."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.e2e.harness import DEMO_MODEL, Process, fleet, wait_for
from tests.e2e.oracle import Case, load

pytestmark = pytest.mark.slow
CASES = 6
HELD = ("xpyd_kv_leases", "xpyd_kv_buffer_used_bytes", "xpyd_kv_pool_used_bytes")


def _holds_nothing(engine: Process) -> bool:
    samples = engine.metrics()
    return all(samples[name] == 0 for name in HELD)


@pytest.mark.parametrize("mode", ["put-async", "put", "get"])
def test_greedy_tokens_are_those_of_one_process(
    tmp_path: Path, cases: list[Case], mode: str
) -> None:
    flags = ("--kv-mode", mode, "--kv-on-failure", "fail", "--max-num-batched-tokens", "256")
    with fleet(tmp_path, prefill=1, decode=1, flags=flags) as running:
        p, d = (running.engine(role) for role in ("Prefill", "Decode"))
        for case in cases[:CASES]:
            assert running.answer(case) == case.ids
        assert d.metric("xpyd_kv_received_bytes_total") == p.metric("xpyd_kv_sent_bytes_total") > 0
        pulled = d.metrics()["xpyd_kv_landings_total{where=pulled}"]
        assert pulled == (CASES if mode == "get" else 0)
        assert (p.metric("xpyd_kv_held_seconds_total") > 0) == (mode == "put")
        for engine in (p, d):
            wait_for("nothing held", lambda e=engine: _holds_nothing(e))


NGRAMS = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
# What guesses best: the model itself.
ITSELF = {"method": "draft_model", "model": str(DEMO_MODEL)}
HEADS = {"method": "eagle3", "model": str(DEMO_MODEL.parent / "demo-eagle3")}
MEDUSA = {"method": "medusa", "model": str(DEMO_MODEL.parent / "demo-medusa")}


@pytest.mark.parametrize(
    ("method", "least"),
    [(NGRAMS, 0), (ITSELF, 0.5), (HEADS, 0.1), (MEDUSA, 0.01)],
    ids=["ngram", "draft_model", "eagle3", "medusa"],
)
def test_d_drafts_behind_a_prompt_of_p_and_no_token_changes(
    tmp_path: Path, cases: list[Case], method: dict[str, object], least: float
) -> None:
    """P and D need not agree on the flag. A draft model computes the prompt itself, for an
    EAGLE-3 head D computes its last tokens again."""
    drafts = json.dumps({**method, "num_speculative_tokens": 3})
    with fleet(tmp_path) as running:
        p = running.start_engine("Prefill", "--kv-on-failure", "fail")
        d = running.start_engine(
            "Decode", "--kv-on-failure", "fail", "--speculative-config", drafts
        )
        running.wait_ready(p, d)
        for case in cases[:CASES]:
            assert running.answer(case) == case.ids
        samples = d.metrics()
        assert samples["xpyd_kv_received_bytes_total"] > 0
        drafted = samples["xpyd_engine_spec_decode_num_draft_tokens_total"]
        accepted = samples["xpyd_engine_spec_decode_num_accepted_tokens_total"]
        assert drafted > 0
        assert accepted >= least * drafted
        # The last of 32 is the token that P drew.
        again = 31 if method is HEADS else 0
        computed = sum(min(again, len(case.prompt)) for case in cases[:CASES])
        assert d.metric("xpyd_engine_prompt_tokens_computed_total") == computed
        for engine in (p, d):
            wait_for("nothing held", lambda e=engine: _holds_nothing(e))


def test_a_p_whose_cache_fills_moves_kv_aside_and_every_answer_is_right(
    tmp_path: Path, cases: list[Case]
) -> None:
    """D runs one request at a time, so that KV waits at P for long."""
    with fleet(tmp_path) as running:
        small = ("--kv-cache-memory", "4Mi", "--max-model-len", "1024")
        p = running.start_engine("Prefill", "--kv-mode", "get", *small, "--kv-buffer-size", "2Mi")
        d = running.start_engine("Decode", "--kv-mode", "get", "--max-num-seqs", "1")
        running.wait_ready(p, d)
        result = asyncio.run(load(running.router.url, cases, seconds=8))
        assert not result.wrong
        assert not result.errors
        assert result.agreed > 0
        samples = p.metrics()
        spilled = {w: samples[f"xpyd_kv_spilled_total{{where={w}}}"] for w in ("buffer", "pool")}
        assert all(spilled.values()), spilled
        assert p.metric("xpyd_kv_pressure_cancels_total") == 0
        for engine in (p, d):
            wait_for("nothing held", lambda e=engine: _holds_nothing(e))

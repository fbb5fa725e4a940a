"""A 1P1D fleet and an aggregated engine of every model family: their greedy tokens are those of
transformers, in chunks, with prefix-cache hits, and under preemption."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from scripts.train_demo_model.random_checkpoint import make_checkpoint
from scripts.train_demo_model.random_weights import Family
from tests.e2e.harness import Fleet, Process, empty_fleet, http

pytestmark = pytest.mark.slow
CONTEXT_TOKENS = 256
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
# What is put into a config.json beside what the random checkpoint has: no weight depends on it.
FAMILIES: list[tuple[Family, dict[str, Any]]] = [
    ("llama", {"rope_scaling": YARN}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 37, "max_window_layers": 1}),
    ("qwen3", {}),
    ("mixtral", {"sliding_window": 37}),
    ("qwen3-moe", {"rope_scaling": YARN}),
]
# Room for 384 tokens: six requests start together and cannot end together.
SMALL_CACHE = ("--kv-cache-memory", str(384 * 2 * 2 * 2 * 16 * 4))
GROWING, GROWN_TOKENS = 6, 100
CHUNKS = (
    "--max-num-batched-tokens",
    "64",
    "--max-num-seqs",
    "8",
    "--max-model-len",
    str(CONTEXT_TOKENS),
)


def make_model(folder: Path, family: Family, more: dict[str, Any]) -> Path:
    """A random checkpoint of two layers with `more` in its config.json."""
    make_checkpoint(
        folder,
        family=family,
        layers=2,
        hidden=64,
        intermediate=96,
        heads=4,
        kv_heads=2,
        max_len=CONTEXT_TOKENS,
    )
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return folder


def make_requests() -> list[tuple[list[int], int]]:
    """Prompts and how many tokens to write: several chunks, one token, almost the whole context,
    and prefixes in common."""
    rng = random.Random(3)
    sizes = [(150, 12), (1, 16), (CONTEXT_TOKENS - 1, 1), (40, 24), (200, 8), (170, 60)]
    made = [([rng.randrange(100, 3000) for _ in range(size)], new) for size, new in sizes]
    return [*made, (made[4][0][:150] + made[0][0][:33], 9), made[0]]


def ask(server: Process, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """The ids that a router or an engine writes behind each prompt of one call, whatever they
    are."""
    return ask_at(server.url, prompts, new_tokens)


def ask_at(url: str, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """As `ask`, by address."""
    body = {
        "model": "demo",
        "prompt": prompts,
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    status, answer = http(f"{url}/v1/completions", body)
    assert status == 200, answer
    choices = sorted(json.loads(answer)["choices"], key=lambda choice: choice["index"])
    return [choice["token_ids"] for choice in choices]


def best_tokens(model: Path, requests: list[tuple[list[int], list[int]]]) -> list[list[int]]:
    """For each prompt and what was written: what transformers holds for best at those places."""
    import torch
    from transformers import AutoModelForCausalLM

    oracle: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    best: list[list[int]] = []
    with torch.inference_mode():
        for prompt, written in requests:
            logits = oracle(torch.tensor([[*prompt, *written[:-1]]])).logits[0]
            best.append(logits[len(prompt) - 1 :].argmax(-1).tolist())
    return best


def start(running: Fleet, model: Path) -> tuple[Process, Process, Process]:
    """P, D and an engine of its own with a small cache."""
    running.start_router()
    pair = ("--kv-on-failure", "fail", *CHUNKS)
    p = running.start_engine("Prefill", *pair, model=model)
    d = running.start_engine("Decode", *pair, model=model)
    alone = running.start_engine(
        "Aggregated", *CHUNKS, *SMALL_CACHE, model=model, env={"XPYD_DISCOVERY": ""}
    )
    running.wait_ready(p, d)
    running.wait_healthy(alone)
    return p, d, alone


@pytest.mark.parametrize(("family", "more"), FAMILIES, ids=[family for family, _ in FAMILIES])
def test_greedy_tokens_are_those_of_transformers(
    tmp_path: Path, family: Family, more: dict[str, Any]
) -> None:
    model = make_model(tmp_path / "model", family, more)
    requests = make_requests()
    growing = [prompt[:40] for prompt, _ in requests if len(prompt) >= 40][:GROWING]
    written: list[tuple[list[int], list[int]]] = []
    with empty_fleet(tmp_path) as running:
        p, d, alone = start(running, model)
        for prompt, new in requests:
            written += [(prompt, ids) for ids in ask(running.router, [prompt], new)]
        for prompts in (growing, growing[:1]):
            written += zip(prompts, ask(alone, prompts, GROWN_TOKENS), strict=True)
        assert d.metric("xpyd_kv_received_bytes_total") > 0
        assert d.metric("xpyd_kv_recomputed_requests_total") == 0
        assert p.metric("xpyd_engine_prefix_hit_tokens_total") >= 144
        assert alone.metric("xpyd_engine_preemptions_total") > 0
        assert alone.metric("xpyd_engine_prefix_hit_tokens_total") >= 32
    wanted = [new for _, new in requests] + [GROWN_TOKENS] * (GROWING + 1)
    assert [len(ids) for _, ids in written] == wanted
    assert [ids for _, ids in written] == best_tokens(model, written)

"""Several vLLM with our connector: 1P2D, 2P1D, 2P2D, and a P of two ranks with a D of one.

Soak: see test_vllm_real; four vLLM take 10 GB.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest

from bench.engine.models import cache
from bench.engine.peer import VERSION
from tests.kv.vllm_kit import LENGTHS, Vllm, by_router, fleet, prompt

pytestmark = pytest.mark.soak
ON_P, ON_D = {"cores": "0"}, {"cores": "1", "pool_bytes": 1 << 28}
TWO_RANKS = ["--tensor-parallel-size", "2"]
SHAPES = {
    "1P2D": ([ON_P], [ON_D, {**ON_D, "cores": "0"}]),
    "2P1D": ([ON_P, {**ON_P, "cores": "1"}], [ON_D]),
    "2P2D": ([ON_P, ON_P], [ON_D, ON_D]),
    "TP2-TP1": ([{"cores": "0|1", "flags": TWO_RANKS}], [ON_D]),
    "TP1-TP2": ([ON_P], [{**ON_D, "cores": "0|1", "flags": TWO_RANKS}]),
}


@pytest.fixture(scope="module", params=SHAPES)
def engines(request, tmp_path_factory) -> Iterator[tuple[list[Vllm], list[Vllm]]]:
    if not (cache() / f"vllm-{VERSION}/ready").exists():
        pytest.skip("run scripts/vllm_environment.py first")
    with fleet(tmp_path_factory.mktemp("vllm"), *SHAPES[request.param]) as all_of_them:
        yield all_of_them


def total(every: list[Vllm], name: str) -> float:
    return sum(one.metric(name) for one in every)


def test_a_fleet_answers_as_one_vllm(engines):
    some_p, some_d = engines
    prompts = [prompt(length, 800 + seed) for seed, length in enumerate(LENGTHS)]
    prompts += [[*prompt(640, 899), *prompt(50 + tail, 900 + tail)] for tail in range(4)]
    before = total(some_d, "xpyd_kv_transfers_total")

    def ask(at: int) -> str:
        body = {"prompt": prompts[at], "max_tokens": 8}
        if at % 2 == 0:
            return json.loads(by_router(**body))["choices"][0]["text"]
        lines = by_router(stream=True, **body).split(b"\n\n")
        parts = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        return "".join(part["choices"][0]["text"] for part in parts if part["choices"])

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(ask, range(len(prompts))))
    for ids, answer in zip(prompts, answers, strict=True):
        alone = some_p[0].complete(uuid4().hex, prompt=ids, max_tokens=8)
        assert answer == alone["choices"][0]["text"], len(ids)
    assert total(some_d, "xpyd_kv_transfers_total") == before + len(prompts)
    assert total(some_d, "xpyd_kv_recomputed_tokens_total") == 0
    assert all(one.metric("vllm:prompt_tokens_total") > 0 for one in (*some_p, *some_d))
    for one in (*some_p, *some_d):
        assert one.metric("vllm:kv_cache_usage_perc") == 0


def test_a_fleet_answers_chats_as_one_vllm(engines):
    some_p, _ = engines
    for count in (1, 30, 120):
        messages = [{"role": "user", "content": "tell me of rivers " * count}]
        body = {"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        apart = json.loads(some_p[0].post("/v1/chat/completions", {"model": "demo-model", **body}))
        answer = json.loads(by_router("/v1/chat/completions", **body))
        lines = by_router("/v1/chat/completions", stream=True, **body).split(b"\n\n")
        parts = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        deltas = [part["choices"][0]["delta"] for part in parts if part["choices"]]
        text = apart["choices"][0]["message"]["content"]
        assert answer["choices"][0]["message"]["content"] == text
        assert "".join(delta.get("content") or "" for delta in deltas) == text

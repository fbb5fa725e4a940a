"""Several vLLM with our connector: 1P2D, 2P1D, 2P2D, and a P of two ranks with a D of one.

Soak: see test_vllm_real; four vLLM take 10 GB.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.engine.models import cache
from bench.engine.peer import VERSION
from tests.kv.vllm_kit import (
    PromptTokens,
    Vllm,
    assert_d_got,
    by_router,
    chats,
    fleet,
    prompt,
    prompts,
    text_of,
    until_free,
)

pytestmark = pytest.mark.soak
ON_P, ON_D = {"cores": "0"}, {"cores": "1", "pool_bytes": 1 << 28}
TWO_RANKS = ["--tensor-parallel-size", "2"]
# Counted from a prompt's end: no token of P may be handed over.
CAPPED = {"flags": ["--override-generation-config", '{"max_new_tokens": 5}']}
SHAPES = {
    "1P2D": ([ON_P], [ON_D, {**ON_D, "cores": "0"}]),
    "2P1D, capped": ([ON_P | CAPPED, {**ON_P, "cores": "1"} | CAPPED], [ON_D | CAPPED]),
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


def test_a_fleet_answers_as_one_vllm_and_d_computes_one_token_of_each_prompt(engines):
    some_p, some_d = engines
    asked = prompts(800)
    before, transfers = PromptTokens.of(some_d), total(some_d, "xpyd_kv_transfers_total")

    def ask(at: int) -> str:
        return text_of(by_router(prompt=asked[at], max_tokens=8, stream=at % 2 == 1))

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(ask, range(len(asked))))
    for ids, answer in zip(asked, answers, strict=True):
        assert answer == some_p[0].text(prompt=ids, max_tokens=8), len(ids)
    assert_d_got(before, some_d, asked)
    assert total(some_d, "xpyd_kv_transfers_total") == transfers + len(asked)
    assert total(some_d, "xpyd_kv_recomputed_tokens_total") == 0
    assert all(one.metric("vllm:prompt_tokens_total") > 0 for one in (*some_p, *some_d))
    for one in (*some_p, *some_d):
        until_free(one)


def test_a_fleet_answers_chats_as_one_vllm_streamed_and_not(engines):
    some_p, _ = engines
    path = "/v1/chat/completions"
    for body in chats():
        alone = some_p[0].text(path, **body)
        for stream in (False, True):
            assert text_of(by_router(path, stream=stream, **body)) == alone


def test_two_prompts_in_one_body_answer_as_apart(engines):
    some_p, some_d = engines
    both = [prompt(200, 950), prompt(333, 951)]
    before = total(some_d, "xpyd_kv_transfers_total")
    choices = json.loads(by_router(prompt=both, max_tokens=8))["choices"]
    apart = [some_p[0].text(prompt=ids, max_tokens=8) for ids in both]
    assert [choice["text"] for choice in choices] == apart
    assert total(some_d, "xpyd_kv_transfers_total") == before + len(both)

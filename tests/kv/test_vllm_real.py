"""Two vLLM on this machine's CPU with our connector and plugin: one P, one D, behind our router.

Their command lines are those of docs/vllm.md, which `vllm_kit` reads.
`make test-vllm` runs one pair, `make soak` one more for each other mode. Two vLLM start in one to
four minutes on two cores.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest

from bench.engine.models import cache
from bench.engine.peer import VERSION
from tests.kv.vllm_kit import (
    KV_PORT,
    LENGTHS,
    STRICT,
    D,
    P,
    PromptTokens,
    Vllm,
    assert_d_got,
    by_router,
    chats,
    disturbed,
    instances,
    pair,
    prompt,
    prompts,
    text_of,
    until_free,
    until_given,
    until_verified,
)
from xpyd_core.request_id import pair_id_text

pytestmark = pytest.mark.vllm


OPTIONS = {
    "put_async": ({}, {"pool_bytes": 1 << 28}),
    "put": ({"mode": "put"}, {"pool_bytes": 1 << 28}),
    "get": ({"mode": "get", "pool_bytes": 1 << 28}, {}),
}
MODES = ["put_async", *(pytest.param(name, marks=pytest.mark.soak) for name in ("put", "get"))]


@pytest.fixture(scope="module", params=MODES)
def engines(request, tmp_path_factory) -> Iterator[tuple[Vllm, Vllm]]:
    if not (cache() / f"vllm-{VERSION}/ready").exists():
        pytest.skip("run scripts/vllm_environment.py first")
    with pair(tmp_path_factory.mktemp("vllm"), *OPTIONS[request.param], *STRICT) as both:
        yield both


def test_a_pair_answers_as_one_vllm_and_d_computes_one_token_of_each_prompt(engines):
    p, d = engines
    before, transfers = PromptTokens.of([d]), d.metric("xpyd_kv_transfers_total")
    asked = prompts(0)
    for ids in asked:
        answer = text_of(by_router(prompt=ids, max_tokens=8))
        assert answer == p.text(prompt=ids, max_tokens=8), len(ids)
    assert_d_got(before, [d], asked)
    assert d.metric("xpyd_kv_recomputed_tokens_total") == 0
    assert d.metric("xpyd_kv_transfers_total") == transfers + len(asked)
    for one in engines:
        until_free(one)


def test_a_pair_answers_eight_at_once_as_one_vllm(engines):
    p, d = engines
    before = d.metric("xpyd_kv_transfers_total")
    tokens = [prompt(40 + 97 * seed, 150 + seed) for seed in range(16)]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda ids: by_router(prompt=ids, max_tokens=8), tokens))
    for ids, answer in zip(tokens, answers, strict=True):
        assert text_of(answer) == p.text(prompt=ids, max_tokens=8)
    assert d.metric("xpyd_kv_transfers_total") == before + len(tokens)
    assert d.metric("xpyd_kv_recomputed_tokens_total") == 0


def test_a_pair_answers_chats_as_one_vllm_streamed_and_not(engines):
    p, d = engines
    path, before = "/v1/chat/completions", d.metric("xpyd_kv_transfers_total")
    for body in chats():
        alone = p.text(path, **body)
        for stream in (False, True):
            assert text_of(by_router(path, stream=stream, **body)) == alone
    assert d.metric("xpyd_kv_transfers_total") == before + 2 * len(chats())
    assert d.metric("xpyd_kv_recomputed_tokens_total") == 0


def test_a_stream_begins_with_the_token_of_p_and_goes_on_as_one_vllm_would(engines):
    p, d = engines
    tokens = PromptTokens.of([d])
    asked = [prompt(length, 200 + seed) for seed, length in enumerate(LENGTHS)]
    for ids in asked:
        before = d.metric("vllm:generation_tokens_total")
        text = text_of(by_router(prompt=ids, max_tokens=8, stream=True))
        alone = p.text(prompt=ids, max_tokens=8)
        assert text == alone, len(ids)
        # P's token may be half a character: then D makes all of them.
        made = d.metric("vllm:generation_tokens_total") - before
        assert made == 7 or (made == 8 and not alone.isascii()), len(ids)
    assert_d_got(tokens, [d], asked)
    assert d.metric("xpyd_kv_recomputed_tokens_total") == 0


def test_what_one_engine_can_do_better_is_not_paired(engines):
    p, d = engines
    ids = prompt(300, 300)
    before = d.metric("xpyd_kv_transfers_total")
    drawn = {"prompt": ids, "max_tokens": 8, "n": 2, "temperature": 1.0, "seed": 7}
    several = json.loads(by_router(**drawn))["choices"]
    first = text_of(by_router(prompt=ids, max_tokens=1))
    assert d.metric("xpyd_kv_transfers_total") == before
    alone = p.text(prompt=ids, max_tokens=8)
    both = p.complete(uuid4().hex, **drawn)["choices"]
    assert [choice["text"] for choice in several] == [choice["text"] for choice in both]
    assert first
    assert alone.startswith(first)


def test_what_p_will_not_send_is_computed_at_once(engines):
    p, d = engines
    tokens = prompt(300, 7)
    name = pair_id_text(f"{P}:{KV_PORT}", f"{D}:{KV_PORT}", uuid4().hex)
    began = time.monotonic()
    said = {"transfer": ["none"], "reason": ["auth"], "decode_incarnation": ""}
    answer = d.complete(name, prompt=tokens, max_tokens=8, kv_transfer_params=said)
    assert time.monotonic() - began < 10.0
    assert answer["choices"][0]["text"] == p.text(prompt=tokens, max_tokens=8)


def test_a_pair_that_must_be_verified_is_by_its_probe(engines):
    until_verified(1)
    found = instances()
    assert (found["kv_verify"], found["kv_problems"]) == ("strict", [])
    assert [one["unverified"] for one in found["instances"]] == [[], []]


def test_what_is_under_way_when_both_are_drained_is_served(engines):
    p, d = engines
    asked = {f"drain-{seed}": prompt(600 + 50 * seed, 700 + seed) for seed in range(6)}
    # Salted, so that neither has any of them in its prefix cache.
    body = {"max_tokens": 256, "cache_salt": "alone"}
    alone = [p.text(prompt=ids, **body) for ids in asked.values()]

    def ask(name: str) -> str:
        body = {"prompt": asked[name], "max_tokens": 256, "stream": name[-1] in "024"}
        return text_of(by_router(request_id=name, **body))

    with ThreadPoolExecutor(len(asked)) as threads:
        answers = threads.map(ask, asked)
        until_given(d, len(asked))
        for one in engines:
            one.process.send_signal(signal.SIGTERM)
        assert list(answers) == alone
    assert disturbed(d.log.parent / "router.log", list(asked)) == []
    for one in engines:
        assert one.process.wait(60.0) == 0
        log = one.log.read_text()
        assert "this instance is Draining" in log
        assert "routers have 0 requests here" in log
        assert "this instance is Gone" in log

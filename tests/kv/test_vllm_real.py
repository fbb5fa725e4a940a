"""Two vLLM on this machine's CPU with our connector and plugin: one P, one D, behind our router.

Their command lines are those of docs/vllm.md, which `vllm_kit` reads.
`make test-vllm` runs one pair, `make soak` one more for each other mode. Two vLLM start in one to
four minutes on two cores.
"""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest

from bench.engine.models import cache
from bench.engine.peer import VERSION
from tests.kv.vllm_kit import (
    KV_PORT,
    LENGTHS,
    D,
    P,
    Vllm,
    by_router,
    pair,
    prompt,
)
from xpyd_core.request_id import pair_id_text

pytestmark = pytest.mark.vllm


def texts(p: Vllm, d: Vllm, tokens: list[int]) -> tuple[str, str]:
    """What the pair answers, and what one vLLM does."""
    name = pair_id_text(f"{P}:{KV_PORT}", f"{D}:{KV_PORT}", uuid4().hex)
    first = p.complete(name, prompt=tokens, max_tokens=1)
    said = first["kv_transfer_params"]
    answer = d.complete(name, prompt=tokens, max_tokens=8, kv_transfer_params=said)
    alone = p.complete(uuid4().hex, prompt=tokens, max_tokens=8)
    return answer["choices"][0]["text"], alone["choices"][0]["text"]


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
    with pair(tmp_path_factory.mktemp("vllm"), *OPTIONS[request.param]) as both:
        yield both


def test_a_pair_answers_as_one_vllm_and_d_computes_no_prompt(engines):
    p, d = engines
    before = d.metric("xpyd_kv_transfers_total")
    for seed, length in enumerate(LENGTHS):
        answer, alone = texts(p, d, prompt(length, seed))
        assert answer == alone, length
    assert d.metric("xpyd_kv_recomputed_tokens_total") == 0
    assert d.metric("xpyd_kv_transfers_total") == before + len(LENGTHS)
    shared = prompt(640, 99)
    for tail in range(3):
        answer, alone = texts(p, d, [*shared, *prompt(50 + tail, tail)])
        assert answer == alone
    assert d.metric("xpyd_kv_recomputed_tokens_total") == 0
    for one in engines:
        assert one.metric("vllm:kv_cache_usage_perc") == 0


def test_the_router_finds_the_pair_by_its_heartbeats(engines):
    p, d = engines
    before = d.metric("xpyd_kv_transfers_total")
    tokens = [prompt(40 + 97 * seed, 50 + seed) for seed in range(16)]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda ids: by_router(prompt=ids, max_tokens=8), tokens))
    for ids, answer in zip(tokens, answers, strict=True):
        alone = p.complete(uuid4().hex, prompt=ids, max_tokens=8)
        assert json.loads(answer)["choices"][0]["text"] == alone["choices"][0]["text"]
    assert d.metric("xpyd_kv_transfers_total") == before + len(tokens)
    assert d.metric("xpyd_kv_recomputed_tokens_total") == 0
    said = {"messages": [{"role": "user", "content": "Tell me of San Francisco."}], "max_tokens": 8}
    whole = json.loads(by_router("/v1/chat/completions", **said))["choices"][0]["message"]
    lines = by_router("/v1/chat/completions", stream=True, **said).split(b"\n\n")
    parts = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    deltas = [part["choices"][0]["delta"].get("content") or "" for part in parts if part["choices"]]
    assert "".join(deltas) == whole["content"]
    assert d.metric("xpyd_kv_transfers_total") == before + len(tokens) + 2


def test_a_stream_begins_with_the_token_of_p_and_goes_on_as_one_vllm_would(engines):
    p, d = engines
    for seed, length in enumerate((1, 60, 127, 128, 129, 300, 700)):
        ids = prompt(length, 200 + seed)
        before = d.metric("vllm:generation_tokens_total")
        lines = by_router(prompt=ids, max_tokens=8, stream=True).split(b"\n\n")
        parts = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        text = "".join(part["choices"][0]["text"] for part in parts if part["choices"])
        alone = p.complete(uuid4().hex, prompt=ids, max_tokens=8)
        assert text == alone["choices"][0]["text"], length
        # P's token may be half a character: then D makes all of them.
        made = d.metric("vllm:generation_tokens_total") - before
        assert made == 7 or (made == 8 and not alone["choices"][0]["text"].isascii()), length
    assert d.metric("xpyd_kv_recomputed_tokens_total") == 0


def test_what_one_engine_can_do_better_is_not_paired(engines):
    p, d = engines
    ids = prompt(300, 300)
    before = d.metric("xpyd_kv_transfers_total")
    drawn = {"prompt": ids, "max_tokens": 8, "n": 2, "temperature": 1.0, "seed": 7}
    several = json.loads(by_router(**drawn))["choices"]
    first = json.loads(by_router(prompt=ids, max_tokens=1))["choices"][0]["text"]
    assert d.metric("xpyd_kv_transfers_total") == before
    alone = p.complete(uuid4().hex, prompt=ids, max_tokens=8)["choices"][0]["text"]
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
    alone = p.complete(uuid4().hex, prompt=tokens, max_tokens=8)
    assert answer["choices"][0]["text"] == alone["choices"][0]["text"]


def test_a_drained_d_takes_no_more_and_ends(engines):
    _, d = engines
    d.process.send_signal(signal.SIGTERM)
    assert d.process.wait(60.0) == 0
    log = d.log.read_text()
    assert "this instance is Draining" in log
    assert "this instance is Gone" in log
    with pytest.raises(urllib.error.HTTPError, match="503"):
        by_router(prompt=[1, 2, 3], max_tokens=2)

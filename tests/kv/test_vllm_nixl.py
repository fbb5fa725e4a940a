"""Two vLLM with NixlConnector, unchanged, behind our router.

Soak: see test_vllm_real; NIXL's wheels are another 200 MB.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from uuid import uuid4

import pytest

from bench.engine.models import cache
from bench.engine.peer import VERSION
from tests.kv.vllm_kit import (
    LENGTHS,
    PORT,
    ROUTER,
    ROUTER_PORT,
    D,
    P,
    Vllm,
    by_router,
    prompt,
    router,
    until_routed,
)

pytestmark = pytest.mark.soak
EXTERNAL = "vllm:external_prefix_cache_hits_total"
LEASE_S = 60.0


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> Iterator[tuple[Vllm, Vllm]]:
    if not (cache() / f"vllm-{VERSION}/ready").exists():
        pytest.skip("run scripts/vllm_environment.py first")
    folder = tmp_path_factory.mktemp("nixl")
    (folder / "kv.key").write_text("a secret of the whole fleet\n")
    listed = (f"{kind}=http://{host}:{PORT},dialect=nixl" for kind, host in (("P", P), ("D", D)))
    flags = [word for one in listed for word in ("--static-instance", one)]
    both = [Vllm.of_nixl(host, folder / f"{host}.log") for host in (P, D)]
    try:
        for one in both:
            one.wait()
        with router(folder, *flags):
            until_routed()
            yield both[0], both[1]
    finally:
        for one in both:
            one.stop()


def alone(p: Vllm, **body: object) -> str:
    return p.complete(uuid4().hex, **body)["choices"][0]["text"]


def until_free(p: Vllm) -> None:
    """Until P holds no block. It says so in a step, so a small request makes it take one."""
    deadline = time.monotonic() + LEASE_S
    while True:
        alone(p, prompt=[5, 6, 7], max_tokens=1)
        if p.metric("vllm:kv_cache_usage_perc") == 0:
            return
        assert time.monotonic() < deadline, p.metric("vllm:kv_cache_usage_perc")
        time.sleep(0.5)


def test_a_pair_answers_as_one_vllm_by_the_kv_of_p(engines):
    p, d = engines
    before = d.metric(EXTERNAL)
    for seed, length in enumerate(LENGTHS):
        ids = prompt(length, 400 + seed)
        answer = json.loads(by_router(prompt=ids, max_tokens=8))["choices"][0]["text"]
        assert answer == alone(p, prompt=ids, max_tokens=8), length
    assert d.metric(EXTERNAL) - before >= 0.95 * sum(LENGTHS)
    until_free(p)


def test_a_stream_answers_as_one_vllm(engines):
    p, d = engines
    for seed, length in enumerate((60, 127, 128, 129, 700)):
        ids = prompt(length, 450 + seed)
        before = d.metric(EXTERNAL)
        lines = by_router(prompt=ids, max_tokens=8, stream=True).split(b"\n\n")
        parts = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        text = "".join(part["choices"][0]["text"] for part in parts if part["choices"])
        assert text == alone(p, prompt=ids, max_tokens=8), length
        assert d.metric(EXTERNAL) - before >= length - 1
    until_free(p)


def test_a_chat_answers_as_one_vllm(engines):
    p, d = engines
    before = d.metric(EXTERNAL)
    for count in (3, 60):
        messages = [{"role": "user", "content": "tell me of rivers " * count}]
        body = {"messages": messages, "max_tokens": 8}
        whole = {"model": "demo-model", "temperature": 0, "ignore_eos": True, **body}
        apart = json.loads(p.post("/v1/chat/completions", whole))["choices"][0]["message"]
        answer = json.loads(by_router("/v1/chat/completions", **body))["choices"][0]["message"]
        assert answer["content"] == apart["content"]
    assert d.metric(EXTERNAL) > before
    until_free(p)


def test_two_prompts_in_one_body_answer_as_apart(engines):
    p, _ = engines
    both = [prompt(200, 500), prompt(333, 501)]
    choices = json.loads(by_router(prompt=both, max_tokens=8))["choices"]
    assert [choice["text"] for choice in choices] == [
        alone(p, prompt=ids, max_tokens=8) for ids in both
    ]
    until_free(p)


def test_blocks_of_a_client_that_left_are_free_when_their_lease_ends(engines):
    p, d = engines
    for at in range(24):
        body = {
            "model": "demo-model",
            "prompt": prompt(1500, 600 + at),
            "max_tokens": 64,
            "temperature": 0,
            "ignore_eos": True,
        }
        sent = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(sent)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        with socket.create_connection((ROUTER, ROUTER_PORT), 10.0) as client:
            client.sendall(head.encode() + sent)
            time.sleep(0.03 * at)
    ids = prompt(300, 700)
    answer = json.loads(by_router(prompt=ids, max_tokens=8))["choices"][0]["text"]
    assert answer == alone(p, prompt=ids, max_tokens=8)
    until_free(p)
    until_free(d)

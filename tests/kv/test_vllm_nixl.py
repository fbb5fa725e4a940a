"""Two vLLM with NixlConnector, unchanged, behind our router.

Soak: see test_vllm_real; NIXL's wheels are another 200 MB.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from bench.engine.models import cache
from bench.engine.peer import VERSION
from tests.kv.vllm_kit import (
    ADMIN_PORT,
    LENGTHS,
    PORT,
    ROUTER,
    ROUTER_PORT,
    D,
    P,
    PromptTokens,
    Vllm,
    assert_d_got,
    by_router,
    chats,
    greedy,
    metric,
    prompt,
    prompts,
    router,
    text_of,
    until_free,
    until_routed,
)

pytestmark = pytest.mark.soak
EXTERNAL = "vllm:external_prefix_cache_hits_total"
RELEASES = "xpyd_router_releases_total"


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


def test_a_pair_answers_as_one_vllm_by_the_kv_of_p(engines):
    p, d = engines
    before, asked = PromptTokens.of([d]), prompts(400)
    for ids in asked:
        assert text_of(by_router(prompt=ids, max_tokens=8)) == p.text(prompt=ids, max_tokens=8)
    assert_d_got(before, [d], asked)
    until_free(p)


def test_a_stream_answers_as_one_vllm(engines):
    p, d = engines
    before = PromptTokens.of([d])
    asked = [prompt(length, 550 + seed) for seed, length in enumerate(LENGTHS)]
    for ids in asked:
        text = text_of(by_router(prompt=ids, max_tokens=8, stream=True))
        assert text == p.text(prompt=ids, max_tokens=8), len(ids)
    assert_d_got(before, [d], asked)
    until_free(p)


def test_a_chat_answers_as_one_vllm_streamed_and_not(engines):
    p, d = engines
    path, before = "/v1/chat/completions", d.metric(EXTERNAL)
    for body in chats():
        alone = p.text(path, **body)
        for stream in (False, True):
            assert text_of(by_router(path, stream=stream, **body)) == alone
    assert d.metric(EXTERNAL) > before
    until_free(p)


def test_two_prompts_in_one_body_answer_as_apart(engines):
    p, _ = engines
    both = [prompt(200, 500), prompt(333, 501)]
    choices = json.loads(by_router(prompt=both, max_tokens=8))["choices"]
    apart = [p.text(prompt=ids, max_tokens=8) for ids in both]
    assert [choice["text"] for choice in choices] == apart
    until_free(p)


def test_blocks_of_a_client_that_left_are_free_when_their_lease_ends(engines):
    p, d = engines
    for at in range(24):
        body = greedy({"prompt": prompt(1500, 600 + at), "max_tokens": 64})
        sent = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(sent)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        with socket.create_connection((ROUTER, ROUTER_PORT), 10.0) as client:
            client.sendall(head.encode() + sent)
            time.sleep(0.03 * at)
    # Some have left behind P's answer: what P has pinned, D gives back, or nobody before the lease.
    assert metric(ROUTER, ADMIN_PORT, RELEASES, 'result="leased"') > 0
    ids = prompt(300, 700)
    assert text_of(by_router(prompt=ids, max_tokens=8)) == p.text(prompt=ids, max_tokens=8)
    until_free(p)
    until_free(d)

"""Clients of other projects that measure OpenAI servers, unchanged, through the router.

`vllm bench serve` and guidellm come from PyPI into environments of their own in the cache, some
gigabytes each, made once. Where one cannot be made, its tests are skipped with the reason.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.engine.peer import peer_environment
from bench.environments import NotHere, cache, environment
from tests.e2e.harness import DEMO_MODEL, Fleet, fleet

pytestmark = [pytest.mark.slow, pytest.mark.long]
GUIDELLM = "0.8.1"
INSTALL_S = 900.0
# vLLM alone needs half a minute of processor time to start.
RUN_S = 600.0
REQUESTS, AT_ONCE = 8, 4
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 12
COMPLETIONS, CHAT = "completions", "chat/completions"
# vLLM's client takes half a minute of processor time to start, so each run has each client and each
# route once, and the soak all four.
IN_SOAK = pytest.mark.soak


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet(tmp_path_factory.mktemp("measured"), prefill=1, decode=1) as running:
        yield running


@pytest.fixture(scope="module")
def vllm() -> Path:
    """The environment that `make bench-engine` measures, too."""
    try:
        return peer_environment()
    except NotHere as error:
        pytest.skip(f"vLLM cannot be installed here: {error}")


@pytest.fixture(scope="module")
def guidellm() -> Path:
    try:
        pin = f"guidellm=={GUIDELLM}"
        return environment(cache() / f"guidellm-{GUIDELLM}", pin, timeout_s=INSTALL_S)
    except NotHere as error:
        pytest.skip(f"guidellm cannot be installed here: {error}")


def measure(argv: list[str], folder: Path, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a client that writes out.json there; what it wrote."""
    offline = {"HF_HUB_OFFLINE": "1", "HOME": str(folder), **(env or {})}
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        cwd=folder,
        env={**os.environ, **offline},
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return json.loads((folder / "out.json").read_text())


def served(running: Fleet) -> tuple[float, float]:
    """Requests that the router answered well; bytes of KV that went from P to D."""
    ok = sum(
        value
        for name, value in running.router.metrics().items()
        if name.startswith("xpyd_router_requests_total") and "status=200" in name
    )
    return ok, running.engine("Decode").metric("xpyd_kv_received_bytes_total")


@pytest.mark.parametrize("route", [COMPLETIONS, pytest.param(CHAT, marks=IN_SOAK)])
def test_vllm_bench_serve_counts_every_request(
    pair: Fleet, vllm: Path, tmp_path: Path, route: str
) -> None:
    before = served(pair)
    backend = "openai-chat" if route.startswith("chat") else "openai"
    found = measure(
        [
            *(str(vllm / "bin/vllm"), "bench", "serve", "--backend", backend),
            *("--base-url", pair.router.url, "--endpoint", f"/v1/{route}"),
            *("--model", "demo", "--tokenizer", str(DEMO_MODEL), "--dataset-name", "random"),
            *("--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS)),
            *("--num-prompts", str(REQUESTS), "--max-concurrency", str(AT_ONCE), "--ignore-eos"),
            *("--save-result", "--result-filename", "out.json", "--disable-tqdm"),
        ],
        tmp_path,
        {"PYTHONPATH": str(vllm / "alias"), "VLLM_NO_USAGE_STATS": "1"},
    )
    assert (found["completed"], found["failed"]) == (REQUESTS, 0)
    assert found["total_output_tokens"] == REQUESTS * OUTPUT_TOKENS
    assert found["total_input_tokens"] >= REQUESTS * PROMPT_TOKENS // 2
    for figure in ("request_throughput", "median_ttft_ms", "median_tpot_ms", "median_itl_ms"):
        assert found[figure] > 0, figure
    assert_through_the_pair(pair, before)


@pytest.mark.parametrize("route", [pytest.param(COMPLETIONS, marks=IN_SOAK), CHAT])
def test_guidellm_counts_every_request(
    pair: Fleet, guidellm: Path, tmp_path: Path, route: str
) -> None:
    before = served(pair)
    sizes = f"prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    backend = f"target={pair.router.url},model=demo,request_format=/v1/{route}"
    found = measure(
        [
            *(str(guidellm / "bin/guidellm"), "run", "--disable-console-interactive"),
            *("--backend", f"kind=openai_http,{backend}"),
            *("--tokenizer", f"kind=huggingface_auto,model={DEMO_MODEL}"),
            *("--profile", f"kind=concurrent,streams={AT_ONCE}"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--data", f"kind=synthetic_text,{sizes}", "--output", "kind=json,path=out.json"),
        ],
        tmp_path,
    )
    (run,) = found["benchmarks"]
    metrics = run["metrics"]
    totals = metrics["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
    outputs = metrics["output_token_count"]["successful"]
    assert outputs["total_sum"] == REQUESTS * OUTPUT_TOKENS
    figures = ("requests_per_second", "time_to_first_token_ms", "inter_token_latency_ms")
    for figure in figures:
        assert metrics[figure]["successful"]["mean"] > 0, figure
    assert_through_the_pair(pair, before)


def assert_through_the_pair(running: Fleet, before: tuple[float, float]) -> None:
    """The router counts each request as answered, and P's KV came to D."""
    ok, kv_bytes = served(running)
    assert ok - before[0] >= REQUESTS
    assert kv_bytes > before[1]
    assert running.engine("Decode").metric("xpyd_kv_recomputed_requests_total") == 0

"""Our engines behind the real vllm-router: they register by their beats and serve as behind ours.

vllm-router comes from PyPI into an environment of its own in the cache. Without a registry the test
is skipped, but not in CI.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.environments import NotHere, cache, environment
from tests.e2e.harness import Fleet, empty_fleet, http, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.long]
VERSION = "0.1.17"
PORT, DISCOVERY_PORT, METRICS_PORT = 10004, 30002, 10003
INSTALL_S = 300.0
PROMPT = "San Francisco is a"
DRAWN = {"temperature": 0.9, "seed": 11}
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def program() -> Path:
    """The installed vllm-router."""
    try:
        pin = f"vllm-router=={VERSION}"
        folder = environment(cache() / f"vllm-router-{VERSION}", pin, timeout_s=INSTALL_S)
    except NotHere as error:
        # CI has a registry: there it must not be skipped.
        say = pytest.fail if os.environ.get("XPYD_CLUSTER_REQUIRED") else pytest.skip
        say(f"vllm-router cannot be installed here: {error}")
    return folder / "bin/vllm-router"


@pytest.fixture(scope="module")
def routed(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, str]]:
    """A P and a D that beat to both routers, and vllm-router's URL."""
    folder = tmp_path_factory.mktemp("vllm-router")
    with empty_fleet(folder) as running, (folder / "vllm-router.log").open("wb") as log:
        host = f"{running.subnet}.1"
        theirs = subprocess.Popen(
            [
                *(str(program), "--host", host, "--port", str(PORT), "--policy", "round_robin"),
                *("--prometheus-host", host, "--prometheus-port", str(METRICS_PORT)),
                *("--vllm-pd-disaggregation", "--vllm-discovery-address"),
                f"{host}:{DISCOVERY_PORT}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            running.start_router()
            env = {"XPYD_DISCOVERY": f"{host}:30001,{host}:{DISCOVERY_PORT}"}
            engines = [
                running.start_engine(role, "--accept-unsigned-pairs", env=env)
                for role in ("Prefill", "Decode")
            ]
            running.wait_ready(*engines, timeout_s=300.0)
            url = f"http://{host}:{PORT}"
            wait_for("vllm-router's pair", lambda: serves(url), 60.0)
            yield running, url
        finally:
            theirs.kill()
            theirs.wait(10)


def serves(url: str) -> bool:
    try:
        body = {"model": "demo", "prompt": "x", "max_tokens": 2}
        return http(f"{url}/v1/completions", body)[0] == 200
    except OSError:
        return False


def ask(url: str, path: str, **body: Any) -> dict[str, Any]:
    status, answer = http(f"{url}/v1/{path}", {"model": "demo", "max_tokens": 12, **body})
    assert status == 200, answer
    return json.loads(answer)


def events(url: str, path: str, **body: Any) -> list[Any]:
    body = {"model": "demo", "max_tokens": 12, "stream": True, **body}
    status, answer = http(f"{url}/v1/{path}", body)
    assert status == 200, answer
    payloads = [e.removeprefix(b"data: ") for e in answer.split(b"\n\n") if e]
    assert payloads.pop() == b"[DONE]"
    return [json.loads(payload) for payload in payloads]


def said(choice: dict[str, Any]) -> str:
    inner = choice.get("message") or choice.get("delta") or choice
    return inner.get("content") or inner.get("text") or ""


def shown(answer: dict[str, Any]) -> Any:
    """What a client reads, ids and times aside."""
    found = [(c["index"], said(c), c["finish_reason"]) for c in answer["choices"]]
    return answer["object"], answer["model"], found, answer["usage"]


def joined(chunks: list[Any]) -> Any:
    """A stream as its client puts it together: text and end of each choice, and the usage."""
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + said(choice)
        if choice["finish_reason"]:
            ends[choice["index"]] = choice["finish_reason"]
    return texts, ends, [c["usage"] for c in chunks if c.get("usage")]


def asks(path: str) -> dict[str, Any]:
    if path == "completions":
        return {"prompt": PROMPT}
    return {"messages": [{"role": "user", "content": PROMPT}]}


@pytest.mark.parametrize("how", [GREEDY, DRAWN, {**DRAWN, "n": 2}], ids=["greedy", "drawn", "two"])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_answers_are_those_behind_our_router(
    routed: tuple[Fleet, str], path: str, how: dict[str, Any]
) -> None:
    running, theirs = routed
    decode = running.engine("Decode")
    before = decode.metric("xpyd_kv_received_bytes_total")
    answer = ask(theirs, path, **asks(path), **how)
    assert decode.metric("xpyd_kv_received_bytes_total") > before, "P's KV came to D"
    assert decode.metric("xpyd_kv_recomputed_requests_total") == 0
    assert shown(answer) == shown(ask(running.router.url, path, **asks(path), **how))
    assert len(answer["choices"]) == how.get("n", 1)
    assert all(said(choice) for choice in answer["choices"])


@pytest.mark.parametrize("how", [GREEDY, {**DRAWN, "n": 2}], ids=["greedy", "two"])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_streams_are_those_behind_our_router(
    routed: tuple[Fleet, str], path: str, how: dict[str, Any]
) -> None:
    running, theirs = routed
    usage = {"stream_options": {"include_usage": True}}
    chunks = events(theirs, path, **asks(path), **how, **usage)
    assert joined(chunks) == joined(events(running.router.url, path, **asks(path), **how, **usage))
    assert sum(bool(said(c)) for chunk in chunks for c in chunk["choices"]) > 1, "it was streamed"


def test_a_client_error_is_the_engines(routed: tuple[Fleet, str]) -> None:
    _, theirs = routed
    status, body = http(f"{theirs}/v1/completions", {"model": "other", "prompt": "x"})
    assert status in (404, 500)
    assert b"other" in body


def test_a_goodbye_or_a_beat_of_a_kind_that_it_does_not_know_costs_nothing(
    routed: tuple[Fleet, str],
) -> None:
    """An aggregated engine beats with type A, which vllm-router ignores; the pair serves on."""
    running, theirs = routed
    env = {"XPYD_DISCOVERY": f"{running.subnet}.1:{DISCOVERY_PORT}"}
    alone = running.start_engine("Aggregated", env=env)
    running.wait_healthy(alone, timeout_s=300.0)
    assert alone.stop(60) == 0
    assert shown(ask(theirs, "completions", prompt=PROMPT, **GREEDY))[2][0][2] == "length"

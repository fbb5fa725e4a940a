"""A 1P3D fleet answers: right tokens, computed on P once, in every form the API has."""

import asyncio
import json
import shutil
import subprocess
import urllib.request
from typing import Any

import openai
import pytest

from tests.e2e.harness import Fleet, http, wait_for
from tests.e2e.oracle import Case, load

pytestmark = pytest.mark.slow


def _computed_on_d(fleet: Fleet) -> list[float]:
    name = "xpyd_engine_prompt_tokens_computed_total"
    return [p.metric(name) for p in fleet.processes if p.role == "Decode"]


def _client(fleet: Fleet) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fleet.router.url}/v1", api_key="unused", max_retries=0)


def test_a_completion_of_a_few_tokens_is_served(fleet_1p3d: Fleet) -> None:  # Article fact 5
    answer = fleet_1p3d.complete(prompt="San Francisco is a", max_tokens=10)
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] <= 10


def test_each_d_serves_in_turn_and_computes_at_most_one_prompt_token(
    fleet_1p3d: Fleet, cases: list[Case]
) -> None:
    before = _computed_on_d(fleet_1p3d)
    finished = "xpyd_engine_requests_total"
    served = [p.metric(finished) for p in fleet_1p3d.processes if p.role == "Decode"]
    chosen = cases[:6]
    for case in chosen:
        assert fleet_1p3d.answer(case) == case.ids
    after = _computed_on_d(fleet_1p3d)
    assert sum(after) - sum(before) <= len(chosen)
    now = [p.metric(finished) for p in fleet_1p3d.processes if p.role == "Decode"]
    assert [b - a for a, b in zip(served, now, strict=True)] == [2, 2, 2]


def test_answers_equal_transformers_under_32_concurrent_clients(
    fleet_1p3d: Fleet, cases: list[Case]
) -> None:
    result = asyncio.run(load(fleet_1p3d.router.url, cases, seconds=5))
    assert not result.wrong
    assert not result.errors
    assert not result.broken_streams
    assert result.agreed > 32


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_with_several_choices_agree_with_one_at_a_time(
    fleet_1p3d: Fleet, cases: list[Case], *, stream: bool
) -> None:
    chosen = [c for c in cases if len(c.ids) >= 8][:2]
    body: dict[str, Any] = {
        "prompt": [list(c.prompt) for c in chosen],
        "n": 3,
        "max_tokens": 8,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    ids: dict[int, list[int]] = {i: [] for i in range(6)}
    if stream:
        url = f"{fleet_1p3d.router.url}/v1/completions"
        _, raw = http(url, {"model": "demo", "temperature": 0, "stream": True, **body})
        for line in raw.decode().splitlines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    ids[choice["index"]].extend(choice.get("token_ids") or ())
    else:
        for choice in fleet_1p3d.complete(**body)["choices"]:
            ids[choice["index"]].extend(choice["token_ids"])
    for index, got in ids.items():
        assert tuple(got) == chosen[index // 3].ids[:8]


def test_the_router_tokenizes_as_each_of_its_engines_does(fleet_1p3d: Fleet) -> None:
    router, text = fleet_1p3d.router.url, "San Francisco is a"
    status, said = http(f"{fleet_1p3d.engine('Prefill').url}/tokenize", {"prompt": text})
    asked = {"model": "demo", "prompt": text}
    found = [http(f"{router}/tokenize", asked) for _ in fleet_1p3d.engines]
    assert [(code, json.loads(raw)) for code, raw in found] == [(status, json.loads(said))] * 4
    tokens = json.loads(said)
    _, raw = http(f"{router}/detokenize", {"tokens": tokens["tokens"]})
    assert json.loads(raw) == {"prompt": text}
    with urllib.request.urlopen(f"{router}/v1/models", timeout=5) as response:
        (model,) = json.load(response)["data"]
    assert (model["id"], model["max_model_len"]) == ("demo", tokens["max_model_len"])


def test_a_seed_gives_the_same_tokens_again_streamed_or_not(fleet_1p3d: Fleet) -> None:
    client = _client(fleet_1p3d)
    kwargs: dict[str, Any] = {
        "model": "demo",
        "prompt": "Return a new",
        "max_tokens": 24,
        "temperature": 1.0,
        "seed": 11,
        "n": 2,
    }
    whole = [c.text for c in client.completions.create(**kwargs).choices]
    parts = ["", ""]
    for chunk in client.completions.create(**kwargs, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.text
    assert parts == whole
    assert whole[0] != whole[1]
    other = [c.text for c in client.completions.create(**{**kwargs, "seed": 12}).choices]
    assert other != whole


def test_the_openai_client_chats_streamed_and_not_with_usage(fleet_1p3d: Fleet) -> None:
    client = _client(fleet_1p3d)
    messages: Any = [{"role": "user", "content": "What does os.path.join do?"}]
    whole = client.chat.completions.create(
        model="demo", messages=messages, max_tokens=32, temperature=0
    )
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content
    assert whole.usage is not None
    text, usage, finish, roles = "", None, None, []
    stream = client.chat.completions.create(
        model="demo",
        messages=messages,
        max_tokens=32,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
            roles += [choice.delta.role] if choice.delta.role else []
    assert text == whole.choices[0].message.content
    assert finish == whole.choices[0].finish_reason
    assert roles == ["assistant"]
    assert usage is not None
    assert usage.total_tokens == whole.usage.total_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_stop_strings_cut_the_text_wherever_they_fall(fleet_1p3d: Fleet) -> None:
    full = fleet_1p3d.complete(prompt="Return a", max_tokens=24)["choices"][0]["text"]
    for start in (0, 1, len(full) // 2):
        stop = full[start : start + 3]
        kwargs: dict[str, Any] = {"prompt": "Return a", "max_tokens": 24, "stop": [stop]}
        choice = fleet_1p3d.complete(**kwargs)["choices"][0]
        assert choice["text"] == full[: full.index(stop)]
        assert choice["finish_reason"] == "stop"
        streamed = _client(fleet_1p3d).completions.create(
            model="demo", temperature=0, stream=True, **kwargs
        )
        assert "".join(c.choices[0].text for c in streamed if c.choices) == choice["text"]


def test_a_single_token_and_echo_run_on_one_instance(fleet_1p3d: Fleet) -> None:
    one = fleet_1p3d.complete(prompt="Return a", max_tokens=1)
    assert one["usage"]["completion_tokens"] == 1
    echoed = fleet_1p3d.complete(prompt="Return a", max_tokens=4, echo=True, logprobs=1)
    assert echoed["choices"][0]["text"].startswith("Return a")
    logprobs = echoed["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"])
    alone = fleet_1p3d.complete(prompt="Return a", max_tokens=0, echo=True)
    assert alone["choices"][0]["text"] == "Return a"


def test_logprobs_cover_the_first_token_too(fleet_1p3d: Fleet) -> None:
    answer = fleet_1p3d.complete(
        prompt="Return a", max_tokens=5, logprobs=2, ignore_eos=True, return_token_ids=True
    )
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == 5
    assert all(value <= 0 for value in logprobs["token_logprobs"])
    assert all(len(top) >= 2 for top in logprobs["top_logprobs"])


def test_answers_leak_no_address_and_no_transfer_key(fleet_1p3d: Fleet) -> None:
    router = fleet_1p3d.router
    for stream in (False, True):
        start = len(router.log)
        body = {"model": "demo", "prompt": "Return a", "max_tokens": 4, "stream": stream}
        request = urllib.request.Request(
            f"{router.url}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            seen = str(response.headers) + response.read().decode()
        line = wait_for("the access line", lambda s=start: router.log[s:].partition("request=")[2])
        assert line.split()[0] not in seen
        assert "_addr_" not in seen
        assert fleet_1p3d.subnet not in seen
        assert "kv_transfer" not in seen


def test_curl_gets_the_stream_as_it_comes(fleet_1p3d: Fleet) -> None:
    curl = shutil.which("curl")
    assert curl is not None, "curl is not installed"
    body = {"model": "demo", "prompt": "Return a", "max_tokens": 8, "stream": True}
    done = subprocess.run(
        [
            *(curl, "-sSN", "-i", f"{fleet_1p3d.router.url}/v1/completions"),
            *("-H", "Content-Type: application/json", "-H", "X-Request-Id: from-curl"),
            *("-d", json.dumps(body)),
        ],
        capture_output=True,
        timeout=60,
        check=True,
    )
    head, _, events = done.stdout.decode().partition("\r\n\r\n")
    assert "200" in head.splitlines()[0]
    assert "x-request-id: from-curl" in head.lower()
    assert "text/event-stream" in head
    assert events.rstrip().endswith("data: [DONE]")


def test_one_request_has_one_id_in_all_three_logs(fleet_1p3d: Fleet) -> None:
    router = fleet_1p3d.router
    start = len(router.log)
    fleet_1p3d.complete(prompt="Return a new one", max_tokens=4)
    line = wait_for("the access line", lambda: router.log[start:].partition("request=")[2])
    uuid = line.split()[0]
    prefill = next(p for p in fleet_1p3d.processes if p.role == "Prefill")
    decodes = [p for p in fleet_1p3d.processes if p.role == "Decode"]
    assert f"request={uuid}" in prefill.log
    assert sum(f"request={uuid}" in p.log for p in decodes) == 1


def test_models_instances_health_and_metrics_answer(fleet_1p3d: Fleet) -> None:
    url = fleet_1p3d.router.url
    models = json.loads(http(f"{url}/v1/models")[1])
    assert [m["id"] for m in models["data"]] == ["demo"]
    assert http(f"{url}/health")[0] == 200
    assert http(f"{url}/readiness")[0] == 200
    assert sorted(i["type"] for i in fleet_1p3d.instances()) == ["D", "D", "D", "P"]
    assert fleet_1p3d.router.metric("xpyd_router_requests_total") > 0

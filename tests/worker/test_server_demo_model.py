"""The whole worker on the demo model: greedy tokens equal transformers', SIGTERM finishes work."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.ranks.kit.worker import Worker, started

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "demo-model"
PROMPTS = ("San Francisco is a", "Return a list of", "The file is", "class", "1 + 1 é中😀")
TOKENS = 24


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with started(tmp_path_factory.mktemp("worker"), "--kv-cache-memory", "32Mi") as found:
        yield found


def test_greedy_tokens_equal_transformers(worker: Worker) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    body = {"temperature": 0, "max_tokens": TOKENS, "return_token_ids": True, "ignore_eos": True}
    answer = worker.client.post("/v1/completions", json={**body, "prompt": list(PROMPTS)})
    assert answer.status_code == 200, answer.text
    for prompt, choice in zip(PROMPTS, answer.json()["choices"], strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        assert choice["prompt_token_ids"] == ids[0].tolist()
        with torch.inference_mode():
            for _ in range(TOKENS):
                logits = model(ids).logits[:, -1]
                ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
        expected = ids[0, -TOKENS:].tolist()
        assert choice["token_ids"] == expected
        assert choice["text"] == tokenizer.decode(expected, skip_special_tokens=True)


def test_streamed_text_equals_the_whole(worker: Worker) -> None:
    chat = {"messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 30}
    for seed in range(3):
        body = {**chat, "seed": seed, "temperature": 1.5, "ignore_eos": True}
        whole = worker.client.post("/v1/chat/completions", json=body).json()
        streamed = worker.client.post("/v1/chat/completions", json={**body, "stream": True})
        lines = [line[6:] for line in streamed.text.split("\n") if line.startswith("data: {")]
        deltas = [json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines]
        assert "".join(deltas) == whole["choices"][0]["message"]["content"]


@pytest.mark.parametrize("choice", ["required", "named"])
def test_a_call_that_must_come_has_arguments_as_the_schema_says(
    worker: Worker, choice: str
) -> None:
    city = {"type": "string", "maxLength": 12}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    function = {"name": "weather", "parameters": {**schema, "additionalProperties": False}}
    named = {"type": "function", "function": {"name": "weather"}}
    body = {
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": named if choice == "named" else "required",
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "temperature": 1.2,
    }
    for seed in range(3):
        answer = worker.client.post("/v1/chat/completions", json={**body, "seed": seed})
        assert answer.status_code == 200, answer.text
        (found,) = answer.json()["choices"]
        assert found["finish_reason"] == "tool_calls", found
        (call,) = found["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert call["function"]["name"] == "weather"
        assert list(arguments) == ["city"]
        assert len(arguments["city"]) <= 12


def test_sigterm_refuses_new_work_finishes_the_rest_and_exits_0(worker: Worker) -> None:
    body = {"prompt": "The", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with worker.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        worker.process.send_signal(signal.SIGTERM)
        refused = 200
        deadline = time.monotonic() + 10
        while refused == 200 and time.monotonic() < deadline:
            refused = worker.client.post("/v1/completions", json={"prompt": "a"}).status_code
        assert refused == 503
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""] or rest[-1] == "data: [DONE]"
    assert worker.process.wait(20) == 0
    assert "drained" in worker.log.read_text()

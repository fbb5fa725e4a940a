"""Every sampling option through P and D: the same tokens as on one instance, whatever else runs."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.harness import Fleet, http

pytestmark = pytest.mark.slow

PROMPT = "San Francisco is a city on the coast. The city on the coast is"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"enum": [1, 20, 300]}},
    "required": ["name", "age"],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 1.5},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1, "temperature": 1.7},
    "repetition": {"repetition_penalty": 1.6, "temperature": 0},
    "presence and frequency": {
        "presence_penalty": -2,
        "frequency_penalty": -2,
        "temperature": 0,
    },
    "logit_bias": {"logit_bias": {"300": 6, "301": -50}},
    "allowed_token_ids": {"allowed_token_ids": list(range(40, 120))},
    "bad_words": {"bad_words": ["the", "we have", "data", "city on"], "temperature": 0},
    "min_tokens": {"min_tokens": 20, "stop_token_ids": list(range(290, 340)), "temperature": 0},
    "stop": {"stop": ["e", "o"], "include_stop_str_in_output": True},
    "stop token": {
        "stop_token_ids": list(range(260, 330)),
        "include_stop_str_in_output": True,
    },
    "special tokens": {
        "allowed_token_ids": [0, 1, 2, 65, 66],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "ignore_eos": True,
    },
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}},
        "n": 2,
    },
    # Complete with the token that P draws, or with the next.
    "choice": {"structured_outputs": {"choice": ["the", "a", "0"]}, "n": 3},
    "regex to no EOS": {"guided_regex": "[a-z]{3} [0-9]{2}", "ignore_eos": True, "logprobs": None},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "min_p": 0.02,
        "top_k": 40,
        "top_p": 0.95,
        "logit_bias": {"310": 3},
        "bad_words": ["the"],
        "min_tokens": 5,
        "n": 3,
    },
}


def _ask(url: str, body: dict[str, Any], *, chat: bool) -> list[tuple[list[int], str, Any]]:
    """Per choice: token ids, text, why it ended."""
    path = "chat/completions" if chat else "completions"
    prompt = {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
    whole = {"model": "demo", "max_tokens": 24, "seed": 11, "return_token_ids": True}
    status, answer = http(f"{url}/v1/{path}", {**whole, **prompt, **body})
    assert status == 200, answer
    if not body.get("stream"):
        return [
            (c["token_ids"], _text(c), (c["finish_reason"], c["stop_reason"]))
            for c in json.loads(answer)["choices"]
        ]
    found: dict[int, tuple[list[int], str, Any]] = {}
    for line in answer.decode().split("\n\n"):
        if line.startswith("data: {"):
            for c in json.loads(line[6:])["choices"]:
                ids, text, end = found.get(c["index"], ([], "", None))
                if c["finish_reason"]:
                    end = (c["finish_reason"], c.get("stop_reason"))
                found[c["index"]] = ([*ids, *c.get("token_ids", ())], text + _text(c), end)
    return [found[index] for index in sorted(found)]


def _text(choice: dict[str, Any]) -> str:
    held = choice.get("message") or choice.get("delta")
    return choice["text"] if "text" in choice else (held or {}).get("content") or ""


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_options_mixed_in_one_batch_through_a_pair_equal_one_request_on_one_instance(
    fleet_1p3d: Fleet, *, chat: bool
) -> None:
    alone = fleet_1p3d.engine("Decode").url
    wanted = {name: _ask(alone, body, chat=chat) for name, body in OPTIONS.items()}
    unchanged = [name for name in OPTIONS if wanted[name] == wanted["greedy"]]
    assert unchanged == ["greedy"], "these options change nothing"
    jobs = [
        (name, {**body, "stream": stream})
        for name, body in OPTIONS.items()
        for stream in (False, True)
    ]
    with ThreadPoolExecutor(len(jobs)) as pool:
        url = fleet_1p3d.router.url
        answers = pool.map(lambda job: _ask(url, job[1], chat=chat), jobs)
        for (name, body), answer in zip(jobs, answers, strict=True):
            assert answer == wanted[name], (name, body)


def test_an_answer_bound_to_a_schema_goes_on_at_another_d_behind_any_token(
    fleet_1p3d: Fleet,
) -> None:
    first, second, _ = (one.url for one in fleet_1p3d.engines if one.role == "Decode")
    body = {"temperature": 1.3, "response_format": OPTIONS["schema"]["response_format"]}
    ((ids, text, end),) = _ask(first, body, chat=False)
    assert json.loads(text).keys() == {"name", "age"}
    assert end == ("stop", None)
    for had in range(len(ids) + 1):
        params = {"continue_from": [ids[:had]], "emit_from": [had]}
        (went_on,) = _ask(second, {**body, "kv_transfer_params": params}, chat=False)
        assert (went_on[0], went_on[2]) == (ids[had:], end)
        assert text.endswith(went_on[1])


def test_the_prompts_log_probabilities_come_through_the_router(fleet_1p3d: Fleet) -> None:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 2, "prompt_logprobs": 2}
    for limit in (0, 1, 2):
        status, answer = http(
            f"{fleet_1p3d.router.url}/v1/completions", {**body, "max_tokens": limit}
        )
        assert status == 200, answer
        scores = json.loads(answer)["choices"][0]["prompt_logprobs"]
        assert scores[0] is None
        assert all(2 <= len(entry) <= 3 for entry in scores[1:])


def test_what_an_engine_refuses_the_router_refuses_with_the_fields_name(fleet_1p3d: Fleet) -> None:
    body = {"model": "demo", "prompt": PROMPT}
    for field, value in (("allowed_token_ids", [10**9]), ("min_p", 2), ("bad_words", [""])):
        status, answer = http(f"{fleet_1p3d.router.url}/v1/completions", {**body, field: value})
        assert status == 400
        assert json.loads(answer)["error"]["param"] == field

"""Request bodies: what is accepted, what gets 400 and which field the error names."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from xpyd_core.errors import ApiError
from xpyd_worker.server.openai.chats import MAX_ARGUMENT_CHARACTERS, MAX_PARTS
from xpyd_worker.server.openai.params import parse_chat, parse_completion

USER = {"role": "user", "content": "hi"}


def as_json(body: dict[str, Any]) -> bytes:
    """The body; infinity as a number that is too large."""
    return json.dumps(body).replace("Infinity", "1e999").encode()


def completion(**fields: Any) -> Any:
    return parse_completion(as_json({"model": "m", "prompt": "hi", **fields}))


def chat(**fields: Any) -> Any:
    return parse_chat(as_json({"model": "m", "messages": [USER], **fields}))


def param_of(parse: Any, **fields: Any) -> str | None:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    assert caught.value.param is not None
    assert caught.value.param in caught.value.message
    return caught.value.param


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ("hi",)),
        (["a", "b"], ("a", "b")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["a", [1]], ("a", (1,))),
    ],
)
def test_prompts_come_in_four_forms(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    "prompt", [None, "", [], [""], [[]], 5, {"a": 1}, [None], [1, "a"], [1, -1], [[1, True]], [1.5]]
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    assert param_of(completion, prompt=prompt) == "prompt"


def test_defaults_are_openais() -> None:
    options = completion().options
    assert (options.temperature, options.top_p, options.top_k, options.n) == (1.0, 1.0, 0, 1)
    assert (options.max_tokens, options.seed, options.logprobs, options.stop) == (
        None,
        None,
        None,
        (),
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "16"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", 2**70),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("temperature", math.inf),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.0),
        ("seed", 1.5),
        ("seed", 2**63),
        ("n", 0),
        ("n", 129),
        ("min_tokens", -1),
        ("stop", 5),
        ("stop", [""]),
        ("stop", ["a"] * 17),
        ("stop", ["x" * 1025]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "1"),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("echo", 1),
        ("stream", "yes"),
        ("ignore_eos", 0),
        ("return_token_ids", "true"),
        ("stream_options", {"include_usage": True}),
        ("model", 5),
        ("cache_salt", 5),
        ("user", 5),
        ("prompt_cache_key", ["x"]),
        ("suffix", "tail"),
        ("best_of", 3),
        ("ebnf", "root ::= a"),
        ("no_stop_trim", True),
        ("use_beam_search", True),
        ("detokenize", False),
        ("early_stopping", True),
        ("length_penalty", True),
        ("stop_regex", ["a+"]),
        ("add_special_tokens", False),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("priority", 1.5),
        ("priority", "high"),
        ("priority", 2**63),
        ("kv_transfer_params", "x"),
    ],
)
def test_a_wrong_value_is_refused_by_name(field: str, value: Any) -> None:
    assert param_of(completion, **{field: value}) == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []),
        ("messages", "hi"),
        ("messages", None),
        ("top_logprobs", 3),
        ("logprobs", 3),
        ("max_completion_tokens", 0),
        ("service_tier", "flex"),
        ("store", True),
        ("tool_choice", "required"),
        ("echo", True),
        ("chat_template", "{{ x }}"),
        ("modalities", ["audio"]),
        ("separate_reasoning", False),
        ("add_special_tokens", True),
        ("functions", [{"name": "f"}]),
    ],
)
def test_a_wrong_value_of_a_chat_is_refused_by_name(field: str, value: Any) -> None:
    assert param_of(chat, **{field: value}) == field


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({"role": "function", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "assistant", "content": "", "tool_calls": [1]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "a b"}}]},
            "messages[0].tool_calls[0].function.name",
        ),
        ({"role": "tool", "content": None}, "messages[0].content"),
        (
            {"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]},
            "messages[0].tool_calls",
        ),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0].function_call"),
    ],
)
def test_a_wrong_message_is_refused_with_its_place(message: Any, param: str) -> None:
    assert param_of(chat, messages=[message]) == param


# What vllm-router adds to every request, and what client libraries send by habit.
HARMLESS = {
    "no_stop_trim": False,
    "ignore_eos": False,
    "return_hidden_states": False,
    "echo": False,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "include_reasoning": True,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "best_of": 1,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "min_p": 0.0,
    "suffix": None,
    "user": "me",
    "lora_path": None,
    "custom_params": {},
    "detokenize": True,
    "early_stopping": False,
    "guided_choice": [],
    "length_penalty": 1.0,
    "logits_processors": [],
    "request_id": "",
    "return_tokens_as_token_ids": False,
    "session_params": {},
    "stop_regex": [],
    "use_beam_search": False,
    "vllm_xargs": {},
    "unknown_field": {"a": [1]},
    "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": None, "seed": None},
}


def test_values_that_change_nothing_are_accepted() -> None:
    assert completion(**HARMLESS, add_special_tokens=True, prompt_embeds=[])
    of_chat = {
        "add_generation_prompt": True,
        "add_special_tokens": False,
        "chat_template_kwargs": {},
        "documents": [],
        "function_call": "auto",
        "functions": [],
        "mm_processor_kwargs": {},
        "modalities": ["text"],
        "stream_options": None,
        "tool_choice": "none",
        "tools": [],
        "verbosity": "medium",
    }
    assert chat(**HARMLESS, **of_chat)


def test_best_of_may_say_what_n_says() -> None:
    assert completion(n=3, best_of=3).options.n == 3


def test_max_completion_tokens_goes_before_max_tokens() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).options.max_tokens == 7


def test_max_tokens_0_needs_echo() -> None:
    assert completion(max_tokens=0, echo=True).options.max_tokens == 0


def test_min_tokens_above_max_tokens_is_refused() -> None:
    assert param_of(completion, min_tokens=5, max_tokens=4) == "min_tokens"


def test_parts_of_type_text_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = chat(messages=[{"role": "user", "content": parts}])
    assert call.conversation.messages == ({"role": "user", "content": "a\nb"},)


def test_chat_logprobs_count_top_logprobs() -> None:
    assert chat(logprobs=True).options.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).options.logprobs == 4
    assert chat(logprobs=False).options.logprobs is None


def test_the_routers_fields_are_read_per_choice_and_per_prompt() -> None:
    kv = completion(
        prompt=["a", "b"],
        n=2,
        kv_transfer_params={
            "seed": 9,
            "client_max_tokens": None,
            "continue_from": [[1], [2], [], [3, 4]],
            "emit_from": [1, 0, 0, 2],
            "transfer": ["granted", "none"],
            "decode_incarnation": "inc",
            "prompt_digest": ["x", "y"],
        },
    ).options.kv
    assert kv.continue_from == ((1,), (2,), (), (3, 4))
    assert (kv.emit_from, kv.seed, kv.transfer) == ((1, 0, 0, 2), 9, ("granted", "none"))
    assert kv.from_router
    assert kv.client_max_tokens is None
    assert not completion().options.kv.from_router


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"continue_from": [[1], [2]]}, "continue_from"),
        ({"continue_from": [1]}, "continue_from"),
        ({"continue_from": [[1]], "emit_from": [2]}, "emit_from"),
        ({"transfer": ["lost"]}, "transfer"),
        ({"prompt_digest": []}, "prompt_digest"),
        ({"first_logprobs": [3]}, "first_logprobs"),
        ({"client_max_tokens": -1}, "client_max_tokens"),
        ({"seed": "x"}, "seed"),
        ({"response_id": "x" * 300}, "response_id"),
    ],
)
def test_the_routers_fields_are_checked(params: Any, field: str) -> None:
    assert param_of(completion, kv_transfer_params=params) == f"kv_transfer_params.{field}"


def test_the_number_of_choices_is_bounded() -> None:
    assert param_of(completion, prompt=["a"] * 257) == "prompt"
    assert param_of(completion, prompt=["a"] * 100, n=11) == "n"


def test_the_ids_that_a_stream_continues_are_bounded() -> None:
    most = {"continue_from": [[0] * 2**20]}
    assert len(completion(kv_transfer_params=most).options.kv.continue_from[0]) == 2**20
    more = {"continue_from": [[0] * (2**20 + 1)]}
    name = "kv_transfer_params.continue_from"
    assert param_of(completion, kv_transfer_params=more) == name


def test_the_bounds_themselves_are_taken_and_what_is_behind_them_is_not() -> None:
    ids = list(range(257))
    assert completion(stop_token_ids=ids[:256]).options.stop_token_ids == tuple(ids[:256])
    assert param_of(completion, stop_token_ids=ids) == "stop_token_ids"
    seed = {"seed": -(2**64)}
    assert completion(kv_transfer_params=seed).options.kv.seed == -(2**64)
    for beyond in (2**64 + 1, -(2**64) - 1):
        param = param_of(completion, kv_transfer_params={"seed": beyond})
        assert param == "kv_transfer_params.seed"


def test_the_parts_of_all_messages_together_are_bounded() -> None:
    half = {"role": "user", "content": [{"type": "text", "text": "a"}] * (MAX_PARTS // 2)}
    assert len(chat(messages=[half, half]).conversation.messages) == 2
    more = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    assert param_of(chat, messages=[half, half, more]) == "messages"


def test_earlier_calls_and_their_arguments_are_bounded() -> None:
    def said(count: int, arguments: str) -> dict[str, Any]:
        call = {"function": {"name": "f", "arguments": arguments}}
        return {"role": "assistant", "tool_calls": [call] * count}

    assert chat(messages=[USER, *[said(1024, "")] * 16])
    assert param_of(chat, messages=[USER, *[said(1024, "")] * 16, said(1, "")]) == "messages"
    assert param_of(chat, messages=[said(1025, "")]) == "messages[0].tool_calls"
    half = "x" * (MAX_ARGUMENT_CHARACTERS // 2)
    assert chat(messages=[said(2, half)])
    assert param_of(chat, messages=[said(2, half), said(1, "x")]) == "messages"


def test_a_wrong_list_is_shown_short() -> None:
    with pytest.raises(
        ApiError, match=r"^n: expected an integer, got \[0, 0, 0, 0, 0, 0, \.\.\.\]$"
    ):
        completion(n=[0] * 10_000)
    with pytest.raises(ApiError, match=r"^n: expected int, got array$"):
        completion(n=[0] * 100_000)

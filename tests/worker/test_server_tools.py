"""Tools and reasoning through the real server: what the template gets, and what clients get."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.worker.replay import always, by_prompt, replaying
from tests.worker.server_fakes import EOS, Running
from tests.worker.test_parsers import PARIS, hermes, llama
from tests.worker.test_server_answers import client_of, events_of
from tests.worker.test_server_pair import PAIR
from xpyd_worker.parsers.registry import REASONING_FAMILIES, TOOL_FAMILIES, Parsers, ToolFamily

USER = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object"}},
}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "g"}}


def parsers(tools: str = "hermes", reasoning: str | None = "qwen3") -> Parsers:
    thinks = None if reasoning is None else REASONING_FAMILIES[reasoning]
    return Parsers(TOOL_FAMILIES[tools], thinks, tools)


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def chat(server: Running, **body: Any) -> httpx.Response:
    return await server.post("/v1/chat/completions", {"messages": [USER], **body})


async def choice_of(server: Running, **body: Any) -> dict[str, Any]:
    answer = await chat(server, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


async def deltas(server: Running, **body: Any) -> tuple[dict[str, Any], str | None]:
    """A stream's deltas joined as clients join them, and its finish_reason."""
    answer = await chat(server, stream=True, **body)
    assert answer.status_code == 200, answer.text
    return join(events_of(answer.text))


def join(events: list[Any]) -> tuple[dict[str, Any], str | None]:
    whole: dict[str, Any] = {"tool_calls": []}
    finish = None
    for event in events:
        for choice in event["choices"]:
            finish = choice["finish_reason"] or finish
            for name, value in choice["delta"].items():
                if name != "tool_calls":
                    whole[name] = whole.get(name, "") + value
                    continue
                for call in value:
                    if call["index"] == len(whole["tool_calls"]):
                        assert call["type"] == "function"
                        whole["tool_calls"].append({"id": call["id"], **call["function"]})
                    else:
                        assert "id" not in call
                        more = call["function"]["arguments"]
                        whole["tool_calls"][call["index"]]["arguments"] += more
    return whole, finish


def prompt_of(server: Running) -> str:
    return bytes(server.engine.requests[-1].prompt).decode()


TWO_CALLS = f"<think>\nwell\n</think>\n\nOne moment. {hermes('f', PARIS)}\n{hermes('g', {})}"


async def test_a_stream_joins_to_the_whole_answer_token_by_token() -> None:
    async with replaying(TWO_CALLS, parsers=parsers()) as server:
        choice = await choice_of(server, tools=[TOOL, OTHER])
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert (message["content"], message["reasoning"]) == ("One moment.", "well")
        assert message["reasoning_content"] == "well"
        calls = [(call["type"], call["function"]) for call in message["tool_calls"]]
        assert [(kind, one["name"]) for kind, one in calls] == [
            ("function", "f"),
            ("function", "g"),
        ]
        assert [json.loads(one["arguments"]) for _, one in calls] == [PARIS, {}]
        joined, finish = await deltas(server, tools=[TOOL, OTHER])
        assert finish == "tool_calls"
        assert (joined["content"], joined["reasoning_content"]) == ("One moment.", "well")
        assert [
            {"name": one["name"], "arguments": one["arguments"]} for one in joined["tool_calls"]
        ] == [one for _, one in calls]
        assert len({one["id"] for one in joined["tool_calls"]}) == 2


async def test_openais_client_reads_calls_and_usage_counts_the_reasoning() -> None:
    async with replaying(TWO_CALLS, parsers=parsers()) as server, client_of(server) as client:
        tools: Any = [TOOL, OTHER]
        answer = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}], tools=tools
        )
        calls = answer.choices[0].message.tool_calls or []
        assert [call.type == "function" and call.function.name for call in calls] == ["f", "g"]
        assert answer.usage is not None
        assert answer.usage.completion_tokens_details is not None
        # Each byte is a token; the tag that opens it is not known as reasoning before its end.
        reasoned = len("\nwell\n</think>")
        assert answer.usage.completion_tokens_details.reasoning_tokens == reasoned
        async with client.chat.completions.stream(
            model="fake", messages=[{"role": "user", "content": "hi"}], tools=tools
        ) as stream:
            final = await stream.get_final_completion()
        again = final.choices[0].message.tool_calls or []
        assert [call.function.arguments for call in again] == [
            call.function.arguments for call in calls if call.type == "function"
        ]


async def test_the_last_chunk_tells_a_router_how_much_of_the_whole_choice_is_reasoning() -> None:
    said = TWO_CALLS.encode()
    body = {"messages": [USER], "stream": True}
    async with replaying(TWO_CALLS, parsers=parsers(), role="Decode") as server:
        for had in (1, 12, len(said) - 3):
            params = {"seed": 3, "continue_from": [list(said[:had])], "emit_from": [had]}
            answer = await server.client.post(
                "/v1/chat/completions",
                json={**body, "kv_transfer_params": params},
                headers={"X-Request-Id": PAIR},
            )
            choices = [one for event in events_of(answer.text) for one in event["choices"]]
            told = [one["reasoning_tokens"] for one in choices if "reasoning_tokens" in one]
            assert told == [len("\nwell\n</think>")]
            assert choices[-1]["finish_reason"]
        answer = await server.post("/v1/chat/completions", body)
        assert "reasoning_tokens" not in answer.text


async def test_without_tools_calls_are_text_and_reasoning_is_parted() -> None:
    async with replaying(TWO_CALLS, parsers=parsers()) as server:
        for body in ({}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}):
            choice = await choice_of(server, **body)
            assert choice["finish_reason"] == "stop"
            assert choice["message"]["content"] == TWO_CALLS.partition("\n\n")[2]
            assert "tool_calls" not in choice["message"]
        hidden = await choice_of(server, include_reasoning=False)
        assert "reasoning_content" not in hidden["message"]
        first = await choice_of(server, tools=[TOOL, OTHER], parallel_tool_calls=False)
        assert [call["function"]["name"] for call in first["message"]["tool_calls"]] == ["f"]


async def test_completions_are_not_parsed() -> None:
    async with replaying(TWO_CALLS, parsers=parsers()) as server:
        answer = await server.post("/v1/completions", {"prompt": "x", "max_tokens": 1000})
        assert answer.json()["choices"][0]["text"] == TWO_CALLS


async def test_a_call_that_is_cut_has_the_reason_length_and_one_that_is_none_is_counted() -> None:
    bad = "<tool_call>no</tool_call>"
    play = by_prompt(("bad", bad), ("hi", hermes("f", PARIS)))
    async with replaying(play, parsers=parsers()) as server:
        cut = await choice_of(server, tools=[TOOL], max_tokens=50)
        assert cut["finish_reason"] == "length"
        (call,) = cut["message"]["tool_calls"]
        assert json.dumps(PARIS).startswith(call["function"]["arguments"])
        told = await choice_of(server, tools=[TOOL], messages=[{"role": "user", "content": "bad"}])
        assert (told["message"]["content"], told["finish_reason"]) == (bad, "stop")
        shown = (await server.client.get("/metrics")).text
        assert 'xpyd_engine_malformed_tool_calls_total{parser="hermes"} 1.0' in shown


async def test_a_stop_string_ends_text_that_was_held_back() -> None:
    async with replaying("abc <tool STOP", parsers=parsers()) as server:
        choice = await choice_of(server, tools=[TOOL], stop=["STOP"])
        assert (choice["message"]["content"], choice["stop_reason"]) == ("abc <tool ", "STOP")
        joined, _ = await deltas(server, tools=[TOOL], stop=["STOP"])
        assert joined["content"] == "abc <tool "


async def test_several_choices_have_parsers_and_ids_of_their_own() -> None:
    def play(_prompt: str, choice: int) -> str:
        return hermes("fg"[choice], {"n": choice})

    async with replaying(play, parsers=parsers()) as server:
        answer = (await chat(server, tools=[TOOL, OTHER], n=2)).json()
        calls = [choice["message"]["tool_calls"][0] for choice in answer["choices"]]
        assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"n": 0}, {"n": 1}]
        assert calls[0]["id"] != calls[1]["id"]


async def test_special_tokens_reach_the_parser_though_they_are_no_text() -> None:
    # BOS (257) stands for a marker that the tokenizer has as a special token.
    class Marked(type(replay_tokenizer())):
        def token_bytes(self, token_id: int) -> bytes:
            return b"<|python_tag|>" if token_id == 257 else super().token_bytes(token_id)

        def decode(self, ids: Any, *, skip_special_tokens: bool) -> str:
            shown = [i for i in ids if i < 256 or (i == 257 and not skip_special_tokens)]
            return b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")

    ids = [*b"Hm. ", 257, *llama("f", PARIS).encode(), EOS]
    served = parsers("llama3_json", None)
    async with replaying(lambda _p, _c: ids, parsers=served, tokenizer=Marked()) as server:
        choice = await choice_of(server, tools=[TOOL])
        assert choice["message"]["content"] == "Hm."
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"
        plain = await choice_of(server)
        assert plain["message"]["content"] == "Hm. " + llama("f", PARIS)


def replay_tokenizer() -> Any:
    from tests.worker.server_fakes import ByteTokenizer

    return ByteTokenizer()


async def test_mistrals_ids_are_nine_characters() -> None:
    said = '[TOOL_CALLS][{"name": "f", "arguments": {}}]'
    async with replaying(said, parsers=parsers("mistral", None)) as server:
        choice = await choice_of(server, tools=[TOOL])
        id_ = choice["message"]["tool_calls"][0]["id"]
        assert len(id_) == 9
        assert id_.isalnum()


async def test_the_prompt_says_whether_the_reasoning_is_open() -> None:
    async with replaying("well</think>yes", parsers=parsers()) as server:
        on = await choice_of(server, chat_template_kwargs={"enable_thinking": True})
        assert (on["message"]["reasoning"], on["message"]["content"]) == ("well", "yes")
        for body in (
            {"reasoning_effort": "none"},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ):
            off = await choice_of(server, **body)
            assert off["message"]["content"] == "well</think>yes"
            assert "reasoning" not in off["message"]


async def test_templates_get_tools_documents_variables_and_the_history_of_calls() -> None:
    history = [
        USER,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "well",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
                {"id": "b", "type": "function", "function": {"name": "f", "arguments": '{"x": '}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "20 C"}]},
    ]
    async with replaying("ok", parsers=parsers()) as server:
        await choice_of(
            server,
            messages=history,
            tools=[{**TOOL, "extra": 1}],
            documents=[{"title": "t"}],
            chat_template_kwargs={"mood": "good"},
            reasoning_effort="high",
        )
        lines = prompt_of(server).split("\n")
        assert lines[0] == f"tools:{json.dumps([{**TOOL, 'extra': 1}])}"
        assert lines[1] == 'documents:[{"title": "t"}]'
        variables = {"reasoning_effort": "high", "enable_thinking": True, "mood": "good"}
        assert lines[2] == f"variables:{json.dumps(variables)}"
        said = json.loads(lines[4].removeprefix("assistant:"))
        assert said["reasoning_content"] == "well"
        assert [call["function"]["arguments"] for call in said["tool_calls"]] == [
            {"x": 1},
            '{"x": ',
        ]
        assert lines[5] == 'tool:20 C{"tool_call_id": "a"}'
        await choice_of(server, tools=[TOOL], tool_choice="none")
        assert prompt_of(server) == "user:hi\n"


async def test_the_answer_goes_on_in_the_last_message_where_that_is_asked_for() -> None:
    messages = [USER, {"role": "assistant", "content": "The sky is"}]
    async with replaying(" blue") as server:
        for body in ({"add_generation_prompt": False}, {}):
            choice = await choice_of(server, messages=messages, continue_final_message=True, **body)
            assert choice["message"]["content"] == " blue"
            assert prompt_of(server) == "user:hi\nassistant:The sky is"
        for wrong in ({"add_generation_prompt": True}, {"messages": [USER]}):
            answer = await chat(
                server, **{"messages": messages, "continue_final_message": True, **wrong}
            )
            assert answer.json()["error"]["param"] == "continue_final_message"


async def test_prompts_are_cut_to_their_end_where_that_is_asked_for() -> None:
    async with replaying("x", max_model_len=32) as server:
        for path, body, name in (
            ("completions", {"prompt": "0123456789" * 8}, "prompt"),
            ("completions", {"prompt": list(b"0123456789" * 8)}, "prompt"),
            ("chat/completions", {"messages": [{"role": "user", "content": "0123456789" * 8}]}, ""),
        ):
            for asked, kept in ((5, 5), (-1, 31)):
                body = {**body, "truncate_prompt_tokens": asked, "max_tokens": 1}
                answer = await server.post(f"/v1/{path}", body)
                assert answer.status_code == 200, answer.text
                end = "0123456789" * 8 + ("" if name else "\n")
                assert prompt_of(server) == end[-kept:]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice.function.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": [TOOL], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tools": [TOOL], "tool_choice": allowed("none", "f")}, "tool_choice.allowed_tools.mode"),
        ({"tools": [TOOL], "tool_choice": allowed("auto", "f", "x")},
         "tool_choice.allowed_tools.tools[1].function.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
         "tools[0].function.parameters"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"reasoning_effort": "hard"}, "reasoning_effort"),
        ({"documents": ["x"]}, "documents"),
        ({"metadata": {"a": 1}}, "metadata"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    async with replaying("x", parsers=parsers()) as server:
        answer = await chat(server, **body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].startswith(param)


async def test_tools_are_refused_where_calls_cannot_be_told_from_text() -> None:
    async with replaying("x") as server:
        answer = await chat(server, tools=[TOOL])
        assert answer.json()["error"]["param"] == "tools"
        assert "--tool-call-parser" in answer.json()["error"]["message"]
        assert (await chat(server, tools=[TOOL], tool_choice="none")).status_code == 200


async def test_tokenize_counts_what_a_chat_with_tools_has() -> None:
    body = {"messages": [USER], "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": True}}
    async with replaying(always("x"), parsers=parsers()) as server:
        await choice_of(server, **body)
        answer = await server.post("/tokenize", body)
        assert bytes(answer.json()["tokens"]).decode() == prompt_of(server)


@dataclass(frozen=True)
class Watched(ToolFamily):
    """Hermes, whose grammar says in which thread it is made."""

    threads: list[int] = field(default_factory=list[int])

    def call_part(self, *args: Any, **kwargs: Any) -> Any:
        self.threads.append(threading.get_ident())
        return super().call_part(*args, **kwargs)


async def test_long_schemas_of_tools_are_read_beside_the_loop() -> None:
    family = Watched(**vars(TOOL_FAMILIES["hermes"]))
    many = {str(i): {"type": "string", "description": "x" * 100} for i in range(1000)}
    async with replaying("", parsers=Parsers(family, None, "hermes")) as server:
        for members, is_here in ((1, True), (len(many), False)):
            schema = {"type": "object", "properties": dict([*many.items()][:members])}
            tools = [
                {"type": "function", "function": {"name": name, "parameters": schema}}
                for name in ("f", "g")
            ]
            family.threads.clear()
            await chat(server, tools=tools, tool_choice="required", max_tokens=1)
            assert [one == threading.get_ident() for one in family.threads] == [is_here] * 2


@pytest.mark.parametrize("choice", ["required", "auto"])
async def test_a_tools_schema_that_no_grammar_follows_is_refused_by_its_place(choice: str) -> None:
    lost: dict[str, Any] = {"$ref": "#/$defs/x"}
    wrong = {"name": "g", "parameters": {"properties": {"a": lost}}, "strict": True}
    async with replaying("", parsers=parsers()) as server:
        tools = [TOOL, {"type": "function", "function": wrong}]
        answer = await chat(server, tools=tools, tool_choice=choice)
        assert answer.status_code == 400
        place = "tools[1].function.parameters.properties.a.$ref"
        assert answer.json()["error"]["param"] == place
        assert "/$defs/x" in answer.json()["error"]["message"]


ONE_CALL = hermes("f", {"city": "Lyon"})
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_a_forced_call_that_is_cut_is_a_call_as_far_as_it_came(choice: Any) -> None:
    """As OpenAI has it: never text of the call's format in `content`."""
    async with replaying(ONE_CALL, parsers=parsers(reasoning=None)) as server:
        for most in range(1, len(ONE_CALL)):
            asked = {"tools": [TOOL, OTHER], "tool_choice": choice, "max_tokens": most}
            whole = await choice_of(server, **asked)
            joined, finish = await deltas(server, **asked)
            assert (whole["finish_reason"], finish) == ("length", "length")
            assert not whole["message"]["content"]
            assert not joined.get("content")
            calls = [call["function"] for call in whole["message"].get("tool_calls", [])]
            said = [
                {key: one[key] for key in ("name", "arguments")} for one in joined["tool_calls"]
            ]
            assert said == calls
            is_known = choice is NAMED or '"f"' in ONE_CALL[:most]
            assert [one["name"] for one in calls] == ["f"] * is_known
            assert all('{"city": "Lyon"}'.startswith(one["arguments"]) for one in calls)


async def test_a_call_that_a_stop_string_cuts_is_no_reason_to_run_it() -> None:
    """With tool_calls an agent would."""
    async with replaying(ONE_CALL, parsers=parsers(reasoning=None)) as server:
        for choice in ("auto", NAMED):
            for stop, arguments in (
                *(("<tool_call>", ""), ('"f"', ""), (": {", "")),
                ('yon"', '{"city": "L'),
            ):
                asked = {"tools": [TOOL], "tool_choice": choice, "stop": [stop]}
                whole = await choice_of(server, **asked)
                assert whole["finish_reason"] == "stop", stop
                assert (await deltas(server, **asked))[1] == "stop"
                for call in whole["message"].get("tool_calls", []):
                    assert call["function"]["arguments"] == arguments
        whole = await choice_of(server, tools=[TOOL], stop=["\n</tool"])
        assert whole["finish_reason"] == "tool_calls", "the call is whole"
        shown = (await server.client.get("/metrics")).text
        assert 'xpyd_engine_malformed_tool_calls_total{parser="hermes"} 1' not in shown


async def test_a_choice_of_allowed_tools_shows_all_and_lets_these_be_called() -> None:
    """The prompt is the same whichever are allowed: that is what OpenAI has it for."""
    texts = {"f": hermes("f", {}), "g": hermes("g", {}), "text": "neither"}
    prompts: set[str] = set()
    for mode, may_be in (("auto", ["f", "text"]), ("required", ["f"])):
        for name, text in texts.items():
            async with replaying(text, parsers=parsers(reasoning=None)) as server:
                asked = {"tools": [TOOL, OTHER], "tool_choice": allowed(mode, "f")}
                answer = await chat(server, **asked)
                prompts.add(prompt_of(server))
                assert (answer.status_code == 200) == (name in may_be), (mode, name, answer.text)
                if name == "f":
                    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
                    assert call["function"] == {"name": "f", "arguments": "{}"}
    assert len(prompts) == 1


async def test_a_grammar_that_cannot_go_on_names_the_field_that_asked_for_it() -> None:
    async with replaying("neither", parsers=parsers(reasoning=None)) as server:
        for asked, field in (
            ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
        ):
            for streams in (False, True):
                answer = await chat(server, stream=streams, **asked)
                assert answer.status_code == 400
                error = answer.json()["error"]
                assert (error["code"], error["param"]) == ("grammar_failed", field)
                assert error["message"].startswith(f"{field}: the answer cannot go on")


async def test_what_an_assistant_refused_with_is_text_of_its_turn() -> None:
    refused = {"type": "refusal", "refusal": "I will not."}
    turns = [
        {"role": "assistant", "content": [refused]},
        {"role": "assistant", "content": None, "refusal": "I will not."},
        {"role": "assistant", "content": "I will not.", "refusal": None},
    ]
    prompts: set[str] = set()
    async with replaying(always("x"), parsers=parsers()) as server:
        for turn in turns:
            await choice_of(server, messages=[USER, turn, USER])
            prompts.add(prompt_of(server))
        (prompt,) = prompts
        assert "I will not." in prompt
        for content, param in (([refused], "type"), ([{"type": "refusal"}], "type")):
            answer = await chat(server, messages=[{"role": "user", "content": content}])
            assert answer.json()["error"]["param"] == f"messages[0].content[0].{param}"
        half = [USER, {"role": "assistant", "content": [{"type": "refusal", "text": "x"}]}]
        answer = await chat(server, messages=half)
        assert answer.json()["error"]["param"] == "messages[1].content[0].refusal"

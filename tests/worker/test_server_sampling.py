"""Sampling fields over HTTP: what reaches the engine, and how answers change with them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from tests.worker.server_fakes import EOS, Running, ScriptedEngine, run, say, serving
from xpyd_worker.engine.request import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    """A small body for that endpoint."""
    if path == COMPLETIONS:
        return {"prompt": "hi", **fields}
    return {"messages": [{"role": "user", "content": "hi"}], **fields}


async def ask(server: Running, path: str, **fields: Any) -> Any:
    answer = await server.post(path, body_of(path, **fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(answer: Any) -> str:
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@PATHS
def test_the_engine_gets_every_option(path: str) -> None:
    async def test() -> SamplingParams:
        async with serving() as server:
            await ask(
                server,
                path,
                max_tokens=9,
                seed=4,
                min_tokens=1,
                temperature=0.5,
                top_p=0.9,
                top_k=7,
                ignore_eos=True,
                stop_token_ids=[67],
                **(
                    {"logprobs": 3}
                    if path == COMPLETIONS
                    else {"logprobs": True, "top_logprobs": 3}
                ),
                min_p=0.1,
                repetition_penalty=1.1,
                presence_penalty=0.2,
                frequency_penalty=0.3,
                logit_bias={"65": 2},
                allowed_token_ids=[65, 66],
                bad_words=["no", " never"],
                prompt_logprobs=2,
            )
            return server.engine.requests[0].sampling

    found: list[SamplingParams] = []

    async def keep() -> None:
        found.append(await test())

    run(keep())
    assert found == [
        SamplingParams(
            max_tokens=9,
            seed=4,
            min_tokens=1,
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            ignore_eos=True,
            stop_token_ids=(67,),
            logprobs=3,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            logit_bias=((65, 2.0),),
            allowed_token_ids=(65, 66),
            # Of a byte vocabulary: with a space in front a word has more tokens.
            bad_words=(tuple(b"no"), tuple(b"never")),
            prompt_logprobs=2,
        )
    ]
    # A field that the body has and the engine does not get would be ignored without a word.
    assert [f.name for f in fields(SamplingParams) if getattr(found[0], f.name) == f.default] == []


@PATHS
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("allowed_token_ids", [3, 9999]),
        ("logit_bias", {"9999": 1}),
        ("stop_token_ids", [9999]),
        ("bad_words", ["  "]),
    ],
)
async def test_what_the_model_does_not_have_is_refused_by_name(
    path: str, field: str, value: Any
) -> None:
    async with serving() as server:
        answer = await server.post(path, body_of(path, **{field: value}))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field


@PATHS
@pytest.mark.parametrize("count", [0, 1])
async def test_prompt_logprobs_are_maps_as_vllm_has_them(path: str, count: int) -> None:
    async with serving() as server:
        answer = await ask(server, path, prompt_logprobs=count, max_tokens=2, n=2)
        prompt = b"hi" if path == COMPLETIONS else b"user:hi\n"
        owners = answer["choices"] if path == COMPLETIONS else [answer]
        for owner in owners:
            scores = owner["prompt_logprobs"]
            assert scores[0] is None
            assert [list(entry) for entry in scores[1:]] == [[str(b)] for b in prompt[1:]]
            # The fake engine's best alternative is the token itself.
            assert scores[1][str(prompt[1])] == {
                "logprob": -1.0,
                "rank": count,
                "decoded_token": chr(prompt[1]),
            }
        assert "prompt_logprobs" not in (await ask(server, path, max_tokens=2))


@PATHS
async def test_max_tokens_0_gives_the_prompts_log_probabilities_and_no_text(path: str) -> None:
    async with serving() as server:
        answer = await ask(server, path, prompt_logprobs=0, max_tokens=0)
        assert text_of(answer) == ""
        assert answer["usage"]["completion_tokens"] == 0
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_echo_and_prompt_logprobs_each_show_as_many_alternatives_as_they_asked_for() -> None:
    async with serving() as server:
        answer = await ask(
            server, COMPLETIONS, echo=True, logprobs=0, prompt_logprobs=1, max_tokens=1
        )
        assert server.engine.requests[0].sampling.prompt_logprobs == 1
        choice = answer["choices"][0]
        assert choice["logprobs"]["tokens"] == ["h", "i", "h"]
        assert choice["logprobs"]["top_logprobs"][1] == {"i": -1.0}
        assert choice["prompt_logprobs"][1]["105"]["rank"] == 1
        # Without echo the prompt's are not among the answer's.
        answer = await ask(server, COMPLETIONS, logprobs=0, prompt_logprobs=1, max_tokens=1)
        assert answer["choices"][0]["logprobs"]["tokens"] == ["h"]


@PATHS
async def test_a_stop_string_is_part_of_the_text_where_that_is_asked_for(path: str) -> None:
    async with serving() as server:
        for include, text in ((False, "hell"), (True, "hello w")):
            answer = await ask(
                server, path, stop=["o w"], include_stop_str_in_output=include, max_tokens=20
            )
            assert text_of(answer) == text
            assert answer["choices"][0]["stop_reason"] == "o w"


@PATHS
async def test_a_stop_token_has_text_where_that_is_asked_for(path: str) -> None:
    async with serving() as server:
        for include, text in ((False, "hello"), (True, "hello ")):
            answer = await ask(
                server,
                path,
                stop_token_ids=[ord(" ")],
                include_stop_str_in_output=include,
                max_tokens=20,
            )
            assert text_of(answer) == text
            assert answer["choices"][0]["stop_reason"] == ord(" ")


@PATHS
async def test_the_first_tokens_stop_string_is_shown_once_through_p_and_d(path: str) -> None:
    """P's text and what D puts behind it are one text, with the stop string in it or not."""

    params = {"seed": 1, "client_max_tokens": 9}
    for include in (False, True):
        fields = {"stop": ["el"], "include_stop_str_in_output": include}
        async with serving(ScriptedEngine(say("hello")), role="Prefill") as server:
            first = await ask(server, path, max_tokens=2, kv_transfer_params=params, **fields)
        continued = {"seed": 1, "continue_from": [list(b"he")], "emit_from": [2]}
        async with serving(ScriptedEngine(say("hello")), role="Decode") as server:
            rest = await ask(server, path, max_tokens=9, kv_transfer_params=continued, **fields)
        assert text_of(first) + text_of(rest) == ("hel" if include else "h")


async def test_special_tokens_are_shown_where_that_is_asked_for() -> None:
    engine = ScriptedEngine(lambda _request, _choice: [*b"a", EOS, *b"b"])
    async with serving(engine) as server:
        calls: list[bool] = []
        tokenizer = server.api.ready_service().model.tokenizer
        decode = tokenizer.decode

        def watching(ids: Any, *, skip_special_tokens: bool) -> str:
            calls.append(skip_special_tokens)
            return decode(ids, skip_special_tokens=skip_special_tokens)

        tokenizer.decode = watching  # type: ignore[method-assign]
        for skip in (True, False):
            calls.clear()
            await ask(server, COMPLETIONS, skip_special_tokens=skip, ignore_eos=True, max_tokens=3)
            assert set(calls) == {skip}

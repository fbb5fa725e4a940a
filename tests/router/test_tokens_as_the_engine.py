"""The router's token ids and block hashes are those of the engine, whose own code is asked."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.router.chat_templates import (
    CHATML,
    DEMO_MODEL,
    FAMILIES,
    files_of,
    save_byte_level,
    save_sentence_pieces,
)
from tests.worker.engine_driver import EngineDriver
from tests.worker.engine_fakes import BLOCK
from xpyd_core.errors import ApiError
from xpyd_router.tokens.child import Checkpoint, PromptLimits
from xpyd_router.tokens.prompts import Refused
from xpyd_worker.engine.request import EngineRequest
from xpyd_worker.runner.tokenizer import Tokenizer
from xpyd_worker.server.bridge import EngineBridge
from xpyd_worker.server.openai.jobs import make_jobs
from xpyd_worker.server.openai.params import parse_chat, parse_completion
from xpyd_worker.server.openai.prompts import chat_ids, completion_ids
from xpyd_worker.server.request_ids import RequestId
from xpyd_worker.server.service import InstanceInfo, ServedModel, Service
from xpyd_worker.server.telemetry.metrics import ServerMetrics

LONG = "The quick brown fox, 日本語 <s> é😀 hello\n" * 150


@dataclass
class Both:
    """An engine's server and the router's side of the same checkpoint."""

    service: Service
    checkpoint: Checkpoint

    def engine_requests(self, body: dict[str, Any], *, is_chat: bool) -> list[EngineRequest]:
        """What the engine computes for a body; ApiError where it refuses it."""

        async def requests() -> list[EngineRequest]:
            if is_chat:
                chat = parse_chat(orjson.dumps(body))
                options = chat.options
                ids = await chat_ids(self.service, chat.conversation, truncate=options.truncate)
                prompts = [ids]
            else:
                call = parse_completion(orjson.dumps(body))
                prompts = await completion_ids(self.service, call.prompts)
                options = call.options
            jobs = make_jobs(
                self.service, RequestId("id"), options, prompts, default_max_tokens=None
            )
            return [job.request for job in jobs]

        try:
            return asyncio.run(requests())
        finally:
            self.service.threads.close()

    def assert_equal(self, body: dict[str, Any], *, is_chat: bool) -> None:
        """The same number of ids, and the engine's prefix cache hits the router's hashes."""
        body = {"model": "m", "max_tokens": 1, "ignore_eos": True, **body}
        requests = self.engine_requests(body, is_chat=is_chat)
        counts = self.checkpoint.count(body, is_chat=is_chat)
        assert counts.tokens == sum(len(request.prompt) for request in requests)
        driver = EngineDriver(blocks=8192, budget=512, model_len=50_000)
        assert driver.pool.lookup(counts.hashes) == []
        driver.submit(requests[0])
        driver.run()
        assert len(counts.hashes) == len(requests[0].prompt) // BLOCK
        assert len(driver.pool.lookup(counts.hashes)) == len(counts.hashes)


def both(folder: Path, *, knows_developer: bool = False) -> Both:
    tokenizer = Tokenizer.load(folder)
    model = ServedModel(
        ("m",), tokenizer, frozenset(), tokenizer.vocab_size, 50_000, 0, knows_developer
    )
    place = InstanceInfo("Aggregated", "inc")
    files = files_of(tokenizer, block_size=BLOCK, knows_developer=knows_developer)
    return Both(
        Service(model, place, EngineBridge(ServerMetrics().requests)),
        Checkpoint(files, PromptLimits(max_hashes=10_000)),
    )


def text_parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


CONVERSATION = [
    {"role": "user", "content": "hello <think> there"},
    {"role": "assistant", "content": "<think>well</think>\n\nhello  "},
    {"role": "user", "content": "日本語 é😀 <|im_end|> hello", "name": "anna"},
]
TOOLS = [{"type": "function", "function": {"parameters": {"b": 1, "a": []}, "name": "f"}, "x": 1}]
CALLED = [
    {"role": "user", "content": "hello"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "well",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": "é"}'}},
            {"function": {"name": "f", "arguments": '{"b'}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "name": "f", "content": text_parts("20", "C")},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    {"role": "assistant", "content": None, "refusal": "never"},
]
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "hello hello"},
    {"prompt": LONG},
    {"prompt": ["hello", "hello there, how are you"]},
    {"prompt": [1, 2, 3, 4, 5, 6, 7, 8, 9]},
    {"prompt": [[7, 6, 5, 4, 3], [1, 2]]},
    {"prompt": ["hello", [1, 2, 3]]},
    {"prompt": "hello hello", "cache_salt": "tenant é"},
    {"prompt": "hello hello", "add_special_tokens": True, "truncate_prompt_tokens": None},
]
CHATS: list[dict[str, Any]] = [
    {"messages": CONVERSATION},
    {"messages": [{"role": "user", "content": LONG}]},
    {"messages": [{"role": "user", "content": text_parts("hello", "there"), "x": 1}]},
    {"messages": CONVERSATION, "cache_salt": "tenant", "tools": [], "chat_template_kwargs": {}},
    {"messages": [{**CONVERSATION[0], "reasoning_content": "dropped", "tool_calls": None}]},
    {"messages": CONVERSATION, "reasoning_effort": "none", "documents": [{"title": "t"}]},
    {"messages": CONVERSATION, "truncate_prompt_tokens": 40},
    {"messages": CONVERSATION, "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": True}},
    {"messages": CONVERSATION, "tools": TOOLS, "tool_choice": "none"},
]


@pytest.mark.parametrize("body", COMPLETIONS)
@pytest.mark.parametrize("kind", ["bytes", "pieces", "demo"])
def test_completions_have_the_engines_ids_and_hashes(
    kind: str, body: dict[str, Any], tmp_path: Path
) -> None:
    folder = DEMO_MODEL
    if kind != "demo":
        folder = {"bytes": save_byte_level, "pieces": save_sentence_pieces}[kind](tmp_path, CHATML)
    both(folder).assert_equal(body, is_chat=False)


@pytest.mark.parametrize("body", CHATS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("save", [save_byte_level, save_sentence_pieces])
def test_chats_have_the_engines_ids_and_hashes(
    save: Any, family: str, body: dict[str, Any], tmp_path: Path
) -> None:
    both(save(tmp_path, FAMILIES[family])).assert_equal(body, is_chat=True)


@pytest.mark.parametrize("knows_developer", [False, True])
def test_chats_of_the_demo_model_have_the_engines_ids_and_hashes(knows_developer: bool) -> None:
    messages = [{"role": "developer", "content": "be brief"}, *CONVERSATION]
    pair = both(DEMO_MODEL, knows_developer=knows_developer)
    pair.assert_equal({"messages": messages}, is_chat=True)


def test_a_developer_is_the_system_where_the_template_does_not_know_it(tmp_path: Path) -> None:
    messages = [{"role": "developer", "content": "be brief"}, *CONVERSATION]
    both(save_byte_level(tmp_path, CHATML)).assert_equal({"messages": messages}, is_chat=True)


SHOWS_ALL = (
    """{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{{ m.content }}{% endfor %}"""
)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tools": TOOLS},
        {
            "messages": [*CALLED, {"role": "assistant", "content": "It is"}],
            "continue_final_message": True,
        },
    ],
)
def test_earlier_calls_reach_templates_as_they_do_the_engines(
    more: dict[str, Any], tmp_path: Path
) -> None:
    pair = both(save_byte_level(tmp_path, SHOWS_ALL))
    pair.assert_equal({"messages": CALLED, **more}, is_chat=True)


REFUSED: list[tuple[bool, dict[str, Any]]] = [
    (False, {"prompt": ""}),
    (False, {"prompt": []}),
    (False, {"prompt": [[1], []]}),
    (False, {"prompt": {"text": "x"}}),
    (False, {"prompt": [1, -2]}),
    (False, {"prompt": [1, True]}),
    (False, {"prompt": [1, 10**6]}),
    (False, {"prompt": ["a"] * 257}),
    (False, {}),
    (True, {}),
    (True, {"messages": []}),
    (True, {"messages": ["hello"]}),
    (True, {"messages": [{"role": "user"}]}),
    (True, {"messages": [{"role": "user", "content": None}]}),
    (True, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    (True, {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "a"}]}]}),
    (True, {"messages": [{"role": "function", "content": "x"}]}),
    (True, {"messages": [{"role": "user", "content": "x"}], "continue_final_message": True}),
    (True, {"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}]}),
    (True, {"messages": [{"role": "user", "content": "x", "name": 3}]}),
    (True, {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}),
    (True, {"messages": [{"role": "assistant", "content": "x"}]}),  # the template wants a user
    (True, {"messages": [{"role": "user", "content": "x"}], "chat_template": "x"}),
    (True, {"messages": [{"role": "user", "content": "x"}], "cache_salt": 3}),
]


@pytest.mark.parametrize(("is_chat", "body"), REFUSED)
def test_what_the_engine_refuses_has_no_exact_count(
    is_chat: bool, body: dict[str, Any], tmp_path: Path
) -> None:
    pair = both(save_byte_level(tmp_path, FAMILIES["inst"], adds_bos=False))
    with pytest.raises(ApiError):
        pair.engine_requests({"model": "m", "max_tokens": 1, **body}, is_chat=is_chat)
    with pytest.raises(Refused):
        pair.checkpoint.count(body, is_chat=is_chat)


def test_an_engine_without_a_prefix_cache_or_with_another_chain_has_no_hashes() -> None:
    tokenizer = Tokenizer.load(DEMO_MODEL)
    body = {"prompt": "hello " * 100}
    usual = Checkpoint(files_of(tokenizer), PromptLimits()).count(body, is_chat=False)
    for change in ({"prefix_caching": False}, {"block_hash": "another/1"}):
        counts = Checkpoint(files_of(tokenizer, **change), PromptLimits()).count(
            body, is_chat=False
        )
        assert (counts.tokens, counts.hashes) == (usual.tokens, [])
    assert len(usual.hashes) == usual.tokens // 16


def test_a_chain_is_as_long_as_it_may_be() -> None:
    files = files_of(Tokenizer.load(DEMO_MODEL))
    body = {"prompt": list(range(1, 1000))}
    whole = Checkpoint(files, PromptLimits()).count(body, is_chat=False)
    cut = Checkpoint(files, PromptLimits(max_hashes=3)).count(body, is_chat=False)
    assert (cut.tokens, cut.hashes) == (999, whole.hashes[:3])

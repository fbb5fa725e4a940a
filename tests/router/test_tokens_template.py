"""Chat templates: as transformers renders them, and what a hostile one can do."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.router.chat_templates import FAMILIES, files_of, save_byte_level
from xpyd_router.tokens.child import Checkpoint, PromptLimits, cpu_limit
from xpyd_router.tokens.prompts import Refused, conversation
from xpyd_router.tokens.template import ChatTemplates
from xpyd_worker.runner.tokenizer import Tokenizer

MESSAGES = [
    {"role": "user", "content": " hello <é> "},
    {"role": "assistant", "content": "<think>a</think>b  "},
]
TOOLS = [{"type": "function", "function": {"name": "f<é>", "parameters": {"b": 1, "a": []}}}]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


def render(template: str, body: dict[str, Any], **limits: Any) -> str:
    templates = ChatTemplates(
        {"default": template}, VARIABLES, **{"max_characters": 10**6, **limits}
    )
    return templates.render(conversation(body, knows_developer=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"tools": TOOLS},
        {"documents": [{"title": "t", "text": "x"}]},
        {"chat_template_kwargs": {"enable_thinking": False, "bos_token": "<other>"}},
    ],
)
def test_a_conversation_becomes_the_text_that_transformers_makes(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_byte_level(tmp_path, FAMILIES[family])
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(str(folder))
    given = {"add_generation_prompt": True, **options}
    body = {"messages": MESSAGES, **options}
    try:
        expected = theirs.apply_chat_template(
            MESSAGES, tokenize=False, **given.pop("chat_template_kwargs", {}), **given
        )
    except ValueError:  # it changes the message that is to be continued
        assert (family, options["continue_final_message"]) == ("chatml", True)
        with pytest.raises(Refused):
            render(FAMILIES[family], body)
    else:
        assert render(FAMILIES[family], body) == expected


def test_requests_with_tools_take_the_template_for_them() -> None:
    sources = {"default": "plain", "tool_use": "{{ tools[0].function.name }}"}
    templates = ChatTemplates(sources, {}, max_characters=100)
    body: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS}
    assert templates.render(conversation(body, knows_developer=True)) == "f<é>"
    assert render("plain", {"messages": MESSAGES}) == "plain"


@pytest.mark.parametrize(("kept", "tokens"), [(3, 3), (10**6, 8), (-1, 4), (None, 8)])
def test_truncated_prompts_keep_their_end(kept: int | None, tokens: int, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save_byte_level(tmp_path, FAMILIES["inst"]))
    checkpoint = Checkpoint(files_of(tokenizer, block_size=1, max_model_len=5), PromptLimits())
    whole = checkpoint.count({"prompt": [10, 11, 12, 13, 14, 15, 16, 17]}, is_chat=False)
    body = {"prompt": [10, 11, 12, 13, 14, 15, 16, 17], "truncate_prompt_tokens": kept}
    counts = checkpoint.count(body, is_chat=False)
    end = checkpoint.count({"prompt": [10, 11, 12, 13, 14, 15, 16, 17][-tokens:]}, is_chat=False)
    assert whole.tokens == 8
    assert (counts.tokens, counts.hashes) == (tokens, end.hashes)


@pytest.mark.parametrize("given", [True, False, None])
def test_special_tokens_are_added_as_asked(given: bool | None, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save_byte_level(tmp_path, "{{ messages[0].content }}"))
    checkpoint = Checkpoint(files_of(tokenizer), PromptLimits())
    for is_chat, body, usual in (
        (False, {"prompt": "hello"}, True),
        (True, {"messages": [{"role": "user", "content": "hello"}]}, False),
    ):
        is_added = usual if given is None else given
        expected = tokenizer.encode("hello", add_special_tokens=is_added)
        counts = checkpoint.count({**body, "add_special_tokens": given}, is_chat=is_chat)
        assert counts.tokens == len(expected)


def test_templates_know_the_time() -> None:
    at = datetime(2031, 5, 6)
    text = render("{{ strftime_now('%d %b %Y') }}", {"messages": MESSAGES}, now=lambda: at)
    assert text == "06 May 2031"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ namespace(_x=1) }}",
        "{{ raise_exception('no') }}",
        "{% include 'x' %}",
        "{{ undefined.member }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% if %}",
        "{{ 'x' * 10**15 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(1001) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ strftime_now(3) }}",
    ],
)
def test_a_template_that_fails_or_does_what_it_may_not_gives_no_text(template: str) -> None:
    with pytest.raises(Refused):
        render(template, {"messages": MESSAGES})


def test_a_template_that_runs_for_long_is_stopped() -> None:
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(Refused, match="too long"), cpu_limit(0.05):
        render(loops, {"messages": MESSAGES})
    with cpu_limit(5):
        assert render("x", {"messages": MESSAGES}) == "x"


def test_a_model_without_a_template_has_no_chats(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save_byte_level(tmp_path, ""))
    checkpoint = Checkpoint(files_of(tokenizer), PromptLimits())
    with pytest.raises(Refused, match="no chat template"):
        checkpoint.count({"messages": MESSAGES}, is_chat=True)

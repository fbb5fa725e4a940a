"""llm-comply and CompatCanary against one P and one D: what passes, and what does not and why.

The demo model answers as it can, greedily. Cases that it fails are in DEMO_FAILS; each of them has
to pass where the model is a script (tests/worker/replay.py), in an engine of ours, or in another's
where ours lacks the input (ADR 0071).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.agents.suites import CANARY, COMPLY, MODEL, is_installed, is_left_out, run_suite
from tests.e2e.harness import Fleet
from tests.router.chat_engines import ChatEngine, content
from tests.router.fakes import fleet
from tests.worker.replay import by_prompt, replayed
from tests.worker.server_fakes import ByteTokenizer
from xpyd_worker.parsers.registry import REASONING_FAMILIES, TOOL_FAMILIES, Parsers

pytestmark = [
    pytest.mark.agents,
    pytest.mark.skipif(not is_installed(), reason="run scripts/agent_suites.py first"),
]

SUITES = [
    pytest.param(
        suite,
        marks=pytest.mark.skipif(is_left_out(suite), reason="npm's registry was not reached"),
    )
    for suite in (*COMPLY, *CANARY)
]
NO_IMAGES = "our engine runs models of text; images pass the router to engines that take them"
DEMO_FAILS = {
    "chat-image-input": NO_IMAGES,
    "image-input": NO_IMAGES,
    "anth-image-input": NO_IMAGES,
    "anth-thinking-display": "asks for 4,096 tokens, and the demo model's context has 2,048",
}
UNTOLD = {
    "annotations": "only answers with sources of a web search have them",
    "compact": "the advisory endpoint /v1/responses/compact is not served",
    "compaction": "the same",
}
"""Words of warnings that answers of the replayed model may have, and why."""
CALL = '<tool_call>\n{"name": "%s", "arguments": {"%s": "%s"}}\n</tool_call>'
PLAY = by_prompt(
    ("get_weather", CALL % ("get_weather", "location", "San Francisco")),
    ("compatcanary_echo", CALL % ("compatcanary_echo", "value", "CANARY_OK")),
    ("Return the requested compatibility status.", '{"status":"ok"}'),
    ("Show your reasoning.", "<think>\n15 * 37 = 15 * 30 + 15 * 7\n</think>\n\n555"),
    ("", "One, two, three."),
)


class AnyOrder(ByteTokenizer):
    """Its template lets the assistant begin, as most do."""

    def apply_chat_template(self, messages: Any, **options: Any) -> list[int]:
        first = {"role": "system", "content": ""}
        return super().apply_chat_template([first, *messages], **options)


@pytest.mark.parametrize("suite", SUITES)
async def test_the_demo_model_passes_all_cases_but_those_that_say_why(
    pair: Fleet, suite: str
) -> None:
    found = await run_suite(suite, f"{pair.router.url}/v1")
    failed = {case: one.complaints for case, one in found.items() if not one.is_passed}
    assert failed.keys() == DEMO_FAILS.keys() & found.keys(), failed


@pytest.mark.parametrize("suite", SUITES)
async def test_a_scripted_model_passes_all_cases_of_text_without_a_warning(suite: str) -> None:
    hermes = Parsers(TOOL_FAMILIES["hermes"], REASONING_FAMILIES["qwen3"], "hermes")
    served = {"parsers": hermes, "tokenizer": AnyOrder()}
    async with replayed(PLAY, names=(MODEL,), served=served) as (made, _):
        found = await run_suite(suite, f"{made.base}/v1")
    seen = {case: one for case, one in found.items() if DEMO_FAILS.get(case) != NO_IMAGES}
    failed = {case: one.complaints for case, one in seen.items() if not one.is_passed}
    assert not failed
    if suite in COMPLY:
        told = [one.complaints for one in seen.values() if one.complaints]
        assert all(any(word in text for word in UNTOLD) for text in told), told


@pytest.mark.parametrize(
    ("suite", "case"),
    [
        ("openai-chat", "chat-image-input"),
        ("open-responses", "image-input"),
        ("anthropic", "anth-image-input"),
    ],
)
async def test_images_reach_an_engine_of_another_kind(suite: str, case: str) -> None:
    async with fleet() as made:
        engine = await made.engine("A", is_ours=False, models=(MODEL,))
        engine.script = ChatEngine(content("A", " photo."))
        found = await run_suite(suite, f"{made.base}/v1")
    assert found[case].is_passed, found[case].complaints

"""PrefixAware by the engines' own block hashes: requests go where their tokens are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.router.chat_templates import DEMO_MODEL, files_of, run
from tests.router.fakes import Fleet, fleet
from xpyd_core.tokenizer_files import encode_tokenizer_files
from xpyd_router.requests.prefixes import hash_marks
from xpyd_worker.runner.tokenizer import Tokenizer

PROMPTS = [f"Story {number}: the quick brown fox jumps. " * 12 for number in range(8)]


def test_marks_of_hashes_stand_at_the_places_of_other_marks() -> None:
    hashes = [bytes((n,)) for n in range(11)]
    assert hash_marks(hashes, 32) == tuple((32 * (n + 1), hashes[n]) for n in range(11))
    assert hash_marks([], 16) == ()
    far = hash_marks([b"x"] * 5000, 16)
    assert far[-1][0] <= 2048 * 16


async def served(made: Fleet, prompt: Any) -> int:
    """Which engine a prompt goes to."""
    before = [engine.served for engine in made.engines]
    await made.json(prompt=prompt)
    (index,) = (i for i, engine in enumerate(made.engines) if engine.served > before[i])
    return index


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_prompt_as_ids_goes_where_its_text_went(is_exact: bool) -> None:
    async def test() -> None:
        tokenizer = Tokenizer.load(DEMO_MODEL)
        async with fleet(policy="PrefixAware", exact_prefixes=is_exact) as made:
            for _ in range(2):
                engine = await made.engine("A")
                engine.files = encode_tokenizer_files(files_of(tokenizer))
            counts = made.router.surface.metrics.token_counts.labels("exact")._value
            while is_exact and not counts.get():
                await made.json(prompt="x")
                await asyncio.sleep(0.05)
            texts = [await served(made, prompt) for prompt in PROMPTS]
            assert set(texts) == {0, 1}
            ids = [
                await served(made, tokenizer.encode(prompt, add_special_tokens=True))
                for prompt in reversed(PROMPTS)
            ]
            assert (ids == texts[::-1]) == is_exact

    run(test())

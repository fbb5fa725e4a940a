"""By the engines' own counts and block hashes: where requests go, and what they cost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.router.chat_templates import DEMO_MODEL, files_of
from tests.router.fakes import Call, Fleet, HttpEngine, fleet, serve_model, until
from xpyd_core.tokenizer_files import encode_tokenizer_files
from xpyd_router.admission import AdmissionLimits
from xpyd_router.request.client_request import hash_marks
from xpyd_worker.runner.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("uv_loop")

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


async def counting(made: Fleet, kinds: str, tokenizer: Tokenizer) -> None:
    """Engines with files, which the router has read."""
    for kind in kinds:
        await made.engine(kind, files=encode_tokenizer_files(files_of(tokenizer)))
    async with asyncio.timeout(60):
        while not made.metric("xpyd_router_token_counts_total", result="exact"):
            await made.json(prompt="x")
            await asyncio.sleep(0.05)


async def test_limits_and_loads_go_by_counted_tokens() -> None:
    tokenizer = Tokenizer.load(DEMO_MODEL)
    limits = AdmissionLimits(tokens=100_000)
    async with fleet(limits=limits, exact_prefixes=True) as made:
        await counting(made, "A", tokenizer)
        (engine,) = made.engines
        text = "the quick brown fox " * 30
        tokens = len(tokenizer.encode(text, add_special_tokens=True))
        assert abs(tokens - len(text) // 4) > 20  # no estimate
        (instance,) = made.router.state.fleet.instances
        load = made.router.state.fleet.load(instance.key)
        before = engine.served
        release = asyncio.Event()

        async def hold(engine: HttpEngine, call: Call, request: Any) -> Any:
            await release.wait()
            return await serve_model(engine, call, request)

        engine.script = hold
        request = asyncio.create_task(made.json(prompt=text, max_tokens=7))
        await until(lambda: engine.served > before)
        assert made.router.state.admission.in_flight.tokens == tokens + 7
        assert load.own.prompt_tokens == tokens
        release.set()
        await request
        await until(lambda: load.own.prompt_tokens == 0)
        assert made.router.state.admission.in_flight.tokens == 0


async def test_a_prompt_stays_on_d_by_its_counted_tokens() -> None:
    tokenizer = Tokenizer.load(DEMO_MODEL)
    for text in ("the quick brown fox " * 30, "x9% " * 100):
        tokens = len(tokenizer.encode(text, add_special_tokens=True))
        for least, is_short in ((tokens, False), (tokens + 1, True)):
            async with fleet(exact_prefixes=True, local_prefill_tokens=least) as made:
                await counting(made, "PD", tokenizer)
                p, _ = made.engines
                before = p.served
                await made.json(prompt=text)
                assert (p.served == before) == is_short


@pytest.mark.parametrize("is_exact", [True, False])
async def test_a_prompt_as_ids_goes_where_its_text_went(is_exact: bool) -> None:
    tokenizer = Tokenizer.load(DEMO_MODEL)
    async with fleet(policy="PrefixAware", exact_prefixes=is_exact) as made:
        if is_exact:
            await counting(made, "AA", tokenizer)
        else:
            for _ in range(2):
                await made.engine("A")
        texts = [await served(made, prompt) for prompt in PROMPTS]
        assert set(texts) == {0, 1}
        ids = [
            await served(made, tokenizer.encode(prompt, add_special_tokens=True))
            for prompt in reversed(PROMPTS)
        ]
        assert (ids == texts[::-1]) == is_exact

"""Greedy token lists made by transformers in fp32, and a load that compares a fleet with them.

The lists are made before any fleet runs, one request at a time, with the whole sequence in one
forward per token batch (`generate` with its own cache): nothing of xpyd is in them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

TEXTS = (
    "San Francisco is a",
    "Return a",
    "Open the file and",
    "The following functions are defined by this module and may be used to read and write data.",
    "Split the string at the first occurrence of sep, and return a 3-tuple containing the part",
    "class Path: a filesystem path. Return a new path with",
)


RETRY_S = 0.3
CUT_SHORT = "stream ended without [DONE] and without an error event"


@dataclass(frozen=True)
class Case:
    """A prompt and what transformers answers: `ids` (max_tokens of them, EOS ignored)."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    message: str = ""
    """Of a chat: the user's, of which the prompt is made."""


def _oracle(model: Path) -> tuple[Any, Any]:
    """transformers' tokenizer and model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizers: Any = AutoTokenizer
    models: Any = AutoModelForCausalLM
    oracle = models.from_pretrained(model, dtype=torch.float32)
    return tokenizers.from_pretrained(model), oracle.eval()


def mixed_cases(model: Path, *, seed: int = 11) -> list[Case]:
    """27 cases: prompts as make_cases() has, of 600 to 900 tokens, long answers, and chats."""
    tokenizer, oracle = _oracle(model)
    rng = random.Random(seed)

    def text(words: int) -> str:
        return " ".join(rng.choice(TEXTS) for _ in range(words))

    def ids_of(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def case(prompt: list[int], new: int, message: str = "") -> Case:
        return Case(tuple(prompt), greedy(oracle, prompt, new), message)

    cases = [case(ids_of(text(1 + n))[:500], rng.randrange(2, 40)) for n in range(10)]
    cases += [case(ids_of(text(90))[: 600 + 75 * n], rng.randrange(2, 40)) for n in range(5)]
    cases += [case(ids_of(text(2)), 200) for _ in range(2)]
    for number in range(10):
        message = text(1 + number % 5)
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
        )
        cases.append(case(ids_of(rendered), rng.randrange(4, 60), message))
    return cases


def long_case(model: Path, new_tokens: int) -> Case:
    """A short prompt with so many output tokens."""
    tokenizer, oracle = _oracle(model)
    prompt = tokenizer(TEXTS[3], add_special_tokens=False)["input_ids"]
    return Case(tuple(prompt), greedy(oracle, prompt, new_tokens))


def make_cases(model: Path, *, count: int = 24, seed: int = 7) -> list[Case]:
    """`count` prompts of 3 to about 500 tokens with 2 to 40 output tokens each."""
    tokenizer, oracle = _oracle(model)
    rng = random.Random(seed)
    cases: list[Case] = []
    for number in range(count):
        text = " ".join(rng.choice(TEXTS) for _ in range(1 + number % 6 * 5))
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"][: rng.randrange(3, 500)]
        new = rng.randrange(2, 40)
        cases.append(Case(tuple(prompt), greedy(oracle, prompt, new)))
    return cases


def greedy(oracle: Any, prompt: list[int] | tuple[int, ...], new_tokens: int) -> tuple[int, ...]:
    """`new_tokens` greedy tokens behind `prompt`, EOS ignored."""
    import torch

    with torch.inference_mode():
        out = oracle.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    return tuple(out[0, len(prompt) :].tolist())


@dataclass
class LoadResult:
    """What a load saw: requests that agreed, and a line for each that did not."""

    agreed: int = 0
    wrong: list[str] = field(default_factory=list[str])
    errors: list[str] = field(default_factory=list[str])
    # Streams that ended in an SSE error event after at least one token.
    broken_streams: list[str] = field(default_factory=list[str])
    retried: list[str] = field(default_factory=list[str])


async def _read_stream(response: aiohttp.ClientResponse, ids: list[int]) -> str | None:
    """Collect token ids; the error event's message, or CUT_SHORT when none came."""
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        payload = line[6:].strip()
        if payload == b"[DONE]":
            return None
        event = json.loads(payload)
        if "error" in event:
            return str(event["error"])
        for choice in event["choices"]:
            ids.extend(choice.get("token_ids") or ())
    return CUT_SHORT


async def _one(
    session: aiohttp.ClientSession, url: str, case: Case, *, stream: bool, user: str = ""
) -> Any:
    """None if the answer agrees, else ("wrong" | "error" | "broken", what)."""
    body = {
        "model": "demo",
        "prompt": list(case.prompt),
        "max_tokens": len(case.ids),
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
        **({"user": user} if user else {}),
    }
    ids: list[int] = []
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            return "error", f"{response.status} {(await response.text())[:300]}"
        if stream:
            error = await _read_stream(response, ids)
            if error is not None:
                prefix_right = tuple(ids) == case.ids[: len(ids)]
                told = error != CUT_SHORT
                return ("broken" if told and ids and prefix_right else "error"), error
        else:
            ids.extend((await response.json())["choices"][0]["token_ids"])
    if tuple(ids) != case.ids:
        return "wrong", f"prompt of {len(case.prompt)}: {ids} instead of {list(case.ids)}"
    return None


async def load(
    url: str,
    cases: list[Case],
    *,
    seconds: float,
    clients: int = 32,
    at_half: Any = None,
    at_least: int = 0,
    tries: int = 1,
    timeout_s: float = 60,
) -> LoadResult:
    """`clients` concurrent clients for `seconds` and `at_least` so many requests, half of them
    streamed.

    `at_half` is called (in a thread) when half of the time is over. A request that takes longer
    than `timeout_s` counts as an error: nothing may hang. One that was told of an error is tried
    again, up to `tries` times in all.
    """
    result, numbers = LoadResult(), itertools.count()
    deadline = time.monotonic() + seconds
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(limit=0)

    async def ask(session: aiohttp.ClientSession, number: int) -> tuple[str, str] | None:
        for left in reversed(range(tries)):
            case = cases[number % len(cases)]
            try:
                outcome = await _one(session, url, case, stream=number % 2 == 0)
            except (aiohttp.ClientError, TimeoutError) as error:
                return ("error", f"{type(error).__name__}: {error}")
            if outcome is None or outcome[0] == "wrong" or outcome[1] == CUT_SHORT or not left:
                return outcome
            result.retried.append(outcome[1])
            await asyncio.sleep(RETRY_S)
        return None

    async def client(session: aiohttp.ClientSession) -> None:
        while (number := next(numbers)) < at_least or time.monotonic() < deadline:
            outcome = await ask(session, number)
            if outcome is None:
                result.agreed += 1
                continue
            kinds = {"wrong": result.wrong, "error": result.errors}
            kinds.get(outcome[0], result.broken_streams).append(outcome[1])

    async def halfway() -> None:
        if at_half is not None:
            await asyncio.sleep(seconds / 2)
            await asyncio.to_thread(at_half)

    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await asyncio.gather(halfway(), *(client(session) for _ in range(clients)))
    return result


@dataclass(frozen=True)
class Asked:
    """One request of an open loop: when it began and ended (time.monotonic), and what was wrong."""

    began_s: float
    ended_s: float
    what: tuple[str, str] | None


async def open_loop(
    url: str,
    cases: list[Case],
    *,
    rate: float,
    seconds: float,
    disturb: Any = None,
    timeout_s: float = 60,
) -> list[Asked]:
    """`rate` requests a second for `seconds`, whether or not others are answered, each on a
    connection of its own, half of them streamed. `disturb` runs in a thread meanwhile. No two have
    the same body: where instances are killed all the time, one that met two deaths is refused.

    A closed loop sends nothing while it waits, and a kept connection meets no closed port: both
    hide what clients see.
    """
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    begin_s = time.monotonic()

    async def ask(session: aiohttp.ClientSession, number: int) -> Asked:
        await asyncio.sleep(begin_s + number / rate - time.monotonic())
        began_s = time.monotonic()
        try:
            case, user = cases[number % len(cases)], f"request-{begin_s}-{number}"
            what = await _one(session, url, case, stream=number % 2 == 0, user=user)
        except (aiohttp.ClientError, TimeoutError) as error:
            what = ("error", f"{type(error).__name__}: {error}")
        return Asked(began_s, time.monotonic(), what)

    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        asked = [asyncio.create_task(ask(session, n)) for n in range(int(rate * seconds))]
        if disturb is not None:
            await asyncio.to_thread(disturb)
        return list(await asyncio.gather(*asked))

"""Real engines and the demo model die, freeze, drain and come back while clients ask: everyone gets
what one engine alone, undisturbed, says.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.harness import Fleet, Process, fleet

_PROMPTS = ("San Francisco is a", "Once upon a time", "The river", "In the morning the baker")
_KINDS = ("kill", "freeze", "pause", "drain")
_AT_ONCE = 4
_REQUEST_S = 120.0
# An engine starts in seconds; on a machine that is shared, in minutes.
_BACK_S = 300.0


def draw(rng: random.Random) -> dict[str, Any]:
    """One request; its answer is the same wherever it is computed."""
    body: dict[str, Any] = {"model": "demo", "prompt": rng.choice(_PROMPTS)}
    body |= {"max_tokens": rng.choice([1, 8, 40, 80]), "return_token_ids": True}
    body |= {"temperature": 0} if rng.random() < 0.5 else {"temperature": 0.8, "seed": 7}
    if rng.random() < 0.3:
        body["n"] = 2
    if rng.random() < 0.6:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


async def ask(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    """An answer as (text, ids, finish) of each choice, and how many tokens it has."""
    async with http.post(f"{url}/v1/completions", data=json.dumps(body)) as response:
        raw = await response.text()
        assert response.status == 200, raw
    if not body.get("stream"):
        documents = [json.loads(raw)]
    else:
        lines = raw.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""], raw[-300:]
        documents = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    said: dict[int, tuple[str, list[int], str | None]] = {}
    for choice in [choice for document in documents for choice in document["choices"]]:
        text, ids, finish = said.get(choice["index"], ("", [], None))
        assert finish is None
        ids = ids + choice.get("token_ids", [])
        said[choice["index"]] = (text + choice["text"], ids, choice["finish_reason"])
    return said, documents[-1]["usage"]["completion_tokens"]


async def disturb(running: Fleet, victim: Process, kind: str, rng: random.Random) -> None:
    """Do one fault to an engine; returns when the router has it back."""
    if kind == "kill":
        victim.restart()
    elif kind == "drain":
        assert await asyncio.to_thread(victim.stop, 60.0) == 0
        victim.popen = victim.start()
    else:
        victim.popen.send_signal(signal.SIGSTOP)
        try:
            # Its beats are waited for 2 s.
            await asyncio.sleep(rng.uniform(4, 6) if kind == "freeze" else rng.uniform(0.2, 1))
        finally:
            victim.popen.send_signal(signal.SIGCONT)
    await asyncio.to_thread(running.wait_ready, victim, timeout_s=_BACK_S)


async def play(running: Fleet, requests: int, faults: int, seed: int) -> list[str]:
    """What was wrong, one line for each request."""
    rng = random.Random(seed)
    bodies = [draw(rng) for _ in range(requests)]
    wrong: list[str] = []
    timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        distinct = {json.dumps(body): body for body in bodies}
        right = {
            key: await ask(http, running.engine("Prefill").url, body)
            for key, body in distinct.items()
        }

        async def disturbing() -> None:
            engines = running.engines
            kinds = [_KINDS[i % len(_KINDS)] for i in range(faults)]
            for number, kind in enumerate(kinds):
                # Ps and Ds in turn, and every kind on both.
                side = [
                    e
                    for e in engines
                    if e.role == ("Prefill", "Decode")[(number + number // 4) % 2]
                ]
                await disturb(running, rng.choice(side), kind, rng)

        script = asyncio.create_task(disturbing())
        numbers = iter(range(10**6))

        async def client() -> None:
            for number in numbers:
                if number >= requests and script.done():
                    return
                body = bodies[number % requests]
                try:
                    got = await ask(http, running.router.url, body)
                except (AssertionError, aiohttp.ClientError, TimeoutError) as error:
                    got = f"{type(error).__name__} {error}"[:500]
                if got != (want := right[json.dumps(body)]):
                    wrong.append(f"{body}: {got}, not {want}")

        await asyncio.gather(*(client() for _ in range(_AT_ONCE)))
        await script
    return wrong


def judge(folder: Path, *, requests: int, faults: int, seed: int) -> None:
    with fleet(folder, prefill=2, decode=2) as running:
        wrong = asyncio.run(play(running, requests, faults, seed))
        assert not wrong, f"seed {seed}: {len(wrong)} wrong\n" + "\n".join(wrong[:5])
        assert "Traceback" not in running.router.log
        assert running.router.metric("xpyd_router_in_flight") == 0


@pytest.mark.slow
def test_real_engines_fail_and_every_answer_is_right(tmp_path: Path) -> None:
    judge(tmp_path, requests=24, faults=2, seed=1)


@pytest.mark.soak
def test_300_requests_among_failing_real_engines_are_all_answered_right(tmp_path: Path) -> None:
    judge(tmp_path, requests=300, faults=16, seed=2)

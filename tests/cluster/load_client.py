"""Runs inside a client pod: sends completions through a fleet's Service and compares the token ids.

    python -c "$(cat load_client.py)" URL REQUESTS CONCURRENCY < cases.json

`cases.json` is a list of {"prompt": [ids], "ids": [ids]}; every second request is streamed. Prints
one JSON object. Needs Python and aiohttp, nothing of xpyd.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import aiohttp

PER_REQUEST_S = 240.0
SHOWN = 10


async def ask(session: aiohttp.ClientSession, url: str, case: dict[str, Any], stream: bool) -> None:
    """One request; raises when it fails or its tokens are not the case's."""
    body = {
        "model": "demo",
        "prompt": case["prompt"],
        "max_tokens": len(case["ids"]),
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise ValueError(f"HTTP {answer.status}: {(await answer.text())[:200]}")
        if stream:
            ids, done = [], False
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    done = True
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(f"error event: {event['error']}")
                for choice in event["choices"]:
                    ids += choice.get("token_ids") or []
            if not done:
                raise ValueError("the stream ended without [DONE]")
        else:
            ids = (await answer.json())["choices"][0]["token_ids"]
    if ids != case["ids"]:
        raise ValueError(f"tokens {ids[:8]}... in place of {case['ids'][:8]}...")


async def run(url: str, requests: int, concurrency: int, cases: list[dict[str, Any]]) -> None:
    """Keep `concurrency` requests under way until `requests` have ended."""
    numbers = iter(range(requests))
    failed: list[str] = []
    slowest = 0.0
    started = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=PER_REQUEST_S)
    # A connection per request, as many clients would: kube-proxy balances connections.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def one_by_one() -> None:
            nonlocal slowest
            for number in numbers:
                begun = time.monotonic()
                try:
                    await ask(session, url, cases[number % len(cases)], number % 2 == 0)
                except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                    at_s = time.monotonic() - started
                    failed.append(f"{at_s:.1f} s, request {number}: {error!r}"[:400])
                slowest = max(slowest, time.monotonic() - begun)
                if number % 100 == 99:
                    sys.stderr.write(f"{number + 1} sent, {time.monotonic() - started:.0f} s\n")
                    sys.stderr.flush()

        await asyncio.gather(*(one_by_one() for _ in range(concurrency)))
    result = {
        "requests": requests,
        "failed": len(failed),
        "first_failures": failed[:SHOWN],
        "seconds": round(time.monotonic() - started, 1),
        "slowest_s": round(slowest, 1),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.load(sys.stdin)))

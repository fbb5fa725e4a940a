"""Two keys of clients at one router: does the flood of one hold up the other, and do they share?

The router has PLACES places (--max-concurrent-requests). The engine is a mock of one instance that
takes PREFILL_S before the first token, since the time to it is what is compared, and then streams.
`quiet` asks with few connections; `flood` with four times as many as there are places.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import subprocess
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from bench.process import Processes, free_port
from bench.router.interpreter import own_path
from bench.router.routers import ContenderFailed

PLACES = 32
PREFILL_S = 0.2
TOKENS = 16
TOKENS_PER_S = 50
QUIET, FLOOD = 2, 4 * PLACES
WEIGHTS = {"quiet": 3, "flood": 1}
_START_S = 60.0
_POLL_S = 0.1
_WARM_S = 2.0
P99_AIM, SHARE_AIM = 1.5, 0.1


def _key(name: str) -> str:
    return f"xpyd-bench-key-of-{name}"


def key_lines() -> str:
    """The key file: both names, with their weights."""
    lines = [
        f"{name} sha256:{hashlib.sha256(_key(name).encode()).hexdigest()} weight={weight}"
        for name, weight in WEIGHTS.items()
    ]
    return "\n".join([*lines, ""])


async def _answer(request: web.Request) -> web.StreamResponse:
    body: dict[str, Any] = await request.json()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await asyncio.sleep(PREFILL_S)
    await response.prepare(request)
    for number in range(1, body["max_tokens"] + 1):
        reason = "length" if number == body["max_tokens"] else None
        choice = {"index": 0, "text": "t ", "logprobs": None, "finish_reason": reason}
        event = {"id": "x", "object": "text_completion", "model": "m", "choices": [choice]}
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await asyncio.sleep(1 / TOKENS_PER_S)
    await response.write(b"data: [DONE]\n\n")
    return response


async def _answer_while_asked(request: web.Request) -> web.StreamResponse:
    try:
        return await _answer(request)
    except ConnectionError:  # the load has ended
        return web.Response(status=499)


@contextlib.asynccontextmanager
async def _engine() -> AsyncGenerator[int]:
    app = web.Application()

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def fine(_: web.Request) -> web.Response:
        return web.json_response({"version": "0"})

    app.add_routes(
        [web.post("/v1/completions", _answer_while_asked), web.get("/v1/models", models)]
    )
    app.add_routes([web.get("/health", fine), web.get("/version", fine)])
    runner, port = web.AppRunner(app), free_port()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield port
    finally:
        await runner.cleanup()


class _Load:
    """`count` connections with the key of `name` that ask again when they have their answer."""

    def __init__(self, port: int, name: str, count: int) -> None:
        self.tokens = 0
        self.ttft_s: list[float] = []
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self._headers = {"Authorization": f"Bearer {_key(name)}"}
        self._tasks = [asyncio.create_task(self._run()) for _ in range(count)]

    async def end(self) -> None:
        """Ask no more. ContenderFailed where an answer was not as asked."""
        for task in self._tasks:
            task.cancel()
        for found in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(found, Exception):
                raise ContenderFailed(f"shares: {found!r}") from found

    def forget(self) -> None:
        """What counts comes from now on."""
        self.tokens = 0
        self.ttft_s.clear()

    def p99_s(self) -> float:
        """Of the times to the first token."""
        return sorted(self.ttft_s)[(len(self.ttft_s) - 1) * 99 // 100]

    async def _run(self) -> None:
        async with aiohttp.ClientSession(headers=self._headers) as http:
            while True:
                body = {"model": "m", "prompt": "a" * 64, "max_tokens": TOKENS, "stream": True}
                began_s = time.monotonic()
                async with http.post(self._url, json=body) as response:
                    first = True
                    async for line in response.content:
                        if first:
                            self.ttft_s.append(time.monotonic() - began_s)
                            first = False
                        self.tokens += line.startswith(b"data: {")
                    if response.status != 200:
                        raise ContenderFailed(f"an answer with status {response.status}")


@contextlib.asynccontextmanager
async def _router(engine: int, folder: Path, python: str, processes: int) -> AsyncGenerator[int]:
    keys, log, port = folder / "keys.txt", folder / "shares.log", free_port()
    keys.write_text(key_lines())
    argv = [
        *(python, "-P", "-m", "xpyd_core", "router", "--kv-insecure", "--port", str(port)),
        *("--discovery-port", str(free_port()), "--drain-seconds", "0"),
        *("--static-instance", f"A=http://127.0.0.1:{engine}", "--api-key-file", str(keys)),
        *("--max-concurrent-requests", str(PLACES), "--heartbeat-interval-ms", "500"),
        *("--admin-port", "0", "--processes", str(processes)),
    ]
    process = await asyncio.to_thread(_started, argv, log)
    router = Processes(process, log)
    try:
        async with asyncio.timeout(_START_S):
            while not await _is_ready(port):  # noqa: ASYNC110 - another process has no event
                await asyncio.sleep(_POLL_S)
        yield port
    except TimeoutError as error:
        raise ContenderFailed(f"shares: no router: {router.complaint()}") from error
    finally:
        await asyncio.to_thread(router.end)


def _started(argv: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        environ = {**os.environ, "PYTHONPATH": own_path()}
        return subprocess.Popen(
            argv, stdout=output, stderr=output, start_new_session=True, env=environ
        )


async def _is_ready(port: int) -> bool:
    try:
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://127.0.0.1:{port}/readiness?pairs=true") as response,
        ):
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def _measure(folder: Path, python: str, seconds: float, processes: int) -> dict[str, Any]:
    async with _engine() as engine, _router(engine, folder, python, processes) as port:
        quiet = _Load(port, "quiet", QUIET)
        await asyncio.sleep(_WARM_S)
        quiet.forget()
        await asyncio.sleep(seconds)
        alone_s = quiet.p99_s()
        flood = _Load(port, "flood", FLOOD)
        await asyncio.sleep(_WARM_S)
        quiet.forget()
        await asyncio.sleep(seconds)
        beside_s = quiet.p99_s()
        more = _Load(port, "quiet", FLOOD)
        await asyncio.sleep(_WARM_S)
        for load in (quiet, flood, more):
            load.forget()
        await asyncio.sleep(seconds)
        by_name = {"quiet": quiet.tokens + more.tokens, "flood": flood.tokens}
        for load in (quiet, flood, more):
            await load.end()
    return {"processes": processes, **result(alone_s, beside_s, by_name)}


def result(alone_s: float, beside_s: float, tokens: dict[str, int]) -> dict[str, Any]:
    """The figures as the report has them. `share`: how far the tokens by weight are apart."""
    ratio = beside_s / alone_s
    by_weight = [tokens[name] / weight for name, weight in WEIGHTS.items()]
    share = max(by_weight) / min(by_weight) - 1 if min(by_weight) else float("inf")
    return {
        "places": PLACES,
        "ttftP99AloneMs": round(alone_s * 1e3, 1),
        "ttftP99BesideMs": round(beside_s * 1e3, 1),
        "ttftRatio": round(ratio, 3),
        "ttftHolds": ratio <= P99_AIM,
        "tokens": tokens,
        "weights": WEIGHTS,
        "apart": round(share, 3),
        "shareHolds": share <= SHARE_AIM,
    }


def measure_shares(folder: Path, python: str, seconds: float, processes: int = 1) -> dict[str, Any]:
    """Run it, with a router of so many processes. ContenderFailed."""
    return asyncio.run(_measure(folder, python, seconds, processes))

"""A proxy before an API server, in memory or real, that does to the operator what a bad day does.

Calls are refused (409, 410, 429 with Retry-After, 500, 503; 404 where something that is there is to
be deleted or gets a status), late, cut before or behind the write
that they ask for; watches end, expire, and lose, repeat and swap events. All of it follows from a
seed. And it plays a crash: behind the Nth write nothing gets through any more, not even that
write's answer.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from xpyd_operator.controller.client import Login

REFUSALS = (409, 410, 429, 500, 503)
_HOP_HEADERS = {"transfer-encoding", "content-length", "connection", "content-encoding"}
_EXPIRED = {"kind": "Status", "code": 410, "message": "too old resource version (injected)"}
_SWAP_S = 0.1
"""An event that waits to be swapped with the next one goes alone after so long."""
_START_S = 10.0
_MISSING = 0.5
"""Of refusals that may be a 404, so many are."""


@dataclass(frozen=True)
class Weather:
    """Shares of calls and of events. `calls` are refused or cut, half of these with what they ask
    for done; `late_s`: up to so late; `events` are lost, repeated or swapped, and a tenth as many
    end their watch."""

    calls: float = 0.0
    late_s: float = 0.0
    events: float = 0.0


class FaultProxy:
    """`async with FaultProxy(login) as proxy`, and `proxy.login` is what an operator uses."""

    def __init__(self, upstream: Login, *, weather: Weather = Weather(), seed: int = 0) -> None:
        self._upstream = upstream
        self.weather = weather
        self._rng = random.Random(seed)
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self.url = ""
        self.writes = 0
        """Writes that got through, without Events and Leases."""
        self.crash_after: int | None = None
        """Of these: the operator is gone behind it."""
        self.crash_behind = ""
        """A part of a path: it is gone behind the first write there."""
        self.crashed = asyncio.Event()

    def revive(self) -> None:
        """After a crash: what comes now is the next operator's."""
        self.crash_after = None
        self.crashed.clear()

    async def login(self) -> Login:
        """What find_login would give."""
        return Login(self.url, None)

    async def __aenter__(self) -> FaultProxy:
        connector = aiohttp.TCPConnector(limit=0, ssl=self._upstream.tls or False)
        headers = {"Authorization": self._upstream.header} if self._upstream.header else None
        self._session = aiohttp.ClientSession(
            connector=connector, headers=headers, auto_decompress=True
        )
        app = web.Application(client_max_size=1 << 25)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        assert self._runner is not None
        await self._session.close()
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if self.crashed.is_set():
            return _cut(request)
        weather, rng = self.weather, self._rng
        if weather.late_s:
            await asyncio.sleep(rng.uniform(0, weather.late_s))
        is_bad = rng.random() < weather.calls
        if is_bad and rng.random() < 0.5:
            status = rng.choice((*REFUSALS, 0))
            if _may_be_missing(request) and rng.random() < _MISSING:
                status = 404
            return _refusal(status) if status else _cut(request)
        if request.query.get("watch") == "true":
            return await self._relay(request, is_bad=is_bad)
        return await self._forward(request, is_bad=is_bad)

    def _ask(
        self, request: web.Request, body: bytes
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        assert self._session is not None
        kept = ("Content-Type", "Accept")
        return self._session.request(
            request.method,
            self._upstream.server + request.path,
            params=request.query,
            data=body or None,
            headers={name: request.headers[name] for name in kept if name in request.headers},
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def _forward(self, request: web.Request, *, is_bad: bool) -> web.StreamResponse:
        async with self._ask(request, await request.read()) as answer:
            body = await answer.read()
        if request.method != "GET" and answer.status < 300:
            self._count(request.path)
        if self.crashed.is_set():
            return _cut(request)
        if is_bad:  # it is done, and the operator does not hear of it
            return _refusal(500) if self._rng.random() < 0.5 else _cut(request)
        headers = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP_HEADERS}
        return web.Response(status=answer.status, body=body, headers=headers)

    def _count(self, path: str) -> None:
        if "/events" not in path and "/leases" not in path:
            self.writes += 1
            if self.writes == self.crash_after:
                self.crashed.set()
        if self.crash_behind and self.crash_behind in path:
            self.crashed.set()

    async def _relay(self, request: web.Request, *, is_bad: bool) -> web.StreamResponse:
        async with self._ask(request, b"") as answer:
            if answer.status != 200:
                return _refusal(answer.status)
            response = web.StreamResponse()
            await response.prepare(request)
            if is_bad:
                await response.write(_line({"type": "ERROR", "object": _EXPIRED}))
                return response
            try:
                async for line in self._changed(answer):
                    await response.write(line)
            except (ConnectionError, aiohttp.ClientError):
                pass
        return response

    async def _changed(self, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """The lines of a watch, in today's weather; ends with the watch, or before it."""
        held = b""
        reading = asyncio.ensure_future(answer.content.readline())
        ended = asyncio.ensure_future(self.crashed.wait())
        try:
            while True:
                some = await asyncio.wait(
                    (reading, ended),
                    timeout=_SWAP_S if held else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if self.crashed.is_set():
                    return
                if not some[0]:
                    yield held
                    held = b""
                    continue
                line = reading.result()
                if not line:
                    return
                reading = asyncio.ensure_future(answer.content.readline())
                share, rng = self.weather.events, self._rng
                roll = rng.random() if b'"BOOKMARK"' not in line else 1.0
                if roll < share / 3:
                    continue
                if roll < share * 2 / 3:
                    yield line + line
                elif roll < share and not held:
                    held = line
                    continue
                else:
                    yield line
                if held:
                    yield held
                    held = b""
                if rng.random() < share / 10:
                    return
        finally:
            reading.cancel()
            ended.cancel()


@contextmanager
def served(upstream: Login, *, weather: Weather = Weather(), seed: int = 0) -> Iterator[FaultProxy]:
    """A proxy in a thread of its own, for tests without a loop and operators in processes. Its
    weather, counts and crash may be read and set from there."""
    started: Future[tuple[FaultProxy, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        async with FaultProxy(upstream, weather=weather, seed=seed) as proxy:
            started.set_result((proxy, asyncio.get_running_loop(), stop))
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="proxy", daemon=True)
    thread.start()
    proxy, loop, stop = started.result(_START_S)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(_START_S)


def _may_be_missing(request: web.Request) -> bool:
    """Whether a 404 may be answered though the object is there. Not where the operator asks whether
    it is: that it has to believe."""
    is_status = request.method == "PATCH" and request.path.endswith("/status")
    return request.method == "DELETE" or is_status


def _line(event: object) -> bytes:
    return json.dumps(event).encode() + b"\n"


def _refusal(status: int) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "message": "injected", "code": status}
    headers = {"Retry-After": "1"} if status == 429 else None
    return web.json_response(body, status=status, headers=headers)


def _cut(request: web.Request) -> web.Response:
    """The connection ends without an answer."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()

"""Running the app: uvicorn without its signal handling, and a deadline on every write.

uvicorn waits for a client that does not read; without a deadline such a client would keep its
request, and the request its KV blocks, for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from typing import Any, cast

import uvicorn

import xpyd_core.listen
from xpyd_worker.server.http_protocol import HeadDeadlineProtocol

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

WRITE_DEADLINE_S = 120.0
_KEEP_ALIVE_S = 75  # above the idle time of clients' pools, so that the client closes first
_BACKLOG = 4096


class WriteDeadline:
    """ASGI middleware: a write that takes longer than `deadline_s` ends the request."""

    def __init__(self, app: AsgiApp, deadline_s: float = WRITE_DEADLINE_S) -> None:
        self._app = app
        self._deadline_s = deadline_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline_s = self._deadline_s

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(deadline_s):
                await send(message)

        await self._app(scope, receive, send_in_time)


class Server(uvicorn.Server):
    """uvicorn's server; the signals stay main's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the handlers as they are."""
        yield


def make_server(app: object) -> Server:
    """A server for `app` (a Quart app); run it by `await serve(sockets=[...])`."""
    config = uvicorn.Config(
        WriteDeadline(cast("AsgiApp", app)),
        http=HeadDeadlineProtocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="warning",
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
        server_header=False,
        date_header=False,
    )
    return Server(config)


def listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets, the one on `host` first; OSError when the address is taken."""
    return xpyd_core.listen.listen(host, port, backlog=_BACKLOG)

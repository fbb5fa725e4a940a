"""The seam to the engines' HTTP, and its aiohttp implementation.

`attempt` calls it. Deadlines are the caller's; only connecting has its own. A cancelled call closes
its connection, which is how an engine learns that nobody waits any more.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import aiohttp

from xpyd_core.request_id import Address
from xpyd_router.errors import Answer, CallFailed

CONNECT_TIMEOUT_S = 2.0
# Engines under uvicorn close an idle connection after 5 s: ours must be given up before.
_IDLE_S = 4.0
MAX_ANSWER_BYTES = 128 * 1024 * 1024
_READ_BUFFER_BYTES = 64 * 1024


class UpstreamStream(Protocol):
    """An answer whose head has come."""

    status: int
    content_type: str
    retry_after: str | None

    async def read(self) -> bytes:
        """The next bytes, empty at the proper end; CallFailed when it broke off."""
        ...


class Upstream(Protocol):
    """POSTs to engines."""

    def post(
        self, to: Address, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[UpstreamStream]:
        """POST, and the answer as it comes. Entering waits for the head; leaving before the end
        closes the connection. Raises CallFailed with cause `connect` when nothing was sent, else
        `reset`.
        """
        ...


class _Stream:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._content = response.content
        self.status = response.status
        self.content_type = response.headers.get("Content-Type", "")
        self.retry_after = response.headers.get("Retry-After")

    async def read(self) -> bytes:
        try:
            return await self._content.readany()
        except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError, OSError) as error:
            raise CallFailed("incomplete") from error


class AiohttpUpstream:
    """Upstream over one aiohttp session; made inside the event loop, closed by its owner.

    `local_host`, where given, is the source address of every connection (local fleets give each pod
    its own loopback address).
    """

    def __init__(self, local_host: str | None = None) -> None:
        connector = aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=_IDLE_S,
            local_addr=(local_host, 0) if local_host else None,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            read_bufsize=_READ_BUFFER_BYTES,
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    @asynccontextmanager
    async def post(
        self, to: Address, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncGenerator[UpstreamStream]:
        """See Upstream."""
        try:
            response = await self._session.post(
                f"http://{to}{path}", data=body, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise CallFailed("connect") from error
        except (aiohttp.ClientError, OSError) as error:
            raise CallFailed("reset") from error
        async with response:
            yield _Stream(response)


async def read_whole(stream: UpstreamStream) -> Answer:
    """The rest of `stream`, bounded by MAX_ANSWER_BYTES."""
    parts: list[bytes] = []
    size = 0
    while data := await stream.read():
        parts.append(data)
        size += len(data)
        if size > MAX_ANSWER_BYTES:
            raise CallFailed("too_large")
    return Answer(stream.status, b"".join(parts), stream.content_type, stream.retry_after)

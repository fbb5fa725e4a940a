"""One probe: GET /health on a connection of its own. Knows nothing of health.

`prober` calls it. A connection of its own shows whether the port still accepts; engines that have
no /health answer 404, which shows as much.
"""

from __future__ import annotations

import asyncio
import errno
import re
from typing import cast

from xpyd_core.request_id import Address
from xpyd_router.fleet.health import ProbeResult
from xpyd_router.source import source_for

_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})")
_STATUS_LINE_BYTES = 12
_OWN_FAULTS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
)
"""Want of files or ports here says nothing about the instance."""


class _StatusReader(asyncio.Protocol):
    """Sends the request, reads the status line, ends."""

    def __init__(self, request: bytes, done: asyncio.Future[ProbeResult]) -> None:
        self._request = request
        self._done = done
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._read += data[:_STATUS_LINE_BYTES]
        if len(self._read) >= _STATUS_LINE_BYTES:
            found = _STATUS_LINE.match(self._read)
            is_answer = found is not None and int(found[1]) < 500
            self._end("ok" if is_answer else "status")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("reset")

    def _end(self, result: ProbeResult) -> None:
        if not self._done.done():
            self._done.set_result(result)


async def probe_http(to: Address, timeout_s: float, local_host: str | None = None) -> ProbeResult:
    """Probe `to`, within `timeout_s`; `local_host` as of source_for."""
    loop = asyncio.get_running_loop()
    request = f"GET /health HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n".encode("ascii")
    done: asyncio.Future[ProbeResult] = loop.create_future()
    transport: asyncio.Transport | None = None
    try:
        async with asyncio.timeout(timeout_s):
            transport, _ = await loop.create_connection(
                lambda: _StatusReader(request, done),
                *(to.host, to.port),
                local_addr=source_for(to, local_host),
            )
            return await done
    except TimeoutError:
        return "timeout"
    except OSError as error:
        return "void" if error.errno in _OWN_FAULTS else "connect"
    finally:
        if transport is not None:
            transport.abort()

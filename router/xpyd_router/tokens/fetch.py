"""GETs tokenizer files from engines over aiohttp. Alone, because aiohttp takes some megabytes."""

from __future__ import annotations

import aiohttp

from xpyd_core.request_id import Address
from xpyd_router.tokens.service import FetchFailed
from xpyd_router.upstream.client import source_for

_PIECE_BYTES = 256 * 1024


class AiohttpFetch:
    """GETs, each on a connection of its own: there are few. `local_host` as of source_for."""

    def __init__(self, local_host: str | None = None) -> None:
        self._local_host = local_host

    async def __call__(self, to: Address, path: str, *, max_bytes: int) -> bytes:
        """See service.Fetch."""
        parts: list[bytes] = []
        size_bytes = 0
        try:
            connector = aiohttp.TCPConnector(local_addr=source_for(to, self._local_host))
            async with (
                aiohttp.ClientSession(connector=connector) as http,
                http.get(f"http://{to}{path}", allow_redirects=False) as response,
            ):
                if response.status != 200:
                    raise FetchFailed(f"status {response.status}")
                async for part in response.content.iter_chunked(_PIECE_BYTES):
                    size_bytes += len(part)
                    if size_bytes > max_bytes:
                        raise FetchFailed(f"more than {max_bytes} bytes")
                    parts.append(part)
        except (aiohttp.ClientError, OSError) as error:
            raise FetchFailed(type(error).__name__) from error
        return b"".join(parts)

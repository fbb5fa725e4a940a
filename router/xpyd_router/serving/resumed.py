"""The body of a streamed response whose first event was waited for: `app` gives it to Quart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator


class Resumed(AsyncIterator[bytes]):
    """An event that was waited for, then the rest. Closing it closes the rest.

    A client that takes nothing for `stall_s` has its request cancelled: it holds a place on D.
    """

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes], stall_s: float) -> None:
        self._first: bytes | None = first
        self._rest = rest
        self._stall_s = stall_s
        self._stall: asyncio.TimerHandle | None = None

    async def __anext__(self) -> bytes:
        self._disarm()
        if self._first is not None:
            data, self._first = self._first, None
        else:
            data = await anext(self._rest)
        task = asyncio.current_task()
        if task is not None:
            loop = asyncio.get_running_loop()
            self._stall = loop.call_later(self._stall_s, task.cancel)
        return data

    async def aclose(self) -> None:
        self._disarm()
        await self._rest.aclose()

    def _disarm(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

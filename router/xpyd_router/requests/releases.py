"""Tells D that a transfer was given up: POST /kv/release, signed with the fleet's key.

Fire and forget, with a deadline and a bound on how many run. A lost one costs D its lease's time,
nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

import orjson

from xpyd_core.keys import release_mac
from xpyd_router.errors import CallFailed
from xpyd_router.fleet.registry import Instance
from xpyd_router.metrics import RouterMetrics
from xpyd_router.upstream import Upstream

logger = logging.getLogger(__name__)

_DEADLINE_S = 2.0
_MAX_IN_FLIGHT = 256


class Releases:
    """Owner of the tasks that release; `key` signs."""

    def __init__(self, upstream: Upstream, metrics: RouterMetrics, key: bytes) -> None:
        self._upstream = upstream
        self._metrics = metrics
        self._key = key
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, decode: Instance, uuid: str) -> None:
        """Have `decode` free what came for `uuid` and refuse what still comes."""
        if not decode.is_continuing:  # engines not of ours do not know it
            return
        if len(self._tasks) >= _MAX_IN_FLIGHT:
            self._metrics.releases.labels("dropped").inc()
            return
        self._start(self._release(decode, uuid, release_mac(self._key, uuid)))

    async def close(self) -> None:
        """Wait for those in flight; each has its own deadline."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, decode: Instance, uuid: str, mac: str) -> None:
        headers = {"Content-Type": "application/json", "X-Xpyd-Mac": mac}
        body = orjson.dumps({"uuid": uuid})
        result = "failed"
        try:
            async with (
                asyncio.timeout(_DEADLINE_S),
                self._upstream.post(decode.http, "/kv/release", body, headers) as answer,
            ):
                await answer.read()
                result = "sent" if answer.status < 300 else "refused"
        except (CallFailed, TimeoutError):
            pass  # counted below; D's lease ends it
        self._metrics.releases.labels(result).inc()
        logger.debug("release %s", result, extra={"request": uuid, "decode": decode.name})

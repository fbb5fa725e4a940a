"""Tells D that a transfer was given up: POST /kv/release, signed with the fleet's key.

Fire and forget, with a deadline and a bound on how many run. A lost one costs D its lease's time,
nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping

import orjson

from xpyd_core.keys import Keys, call_mac
from xpyd_router.errors import Answer, CallFailed
from xpyd_router.fleet.instances import Instance
from xpyd_router.metrics import RouterMetrics
from xpyd_router.policy.pairs import Pair
from xpyd_router.request.dialects import dialect_between
from xpyd_router.upstream.client import UpstreamClient

logger = logging.getLogger(__name__)
_DEADLINE_S = 2.0
_MAX_IN_FLIGHT = 256
_MAX_ANSWER_BYTES = 64 * 1024


async def post_signed(
    upstream: UpstreamClient,
    to: Instance,
    path: str,
    content: Mapping[str, str],
    mac: str,
    *,
    within_s: float,
    most_bytes: int = _MAX_ANSWER_BYTES,
) -> Answer:
    """What an engine answers to a call that the fleet's key has signed. Raises CallFailed."""
    body = orjson.dumps(content)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {to.http}\r\n"
        f"Content-Type: application/json\r\nX-Xpyd-Mac: {mac}\r\n{to.replica_line}"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode("ascii")
    exchange = await upstream.start(to.http, head, body, instance=to.key, timeout_s=within_s)
    try:
        return await exchange.read(most_bytes)
    finally:
        upstream.end(exchange)


class Releases:
    """Owner of the tasks that release; the first of `keys` signs."""

    def __init__(self, upstream: UpstreamClient, metrics: RouterMetrics, keys: Keys) -> None:
        self._upstream = upstream
        self._metrics = metrics
        self._keys = keys
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, pair: Pair, uuid: str) -> None:
        """Have D free what came for `uuid` and refuse what still comes. What a P keeps that knows
        no such call is counted: it frees it when its own lease ends."""
        decode = pair.decode
        if dialect_between(pair).gives_back == "lease":
            self._metrics.releases.labels("leased").inc()
            return
        if not decode.serves_alone:  # vLLM's engines of three fields lack the call
            return
        if len(self._tasks) >= _MAX_IN_FLIGHT:
            self._metrics.releases.labels("dropped").inc()
            return
        self._start(self._release(decode, uuid, call_mac(self._keys[0], "kv-release", uuid)))

    async def close(self) -> None:
        """Wait for those in flight; each has its own deadline."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, decode: Instance, uuid: str, mac: str) -> None:
        result = "failed"
        with contextlib.suppress(CallFailed):  # counted; D's lease ends it
            answer = await post_signed(
                self._upstream, decode, "/kv/release", {"uuid": uuid}, mac, within_s=_DEADLINE_S
            )
            result = "sent" if answer.status < 300 else "refused"
        self._metrics.releases.labels(result).inc()
        logger.debug("release %s", result, extra={"request": uuid, "decode": decode.name})

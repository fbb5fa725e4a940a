"""One try of a request: the instances, the transfer's uuid, and what it may still owe D.

`flow` makes one per try; the calls of a try go through it, so that every failure is told as a
CallFailed, every wait has a deadline, and internal ids and addresses stay inside.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import orjson

from xpyd_core.errors import ApiError
from xpyd_core.request_id import PairId
from xpyd_router.errors import Answer, CallFailed, EngineRefused
from xpyd_router.fleet.registry import Instance
from xpyd_router.fleet.view import FleetView
from xpyd_router.policy.round_robin import Alone, Pair
from xpyd_router.requests.answers import scrub
from xpyd_router.requests.bodies import Ask
from xpyd_router.upstream import Upstream, UpstreamStream, read_whole

Seconds = Callable[[], float]
"""A deadline's length, asked when the wait begins."""


class _Bounded:
    """A stream whose reads have a deadline."""

    def __init__(self, stream: UpstreamStream, read: Callable[[], Awaitable[bytes]]) -> None:
        self.status = stream.status
        self.content_type = stream.content_type
        self.retry_after = stream.retry_after
        self._read = read

    async def read(self) -> bytes:
        return await self._read()


class Attempt:
    """See the module. `public` is the hex part of the response id; it replaces internal ids."""

    def __init__(
        self,
        choice: Pair | Alone,
        *,
        uuid: str,
        public: str,
        fleet: FleetView,
        upstream: Upstream,
    ) -> None:
        self.choice = choice
        self.uuid = uuid
        self._fleet = fleet
        self._upstream = upstream
        self._public = public.encode()
        self.request_id = uuid
        self.instances: tuple[Instance, ...]
        if isinstance(choice, Pair):
            self.request_id = str(PairId(choice.prefill.kv, choice.decode.kv, uuid))
            self.instances = (choice.prefill, choice.decode)
        else:
            self.instances = (choice.instance,)
        self._secrets = (self.request_id.encode(), uuid.encode())
        self.called = self.instances[0]
        """Who was called last."""
        self.owes_release = False
        """P was called, and D may hold or get KV that nobody will ask for."""

    @asynccontextmanager
    async def open(
        self, instance: Instance, ask: Ask, body: bytes, seconds: Seconds
    ) -> AsyncGenerator[UpstreamStream]:
        """POST `body`; the stream of a 2xx answer, whose reads each have `seconds()` too.

        Raises EngineRefused for a 4xx, CallFailed for what may succeed elsewhere.
        """
        self.called = instance
        headers = {"Content-Type": "application/json", "X-Request-Id": self.request_id}
        post = self._upstream.post(instance.http, f"/v1/{ask.endpoint}", body, headers)
        stream = await self._fleet.bounded(instance, seconds(), post.__aenter__)
        try:
            bounded = _Bounded(
                stream, lambda: self._fleet.bounded(instance, seconds(), stream.read)
            )
            if stream.status >= 300:
                self._refuse(await read_whole(bounded))
            yield bounded
        finally:
            await post.__aexit__(None, None, None)

    async def call(self, instance: Instance, ask: Ask, body: bytes, seconds: Seconds) -> Answer:
        """POST `body` and read the whole answer; raises as `open`."""
        async with self.open(instance, ask, body, seconds) as stream:
            return await read_whole(stream)

    def scrubbed(self, data: bytes) -> bytes:
        """`data` without the internal ids."""
        return scrub(data, self._secrets, self._public)

    def scrubbed_error(self, body: bytes) -> bytes:
        """An engine's error without internal ids and without engine addresses."""
        addresses = [str(a).encode() for i in self.instances for a in (i.http, i.kv)]
        return scrub(self.scrubbed(body), addresses, b"engine")

    def _refuse(self, answer: Answer) -> None:
        error = _error_in(answer.body)
        if not 400 <= answer.status < 500:
            is_transfer = error is not None and error.get("code") == "kv_transfer_failed"
            raise CallFailed("refused" if answer.status == 503 and not is_transfer else "status")
        body = self.scrubbed_error(answer.body)
        if error is None:
            body = ApiError(answer.status, "the engine refused the request").body()
        raise EngineRefused(answer._replace(body=body, content_type="application/json"))


def _error_in(body: bytes) -> dict[str, Any] | None:
    """The error object of an OpenAI error answer."""
    try:
        document = orjson.loads(body)
        error = document["error"]
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return None
    return cast("dict[str, Any]", error) if isinstance(error, dict) else None

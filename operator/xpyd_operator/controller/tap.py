"""The seam in kopf's HTTP: what the API server tells is read on its way, and kopf hears little.

kopf hands objects on one by one and does not say when a list was complete, nor, after an
interruption, what is no longer in it: both are needed before anything is created or deleted. And it
makes a task, a queue and several views of an object for each event, which is half of what a fleet
of a thousand pods costs. So kopf gets empty lists, and bookmarks in place of events; it goes on to
connect, to resume where a stream ended, to list anew after 410 Gone, to sign in again.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import aiohttp
from aiohttp.client_middlewares import ClientHandlerType

from xpyd_operator.controller.client import Count
from xpyd_operator.controller.decode import parse, parse_event
from xpyd_operator.controller.inbox import Gone, Listed, Message, Missing, Present, Unlisted
from xpyd_operator.controller.kinds import Address, Kind, Obj, address_of
from xpyd_operator.controller.trim import trim

STREAM_GRACE_S = 120.0
"""A stream that is not open is unhealthy when nothing was tried for so long. kopf's own retries
are at most 20 s apart, and it reopens a silent stream after 70 s."""
_GATHER_S = 0.01
"""What comes within this time is read in one go: of a thousand pods' events each costs less than a
wake-up of this thread, of kopf and of the reconciler's loop. What is `_LARGE` had gathered."""
_LARGE = 1 << 16
_CHANGES = frozenset({"ADDED", "MODIFIED", "DELETED"})


class Tap:
    """Middleware of kopf's session: tells what it reads, knows which streams are open."""

    def __init__(
        self,
        kinds: Sequence[Kind],
        send: Callable[[Message], None],
        *,
        count: Count,
        count_event: Callable[[str], None],
    ) -> None:
        self._kinds = frozenset(kinds)
        self._send = send
        self._count = count
        self._count_event = count_event
        self._streams: dict[Address, aiohttp.ClientResponse | None] = {}
        self._tried_at: dict[Address, float] = {}

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: ClientHandlerType
    ) -> aiohttp.ClientResponse:
        address = address_of(request.url.path)
        if request.method != "GET" or address is None or address.kind not in self._kinds:
            return await handler(request)
        watch = request.url.query.get("watch") == "true"
        verb = "watch" if watch else "list"
        self._tried_at[address] = time.monotonic()
        try:
            answer = await handler(request)
        except (aiohttp.ClientError, TimeoutError, OSError):
            self._count(verb, address.kind.plural, "error")
            if not watch:
                self._send(Unlisted(address.kind))
            raise
        self._count(verb, address.kind.plural, str(answer.status))
        if answer.status == 404:
            self._send(Missing(address.kind))
        if answer.status == 403 or (not watch and _is_fault(answer.status)):
            self._send(Unlisted(address.kind))
        if answer.status == 200 and watch:
            self._streams[address] = answer
            self._relay(address.kind, answer)
        elif answer.status == 200:
            await self._take_list(address, answer, first="continue" not in request.url.query)
        return answer

    def untried(self) -> list[str]:
        """Kinds that were never asked for."""
        tried = {address.kind for address in self._tried_at}
        return sorted(kind.plural for kind in self._kinds - tried)

    def silent(self, now: float) -> list[str]:
        """Streams that are neither open nor being opened; `now` by time.monotonic."""
        return [
            address.kind.plural
            for address, tried_at in list(self._tried_at.items())
            if (stream := self._streams.get(address)) is None or stream.closed
            if now - tried_at > STREAM_GRACE_S
        ]

    async def _take_list(
        self, address: Address, answer: aiohttp.ClientResponse, *, first: bool
    ) -> None:
        def take(found: Obj) -> Obj:
            self._send(listed(address.kind, address.namespace, found, first=first))
            return {**found, "items": ()}

        emptied = parse(await answer.read(), take)

        async def without_items(**_: object) -> Obj:
            return emptied

        # aiohttp has no other way to answer differently from what was received.
        cast("Any", answer).json = without_items

    def _relay(self, kind: Kind, answer: aiohttp.ClientResponse) -> None:
        def hear(change: str, obj: Obj) -> None:
            self._count_event(kind.name)
            kept = trim(kind, obj)
            self._send(Gone(kind, kept) if change == "DELETED" else Present(kind, kept))

        # As above.
        cast("Any", answer).content = Relay(kind, answer.content, hear)


class Relay:
    """The body of a watch as kopf is to read it: bookmarks in place of events, errors as they are.

    `hear(change, object)` gets the events. All else of the body is the stream's own.
    """

    def __init__(
        self, kind: Kind, content: aiohttp.StreamReader, hear: Callable[[str, Obj], None]
    ) -> None:
        self._kind = kind
        self._content = content
        self._hear = hear

    def __getattr__(self, name: str) -> object:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """What kopf reads: whole lines, at most one bookmark for what came at once."""
        rest = b""
        async for data in self._content.iter_chunked(size):
            *lines, rest = (rest + data).split(b"\n")
            told = self._take(lines)
            if told:
                yield told
            if len(data) < _LARGE:
                await asyncio.sleep(_GATHER_S)
        # The rest of a line that was cut off comes again: kopf resumes from the last bookmark.

    def _take(self, lines: Sequence[bytes]) -> bytes:
        told: list[bytes] = []
        version = ""
        for line in filter(None, lines):
            reached = parse_event(self._kind, line, self._hear_one)
            if not reached:
                told += [_bookmark(version), line + b"\n"]
            version = reached
        return b"".join((*told, _bookmark(version)))

    def _hear_one(self, event: Obj) -> str:
        """The version that the stream has come to; empty: what came is kopf's to read."""
        change, obj = event["type"], cast("Obj", event["object"])
        if change in _CHANGES:
            version = str(obj["metadata"]["resourceVersion"])
            self._hear(change, obj)
            return version
        return str(obj["metadata"]["resourceVersion"]) if change == "BOOKMARK" else ""


def _is_fault(status: int) -> bool:
    return status == 429 or status >= 500


def _bookmark(version: str) -> bytes:
    if not version:
        return b""
    told = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": version}}}
    return json.dumps(told).encode() + b"\n"


def listed(kind: Kind, namespace: str | None, answer: Obj, *, first: bool) -> Listed:
    """The message that an answer to a list amounts to. `first`: it begins the list."""
    metadata = cast("dict[str, str]", answer.get("metadata") or {})
    version = metadata.get("resourceVersion", "")
    items = cast("list[Obj]", answer.get("items") or [])
    return Listed(
        kind,
        namespace,
        [trim(kind, item) for item in items],
        # A version that is no number drops nothing.
        int(version) if version.isdecimal() else -1,
        first=first,
        last=not metadata.get("continue"),
    )

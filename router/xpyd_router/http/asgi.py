"""The other end of a request that comes as raw ASGI: its body, and the sink of its answer.

`inference` uses it under another server than ours, and for an unusual request (a body of unknown
length, pipelining). The request's task writes to the sink and never waits: a client that reads too
slowly pauses the source of the answer by `on_pause`, and resumes it by `on_resume`. Knows no route.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any
from uuid import uuid4

from xpyd_core.bodies import BodyBuffer, BodyCharge
from xpyd_core.errors import ApiError
from xpyd_router.errors import Answer, EngineRefused
from xpyd_router.request.relay import Header, do_nothing
from xpyd_router.translations.seam import Api, error_of

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
BODY_DEADLINE_S = 60.0
"""Deadline for the whole body of a request, counted from its head."""
HIGH_WATER_BYTES = 64 * 1024
"""Bytes of an answer that the client has not taken: above this the source is paused."""


class ClientLeft(Exception):
    """The client closed its connection before its request was whole."""


class AsgiSink:
    """Writes through ASGI's send, for servers other than ours and for unusual requests.

    `run` sends what was written, until the end; its caller awaits it. A client that takes nothing
    for `stall_s` counts as gone: it holds a place on an engine.
    """

    write_frame: Callable[[bytes], None] | None = None

    def __init__(self, send: Send, on_lost: Callable[[], object], stall_s: float) -> None:
        self._send = send
        self._on_lost = on_lost
        self._stall_s = stall_s
        self._messages: list[Message] = []
        self._size = 0
        self._news = asyncio.Event()
        self._has_ended = False
        self.on_pause: Callable[[], None] = do_nothing
        self.on_resume: Callable[[], None] = do_nothing
        self.is_paused = False
        self.is_lost = False

    def whole(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        """See Sink."""
        length = (b"content-length", str(len(body)).encode())
        self._put({"type": "http.response.start", "status": status, "headers": [*headers, length]})
        self._put({"type": "http.response.body", "body": body})
        self._has_ended = True

    def start(self, status: int, headers: Sequence[Header]) -> None:
        """See Sink."""
        self._put({"type": "http.response.start", "status": status, "headers": list(headers)})

    def write(self, data: bytes) -> None:
        """See Sink."""
        self._put({"type": "http.response.body", "body": data, "more_body": True})
        self._size += len(data)
        if self._size > HIGH_WATER_BYTES and not self.is_paused:
            self.is_paused = True
            self.on_pause()

    def end(self) -> None:
        """See Sink."""
        self._put({"type": "http.response.body", "body": b""})
        self._has_ended = True

    def cut(self) -> None:
        """See Sink: a server cuts the connection of an application that returns too early."""
        self._messages.clear()
        self._has_ended = True
        self._news.set()

    def lose(self) -> None:
        """The client is gone. Servers also say so of one that has its whole answer."""
        if not self.is_lost and (self._messages or not self._has_ended):
            self.is_lost = True
            self.cut()
            self._on_lost()

    async def run(self) -> None:
        """Send what is written; returns at the end of the answer."""
        while self._messages or not self._has_ended:
            await self._news.wait()
            self._news.clear()
            messages, self._messages = self._messages, []
            self._size = 0
            try:
                for message in messages:
                    async with asyncio.timeout(self._stall_s):
                        await self._send(message)
            except TimeoutError:
                self.lose()
                return
            if self.is_paused and self._size <= HIGH_WATER_BYTES:
                self.is_paused = False
                self.on_resume()

    def _put(self, message: Message) -> None:
        if not self.is_lost:
            self._messages.append(message)
            self._news.set()


async def read_body(receive: Receive, scope: Scope, charge: BodyCharge) -> bytes:
    """The whole body, which is charged. Raises ApiError 413 for one above the limit, 408
    for one that does not come, 503 where there is no room for it, ClientLeft.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > charge.most_bytes:
            raise _too_long()
    body = BodyBuffer()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(BODY_DEADLINE_S):
            while (message := await receive())["type"] == "http.request":
                part = message.get("body", b"")
                body.add(part)
                if len(body) > charge.most_bytes:
                    raise _too_long()
                charge.take(len(part))
                charge.check()
                if not message.get("more_body"):
                    return body.take()
            raise ClientLeft
    raise late_body()


def late_body() -> ApiError:
    return ApiError(408, "the request body did not come in time")


def _too_long() -> ApiError:
    return ApiError(413, "the request body is too long")


def refusal(
    error: ApiError | EngineRefused, name: bytes, api: Api | None = None
) -> tuple[Answer, list[Header]]:
    """The answer that says `error`, with its headers, in the format of `api`; None: OpenAI's.
    `name`: its X-Request-Id, if there is one.
    """
    if isinstance(error, ApiError):
        retry_after = None if error.retry_after_s is None else str(error.retry_after_s)
        answer = Answer(error.status, error.body(), "application/json", retry_after)
    else:
        answer = error.answer
    if api is not None:
        if api.id_header and not name:
            name = b"req_%b" % uuid4().hex.encode()
        said = error_of(answer.status, answer.body)
        body = api.refusal(said, name.decode("latin-1"))
        answer = answer._replace(body=body, content_type="application/json")
    headers: list[Header] = [(b"content-type", answer.content_type.encode("latin-1"))]
    headers += id_headers(name, api)
    if answer.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if answer.retry_after is not None:
        headers.append((b"retry-after", answer.retry_after.encode("latin-1")))
    return answer, headers


def id_headers(name: bytes, api: Api | None) -> list[Header]:
    """The headers that hold the request's id, `name`."""
    if not name:
        return []
    if api is None or not api.id_header:
        return [(b"x-request-id", name)]
    return [(b"x-request-id", name), (api.id_header, name)]


async def send_answer(send: Send, answer: Answer, headers: Sequence[Header]) -> None:
    """Send all of `answer`. Where a body was not read to its end, the server tidies that up."""
    length = (b"content-length", str(len(answer.body)).encode())
    start = {"type": "http.response.start", "status": answer.status, "headers": [*headers, length]}
    await send(start)
    await send({"type": "http.response.body", "body": answer.body})


async def watch_client(receive: Receive, sink: AsgiSink) -> None:
    """Tell `sink` when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    sink.lose()

"""kopf's watches, in a thread and an event loop of their own, and their way into the cache.

kopf lists, watches, reconnects and signs in again. It does nothing else: no handler writes, no
finalizer, no annotation, no peering, no Events. It runs in a thread because kopf.operator(), when
it ends, also for an error in one stream, cancels every task of its loop that began after it and
takes the main thread's signals. In its own thread it may fail and be started again while the
reconciler goes on. ADR 0006 has the reasons.

WatchInterceptor reads lists and events in kopf's HTTP session, before kopf does. kopf hands objects
on one by one and does not say when a list was complete, nor what disappeared during an
interruption; both must be known before anything is created or deleted. kopf also makes a task, a
queue and several views for each event, which is half of the cost of a fleet of a thousand pods. So
kopf is given empty lists, and bookmarks in place of events.

kopf does not survive an answer such as 404, which a deleted CRD gives, or an error inside a stream:
it cancels all its streams and waits for them for ever. So it never gets one: a list that is refused
looks like a lost connection, which kopf tries again, and a watch like one that is too old, after
which kopf lists. ADR 0042 has the figures.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import aiohttp
import kopf
from aiohttp.client_middlewares import ClientHandlerType

from xpyd_operator.controller.client import NEVER_CURRENT, PAGE, Count, Login, open_session
from xpyd_operator.controller.decision.cache import (
    Gone,
    Listed,
    Message,
    Missing,
    Present,
    Unlisted,
)
from xpyd_operator.controller.decision.kinds import (
    FLEET_LABEL,
    Address,
    Kind,
    Obj,
    address_of,
    parse,
    parse_event,
    trim,
)

_MOST_AT_ONCE = 500
"""Messages taken before other tasks get their turn: about 10 ms."""


class Inbox:
    """Made in the loop that `deliver` runs in; `send` from any thread."""

    def __init__(self, deliver: Callable[[Message], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._messages: deque[Message] = deque()
        self._scheduled = False

    def send(self, message: Message) -> None:
        """Send one message; after the end of the loop it is dropped."""
        self._messages.append(message)
        # A race of two threads schedules twice at worst; the second call finds nothing.
        if not self._scheduled:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._take)
            except RuntimeError:
                # The loop is closed: the operator is stopping.
                self._messages.clear()

    def _take(self) -> None:
        self._scheduled = False
        for _ in range(_MOST_AT_ONCE):
            if not self._messages:
                return
            self._deliver(self._messages.popleft())
        self._scheduled = True
        self._loop.call_soon(self._take)


STREAM_GRACE_S = 15.0
"""A stream that is neither open nor being opened is dead after so long. kopf's own retries are at
most `_LONGEST_WAIT_S` apart."""
_LONGEST_WAIT_S = 8.0
_MAX_RETRY_AFTER_S = 60.0
_GATHER_S = 0.01
"""Data that arrives within this time is read at once: with a thousand pods an event costs less than
a wake-up of this thread, of kopf and of the reconciler's loop. `_LARGE` data is not delayed."""
_LARGE = 1 << 16
_CHANGES = frozenset({"ADDED", "MODIFIED", "DELETED"})


class WatchInterceptor:
    """Middleware of kopf's session: sends what it reads to the inbox, and knows which streams are
    open."""

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
        self._trying: Counter[Address] = Counter()

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: ClientHandlerType
    ) -> aiohttp.ClientResponse:
        address = address_of(request.url.path)
        if request.method != "GET" or address is None or address.kind not in self._kinds:
            return await handler(request)
        watch = request.url.query.get("watch") == "true"
        verb = "watch" if watch else "list"
        self._trying[address] += 1
        try:
            answer = await self._ask(request, handler, address, verb)
            return await self._read(request, answer, address, watch=watch)
        finally:
            self._trying[address] -= 1
            self._tried_at[address] = max(time.monotonic(), self._tried_at.get(address, 0.0))

    async def _ask(
        self,
        request: aiohttp.ClientRequest,
        handler: ClientHandlerType,
        address: Address,
        verb: str,
    ) -> aiohttp.ClientResponse:
        try:
            answer = await handler(request)
        except (aiohttp.ClientError, TimeoutError, OSError):
            self._count(verb, address.kind.plural, "error")
            if verb == "list":
                self._send(Unlisted(address.kind))
            raise
        self._count(verb, address.kind.plural, str(answer.status))
        if wait := answer.headers.get("Retry-After", ""):
            # kopf obeys it.
            quiet_s = float(wait) if wait.isdecimal() else 0.0
            self._tried_at[address] = time.monotonic() + min(quiet_s, _MAX_RETRY_AFTER_S)
        return answer

    async def _read(
        self,
        request: aiohttp.ClientRequest,
        answer: aiohttp.ClientResponse,
        address: Address,
        *,
        watch: bool,
    ) -> aiohttp.ClientResponse:
        if answer.status == 404:
            self._send(Missing(address.kind))
        if answer.status == 403 or (not watch and answer.status not in (200, 401, 404)):
            self._send(Unlisted(address.kind))
        if answer.status == 200 and watch:
            self._streams[address] = answer
            self._relay(address, answer)
        elif answer.status == 200:
            await self._take_list(address, answer, first="continue" not in request.url.query)
        elif _ends_kopf(answer.status):
            self._soften(request, answer, watch=watch)
        return answer

    def _soften(
        self, request: aiohttp.ClientRequest, answer: aiohttp.ClientResponse, *, watch: bool
    ) -> None:
        """Turn a refusal that would end kopf into what kopf goes on after: see above."""
        answer.release()
        # aiohttp has no other way to change the answer that its caller gets.
        changed = cast("Any", answer)
        if watch:
            changed.status, changed.content = 200, _TooOld()
        elif "continue" in request.url.query:
            # The rest of the list is gone: kopf watches from a version that is too old.
            async def ended(**_: object) -> Obj:
                return {"metadata": {"resourceVersion": NEVER_CURRENT}, "items": ()}

            changed.status, changed.json = 200, ended
        else:
            raise aiohttp.ClientConnectionError(f"HTTP {answer.status}")

    def untried(self) -> list[str]:
        """Kinds that were never listed."""
        return sorted(kind.plural for kind in self._untried())

    def give_up(self) -> None:
        """kopf has ended: let nobody wait for the kinds that it has not found."""
        for kind in self._untried():
            self._send(Unlisted(kind))

    def _untried(self) -> frozenset[Kind]:
        return self._kinds - {address.kind for address in self._trying}

    def silent(self, now: float) -> list[str]:
        """Streams that are neither open nor being opened; `now` by time.monotonic."""
        return [
            address.kind.plural
            for address, tried_at in list(self._tried_at.items())
            if (stream := self._streams.get(address)) is None or stream.closed
            if not self._trying[address] and now - tried_at > STREAM_GRACE_S
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

        # aiohttp has no other way to change the answer that its caller gets.
        cast("Any", answer).json = without_items

    def _relay(self, address: Address, answer: aiohttp.ClientResponse) -> None:
        kind = address.kind

        def receive(change: str, obj: Obj) -> None:
            self._count_event(kind.name)
            kept = trim(kind, obj)
            self._send(Gone(kind, kept) if change == "DELETED" else Present(kind, kept))

        def close() -> None:
            # Nothing reads it any more, though it may still be open.
            if self._streams.get(address) is answer:
                self._streams[address] = None
                self._tried_at[address] = time.monotonic()

        # As above.
        cast("Any", answer).content = WatchBody(kind, answer.content, receive, close)


class WatchBody:
    """The body of a watch as kopf is to read it: bookmarks in place of events, errors as they are.

    `receive(change, object)` gets the events; `close()` is called when reading ends. Other
    attributes are the stream's own.
    """

    def __init__(
        self,
        kind: Kind,
        content: aiohttp.StreamReader,
        receive: Callable[[str, Obj], None],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._kind = kind
        self._content = content
        self._receive = receive
        self._close = close

    def __getattr__(self, name: str) -> object:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """What kopf reads: whole lines, and at most one bookmark for data that arrived at once."""
        rest = b""
        try:
            async for data in self._content.iter_chunked(size):
                *lines, rest = (rest + data).split(b"\n")
                shown = self._take(lines)
                if shown:
                    yield shown
                if len(data) < _LARGE:
                    await asyncio.sleep(_GATHER_S)
            # The rest of a line that was cut off is sent again: kopf resumes from the last
            # bookmark.
        finally:
            self._close()

    def _take(self, lines: Sequence[bytes]) -> bytes:
        shown: list[bytes] = []
        version = ""
        for line in filter(None, lines):
            reached = parse_event(self._kind, line, self._receive_one)
            if not reached:
                shown += [_bookmark(version), _TOO_OLD]
            version = reached
        return b"".join((*shown, _bookmark(version)))

    def _receive_one(self, event: Obj) -> str:
        """The version that the stream has reached; empty: the stream has failed."""
        change, obj = event["type"], cast("Obj", event["object"])
        if change in _CHANGES:
            version = str(obj["metadata"]["resourceVersion"])
            self._receive(change, obj)
            return version
        return str(obj["metadata"]["resourceVersion"]) if change == "BOOKMARK" else ""


_TOO_OLD = b'{"type":"ERROR","object":{"code":410,"message":"the operator lists again"}}\n'
"""The one error in a stream that kopf survives: it lists again."""


class _TooOld:
    """The body of a watch that was refused, as kopf is to read it."""

    async def iter_chunked(self, _: int) -> AsyncIterator[bytes]:
        """What kopf reads."""
        yield _TOO_OLD


def _ends_kopf(status: int) -> bool:
    """Whether kopf takes the answer for the end of all: 401, 403 and 429 it tries again."""
    return 400 <= status < 500 and status not in (401, 403, 429)


def _bookmark(version: str) -> bytes:
    if not version:
        return b""
    event = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": version}}}
    return json.dumps(event).encode() + b"\n"


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


logger = logging.getLogger(__name__)

RESTART_FIRST_S = 1.0
RESTART_MOST_S = 30.0
_STOP_TIMEOUT_S = 3.0
_REQUEST_TIMEOUT_S = 60.0
_ALL_TRIED_S = 15.0
"""Deadline for kopf to list every kind. kopf asks the server only once which kinds exist, and
that answer may lag behind a CRD that was installed a moment ago."""


class _Backoffs(Iterable[float]):
    """kopf's waits between attempts, without an end: kopf's default is to give up and exit."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((0.5, 1, 2, 3, 5), itertools.repeat(_LONGEST_WAIT_S))


class Watcher:
    """Watches `kinds` in `namespaces` (none: everywhere) and sends what it receives.

    `send` is called in the watcher's thread. Owned by the loop that starts and stops it.
    """

    def __init__(
        self,
        kinds: Sequence[Kind],
        namespaces: Sequence[str],
        *,
        find_login: Callable[[], Awaitable[Login]],
        send: Callable[[Message], None],
        count: Count,
        count_event: Callable[[str], None],
    ) -> None:
        self._kinds = tuple(kinds)
        self._namespaces = tuple(namespaces)
        self._find_login = find_login
        self._interceptor = WatchInterceptor(
            self._kinds, send, count=count, count_event=count_event
        )
        self._thread = threading.Thread(target=self._main, name="watches", daemon=True)
        self._stopping = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_flag: asyncio.Event | None = None
        self._waits = False

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    async def stop(self) -> None:
        """End the streams; a thread that does not end within seconds stays as a daemon thread."""
        self._stopping.set()
        if self._loop is not None and self._stop_flag is not None:
            try:
                self._loop.call_soon_threadsafe(self._stop_flag.set)
            except RuntimeError:
                logger.debug("the watches ended by themselves")
        await asyncio.to_thread(self._thread.join, _STOP_TIMEOUT_S)

    def silent(self, now: float) -> list[str]:
        """Streams that are neither open nor being opened; `now` by time.monotonic."""
        if not self._thread.is_alive():
            return [kind.plural for kind in self._kinds]
        return [] if self._waits else self._interceptor.silent(now)

    def _main(self) -> None:
        wait_s = RESTART_FIRST_S
        while not self._stopping.is_set():
            started = time.monotonic()
            try:
                asyncio.run(self._run())
            except (Exception, asyncio.CancelledError) as error:
                names = ", ".join(kind.plural for kind in self._kinds)
                logger.error("watches of %s: %r; again in %g s", names, error, wait_s)
                logger.debug("where it failed", exc_info=True)
            self._interceptor.give_up()
            if time.monotonic() - started > RESTART_MOST_S:
                wait_s = RESTART_FIRST_S
            self._waits = True
            self._stopping.wait(wait_s)
            self._waits = False
            wait_s = min(RESTART_MOST_S, wait_s * 2)

    async def _run(self) -> None:
        self._loop, self._stop_flag = asyncio.get_running_loop(), asyncio.Event()
        if self._stopping.is_set():
            return
        check = self._loop.call_later(_ALL_TRIED_S, self._check_all_tried, self._stop_flag)
        try:
            await kopf.operator(
                registry=self._registry(),
                settings=self._settings(),
                standalone=True,
                clusterwide=not self._namespaces,
                namespaces=self._namespaces,
                stop_flag=self._stop_flag,
            )
        finally:
            check.cancel()

    def _check_all_tried(self, stop_flag: asyncio.Event) -> None:
        untried = self._interceptor.untried()
        if untried:
            logger.warning("kopf does not watch %s; its watches start again", ", ".join(untried))
            stop_flag.set()

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        async def login(**_: object) -> kopf.AiohttpSession:
            found = await self._find_login()
            session = open_session(found, [self._interceptor], connections=0)
            return kopf.AiohttpSession(server=found.server, aiohttp_session=session)

        for kind in self._kinds:
            self._register(registry, kind)
        return registry

    def _register(self, registry: kopf.OperatorRegistry, kind: Kind) -> None:
        @kopf.on.event(
            group=kind.group, version=kind.version, plural=kind.plural, registry=registry
        )
        async def ignored(**_: object) -> None:
            """kopf watches only kinds with a handler; the interceptor leaves no event for this
            one."""

    def _settings(self) -> kopf.OperatorSettings:
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        # No permission on namespaces and CRDs is needed then; a kind that is installed later gets
        # a watcher of its own.
        settings.scanning.disabled = True
        settings.networking.error_backoffs = _Backoffs()
        # An attempt that hangs counts as one under way.
        settings.networking.request_timeout = _REQUEST_TIMEOUT_S
        settings.watching.connect_timeout = _REQUEST_TIMEOUT_S
        settings.watching.chunk_size = PAGE
        # Otherwise kopf kills the whole process when it takes longer than this to end.
        settings.process.ultimate_exiting_timeout = None
        for kind in self._kinds:
            if kind.labelled:
                key = (kind.group, kind.version, kind.plural)
                settings.watching.label_selectors[key] = FLEET_LABEL
        return settings

"""kopf's watches, in a thread and an event loop of their own.

kopf lists, watches, reconnects and signs in again. It does nothing else here: no handler writes, no
finalizer, no annotation, no peering, no events. Why a thread: when kopf.operator() ends, also for
an error in one stream, it cancels every task of its loop that began after it, and it takes over the
signals of the main thread. So it may fail here and be started again while the reconciler goes on.

Initial lists come from the HTTP seam, not from handlers: kopf hands objects on one by one and does
not say when a list was complete, nor, after an interruption, what is no longer in it. Both are
needed before anything is created or deleted, so the list answers are read on their way to kopf.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import cast

import aiohttp
import kopf
from aiohttp.client_middlewares import ClientHandlerType

from xpyd_operator.kube.client import PAGE, Count
from xpyd_operator.kube.inbox import Gone, Listed, Message, Missing, Present
from xpyd_operator.kube.kinds import FLEET_LABEL, Address, Kind, Obj, address_of
from xpyd_operator.kube.login import Login, open_session
from xpyd_operator.kube.trim import trim

logger = logging.getLogger(__name__)

RESTART_FIRST_S = 1.0
RESTART_MOST_S = 30.0
STREAM_GRACE_S = 120.0
"""A stream that is not open is unhealthy when nothing was tried for so long. kopf's own retries
are at most 20 s apart, and it reopens a silent stream after 70 s."""
_STOP_TIMEOUT_S = 3.0
_ALL_TRIED_S = 15.0
"""By when kopf must have asked for every kind. It asks the server only once which kinds there are,
and that list may lag behind a CRD that was installed a moment ago."""


class _Backoffs(Iterable[float]):
    """kopf's waits between attempts, without an end: its default is to give up and exit."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((0.5, 1, 2, 3, 5, 8, 13), itertools.repeat(20.0))


class _NoDiffBase(kopf.DiffBaseStorage):
    """kopf compares each object with its last-seen form, by a deep copy per event, for handlers
    of a sort that we do not have.
    """

    def build(self, **_: object) -> kopf.BodyEssence:
        return cast("kopf.BodyEssence", {})

    def fetch(self, **_: object) -> None:
        return None

    def store(self, **_: object) -> None:
        raise AssertionError("kopf has nothing to store: there are only event handlers")


class Watcher:
    """Watches `kinds` in `namespaces` (none: everywhere) and sends what it hears.

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
        self._send = send
        self._count_event = count_event
        self._tap = _Tap(self._kinds, send, count)
        self._thread = threading.Thread(target=self._main, name="watches", daemon=True)
        self._stopping = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_flag: asyncio.Event | None = None

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    async def stop(self) -> None:
        """End the streams; a thread that does not end in seconds is left behind as a daemon."""
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
            return ["all"]
        return self._tap.silent(now)

    def _main(self) -> None:
        wait_s = RESTART_FIRST_S
        while not self._stopping.is_set():
            started = time.monotonic()
            try:
                asyncio.run(self._run())
            except Exception as error:
                names = ", ".join(kind.plural for kind in self._kinds)
                logger.error("watches of %s: %r; again in %g s", names, error, wait_s)
                logger.debug("where it failed", exc_info=True)
            if time.monotonic() - started > RESTART_MOST_S:
                wait_s = RESTART_FIRST_S
            self._stopping.wait(wait_s)
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
        untried = self._tap.untried()
        if untried:
            logger.warning("kopf does not watch %s; its watches start again", ", ".join(untried))
            stop_flag.set()

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        async def login(**_: object) -> kopf.AiohttpSession:
            found = await self._find_login()
            session = open_session(found, [self._tap], connections=0)
            return kopf.AiohttpSession(server=found.server, aiohttp_session=session)

        for kind in self._kinds:
            self._register(registry, kind)
        return registry

    def _register(self, registry: kopf.OperatorRegistry, kind: Kind) -> None:
        @kopf.on.event(
            group=kind.group, version=kind.version, plural=kind.plural, registry=registry
        )
        async def heard(event: kopf.RawEvent, **_: object) -> None:
            change = event["type"]
            if change is None:
                # Part of a list: the tap has read it.
                return
            self._count_event(kind.name)
            obj = trim(kind, cast("Obj", event["object"]))
            self._send(Gone(kind, obj) if change == "DELETED" else Present(kind, obj))

    def _settings(self) -> kopf.OperatorSettings:
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        # No permission on namespaces and CRDs is needed then; a kind that is installed later gets
        # a watcher of its own.
        settings.scanning.disabled = True
        settings.networking.error_backoffs = _Backoffs()
        settings.watching.chunk_size = PAGE
        settings.persistence.diffbase_storage = _NoDiffBase()
        # Otherwise kopf kills the whole process when it takes longer than this to end.
        settings.process.ultimate_exiting_timeout = None
        # A task per object that was heard of lives so long.
        settings.queueing.idle_timeout = 1.0
        for kind in self._kinds:
            if kind.labelled:
                key = (kind.group, kind.version, kind.plural)
                settings.watching.label_selectors[key] = FLEET_LABEL
        return settings


class _Tap:
    """Middleware of kopf's session: reads lists on their way, knows which streams are open."""

    def __init__(
        self, kinds: Sequence[Kind], send: Callable[[Message], None], count: Count
    ) -> None:
        self._kinds = frozenset(kinds)
        self._send = send
        self._count = count
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
            raise
        self._count(verb, address.kind.plural, str(answer.status))
        if answer.status == 404:
            self._send(Missing(address.kind))
        if answer.status == 200:
            if watch:
                self._streams[address] = answer
            else:
                # aiohttp keeps the body: kopf reads the same bytes again.
                first = "continue" not in request.url.query
                self._send(_listed(address, await answer.read(), first=first))
        return answer

    def untried(self) -> list[str]:
        """Kinds that were never asked for."""
        tried = {address.kind for address in self._tried_at}
        return sorted(kind.plural for kind in self._kinds - tried)

    def silent(self, now: float) -> list[str]:
        """As Watcher.silent."""
        return [
            address.kind.plural
            for address, tried_at in list(self._tried_at.items())
            if (stream := self._streams.get(address)) is None or stream.closed
            if now - tried_at > STREAM_GRACE_S
        ]


def _listed(address: Address, body: bytes, *, first: bool) -> Listed:
    answer = cast("Obj", json.loads(body))
    return listed(address.kind, address.namespace, answer, first=first)


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

"""kopf's watches, in a thread and an event loop of their own.

kopf lists, watches, reconnects and signs in again. It does nothing else here: no handler writes, no
finalizer, no annotation, no peering, no events. Why a thread: when kopf.operator() ends, also for
an error in one stream, it cancels every task of its loop that began after it, and it takes over the
signals of the main thread. So it may fail here and be started again while the reconciler goes on.

What is heard comes from the HTTP seam (`tap`), not from handlers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

import kopf

from xpyd_operator.controller.client import PAGE, Count
from xpyd_operator.controller.inbox import Message
from xpyd_operator.controller.kinds import FLEET_LABEL, Kind
from xpyd_operator.controller.login import Login, open_session
from xpyd_operator.controller.tap import Tap

logger = logging.getLogger(__name__)

RESTART_FIRST_S = 1.0
RESTART_MOST_S = 30.0
_STOP_TIMEOUT_S = 3.0
_ALL_TRIED_S = 15.0
"""By when kopf must have asked for every kind. It asks the server only once which kinds there are,
and that list may lag behind a CRD that was installed a moment ago."""


class _Backoffs(Iterable[float]):
    """kopf's waits between attempts, without an end: its default is to give up and exit."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((0.5, 1, 2, 3, 5, 8, 13), itertools.repeat(20.0))


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
        self._tap = Tap(self._kinds, send, count=count, count_event=count_event)
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
            except (Exception, asyncio.CancelledError) as error:
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
        async def heard(**_: object) -> None:
            """kopf watches a kind that has a handler; the tap leaves nothing for it to hand on."""

    def _settings(self) -> kopf.OperatorSettings:
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        # No permission on namespaces and CRDs is needed then; a kind that is installed later gets
        # a watcher of its own.
        settings.scanning.disabled = True
        settings.networking.error_backoffs = _Backoffs()
        settings.watching.chunk_size = PAGE
        # Otherwise kopf kills the whole process when it takes longer than this to end.
        settings.process.ultimate_exiting_timeout = None
        for kind in self._kinds:
            if kind.labelled:
                key = (kind.group, kind.version, kind.plural)
                settings.watching.label_selectors[key] = FLEET_LABEL
        return settings

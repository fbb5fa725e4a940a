"""How long the HTTP port waits for a client, and which connection goes where there are too many.

uvicorn closes a connection that is idle between requests, but waits for ever for the first request,
for the rest of a head that began, and for a client that takes nothing of its answer. Within these
deadlines a stranger may still open more connections than the process may have files; then those
that have waited longest for their clients make room, none in which a request is served
(docs/adr/0094).
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import resource
import time
from collections.abc import Callable, Collection, Iterable
from itertools import chain
from typing import TYPE_CHECKING, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from xpyd_core.tls_connection import TlsServer

if TYPE_CHECKING:
    from xpyd_router.http.direct import DirectRequest

HEAD_DEADLINE_S = 30.0
STALL_S = 1800.0
MOST_FILES = 16_384
"""Of one process. An idle connection takes 10 KiB: a higher limit of the system is not used up."""
_SPARE_PART = 4
"""So large a part of the files is for engines, beats and the admin port."""
_ROOM_PART = 16
"""So large a part of the connections goes at once: looking at all of them takes milliseconds."""
_STALLED_S = 5.0
"""A client that took nothing for so long may have to go; others read slowly."""
_LOG_EVERY_S = 10.0
_log = logging.getLogger(__name__)


def cancelled(timer: asyncio.TimerHandle | None) -> None:
    """Cancel the timer, if there is one; None, in its place."""
    if timer is not None:
        timer.cancel()


class PatientProtocol(HttpToolsProtocol):
    """uvicorn's protocol; a head that is not whole `HEAD_DEADLINE_S` after the connection was made,
    or after its first byte, closes the connection, as does a client that takes nothing of its
    answer for `stall_s`: it may hold a place on an engine.
    """

    head_deadline_s = HEAD_DEADLINE_S
    stall_s = STALL_S
    _is_in_head = False
    _is_in_body = False
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _idle_timer: asyncio.TimerHandle | None = None
    _idle_since_s = 0.0
    """When the connection was made, or its last answer ended."""

    # uvicorn narrows asyncio's BaseTransport in the same way.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since_s = self.loop.time()
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._stall_timer, self._idle_timer):
            cancelled(timer)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_taking()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stall_timer = cancelled(self._stall_timer)

    def on_response_complete(self) -> None:
        self._idle_since_s = self.loop.time()
        super().on_response_complete()
        self._watch_close()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_close()

    def waits(self) -> tuple[int, float] | None:
        """Who goes first where there are too many: the lowest. What is waited for (a request, the
        rest of one, a client that takes its answer), and since when. None: the answer is ours to
        give."""
        if self._stall_timer is not None:
            since_s = self._stall_timer.when() - self.stall_s
            return (2, since_s) if self.loop.time() > since_s + _STALLED_S else None
        if self._is_in_body:
            return (1, self._idle_since_s)
        return None if self._is_busy else (0, self._idle_since_s)

    @property
    def is_leaving(self) -> bool:
        """Its file is free in a moment."""
        return self.transport.is_closing() and not self.transport.get_write_buffer_size()

    def make_room(self) -> None:
        """Close the connection now: another client needs its place."""
        if self._is_in_body or self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self._close()

    @property
    def _is_busy(self) -> bool:
        """A request is read or served."""
        cycle = cast("DirectRequest | None", self.cycle)
        return cycle is not None and not cycle.response_complete

    def _rest(self) -> None:
        """Begin to be idle. uvicorn's own timer is made and cancelled for each request."""
        self._idle_since_s = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._look_idle)

    def _look_idle(self) -> None:
        self._idle_timer = None
        if self._is_in_head or self._is_busy:
            return  # the next answer's end sets it again
        left_s = self._idle_since_s + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._idle_timer = self.loop.call_later(left_s, self._look_idle)
        else:
            self.timeout_keep_alive_handler()

    def _expect_head(self) -> None:
        cancelled(self._head_timer)
        self._head_timer = self.loop.call_later(self.head_deadline_s, self._close_late)

    def _close_late(self) -> None:
        self._head_timer = None
        if self._is_busy:
            self._expect_head()  # of the next request: the answer to the last one goes on
        else:
            self._close()

    def _close(self) -> None:
        self.transport.close()
        self._watch_close()

    def _watch_close(self) -> None:
        """A connection that closes does so when all that was written is taken."""
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._expect_taking()

    def _expect_taking(self) -> None:
        """The client must take some of what was written in time, or it counts as gone."""
        cancelled(self._stall_timer)
        waiting = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self.stall_s, self._check_taking, waiting)

    def _check_taking(self, waiting_bytes: int) -> None:
        self._stall_timer = None
        if self.transport.get_write_buffer_size() < waiting_bytes:
            self._expect_taking()
        else:
            self.transport.abort()


class Places:
    """The places that clients of one process have among its files.

    `connections`: all that there are, uvicorn's, of each port; `tls` has those that are none yet.
    `count` is told how many made room.
    """

    def __init__(
        self,
        connections: Iterable[Collection[object]],
        count: Callable[[int], object],
        tls: TlsServer | None = None,
        files: int = 0,
    ) -> None:
        self._connections = tuple(connections)
        self._count = count
        self._tls = tls
        self._files = files or files_of_process()
        self._said_s = float("-inf")

    def is_crowded(self, number: int) -> bool:
        """Whether so many files are open that clients must make room, by the number of the newest:
        a new file has the lowest free one."""
        return number >= self._files - max(1, self._files // _SPARE_PART)

    def make_room(self) -> bool:
        """Close some connections that wait for their clients; whether any are closing."""
        found: list[tuple[tuple[int, float], int, PatientProtocol]] = []
        closing = 0
        for number, one in enumerate(chain.from_iterable(self._connections)):
            if not isinstance(one, PatientProtocol):
                continue
            if one.is_leaving:
                closing += 1
            elif (waits := one.waits()) is not None:
                found.append((waits, number, one))
        tls = self._tls
        total = sum(map(len, self._connections)) + (0 if tls is None else tls.shaking_hands)
        wanted = max(1, total // _ROOM_PART) - closing
        if wanted > 0:
            made = 0 if tls is None else tls.make_room(wanted)
            for *_, one in heapq.nsmallest(wanted - made, found):
                one.make_room()
                made += 1
            self._count(made)
            closing += made
            self._say(total, made)
        return closing > 0

    def _say(self, total: int, made: int) -> None:
        now = time.monotonic()
        if now > self._said_s + _LOG_EVERY_S:
            self._said_s = now
            _log.warning(
                "clients have %d connections, too many for %d open files: %d that waited longest "
                "for their clients were closed; allow more files (ulimit -n), or bound connections "
                "in front of the router",
                total,
                self._files,
                made,
            )


def files_of_process() -> int:
    """How many files this process may have open, at most MOST_FILES. It takes all that the system
    lets it have: the soft limit of many systems is 1,024, for programs of the time of select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    elif soft != resource.RLIM_INFINITY:
        wanted = min(soft, MOST_FILES)
    return wanted

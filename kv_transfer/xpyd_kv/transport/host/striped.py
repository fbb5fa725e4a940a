"""The data path `striped`: DATA over further connections between the same two processes, each with
a thread of its own on either side, so that bytes are moved and summed up beside the I/O thread.

Each frame is cut in as many parts as there are connections. A part is its bytes and their checksum
behind them, nothing else: SHARED, on the first connection, says when one follows. The connections
come authenticated from the endpoint, one after another; until all are there DATA takes the first
one. Fills the seam of `data_path`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from queue import SimpleQueue

from xpyd_core.errors import ProtocolError
from xpyd_kv.memory.device import View
from xpyd_kv.spans import Span
from xpyd_kv.transport.body import Checksum, Cursor
from xpyd_kv.transport.host.data_path import (
    Borrower,
    CorruptError,
    DataPath,
    Fetch,
    Lender,
    Lent,
    pack,
)
from xpyd_kv.transport.settings import MAX_LINKS

_JOIN_S = 5.0
# Of a part, moved at once: what one processor's own cache has room for beside the checksum.
_STEP_BYTES = 2**20
_DIGEST_BYTES = 8
_READY = b"\1"
Job = Callable[[socket.socket], None]


class _Link:
    """A further connection and the thread that does its jobs, in order, until one fails."""

    def __init__(self, sock: socket.socket, failed: Callable[[Exception], None]) -> None:
        self._sock = sock
        self._failed = failed
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="xpyd-kv-link", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def shut(self) -> None:
        """End what is under way, and what waits."""
        self._jobs.put(None)
        with contextlib.suppress(OSError):  # The peer may have been faster.
            self._sock.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait for the thread, after `shut`: it reads and writes no memory any more."""
        self._thread.join(_JOIN_S)
        self._sock.close()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job(self._sock)
            except Exception as error:
                self._failed(error)
                # The other side hears of it, and ends the first connection.
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
                return
            del job


class _Links:
    """The links of one peer."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._links: dict[int, _Link] = {}
        self._wake = wake
        self.fault: Exception | None = None

    def __contains__(self, number: int) -> bool:
        return number in self._links

    def are(self, count: int) -> bool:
        """Whether those from 1 to `count` are here, and no other."""
        return sorted(self._links) == list(range(1, count + 1))

    def add(self, number: int, sock: socket.socket) -> _Link:
        link = self._links[number] = _Link(sock, self._fail)
        return link

    def put(self, jobs: Sequence[Job]) -> None:
        """The first job to the connection number 1, and so on."""
        for number, job in enumerate(jobs, start=1):
            self._links[number].put(job)

    def close(self) -> None:
        links, self._links = self._links.values(), {}
        for link in links:
            link.shut()
        for link in links:
            link.join()

    def _fail(self, error: Exception) -> None:
        self.fault = self.fault or error
        self._wake()


class StripedLender(Lender):
    """Lends the views of the frames themselves, until D has read them."""

    def __init__(self, connections: int, wake: Callable[[], None]) -> None:
        self._connections = connections
        self._links = _Links(wake)
        self._ready = threading.Semaphore(0)
        self._missing = connections
        self._frames = 0
        self._views: Sequence[memoryview] = ()

    def attach(self, number: int, sock: socket.socket) -> None:
        """Add one of the connections."""
        self._links.add(number, sock).put(self._await_ready)

    def lent(self) -> Lent:
        return Lent(self._connections)

    def places(self, views: Sequence[View], *, at_most: int) -> bytes | None:
        while self._missing and self._ready.acquire(blocking=False):
            self._missing -= 1
        host = [view for view in views if isinstance(view, memoryview)]
        if self._missing or self._links.fault is not None or len(host) != len(views):
            return None
        self._views = host
        return pack([Span(self._frames, sum(map(len, host)))])

    def sent(self) -> None:
        views, self._views = self._views, ()
        self._frames += 1
        self._links.put([_sending(views, *part) for part in _parts(views, self._connections)])

    def close(self) -> None:
        self._links.close()

    def _await_ready(self, sock: socket.socket) -> None:
        if sock.recv(1) != _READY:
            raise ConnectionError("closed by the peer")
        self._ready.release()


class StripedBorrower(Borrower):
    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._links = _Links(wake)
        self._connections = 0
        self._frames = 0

    def attach(self, number: int, sock: socket.socket) -> None:
        """Add one of the connections. ProtocolError for a number that is here, or too high."""
        if number > MAX_LINKS or number in self._links:
            raise ProtocolError(f"further connection {number}: again, or over {MAX_LINKS}")
        self._links.add(number, sock).put(lambda sock: sock.sendall(_READY))

    def open(self, size_bytes: int, body: bytes, descriptors: Sequence[int]) -> None:
        if body or descriptors or size_bytes > MAX_LINKS:
            raise ProtocolError("REGION that says no number of connections")
        self._connections = size_bytes

    def prepare(self, body: bytes, length: int) -> Callable[[Sequence[View] | None], _Arriving]:
        if not self._links.are(self._connections):
            raise ProtocolError("SHARED before all connections are there")
        if body != pack([Span(self._frames, length)]):
            raise ProtocolError("SHARED for another frame than the next")
        self._frames += 1

        def start(views: Sequence[View] | None) -> _Arriving:
            return _Arriving(self._links, self._connections, views, length, self._wake)

        return start

    def close(self) -> None:
        self._links.close()


class _Arriving(Fetch):
    def __init__(
        self,
        links: _Links,
        count: int,
        views: Sequence[View] | None,
        length: int,
        wake: Callable[[], None],
    ) -> None:
        self._links = links
        self._wake = wake
        self._lock = threading.Lock()
        self._left = count
        self._intact = True
        if views is None:
            room = [memoryview(bytearray(length))]
        else:
            room = [view for view in views if isinstance(view, memoryview)]
        links.put([self._receiving(room, *part) for part in _parts(room, count)])

    def poll(self) -> bool:
        if self._left and self._links.fault is not None:
            raise ConnectionResetError(f"a further connection: {self._links.fault}")
        if self._left:
            return False
        if not self._intact:
            raise CorruptError
        return True

    def _receiving(self, views: Sequence[memoryview], begin: int, end: int) -> Job:
        def receive(sock: socket.socket) -> None:
            digest = Checksum()
            for window in _windows(views, begin, end):
                size = sum(map(len, window))
                if sock.recvmsg_into(window, 0, socket.MSG_WAITALL)[0] != size:
                    raise ConnectionError("closed by the peer")
                digest.take(window, size)
            theirs = sock.recv(_DIGEST_BYTES, socket.MSG_WAITALL)
            if len(theirs) != _DIGEST_BYTES:
                raise ConnectionError("closed by the peer")
            self._end(theirs == digest.digest())

        return receive

    def _end(self, intact: bool) -> None:
        with self._lock:
            self._intact = self._intact and intact
            self._left -= 1
        self._wake()


class StripedPath(DataPath):
    """`connections` beside the first one are P's to choose. `wake` ends the I/O
    thread's waiting, from any thread."""

    name = "striped"

    def __init__(self, connections: int, wake: Callable[[], None]) -> None:
        self.connections = connections
        self._wake = wake

    def lender(self) -> StripedLender:
        return StripedLender(self.connections, self._wake)

    def borrower(self) -> StripedBorrower:
        return StripedBorrower(self._wake)


def _parts(views: Sequence[memoryview], count: int) -> list[tuple[int, int]]:
    """[begin, end) of each connection's part of these bytes."""
    length = sum(map(len, views))
    edges = [length * n // count for n in range(count + 1)]
    return list(pairwise(edges))


def _windows(views: Sequence[memoryview], begin: int, end: int) -> Iterator[list[memoryview]]:
    cursor = Cursor(views)
    cursor.advance(begin)
    while begin < end:
        window = cursor.window(min(_STEP_BYTES, end - begin))
        size = sum(map(len, window))
        cursor.advance(size)
        begin += size
        yield window


def _sending(views: Sequence[memoryview], begin: int, end: int) -> Job:
    def send(sock: socket.socket) -> None:
        digest = Checksum()
        for window in _windows(views, begin, end):
            size = sum(map(len, window))
            digest.take(window, size)
            rest = Cursor(window)
            while rest.left:
                rest.advance(sock.sendmsg(rest.window(rest.left)))
        sock.sendall(digest.digest())

    return send

"""One connection's socket: bytes between it, the wire's state machine and the session.

Knows neither listening nor dialling, which are the endpoint's. Control frames go out before DATA;
DATA goes straight from the session's views to the kernel and from the kernel into its views. Its
methods raise where the connection must end; the endpoint ends it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from xpyd_core.errors import ProtocolError
from xpyd_core.request_id import Address
from xpyd_kv.device.api import View, on_host
from xpyd_kv.transport import sockets
from xpyd_kv.transport.api import Handler
from xpyd_kv.transport.body import Body
from xpyd_kv.transport.checksum import checksum
from xpyd_kv.transport.counters import Counters
from xpyd_kv.transport.cursor import Cursor
from xpyd_kv.transport.data_path import DataPath, Lender, Rights
from xpyd_kv.transport.probes import answer_of
from xpyd_kv.transport.settings import Bounds
from xpyd_kv.transport.sharing import NO_CHECKSUM, Borrowing, Lending, data_of, shared_of
from xpyd_kv.wire import errors
from xpyd_kv.wire.connection import Connection, Event, Opened, Received
from xpyd_kv.wire.frames import DataBegin, DataChunk, DataEnd
from xpyd_kv.wire.messages import Copied, Data, Hello, Layout, Probe, Region, Shared

_log = logging.getLogger(__name__)


class ClosedByPeerError(OSError):
    """The peer has closed its side."""


class SlowReaderError(Exception):
    """The peer leaves its control frames unread."""


class DataFrame(NamedTuple):
    """A DATA frame in the queue: see Endpoint.send_data."""

    make_header: Callable[[bytes], Data | Probe | None]
    views: Sequence[View]
    done: Callable[[bool], None]


class Stream:
    """A Peer, once `protocol` is open."""

    def __init__(
        self,
        sock: socket.socket,
        protocol: Connection,
        *,
        handler: Handler,
        bounds: Bounds,
        counters: Counters,
        scratch: memoryview,
        opened: Callable[[Stream], None],
        mismatch: Callable[[Stream, float], bool],
        remote: str,
        paths: Mapping[str, DataPath],
        fetch_s: float,
        address: Address | None = None,
        connect_by: float | None = None,
    ) -> None:
        self.sock = sock
        self.protocol = protocol
        self.remote = remote
        """For log lines only."""
        self.connect_by = connect_by
        """Until when the TCP connection must stand; None once it does."""
        self.wants_write = False
        self.closing: str | None = None
        self.is_up = False
        """Whether the session has been told of this peer."""
        self.session_ran = False
        """Whether the session was called since this was set to False."""
        self._address = address
        self._handler = handler
        self._bounds = bounds
        self._counters = counters
        self._scratch = scratch
        self._opened = opened
        # Tells of a broken frame; whether this peer may send no more.
        self._mismatch = mismatch
        self._paths = paths
        self._fetch_s = fetch_s
        # Where DATA moves beside the socket: at P or at D.
        self._lending: Lending | None = None
        self._borrowing: Borrowing | None = None
        self._control: deque[bytes] = deque()
        self._control_bytes = 0
        self._data: deque[DataFrame] = deque()
        self._sending: Cursor | None = None
        self._sending_data: DataFrame | None = None
        # Ancillary data that goes with the first byte of what is sent next.
        self._rights: Rights = ()
        self._has_lent = False
        self._is_shared = self._is_kv = False
        self._unlogged: Data | None = None
        self._landing: Body | None = None
        self._copied_bytes = 0

    @property
    def address(self) -> Address | None:
        return self._address

    @property
    def transport(self) -> str:
        return self.protocol.transport

    @property
    def hello(self) -> Hello:
        return self.protocol.peer.hello

    @property
    def layout(self) -> Layout:
        return self.protocol.peer.layout

    @property
    def due(self) -> float:
        """When `tick` has something to do."""
        return self.protocol.due if self.connect_by is None else self.connect_by

    @property
    def has_output(self) -> bool:
        """Whether something is not through yet, written or to be copied by the peer."""
        lends = self._lending is not None and self._lending.is_lending
        return self._can_write or lends or bool(self._data)

    @property
    def _can_write(self) -> bool:
        if self._sending is not None or self._control:
            return True
        return bool(self._data) and (self._lending is None or self._lending.has_room)

    @property
    def fetching_since(self) -> float | None:
        """When the oldest frame was begun that another thread or device is still fetching."""
        return None if self._borrowing is None else self._borrowing.fetching_since

    # --- reading

    def read(self, now: float) -> None:
        """Read one turn's worth. OSError, ProtocolError and the session's errors end the
        connection."""
        budget = self._bounds.turn_bytes
        while budget > 0 and self.closing is None:
            try:
                count, room = self._read_once(now, budget)
            except BlockingIOError:
                return
            budget -= max(count, self._copied_bytes)
            if count < room:
                return

    def _read_once(self, now: float, budget: int) -> tuple[int, int]:
        """Bytes read, and bytes that there was room for."""
        self._copied_bytes = 0
        landing = self._landing
        if landing is not None:
            room = min(budget, landing.left)
            count = self._came(landing.read(self.sock, room, self._bounds.read_bytes))
            self._body_read(count, now)
            return count, room
        room = len(self._scratch)
        left = self.protocol.data_left
        if left:
            room = min(room, left)
            count = self._came(self.sock.recv_into(self._scratch, room))
            self._body_read(count, now)
            return count, room
        count = self._came(self._receive())
        try:
            for event in self.protocol.feed(self._scratch[:count], now):
                self._handle(event, now)
                if self.closing is not None:
                    break
        finally:
            self._queue_copied()
            self._queue_own()
        return count, room

    def poll(self, now: float) -> None:
        """See what has been fetched meanwhile. Errors end the connection."""
        try:
            self._end_fetches(now)
        finally:
            self._queue_copied()

    def _queue_copied(self) -> None:
        frames = self._borrowing.take_copied() if self._borrowing is not None else 0
        if frames:
            self.queue_control(self.protocol.encode(Copied(frames=frames)))

    def _receive(self) -> int:
        """Read control frames. From the peer's AUTH on D takes the descriptor that REGION may
        have."""
        if self._borrowing is None and self._address is None and self.protocol.is_proved:
            path = self._paths.get(self.transport)
            if path is not None:
                self._borrowing = Borrowing(path.borrower(), fetch_s=self._fetch_s)
        if self._borrowing is None:
            return self.sock.recv_into(self._scratch)
        return self._borrowing.receive(self.sock, self._scratch)

    def _came(self, count: int) -> int:
        if not count:
            raise ClosedByPeerError("closed by the peer")
        self._counters.received_bytes += count
        return count

    def _body_read(self, count: int, now: float) -> None:
        end = self.protocol.data_read(count, now)
        if end is not None:
            self._end_data(end.header, now)

    def _handle(self, event: Event, now: float) -> None:
        if isinstance(event, Received):
            if isinstance(event.message, Region | Shared | Copied):
                self._handle_shared(event.message, event.body, now)
                return
            if isinstance(event.message, Probe):
                self._handle_probe(event.message, event.body, now)
                return
            self.session_ran = True
            self._handler.message(self, event.message, event.body)
        elif isinstance(event, DataBegin):
            self._begin_data(event.header, event.length)
        elif isinstance(event, DataChunk):
            if self._landing is not None:
                self._landing.write(event.data)
        elif isinstance(event, DataEnd):
            self._end_data(event.header, now)
        else:
            assert isinstance(event, Opened)
            # Our LAYOUT may have been made by the same read: it goes before the session's frames.
            self._queue_own()
            path = self._paths.get(self.transport)
            if path is not None and self._address is not None:
                self._lending = Lending(path.lender())
            self._opened(self)

    def _handle_shared(self, message: Region | Shared | Copied, body: bytes, now: float) -> None:
        """What stands in for DATA bodies that move beside the socket."""
        if isinstance(message, Copied):
            assert self._lending is not None
            for done in self._lending.copied(message.frames):
                self.session_ran = True
                done(True)
            return
        borrowing = self._borrowing
        assert borrowing is not None
        if isinstance(message, Region):
            borrowing.open(message, body)
            return
        length = self.protocol.data_bytes(message)
        start = borrowing.prepare(body, length)
        header = data_of(message)
        views = self._room_for(header, length)
        borrowing.begin(header, length, views, start, now)
        self._end_fetches(now)

    def _end_fetches(self, now: float) -> None:
        if self._borrowing is None:
            return
        for header, length, views in self._borrowing.ended(now):
            stored = views is not None
            if stored:
                self._copied_bytes += length
            if isinstance(header, Probe):
                self._answer_probe(header, views or (), self.transport)
                continue
            self._counters.shared_bytes += length if stored else 0
            self.session_ran = True
            self._handler.data_end(self, header, stored=stored, intact=stored)

    def _handle_probe(self, probe: Probe, body: bytes, now: float) -> None:
        """Bytes that P wants the digest of. They take DATA's way, and end here."""
        if not probe.shared:
            views = [memoryview(body)]
            self._answer_probe(probe, views, sockets.usable(self.sock)[-1])
            if checksum(views) != probe.checksum:
                self._count_broken(now)
            return
        borrowing = self._borrowing
        if borrowing is None:
            raise ProtocolError("PROBE of lent bytes where nothing is lent")
        start = borrowing.prepare(body, probe.size_bytes)
        room = [memoryview(bytearray(probe.size_bytes))]
        borrowing.begin(probe, probe.size_bytes, room, start, now)
        self._end_fetches(now)

    def _answer_probe(self, probe: Probe, views: Sequence[View], transport: str) -> None:
        self.queue_control(self.protocol.encode(answer_of(probe, on_host(views), transport)))

    def _room_for(self, header: Data, length: int) -> Sequence[View] | None:
        self.session_ran = True
        views = self._handler.data_begin(self, header, length)
        room = length if views is None else sum(map(len, views))
        if room != length:
            raise ValueError(f"the session gave {room} bytes of room for {length}")
        return views

    def _begin_data(self, header: Data, length: int) -> None:
        views = self._room_for(header, length)
        if views is not None:
            self._landing = Body(on_host(views))

    def _end_data(self, header: Data, now: float) -> None:
        landing, self._landing = self._landing, None
        intact = landing is not None and landing.digest() == header.checksum
        self.session_ran = True
        self._handler.data_end(self, header, stored=landing is not None, intact=intact)
        if landing is not None and not intact:
            self._count_broken(now)

    def _count_broken(self, now: float) -> None:
        self._counters.corrupt_frames += 1
        if self._mismatch(self, now):
            raise self.protocol.refuse(errors.QUARANTINE)

    # --- writing

    def queue_control(self, frame: bytes) -> None:
        """SlowReaderError when the queue is full."""
        self._control.append(frame)
        self._control_bytes += len(frame)
        if (
            self._control_bytes > self._bounds.control_bytes
            or len(self._control) > self._bounds.control_frames
        ):
            raise SlowReaderError("control queue full")

    def queue_data(self, frame: DataFrame) -> None:
        self._data.append(frame)

    def tick(self, now: float) -> None:
        """PING, or raise SilentPeerError. TimeoutError while connecting."""
        if self.connect_by is not None:
            if now >= self.connect_by:
                raise TimeoutError("not connected in time")
            return
        self.protocol.tick(now)
        self._queue_own()

    def connected(self) -> None:
        """The TCP connection stands: the dialler's HELLO may go."""
        self.connect_by = None
        self._queue_own()

    def _queue_own(self) -> None:
        frames = self.protocol.outgoing()
        if frames:
            self.queue_control(frames)

    def write(self) -> bool:
        """Write one turn's worth; whether there is more to write. Errors end the connection."""
        budget = self._bounds.turn_bytes
        while budget > 0 and self.closing is None:
            cursor = self._sending or self._next_frame()
            if cursor is None:
                return False
            try:
                count = self.sock.sendmsg(cursor.window(budget), self._rights)
            except BlockingIOError:
                return True
            self._rights = ()
            cursor.advance(count)
            budget -= count
            self._counters.sent_bytes += count
            if self._unlogged is not None:
                self._log_sent(self._unlogged)
            if not cursor.left:
                self._finish_frame()
        return self._can_write

    def _next_frame(self) -> Cursor | None:
        """Begin with the next thing to send: all control frames, else one DATA frame (which waits
        while too much is lent)."""
        if self._control:
            frames = [memoryview(frame) for frame in self._control]
            self._control.clear()
            self._control_bytes = 0
            self._sending = Cursor(frames)
            return self._sending
        lending = self._lending
        if lending is not None and not self._has_lent and self._data:
            return self._next_region(lending.lender)
        while self._data and (lending is None or lending.has_room):
            # Stays reachable for `abandon` until its header is made, which may raise.
            frame = self._sending_data = self._data.popleft()
            self.session_ran = True
            length = sum(map(len, frame.views))
            places = None
            if lending is not None:
                most = max(1, length // self.protocol.block_bytes)
                places = lending.lender.places(frame.views, at_most=most)
            self._is_shared = places is not None
            digest = checksum(on_host(frame.views)) if places is None else NO_CHECKSUM
            header = frame.make_header(digest)
            if header is None:
                self._sending_data = None
                frame.done(False)
                continue
            self._is_kv = isinstance(header, Data)
            if places is None:
                prefix = self.protocol.encode(header, length)
                self._sending = Cursor([memoryview(prefix), *on_host(frame.views)])
            else:
                prefix = self.protocol.encode(shared_of(header), len(places))
                self._sending = Cursor([memoryview(prefix + places)])
            if isinstance(header, Data) and _log.isEnabledFor(logging.DEBUG):
                self._unlogged = header
            return self._sending
        return None

    def _next_region(self, lender: Lender) -> Cursor:
        self._has_lent = True
        lent = lender.lent()
        prefix = self.protocol.encode(Region(size_bytes=lent.size_bytes), len(lent.body))
        self._sending, self._rights = Cursor([memoryview(prefix + lent.body)]), lent.rights
        return self._sending

    def _finish_frame(self) -> None:
        frame, self._sending, self._sending_data = self._sending_data, None, None
        if frame is None:
            return
        if self._is_shared and self._lending is not None:
            length = sum(map(len, frame.views))
            self._counters.shared_bytes += length if self._is_kv else 0
            self._lending.lend(length, frame.done)
            return
        self.session_ran = True
        frame.done(True)

    def _log_sent(self, header: Data) -> None:
        self._unlogged = None
        extra = {
            "request": header.uuid,
            "prompt_index": header.prompt_index,
            "seq": header.seq,
            "layers": f"{header.first_layer}:{header.end_layer}",
            "blocks": f"{header.first_block}:{header.end_block}",
            "monotonic_ns": time.monotonic_ns(),
        }
        _log.debug("data sent", extra=extra)

    # --- the end

    def say_last_words(self) -> None:
        """Try once to send what the handshake has to say, a REFUSE above all."""
        if self.connect_by is not None or self._sending is not None:
            return
        frames = b"".join(self._control) + self.protocol.outgoing()
        if frames:
            # It is closed next in any case; a full or broken socket loses nothing but the reason.
            with contextlib.suppress(OSError):
                self._counters.sent_bytes += self.sock.send(frames)

    def abandon(self) -> list[Callable[[bool], None]]:
        """Close the socket, let go of all views; the `done` of every frame not through."""
        self.sock.close()
        lent = self._lending.close() if self._lending is not None else []
        if self._borrowing is not None:
            self._borrowing.close()
        frames = [self._sending_data] if self._sending_data is not None else []
        frames += self._data
        self._data.clear()
        self._control.clear()
        self._sending = self._sending_data = self._unlogged = None
        self._landing = None
        return lent + [frame.done for frame in frames]

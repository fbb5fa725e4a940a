"""One connection's socket: bytes between it, the wire's state machine and the session.

Knows neither listening nor dialling, which are the endpoint's. SocketWriter writes; DATA that comes
goes straight from the kernel into the session's views, or by a slab to a GPU (`staging`). Its
methods raise where the connection must end; the endpoint ends it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from xpyd_core.errors import ProtocolError
from xpyd_core.request_id import Address
from xpyd_kv.memory.device import View, is_on_host, on_host
from xpyd_kv.metrics import EndpointCounters
from xpyd_kv.plan.pairs import Pair
from xpyd_kv.transport.api import Done, Handler
from xpyd_kv.transport.body import Body, answer_of, checksum
from xpyd_kv.transport.devices.staging import Into, Inward, Staging
from xpyd_kv.transport.host.data_path import DataPath
from xpyd_kv.transport.host.sharing import NO_CHECKSUM, Borrowing, data_of
from xpyd_kv.transport.settings import Bounds
from xpyd_kv.transport.stream import sockets
from xpyd_kv.transport.stream.tls import RECORD_BYTES, TlsSocket
from xpyd_kv.transport.stream.writer import SocketWriter
from xpyd_kv.wire import errors
from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.connection import Connection, Event, Opened, Received
from xpyd_kv.wire.frames import DataBegin, DataChunk, DataEnd
from xpyd_kv.wire.messages import CHECKSUM_BYTES

_log = logging.getLogger(__name__)


class ClosedByPeerError(OSError):
    """The peer has closed its side."""


class Stream:
    """One connection: its socket, its protocol and the peer. It is a Peer once `protocol` is
    open."""

    # Set when it opens: what the session reads often.
    hello: wire.Hello
    layout: wire.Layout
    is_data = False
    pair: Pair | None = None
    transport = ""

    def __init__(
        self,
        sock: socket.socket,
        protocol: Connection,
        *,
        handler: Handler,
        bounds: Bounds,
        counters: EndpointCounters,
        scratch: memoryview,
        opened: Callable[[Stream], None],
        mismatch: Callable[[Stream, float], bool],
        remote: str,
        paths: Mapping[str, DataPath],
        fetch_s: float,
        staging: Staging | None = None,
        address: Address | None = None,
        connect_by: float | None = None,
        main: Stream | None = None,
    ) -> None:
        self.sock = sock
        self.protocol = protocol
        self.remote = remote
        """The peer's address, for log lines only."""
        self.connect_by = connect_by
        """The time at which the TCP connection must be established; None once it is."""
        self.wants_write = False
        self.paused_since: float | None = None
        """The time since which the socket is not read, because no slab is free; see `resume`."""
        self.closing: str | None = None
        self.detail = ""
        """What the reason of its end leaves out, in words for people."""
        self.may_fetch = staging is not None
        """Whether `waiting_since` may be a time: it has more to do than read and write its
        socket."""
        self.is_up = False
        """Whether the session knows this peer."""
        self.main = main
        """P: the peer that this is a further connection of."""
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
        self._staging = staging
        self.writer = SocketWriter(
            sock,
            protocol,
            bounds=bounds,
            counters=counters,
            staging=staging,
        )
        # At D: where DATA moves beside the socket, and where it goes on to a GPU.
        self._borrowing: Borrowing | None = None
        self._may_borrow = address is None and bool(paths)
        self._inward: Inward | None = None
        self._into: Into | None = None
        self._is_at_end = False
        self._landing: Body | None = None
        self._copied_bytes = 0
        self._wake_bytes = 1
        self._can_wait = sock.family != socket.AF_UNIX
        self._tls = sock if isinstance(sock, TlsSocket) else None

    @property
    def address(self) -> Address | None:
        return self._address

    @property
    def due(self) -> float:
        """When `tick` has something to do."""
        if self.paused_since is not None:
            return math.inf
        return self.protocol.due if self.connect_by is None else self.connect_by

    @property
    def has_output(self) -> bool:
        """Whether something is not through yet, written or to be copied by the peer."""
        return self.writer.has_output

    @property
    def waiting_since(self) -> float | None:
        """The time since which a copy by another thread or device, or a slab, has to be polled."""
        times = (
            self.paused_since,
            self.writer.waiting_since,
            self._borrowing.fetching_since if self._borrowing is not None else None,
            self._inward.since_s if self._inward is not None else None,
        )
        return min((time_s for time_s in times if time_s is not None), default=None)

    def end(self, reason: str) -> None:
        """Mark the connection as closing: no byte is read or written any more."""
        self.closing = reason
        self.writer.is_closing = True

    # --- reading

    def read(self, now: float) -> None:
        """Read one turn's worth. OSError, ProtocolError and the session's errors end the
        connection."""
        budget = self._bounds.turn_bytes
        # The kernel does not wake us for what a TLS socket has taken from it. That is read, too,
        # and no more: other peers have their turn.
        while (budget > 0 or self.holds_more) and self.closing is None:
            if self._tls is not None:
                self._tls.may_take = budget > 0
            if self._inward is not None and not self._may_read(self._inward):
                self.paused_since = now
                break
            try:
                count, room = self._read_once(now, max(budget, RECORD_BYTES))
            except BlockingIOError:
                break
            budget -= max(count, self._copied_bytes)
            if count < room:
                break
        if self._is_at_end:
            self.paused_since = now
        if self._inward is not None and not self._is_in_body:
            self._inward.rest()
        if self._landing is not None or self._wake_bytes > 1:
            self._wait_for_more()

    @property
    def holds_more(self) -> bool:
        """Whether bytes wait to be read that its socket is not ready for."""
        return self._tls is not None and self._tls.holds_more

    @property
    def may_have_more(self) -> bool:
        """Whether bytes may have come that were too few to wake us."""
        return self._wake_bytes > 1

    def _wait_for_more(self) -> None:
        """Be woken once for much of a body, and at once for anything else."""
        left = (
            self.protocol.decoder.data_left if self._landing is not None and self._can_wait else 0
        )
        count = min(left + CHECKSUM_BYTES, self._bounds.wake_bytes) if left else 1
        if self._tls is not None:
            # The begin of a record may be inside already.
            count = max(1, count - RECORD_BYTES)
        if count != self._wake_bytes:
            sockets.wake_at(self.sock, count)
            self._wake_bytes = count

    def resume(self) -> bool:
        """Whether a paused connection may be read from now on."""
        if self.paused_since is None:
            return False
        if self._inward is not None and not self._may_read(self._inward):
            return False
        self.paused_since = None
        return True

    def _may_read(self, inward: Inward) -> bool:
        """Whether there is room for the frames that a read may begin; and nothing on its way to
        the GPU, where the end is all that is left to be read."""
        if self._is_at_end:
            return inward.since_s is None
        return self._is_in_body or inward.reserve()

    @property
    def _is_in_body(self) -> bool:
        return self._landing is not None or self.protocol.decoder.data_left > 0

    def _read_once(self, now: float, budget: int) -> tuple[int, int]:
        """Bytes read, and bytes that there was room for."""
        self._copied_bytes = 0
        landing, left = self._landing, self.protocol.decoder.data_left
        if left:
            if landing is not None:
                room = min(budget, left)
                count = self._came(landing.read(self.sock, room, self._bounds.read_bytes))
            else:
                room = min(len(self._scratch), left)
                count = self._came(self.sock.recv_into(self._scratch, room))
            self.protocol.data_read(count, now)
            return count, room
        room = len(self._scratch)
        if self.main is not None or (self._inward is not None and landing is not None):
            # The bytes behind D's LAYOUT are for the thread that gets the socket then; a frame
            # for which no slab is reserved may follow a frame's checksum.
            room = min(room, self.protocol.wanted_bytes)
        if self._may_borrow and self.protocol.is_proved:
            self._borrow()
        if self._borrowing is None:
            count = self._came(self.sock.recv_into(self._scratch, room))
        else:
            count = self._came(self._borrowing.receive(self.sock, self._scratch[:room]))
        try:
            for event in self.protocol.feed(self._scratch[:count], now):
                self._handle(event, now)
                if self.closing is not None:
                    break
                if self._borrowing is not None:
                    self._say_copied(now)
        finally:
            if self.protocol.own_frames:
                self._queue_own()
        return count, room

    def poll(self, now: float) -> None:
        """See what has been fetched meanwhile. Errors end the connection."""
        self._end_fetches(now)
        self.writer.check(now, self._fetch_s)
        if self._inward is not None:
            self._inward.poll(now, self._fetch_s)
        self._say_copied(now)

    def _say_copied(self, now: float) -> None:
        """At once, not with what the rest of the read makes: P lends the next frame meanwhile."""
        frames = self._borrowing.take_copied() if self._borrowing is not None else 0
        if frames:
            self.writer.queue_control(self.protocol.encode(wire.Copied(frames=frames)))
            if not self.wants_write:
                # A P that has gone may have said more, which is read first; the next write ends it.
                with contextlib.suppress(ConnectionError):
                    self.writer.write(now)

    def attach(self, number: int, sock: socket.socket) -> None:
        """Attach a further connection between the two processes, for DATA only."""
        sockets.make_blocking(sock, self._fetch_s)
        books = self.writer.lending or self._borrowing
        assert books is not None
        books.attach(number, sock)

    def _borrow(self) -> None:
        """At D, from P's AUTH on: REGION may come with a descriptor."""
        self._may_borrow = False
        path = self._paths.get(self.protocol.transport)
        if self._borrowing is None and path is not None:
            self.may_fetch = True
            self._borrowing = Borrowing(path.borrower(), fetch_s=self._fetch_s)

    def _came(self, count: int) -> int:
        """Count the bytes that were read, and return their number. ClosedByPeerError for 0."""
        if not count and self._inward is not None and self._inward.since_s is not None:
            self._is_at_end = True
            raise BlockingIOError
        if not count:
            raise ClosedByPeerError("closed by the peer")
        self._counters.received_bytes += count
        return count

    def _handle(self, event: Event, now: float) -> None:
        if isinstance(event, Received):
            if isinstance(event.message, wire.Region | wire.Shared | wire.Copied):
                self._handle_shared(event.message, event.body, now)
                return
            if isinstance(event.message, wire.Probe):
                self._handle_probe(event.message, event.body, now)
                return
            if self._inward is None:
                self._handler.message(self, event.message, event.body)
            else:
                call = partial(self._handler.message, self, event.message, event.body)
                self._inward.after(partial(self._say_now, call), now)
        elif isinstance(event, DataBegin):
            self._begin_data(event.header, event.length)
        elif isinstance(event, DataChunk):
            if self._landing is not None:
                self._landing.write(event.data)
        elif isinstance(event, DataEnd):
            self._end_data(event, now)
        else:
            assert isinstance(event, Opened)
            self.hello, self.layout = event
            self.is_data, self.pair = self.protocol.is_data, self.protocol.pair
            self.transport = self.protocol.transport
            # Our LAYOUT may have been made by the same read: it goes before the session's frames.
            self._queue_own()
            path = self._paths.get(self.transport)
            if self._address is None:
                self._borrow()
            elif path is not None and self.main is None and self.pair is not None:
                self.writer.lend(path.lender())
            if self._staging is not None and self._address is None:
                room = self.protocol.max_own_data_bytes + len(self._scratch)
                self._inward = Inward(self._staging, room_bytes=room)
                # For frames that may follow LAYOUT in this read.
                self._inward.reserve()
            self._opened(self)

    def _handle_shared(
        self, message: wire.Region | wire.Shared | wire.Copied, body: bytes, now: float
    ) -> None:
        """Handle the frames that replace DATA bodies which move outside the socket."""
        if isinstance(message, wire.Copied):
            lending = self.writer.lending
            assert lending is not None
            for done in lending.copied(message.frames):
                done(NO_CHECKSUM)
            return
        borrowing = self._borrowing
        assert borrowing is not None
        if isinstance(message, wire.Region):
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
        for header, length, views, intact in self._borrowing.ended(now):
            stored = views is not None
            if stored:
                self._copied_bytes += length
            if isinstance(header, wire.Probe):
                self._answer_probe(header, views or (), self.transport)
            else:
                self._counters.shared_bytes += length if stored else 0
                whole = stored and intact
                self._handler.data_end(self, header, NO_CHECKSUM, stored=stored, intact=whole)
            if not intact:
                self._count_broken(now)

    def _handle_probe(self, probe: wire.Probe, body: bytes, now: float) -> None:
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

    def _answer_probe(self, probe: wire.Probe, views: Sequence[View], transport: str) -> None:
        self.writer.queue_control(self.protocol.encode(answer_of(probe, on_host(views), transport)))

    def _room_for(self, header: wire.Data, length: int) -> Sequence[View] | None:
        views = self._handler.data_begin(self, header, length)
        room = length if views is None else sum(map(len, views))
        if room != length:
            raise ValueError(f"the session gave {room} bytes of room for {length}")
        return views

    def _begin_data(self, header: wire.Data, length: int) -> None:
        views = self._room_for(header, length)
        if views is None:
            return
        if self._inward is not None and not is_on_host(views):
            self._into = self._inward.carve(views, length)
            views = [self._into.part]
        self._landing = Body(on_host(views))

    def _end_data(self, end: DataEnd, now: float) -> None:
        landing, self._landing = self._landing, None
        into, self._into = self._into, None
        intact = landing is not None and landing.digest() == end.checksum
        stored = landing is not None
        if self._inward is None:
            self._handler.data_end(self, *end, stored=stored, intact=intact)
        else:
            ended = partial(self._handler.data_end, self, *end, stored=stored, intact=intact)
            then = partial(self._say_now, ended)
            if into is not None and intact:
                self._inward.land(into, then=then, now=now)
                return
            if into is not None:
                self._inward.drop(into.slab)
            self._inward.after(then, now)
        if landing is not None and not intact:
            self._count_broken(now)

    def _say_now(self, call: Callable[[], None]) -> None:
        """Make a call to the session at once: no frame before it is on its way to the device."""
        if self.closing is None:
            call()

    def _count_broken(self, now: float) -> None:
        self._counters.corrupt_frames += 1
        if self._mismatch(self, now):
            raise self.protocol.refuse(errors.QUARANTINE)

    # --- writing

    def tick(self, now: float) -> None:
        """Send a PING when it is due, or raise SilentPeerError. TimeoutError while connecting.
        Nothing while reading is paused: answers of the peer are unread."""
        if self.paused_since is not None:
            return
        if self.connect_by is not None:
            if now >= self.connect_by:
                raise TimeoutError("not connected in time")
            return
        self.protocol.tick(now)
        self._queue_own()

    def connected(self) -> None:
        """Send the dialler's HELLO: the TCP connection is established."""
        self.connect_by = None
        self._queue_own()

    def _queue_own(self) -> None:
        frames = self.protocol.outgoing()
        if frames:
            self.writer.queue_control(frames)

    # --- the end

    def say_last_words(self) -> None:
        """Try once to send what the handshake has to say, a REFUSE above all."""
        if self.connect_by is None and not self.writer.is_in_frame:
            self.writer.say_last_words(self.protocol.outgoing())

    def abandon(self) -> list[Done]:
        """Close the socket, let go of all views; the `done` of every frame not through."""
        self.sock.close()
        ended = self.writer.abandon()
        if self._borrowing is not None:
            self._borrowing.close()
        if self._inward is not None:
            self._inward.close(self._into.slab if self._into is not None else None)
        self._landing = self._into = None
        return ended

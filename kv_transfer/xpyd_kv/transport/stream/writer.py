"""What is written to one connection's socket: control frames first, then DATA from its views.

The sending half of a Stream: it owns both queues and the place in the frame under way. DATA goes
straight from the session's views to the kernel, or its places go in a SHARED frame; of a cache on a
GPU without a data path it goes through slabs (`staging`). Its methods raise where the connection
must end.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from xpyd_kv.memory.device import View, is_on_host, on_host
from xpyd_kv.metrics import EndpointCounters
from xpyd_kv.transport.api import Done
from xpyd_kv.transport.body import TURN_BYTES, Cursor, Departure
from xpyd_kv.transport.devices.staging import AHEAD, Outward, Staging
from xpyd_kv.transport.host.data_path import Lender, Rights
from xpyd_kv.transport.host.sharing import NO_CHECKSUM, Lending, shared_of
from xpyd_kv.transport.settings import Bounds
from xpyd_kv.transport.stream.tls import TlsSocket
from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.connection import Connection
from xpyd_kv.wire.errors import IllegalMoveError
from xpyd_kv.wire.messages import CHECKSUM_BYTES

_log = logging.getLogger(__name__)


class SlowReaderError(Exception):
    """The peer leaves its control frames unread."""


class DataFrame(NamedTuple):
    """A DATA frame in the queue: see Endpoint.send_data. Or a PROBE, whose header has its bytes'
    checksum."""

    make_header: Callable[[], wire.Data | wire.Probe | None]
    views: Sequence[View]
    done: Done


class SocketWriter:
    """Once `is_closing` is set nothing more is written."""

    def __init__(
        self,
        sock: socket.socket,
        protocol: Connection,
        *,
        bounds: Bounds,
        counters: EndpointCounters,
        staging: Staging | None,
    ) -> None:
        self._sock = sock
        self._protocol = protocol
        self._bounds = bounds
        self._counters = counters
        self._staging = staging
        self.is_closing = False
        self._control: deque[bytes] = deque()
        self._control_bytes = 0
        self._data: deque[DataFrame] = deque()
        self._sending: Cursor | Departure | None = None
        self._sending_data: DataFrame | None = None
        # Ancillary data that goes with the first byte of what is sent next.
        self._rights: Rights = ()
        self._lending: Lending | None = None
        self._has_lent = False
        self._is_shared = False
        self._is_kv = False
        self._unlogged: wire.Data | None = None
        # Where device memory goes through the socket.
        self._outward = Outward(staging) if staging is not None else None

    @property
    def lending(self) -> Lending | None:
        """The lender of P's memory, where DATA moves outside the socket."""
        return self._lending

    def lend(self, lender: Lender) -> None:
        """Move DATA outside the socket from now on."""
        self._lending = Lending(lender)

    @property
    def waiting_since(self) -> float | None:
        """The time since which the next frame is being copied to a slab, or waits for one."""
        return None if self._outward is None else self._outward.since_s

    @property
    def is_in_frame(self) -> bool:
        """Whether a frame is partly sent."""
        return self._sending is not None

    @property
    def has_output(self) -> bool:
        """Whether something is not through yet, written or to be copied by the peer."""
        lends = self._lending is not None and self._lending.is_lending
        return self.can_write or lends or bool(self._data)

    @property
    def can_write(self) -> bool:
        """Whether something can be written now, if the socket takes it."""
        if self._sending is not None or self._control:
            return True
        return bool(self._data) and (self._lending is None or self._lending.has_room)

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
        """IllegalMoveError when no slab can take it."""
        staging = self._staging
        if staging is not None and self._lending is None and not is_on_host(frame.views):
            length = sum(map(len, frame.views))
            if length > staging.slab_bytes:
                raise IllegalMoveError(f"DATA body of {length} bytes: longer than a slab")
        self._data.append(frame)

    def check(self, now: float, limit_s: float) -> None:
        """FetchTimeoutError when the device takes too long with a frame."""
        if self._outward is not None:
            self._outward.check(now, limit_s)

    def write(self, now: float) -> bool:
        """Write one turn's worth; whether there is more to write. Errors end the connection."""
        if self._outward is not None and self._data:
            self._outward.gather(self._staged_frames(), now)
        budget = self._bounds.turn_bytes
        while budget > 0 and not self.is_closing:
            cursor = self._sending
            try:
                if cursor is None and self._control:
                    count = self._send_control()
                else:
                    cursor = cursor or (self._next_data(now) if self._data else None)
                    if cursor is None:
                        return False
                    # Over the budget rather than in two: a turn is summed up to be sent at once.
                    window = cursor.window(budget + TURN_BYTES)
                    count = self._sock.sendmsg(window, self._rights)
                    self._rights = ()
            except BlockingIOError:
                # Of a TLS handshake the peer's part may have to come first.
                return not (isinstance(self._sock, TlsSocket) and self._sock.waits_to_read)
            budget -= count
            self._counters.sent_bytes += count
            if cursor is None:
                continue
            left = cursor.advance(count)
            if self._unlogged is not None:
                self._log_sent(self._unlogged)
            if not left:
                self._finish_frame()
        return self.can_write

    def _send_control(self) -> int:
        """Send all control frames; how many bytes went. What the kernel does not take follows."""
        frames = b"".join(self._control)
        count = self._sock.send(frames)
        self._control.clear()
        self._control_bytes = 0
        if count < len(frames):
            self._sending = Cursor([memoryview(frames)[count:]])
        return count

    def _next_data(self, now: float) -> Cursor | Departure | None:
        """Begin with the next DATA frame, which waits while too much is lent, or with the REGION
        that goes before it; None: it cannot go yet."""
        lending = self._lending
        if lending is not None and self._owes_region(lending):
            return self._next_region(lending.lender)
        while self._data and (lending is None or lending.has_room):
            frame = self._data[0]
            views, length = frame.views, sum(map(len, frame.views))
            places = self._places(views, length)
            if places is None and self._outward is not None and not is_on_host(views):
                part = self._gathered(self._outward, now)
                if part is None:
                    return None
                views = [part]
            # Stays reachable for `abandon` until its header is made, which may raise.
            self._sending_data = self._data.popleft()
            self._is_shared = places is not None
            header = frame.make_header()
            if header is None:
                self._sending_data = None
                self._end_staged()
                frame.done(None)
                continue
            self._is_kv = isinstance(header, wire.Data)
            if places is not None:
                prefix = self._protocol.encode(shared_of(header), len(places))
                self._sending = Cursor([memoryview(prefix + places)])
            elif isinstance(header, wire.Data):
                prefix = self._protocol.encode(header, length + CHECKSUM_BYTES)
                self._sending = Departure(prefix, on_host(views))
            else:
                prefix = self._protocol.encode(header, length)
                self._sending = Cursor([memoryview(prefix), *on_host(views)])
            if isinstance(header, wire.Data) and _log.isEnabledFor(logging.DEBUG):
                self._unlogged = header
            return self._sending
        return None

    def _owes_region(self, lending: Lending) -> bool:
        """Whether REGION goes before the next frame, which is not on its way to a slab."""
        return bool(self._data) and not self._is_staged and not self._is_known(lending.lender)

    def _places(self, views: Sequence[View], length: int) -> bytes | None:
        """Where the next frame's bytes are lent; None: they go through the socket."""
        if self._lending is None or self._is_staged:
            return None
        most = max(1, length // self._protocol.block_bytes)
        return self._lending.lender.places(views, at_most=most)

    def _gathered(self, outward: Outward, now: float) -> memoryview | None:
        """The next frame's bytes, once they are here. A turn may send more frames than were
        gathered before it: with none under way the queue would not be read again."""
        outward.gather(self._staged_frames(), now)
        return outward.next()

    def _staged_frames(self) -> list[Sequence[View]]:
        """The frames at the head of the queue that go through slabs."""
        if self._lending is not None:
            if not self._is_known(self._lending.lender):
                return []  # Whether it is lent is said then.
            if self._sending_data is not None and self._is_shared:
                return []  # What `places` said last is still to be sent.
            head = self._data[0].views
            is_lent = self._lending.lender.places(head, at_most=len(head)) is not None
            return [] if is_lent or is_on_host(head) else [head]
        ahead = (frame.views for frame in islice(self._data, AHEAD))
        return list(takewhile(lambda views: not is_on_host(views), ahead))

    @property
    def _is_staged(self) -> bool:
        """Whether the next frame is on its way to a slab, and so to the socket."""
        return self._outward is not None and self._outward.is_gathering

    def _end_staged(self) -> None:
        if self._outward is not None:
            self._outward.sent()

    def _is_known(self, lender: Lender) -> bool:
        """Whether REGION has said what is so now."""
        return self._has_lent and not lender.has_news

    def _next_region(self, lender: Lender) -> Cursor:
        self._has_lent = True
        lent = lender.lent()
        prefix = self._protocol.encode(wire.Region(size_bytes=lent.size_bytes), len(lent.body))
        self._sending, self._rights = Cursor([memoryview(prefix + lent.body)]), lent.rights
        return self._sending

    def _finish_frame(self) -> None:
        sent, self._sending = self._sending, None
        frame, self._sending_data = self._sending_data, None
        if frame is None:
            return
        self._end_staged()
        if self._is_shared and self._lending is not None:
            length = sum(map(len, frame.views))
            self._counters.shared_bytes += length if self._is_kv else 0
            self._lending.lend(length, frame.done)
            return
        frame.done(sent.digest() if isinstance(sent, Departure) else NO_CHECKSUM)

    def _log_sent(self, header: wire.Data) -> None:
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

    def say_last_words(self, frames: bytes) -> None:
        """Try once to send what is queued and `frames`."""
        frames = b"".join(self._control) + frames
        if frames:
            # It is closed next in any case; a full or broken socket loses nothing but the reason.
            with contextlib.suppress(OSError):
                self._counters.sent_bytes += self._sock.send(frames)

    def abandon(self) -> list[Done]:
        """Let go of all views; the `done` of every frame not through."""
        lent = self._lending.close() if self._lending is not None else []
        if self._outward is not None:
            self._outward.close()
        frames = [self._sending_data] if self._sending_data is not None else []
        frames += self._data
        self._data.clear()
        self._control.clear()
        self._sending = self._sending_data = self._unlogged = None
        return lent + [frame.done for frame in frames]

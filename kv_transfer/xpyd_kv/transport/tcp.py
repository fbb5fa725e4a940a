"""The Endpoint over TCP: one I/O thread that listens, dials and moves frames for all peers.

A turn of its loop: wait, sockets, calls of other threads, timers, output, closings, the session's
tick. Whatever goes wrong on one connection ends that connection; the thread ends by `close` only.
The handshake and the frames are xpyd_kv.wire's, transfers are the Handler's.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from xpyd_core.errors import UserError
from xpyd_core.request_id import Address
from xpyd_kv.transport import sockets
from xpyd_kv.transport.api import Handler, Peer
from xpyd_kv.transport.counters import Counters
from xpyd_kv.transport.failure import count, is_auth_failure, reason_of
from xpyd_kv.transport.rate_limit import RateLimit
from xpyd_kv.transport.registry import Registry
from xpyd_kv.transport.selector import READ, WRITE, WakeableSelector
from xpyd_kv.transport.settings import Bounds, Deadlines, Identity
from xpyd_kv.transport.stream import ClosedByPeerError, DataFrame, Stream
from xpyd_kv.wire import errors
from xpyd_kv.wire.connection import Connection, Pulse
from xpyd_kv.wire.errors import IllegalMoveError
from xpyd_kv.wire.handshake import Terms
from xpyd_kv.wire.messages import Data, Goaway, Layout, Message

_log = logging.getLogger(__name__)
# Of a close's deadline this share is for flushing; the rest for closing and ending the thread.
_FLUSH_SHARE = 0.75
_TICK_AFTER_ERROR_S = 1.0
_END_ROUNDS = 8


def _random_nonce() -> bytes:
    return os.urandom(32)


class TcpEndpoint:
    """See xpyd_kv.transport.api.Endpoint.

    `listen` None: dials only. Port 0 takes a free one (`listen_address`). `source_host` is the
    literal ip that dialled connections come from ('' = the system's choice). `keys` are the fleet's
    (UserError when there is none). `clock` and `nonce` (32 random bytes) are replaced in tests.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        identity: Identity,
        layout: Layout,
        keys: tuple[bytes, ...],
        listen: Address | None = None,
        source_host: str = "",
        deadlines: Deadlines | None = None,
        bounds: Bounds | None = None,
        clock: Callable[[], float] = time.monotonic,
        nonce: Callable[[], bytes] = _random_nonce,
    ) -> None:
        if not keys:
            raise UserError("KV transfer needs a key: give --kv-key-file")
        self.counters = Counters()
        self._handler = handler
        self._identity = identity
        self._layout = layout
        self._keys = keys
        self._listen = listen
        self._source_host = source_host
        self._deadlines = deadlines or Deadlines()
        self._bounds = bounds or Bounds()
        self._clock = clock
        self._nonce = nonce
        self._selector = WakeableSelector()
        self._registry = Registry(self._deadlines.failed_auth_s)
        self._scratch = memoryview(bytearray(self._bounds.scratch_bytes))
        self._listener: socket.socket | None = None
        self._listen_again_at = math.inf
        self._dirty: dict[Stream, None] = {}
        self._to_close: deque[Stream] = deque()
        self._later: deque[Callable[[], None]] = deque()
        self._timer_at = math.inf
        self._tick_at = -math.inf
        self._session_ran = True
        self._junk_log = RateLimit()
        self._thread: threading.Thread | None = None
        self._flush_by: float | None = None
        self._has_ended = False

    @property
    def listen_address(self) -> Address | None:
        """Where it listens, once started."""
        return self._listen

    # --- from any thread

    def start(self) -> None:
        if self._thread is not None or self._has_ended:
            raise RuntimeError("an endpoint is started once")
        if self._listen is not None:
            self._listener = sockets.listen(self._listen)
            self._listen = sockets.bound_address(self._listener)
            self._selector.set(self._listener, READ, self._accept)
        self._thread = threading.Thread(target=self._run, name="xpyd-kv-io", daemon=True)
        self._thread.start()

    def close(self, deadline_s: float) -> None:
        if self._has_ended:
            return
        if self._thread is None:
            self._has_ended = True
            self._selector.close()
            return
        if self._thread is threading.current_thread():
            raise RuntimeError("close() waits for the thread that it was called on")
        flush_by = self._clock() + deadline_s * _FLUSH_SHARE
        self.call(lambda: self._begin_close(flush_by))
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            _log.error("the KV I/O thread has not ended within %.1f s", deadline_s)

    def call(self, function: Callable[[], None]) -> None:
        if not self._has_ended:
            self._selector.call(function)

    # --- on the I/O thread, for the session

    def connect(self, address: Address) -> Peer | None:
        self._check_thread()
        peer = self._registry.peer_at(address)
        if peer is not None or self._registry.is_dialling(address):
            return peer
        now = self._clock()
        if self._flush_by is not None:
            self._report_dial(address, "closed")
        elif self._registry.has_failed_auth(address, now):
            self._report_dial(address, "auth")
        else:
            self._dial(address, now)
        return None

    def send(self, peer: Peer, message: Message, body: bytes = b"") -> None:
        stream = self._stream(peer)
        if stream.closing is None:
            frame = stream.protocol.encode(message, len(body)) + body
            self._guard(stream, lambda: stream.queue_control(frame))
            self._dirty[stream] = None

    def disconnect(self, peer: Peer, reason: str) -> None:
        stream = self._stream(peer)
        _log.info("KV connection with %s is closed: %s", stream.remote, reason)
        self._end_stream(stream, reason)

    def send_data(
        self,
        peer: Peer,
        make_header: Callable[[bytes], Data | None],
        views: Sequence[memoryview],
        done: Callable[[bool], None],
    ) -> None:
        stream = self._stream(peer)
        if stream.closing is not None:
            self._later.append(lambda: done(False))
            return
        if sum(map(len, views)) > stream.protocol.max_data_bytes:
            raise IllegalMoveError("DATA body over the peer's limit")
        stream.queue_data(DataFrame(make_header, views, done))
        self._dirty[stream] = None

    def _stream(self, peer: Peer) -> Stream:
        self._check_thread()
        if not isinstance(peer, Stream):
            raise TypeError("not a peer of this endpoint")
        return peer

    def _check_thread(self) -> None:
        if threading.current_thread() is not self._thread:
            raise RuntimeError("only on the I/O thread: use call()")

    # --- the loop

    def _run(self) -> None:
        try:
            while self._flush_by is None or not self._is_flushed(self._flush_by):
                self._turn()
        except Exception:
            # A defect of the loop itself: the session must hear of it as closed peers.
            _log.exception("the KV I/O loop has failed")
        finally:
            self._end()

    def _turn(self) -> None:
        for ready, mask in self._selector.select(self._timeout_s()):
            ready(mask, self._clock())
        for function in self._selector.take_calls():
            self._run_session(function)
        now = self._clock()
        if now >= self._timer_at:
            self._run_timers(now)
        self._settle()
        if self._session_ran or now >= self._tick_at:
            self._tick(now)
            self._settle()

    def _timeout_s(self) -> float | None:
        if self._dirty or self._later or self._to_close or self._session_ran:
            return 0.0
        until = min(self._timer_at, self._tick_at, self._flush_by or math.inf)
        return None if until == math.inf else max(0.0, until - self._clock())

    def _settle(self) -> None:
        """Report what was put off, write what was queued, close what has ended."""
        for _ in range(len(self._later)):
            self._run_session(self._later.popleft())
        dirty, self._dirty = self._dirty, {}
        for stream in dirty:
            if not stream.wants_write and stream.connect_by is None:
                self._write(stream)
        for _ in range(len(self._to_close)):
            self._close_stream(self._to_close.popleft())

    def _tick(self, now: float) -> None:
        self._session_ran = False
        self._tick_at = now + _TICK_AFTER_ERROR_S
        try:
            tick_at = self._handler.tick(now)
            self._tick_at = math.inf if tick_at is None else tick_at
        except Exception:
            _log.exception("the session's tick has failed")

    def _run_timers(self, now: float) -> None:
        for stream in self._registry:
            if now >= stream.due:
                self._guard(stream, partial(stream.tick, now))
                self._dirty[stream] = None
        if self._listener is not None and now >= self._listen_again_at:
            self._listen_again_at = math.inf
            self._selector.set(self._listener, READ, self._accept)
        # A lower bound from here on: what a peer says moves its own time later, never earlier.
        dues = (stream.due for stream in self._registry)
        self._timer_at = min(dues, default=math.inf)
        self._timer_at = min(self._timer_at, self._listen_again_at)

    def _run_session(self, function: Callable[[], None]) -> None:
        self._session_ran = True
        try:
            function()
        except Exception:
            _log.exception("the session has failed in a call")

    def _guard(self, stream: Stream, action: Callable[[], object]) -> None:
        """Run what concerns `stream` only; an error ends it and nothing else."""
        if stream.closing is not None:
            return
        try:
            action()
        except Exception as error:
            self._fail(stream, error)
        self._session_ran = self._session_ran or stream.session_ran
        stream.session_ran = False

    # --- sockets

    def _accept(self, _mask: int, now: float) -> None:
        assert self._listener is not None
        for _ in range(self._bounds.accepts_per_turn):
            try:
                sock, name = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in sockets.OUT_OF_RESOURCES:
                    _log.warning("accept: %s; not accepting for a moment", error.strerror)
                    self._selector.set(self._listener, 0, self._accept)
                    self._listen_again_at = now + self._deadlines.listen_pause_s
                    self._timer_at = min(self._timer_at, self._listen_again_at)
                    return
                continue
            if self._registry.strangers >= self._bounds.strangers:
                crowd = errors.SilentPeerError("too many strangers")
                self._fail(self._registry.oldest_stranger(), crowd)
            self._add(sock, now, remote=str(name[0]))

    def _dial(self, address: Address, now: float) -> None:
        try:
            sock = sockets.dial(address, self._source_host)
        except ValueError:
            self._report_dial(address, "refused:address")
        except OSError:
            self._report_dial(address, "unreachable")
        else:
            self._add(sock, now, remote=str(address), address=address)

    def _add(
        self, sock: socket.socket, now: float, *, remote: str, address: Address | None = None
    ) -> None:
        times = self._deadlines
        terms = Terms(self._identity.hello(self._nonce()), self._layout, self._keys)
        pulse = Pulse(times.ping_s, times.missed_pings)
        open_by = now + times.connect_s + times.auth_s
        stream = Stream(
            sock,
            Connection(terms, dialler=address is not None, deadline=open_by, pulse=pulse),
            handler=self._handler,
            bounds=self._bounds,
            counters=self.counters,
            scratch=self._scratch,
            opened=self._opened,
            remote=remote,
            address=address,
            connect_by=None if address is None else now + times.connect_s,
        )
        self._registry.add(stream)
        self._timer_at = min(self._timer_at, stream.due)
        self._guard(stream, partial(sockets.prepare, sock))
        self._watch(stream, READ if address is None else WRITE)
        self._count_connections()

    def _watch(self, stream: Stream, mask: int) -> None:
        stream.wants_write = bool(mask & WRITE)
        self._selector.set(stream.sock, mask, partial(self._ready, stream))

    def _ready(self, stream: Stream, mask: int, now: float) -> None:
        if stream.connect_by is not None:
            self._guard(stream, partial(self._connected, stream, now))
            return
        if mask & READ:
            self._guard(stream, partial(stream.read, now))
            # What it read may have been answered at once: PONG, the handshake.
            self._dirty[stream] = None
        if mask & WRITE:
            self._write(stream)

    def _connected(self, stream: Stream, now: float) -> None:
        error = sockets.dial_error(stream.sock)
        if error is not None:
            raise error
        stream.connected()
        self._timer_at = min(self._timer_at, stream.due)
        self._watch(stream, READ)
        self._dirty[stream] = None

    def _write(self, stream: Stream) -> None:
        def write() -> None:
            if stream.write() != stream.wants_write:
                self._watch(stream, READ if stream.wants_write else READ | WRITE)

        self._guard(stream, write)

    # --- peers come and go

    def _opened(self, stream: Stream) -> None:
        """The handshake has succeeded. Raises where we have no room."""
        if self._registry.num_peers >= self._bounds.connections:
            raise stream.protocol.refuse(errors.LIMIT)
        self._timer_at = min(self._timer_at, stream.due)
        older = self._registry.open(stream)
        if older is not None:
            self._end_stream(older, "replaced")
        self._count_connections()
        _log.info("KV peer %s at %s is up", stream.hello.engine_id, stream.remote)
        stream.is_up = stream.session_ran = True
        self._handler.peer_up(stream)

    def _fail(self, stream: Stream, error: Exception) -> None:
        """End `stream` because of `error`."""
        count(self.counters, stream, error)
        reason = reason_of(error, was_open=stream.is_up)
        if reason == "internal":
            _log.error("the session has failed on a KV connection", exc_info=error)
        if is_auth_failure(error) and stream.address is not None:
            self._registry.remember_failed_auth(stream.address, self._clock())
        self._log_end(stream, error)
        self._end_stream(stream, reason)

    def _log_end(self, stream: Stream, error: Exception) -> None:
        if stream.is_up or stream.address is not None:
            level = logging.INFO if isinstance(error, ClosedByPeerError) else logging.WARNING
            _log.log(level, "KV connection with %s ends: %s", stream.remote, error)
            return
        # A stranger: whoever only connects (a probe) is not worth a line.
        left_out = None if isinstance(error, OSError) else self._junk_log.take(self._clock())
        if left_out is not None:
            text = "KV connection from %s refused: %s (%d more like it before)"
            _log.warning(text, stream.remote, error, left_out)

    def _end_stream(self, stream: Stream, reason: str) -> None:
        """From here on `stream` is nobody's peer; it is closed and reported in `_settle`."""
        if stream.closing is None:
            stream.closing = reason
            self._registry.remove(stream)
            self._count_connections()
            self._to_close.append(stream)

    def _close_stream(self, stream: Stream) -> None:
        stream.say_last_words()
        self._selector.set(stream.sock, 0, partial(self._ready, stream))
        for done in stream.abandon():
            self._run_session(partial(done, False))
        reason = stream.closing or ""
        if stream.is_up:
            self._run_session(partial(self._handler.peer_down, stream, reason))
        elif stream.address is not None:
            self._run_session(partial(self._handler.dial_failed, stream.address, reason))

    def _report_dial(self, address: Address, reason: str) -> None:
        self._later.append(partial(self._handler.dial_failed, address, reason))

    def _count_connections(self) -> None:
        self.counters.connections = self._registry.num_peers
        self.counters.strangers = self._registry.strangers

    # --- the end

    def _begin_close(self, flush_by: float) -> None:
        self._flush_by = flush_by
        self._close_listener()
        for stream in self._registry:
            if stream.is_up:
                self.send(stream, Goaway(reason="closing"))
            else:
                self._end_stream(stream, "closed")

    def _is_flushed(self, flush_by: float) -> bool:
        return self._clock() >= flush_by or not any(s.has_output for s in self._registry)

    def _close_listener(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            self._selector.set(listener, 0, self._accept)
            listener.close()

    def _end(self) -> None:
        self._flush_by = self._clock()
        self._close_listener()
        for stream in self._registry:
            self._end_stream(stream, "closed")
        # Rounds, since what is reported may be answered; bounded, should it be so for ever.
        for _ in range(_END_ROUNDS):
            self._settle()
        self._has_ended = True
        self._selector.close()

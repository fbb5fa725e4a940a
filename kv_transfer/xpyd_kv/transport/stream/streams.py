"""All connections of one endpoint: their sockets' readiness, timers, failures and ends.

Whatever goes wrong on one of them ends that one. An end is decided at once and carried out in
`settle`, so that the session is never called inside another of its calls. Listening and dialling
are the endpoint's. For the data path `striped` a peer has further connections.
"""

from __future__ import annotations

import logging
import math
import socket
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

from xpyd_core.errors import ProtocolError
from xpyd_core.request_id import Address
from xpyd_kv.metrics import EndpointCounters, RateLimit, RateLimits
from xpyd_kv.transport.api import Handler
from xpyd_kv.transport.devices.staging import Staging
from xpyd_kv.transport.host.data_path import DataPath
from xpyd_kv.transport.host.sharing import PathError
from xpyd_kv.transport.settings import Bounds, Timeouts
from xpyd_kv.transport.stream import registry as links
from xpyd_kv.transport.stream import sockets
from xpyd_kv.transport.stream.registry import MISMATCHES, Quarantine, Registry
from xpyd_kv.transport.stream.sockets import READ, WRITE, WakeableSelector
from xpyd_kv.transport.stream.stream import ClosedByPeerError, Stream
from xpyd_kv.transport.stream.tls import TlsSocket
from xpyd_kv.transport.stream.writer import DataFrame, SlowReaderError
from xpyd_kv.wire import errors
from xpyd_kv.wire.connection import Connection, Pulse
from xpyd_kv.wire.errors import RefusedError, SilentPeerError
from xpyd_kv.wire.handshake import LENT, Terms


def is_lasting(error: Exception) -> bool:
    """Whether another dial soon would be refused for the same reason."""
    return isinstance(error, RefusedError) and error.reason in (errors.AUTH, errors.QUARANTINE)


def failed_path(error: Exception) -> str:
    """The name of the data path whose lent memory the peer could not open; '' for any other
    error."""
    if not isinstance(error, RefusedError) or not error.by_peer:
        return ""
    return error.factor if error.reason == errors.TRANSPORT and error.factor in LENT else ""


def reason_of(error: Exception, *, was_open: bool) -> str:
    """The reason for `dial_failed` and `peer_down`: nothing of what the peer sent but a factor."""
    if isinstance(error, RefusedError):
        if error.reason == errors.AUTH:
            return "auth"
        if error.reason == errors.INCOMPATIBLE:
            return f"incompatible:{error.factor}"
        return f"refused:{error.reason}"
    if isinstance(error, TimeoutError) and not was_open:
        return "no_answer"
    if isinstance(error, SilentPeerError | TimeoutError):
        return "timeout"
    if isinstance(error, ProtocolError):
        return "protocol"
    if isinstance(error, SlowReaderError):
        return "slow_reader"
    if isinstance(error, ClosedByPeerError) and was_open:
        return "closed_by_peer"
    if isinstance(error, OSError):
        return "lost" if was_open else "unreachable"
    return "internal"


def count(counters: EndpointCounters, stream: Stream, error: Exception) -> None:
    """Enter the end of `stream` by `error` where it belongs."""
    if isinstance(error, RefusedError):
        counters.auth_failed += error.reason == errors.AUTH
        counters.refused.add(error.factor or error.reason)
    elif isinstance(error, SlowReaderError):
        counters.silent_peers += 1
    elif isinstance(error, ProtocolError):
        if not stream.is_up:
            counters.junk_connections += stream.address is None
        elif isinstance(error, SilentPeerError):
            counters.silent_peers += 1
        else:
            counters.protocol_errors += 1


_log = logging.getLogger(__name__)
_TICK_AFTER_ERROR_S = 1.0


class SessionCalls:
    """Calls of the Handler, none inside another, and when its tick is due."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.calls_later: deque[Callable[[], None]] = deque()
        """The calls that wait until the call that runs now has returned."""
        self.tick_at = -math.inf
        """The latest time at which `tick` has something to do."""

    def run(self, function: Callable[[], None]) -> None:
        """Make a call now; no other call of the session may be running."""
        self.run_all(deque((function,)))

    def run_all(self, calls: deque[Callable[[], None]]) -> None:
        """Make these calls; calls that are added meanwhile wait for the next time."""
        for _ in range(len(calls)):
            function = calls.popleft()
            try:
                function()
            except Exception:
                _log.exception("the session has failed in a call")

    def run_later(self, function: Callable[[], None]) -> None:
        """Make a call when the call that runs now has returned."""
        self.calls_later.append(function)

    def tick(self, now: float) -> None:
        """The session's tick, once in a turn: what it asks for costs a comparison."""
        self.tick_at = now + _TICK_AFTER_ERROR_S
        try:
            tick_at = self.handler.tick(now)
            self.tick_at = math.inf if tick_at is None else tick_at
        except Exception:
            _log.exception("the session's tick has failed")


# Fetches that another thread or device carries out are looked at without a pause while they are
# this young, then at each waking of the selector, which is a millisecond at least.
_EAGER_S = 0.001
_POLL_S = 0.001


@dataclass(frozen=True)
class Context:
    """The values that the parts of one endpoint share."""

    terms: Callable[[tuple[str, ...], Collection[str], bool], Terms]
    """Our side of a new connection, with a nonce of its own; given what its socket can carry, what
    to do without, and whether we dial as one rank does another."""
    session: SessionCalls
    selector: WakeableSelector
    counters: EndpointCounters
    timeouts: Timeouts
    bounds: Bounds
    clock: Callable[[], float]
    paths: Mapping[str, DataPath]
    """The data paths, by name."""
    staging: Staging | None
    """The staging of device memory that moves through sockets."""
    connections: int
    """Further ones that a P makes to each D for `striped`."""
    source_host: str


class Streams:
    """The I/O thread's connections."""

    def __init__(self, context: Context) -> None:
        times = context.timeouts
        self.registry = Registry(times.failed_auth_s, times.path_retry_s)
        self._quarantine = Quarantine(window_s=times.mismatch_window_s, for_s=times.quarantine_s)
        self._context = context
        self._scratch = memoryview(bytearray(context.bounds.scratch_bytes))
        self.dirty: dict[Stream, None] = {}
        """Connections that have bytes to write, for `settle`."""
        self.to_close: deque[Stream] = deque()
        """Connections that have ended, for `settle`."""
        self.timers_at = math.inf
        """When `run_timers` has something to do, at the earliest."""
        self._timer_at = math.inf
        # Those with fetches under way, and when to look at them.
        self._fetching: dict[Stream, None] = {}
        self._poll_at = math.inf
        self._junk_log = RateLimit()
        self._refusal_log = RateLimits()

    def add(
        self,
        sock: socket.socket,
        now: float,
        *,
        remote: str,
        address: Address | None = None,
        data: bool = False,
        main: Stream | None = None,
        number: int = 0,
    ) -> None:
        """A new connection: accepted, or being dialled to `address` (`data`: as one rank does
        another); the further one of this `number` of `main`."""
        context, times = self._context, self._context.timeouts
        without = self.registry.avoided(address, now) if address is not None else ()
        terms = context.terms(sockets.usable(sock), without, data)
        if isinstance(sock, TlsSocket):
            terms = replace(terms, binding=sock.binding)
        protocol = Connection(
            terms if address is None else links.of_group(terms, main, number),
            dialler=address is not None,
            deadline=now + times.connect_s + times.auth_s,
            pulse=Pulse(times.ping_s, times.missed_pings),
        )
        stream = Stream(
            sock,
            protocol,
            handler=context.session.handler,
            bounds=context.bounds,
            counters=context.counters,
            scratch=self._scratch,
            opened=self._opened,
            mismatch=self._mismatch,
            remote=remote,
            paths=context.paths,
            fetch_s=times.fetch_s,
            staging=context.staging,
            address=address,
            connect_by=None if address is None else now + times.connect_s,
            main=main,
        )
        if address is None and self.registry.strangers >= context.bounds.strangers:
            crowd = errors.SilentPeerError("too many strangers")
            self._fail(self.registry.oldest_stranger(), crowd)
        self.registry.add(stream)
        self._count()
        self._wake_by(stream.due)
        self.guard(stream, partial(sockets.prepare, sock))
        self._watch(stream, READ if address is None else WRITE)

    def send(self, stream: Stream, frame: bytes) -> None:
        """A control frame, for `settle` to write. A stream whose queue is full ends."""
        try:
            stream.writer.queue_control(frame)
        except SlowReaderError as error:
            self._fail(stream, error)
        self.dirty[stream] = None

    def send_data(self, stream: Stream, frame: DataFrame) -> None:
        """A DATA frame, likewise. IllegalMoveError when it can never be sent."""
        stream.writer.queue_data(frame)
        self.dirty[stream] = None

    def guard(self, stream: Stream, action: Callable[[], object]) -> None:
        """Run what concerns `stream` only; an error ends it and nothing else."""
        if stream.closing is not None:
            return
        try:
            action()
        except Exception as error:
            self._fail(stream, error)

    def run_timers(self, now: float) -> None:
        """PINGs, deadlines, and what was fetched meanwhile."""
        if now >= self._poll_at:
            self._poll_fetches(now)
        if now < self._timer_at:
            self.timers_at = min(self._timer_at, self._poll_at)
            return
        for stream in self.registry:
            if now >= stream.due:
                if stream.may_have_more:
                    # They show that the peer lives.
                    self._ready(stream, READ, now)
                self.guard(stream, partial(stream.tick, now))
                self.dirty[stream] = None
        # A lower bound from here on: what a peer says moves its own time later, never earlier.
        self._timer_at = min((stream.due for stream in self.registry), default=math.inf)
        self.timers_at = min(self._timer_at, self._poll_at)

    def _wake_by(self, at: float) -> None:
        self._timer_at = min(self._timer_at, at)
        self.timers_at = min(self.timers_at, at)

    def _poll_fetches(self, now: float) -> None:
        fetching, self._fetching, self._poll_at = self._fetching, {}, math.inf
        for stream in fetching:
            self.guard(stream, partial(stream.poll, now))
            self.dirty[stream] = None
            if stream.closing is None and stream.resume():
                self._watch(stream, READ | WRITE if stream.wants_write else READ)
                self._wake_by(stream.due)
                if stream.holds_more:
                    self._ready(stream, READ, now)
            self._note_fetches(stream, now)

    def _note_fetches(self, stream: Stream, now: float) -> None:
        since_s = stream.waiting_since
        if since_s is None or stream.closing is not None:
            return
        self._fetching[stream] = None
        # Whose data path wakes us need not be looked at.
        is_young = now < since_s + _EAGER_S and stream.transport != links.NAME
        self._poll_at = min(self._poll_at, now if is_young else now + _POLL_S)
        self.timers_at = min(self.timers_at, self._poll_at)

    def settle(self) -> None:
        """Write what was queued, close what has ended."""
        dirty, self.dirty = self.dirty, {}
        for stream in dirty:
            if not stream.wants_write and stream.connect_by is None:
                self._write(stream)
                # A write goes on until all is written that came meanwhile, or the socket is full.
                self.dirty.pop(stream, None)
        for _ in range(len(self.to_close)):
            self._close(self.to_close.popleft())

    def end(self, stream: Stream, reason: str) -> None:
        """Remove `stream` from the registry; `settle` closes and reports it."""
        if stream.closing is None:
            stream.end(reason)
            self.registry.remove(stream)
            if stream.is_up:
                self._context.counters.connections_by[stream.transport] -= 1
            self._count()
            self.to_close.append(stream)

    # --- sockets

    def _watch(self, stream: Stream, mask: int) -> None:
        stream.wants_write = bool(mask & WRITE)
        self._context.selector.set(stream.sock, mask, partial(self._ready, stream))

    def _ready(self, stream: Stream, mask: int, now: float) -> None:
        if stream.connect_by is not None:
            self.guard(stream, partial(self._connected, stream))
            return
        if mask & READ:
            self.guard(stream, partial(stream.read, now))
            if stream.may_fetch or stream.writer.can_write:
                # What it read was answered at once (PONG, the handshake), or gave room to lend.
                self.dirty[stream] = None
            if stream.paused_since is not None:
                self._watch(stream, WRITE if stream.wants_write else 0)
            if stream.may_fetch:
                self._note_fetches(stream, now)
        if mask & WRITE:
            self._write(stream)

    def _connected(self, stream: Stream) -> None:
        error = sockets.dial_error(stream.sock)
        if error is not None:
            raise error
        stream.connected()
        self._watch(stream, READ)
        self.dirty[stream] = None

    def _write(self, stream: Stream) -> None:
        if stream.closing is not None:
            return
        now = self._context.clock()
        try:
            wants_write = stream.writer.write(now)
            if wants_write != stream.wants_write:
                reads = READ if stream.paused_since is None else 0
                self._watch(stream, reads | WRITE if wants_write else reads)
        except ConnectionError as error:
            # The peer is gone; what it has said before, a REFUSE perhaps, says more.
            self.guard(stream, partial(stream.read, now))
            if stream.closing is None:
                self._fail(stream, error)
        except Exception as error:
            self._fail(stream, error)
        if stream.may_fetch:
            self._note_fetches(stream, now)

    # --- peers come and go

    def _opened(self, stream: Stream) -> None:
        """The handshake has succeeded. Raises where we have no room."""
        context = self._context
        if links.is_further(stream):
            self._attach(stream)
            return
        if self.registry.num_peers >= context.bounds.connections:
            raise stream.protocol.refuse(errors.LIMIT)
        if self._quarantine.holds(stream.hello.engine_id, context.clock()):
            raise stream.protocol.refuse(errors.QUARANTINE)
        self._wake_by(stream.due)
        older = self.registry.open(stream)
        if older is not None:
            self.end(older, "replaced")
        self._count()
        name = stream.transport
        for counts in (context.counters.opened, context.counters.connections_by):
            counts[name] = counts.get(name, 0) + 1
        _log.info("KV peer %s at %s is up over %s", stream.hello.engine_id, stream.remote, name)
        stream.is_up = True
        context.session.handler.peer_up(stream)
        if stream.address is not None and stream.transport == links.NAME:
            self._dial_links(stream, stream.address)

    def _dial_links(self, main: Stream, address: Address) -> None:
        """The connections that DATA of this D goes over; without one of them it takes `main`."""
        now = self._context.clock()
        for number in range(1, self._context.connections + 1):
            try:
                sock = sockets.dial(address, self._context.source_host)
            except OSError as error:
                _log.warning("KV peer at %s: a further connection failed: %s", main.remote, error)
                return
            self.add(
                sock,
                now,
                remote=main.remote,
                address=address,
                data=main.is_data,
                main=main,
                number=number,
            )

    def _attach(self, stream: Stream) -> None:
        """A further connection is the data path's from now on. Raises where it has no peer."""
        main = links.main_of(stream, self.registry.peer_of(stream.hello))
        # P's LAYOUT, which its first job must not overtake.
        stream.writer.write(self._context.clock())
        main.attach(links.number_of(stream), stream.sock)
        self._watch(stream, 0)
        self.registry.remove(stream)
        stream.end("attached")
        self._count()

    def _mismatch(self, stream: Stream, now: float) -> bool:
        engine_id = stream.hello.engine_id
        if not self._quarantine.mismatch(engine_id, now):
            return False
        self._context.counters.quarantines += 1
        text = "KV peer %s at %s is refused for %g s: %d frames of it came broken"
        for_s = self._context.timeouts.quarantine_s
        _log.warning(text, engine_id, stream.remote, for_s, MISMATCHES)
        return True

    def _fail(self, stream: Stream, error: Exception) -> None:
        """End `stream` because of `error`."""
        if isinstance(error, PathError):
            error = self._refuse_path(stream, error)
        count(self._context.counters, stream, error)
        reason = reason_of(error, was_open=stream.is_up)
        if stream.address is not None:
            self._learn(stream.address, error, reason)
        self._log_end(stream, error, reason)
        stream.detail = error.detail if isinstance(error, RefusedError) else str(error)
        self.end(stream, reason)

    def _refuse_path(self, stream: Stream, error: PathError) -> RefusedError:
        """Refuse a data path: D cannot open or read what P lends, and P does not lend it for a
        while."""
        self._context.counters.paths_failed.add(stream.transport)
        text = "KV over %s from %s does not work here: %s; the peer has to use another"
        _log.warning(text, stream.transport, stream.remote, error)
        return stream.protocol.refuse(errors.TRANSPORT, factor=stream.transport)

    def _learn(self, address: Address, error: Exception, reason: str) -> None:
        now = self._context.clock()
        if is_lasting(error):
            self.registry.remember_refusal(address, reason, now)
        path = failed_path(error)
        if path:
            self.registry.avoid(address, path, now)
            self._context.counters.paths_failed.add(path)
            text = "KV peer at %s cannot use %s; not offered to it for %g s"
            _log.warning(text, address, path, self._context.timeouts.path_retry_s)

    def _log_end(self, stream: Stream, error: Exception, reason: str) -> None:
        now, refused = self._context.clock(), isinstance(error, RefusedError)
        if reason == "internal":
            _log.error("the session has failed on a KV connection", exc_info=error)
        elif stream.is_up:
            level = logging.INFO if isinstance(error, ClosedByPeerError) else logging.WARNING
            _log.log(level, "KV connection with %s ends: %s", stream.remote, error)
        elif stream.address is not None:
            # Every request would dial again, and fail alike.
            left_out = self._refusal_log.take((stream.address, reason), now)
            if left_out is not None:
                text = "KV connection to %s failed: %s (%d more like it before)"
                _log.warning(text, stream.remote, error, left_out)
        elif not isinstance(error, OSError):
            # A stranger; one that only connects and leaves (a probe) is not worth a line.
            left_out = self._refusal_log.take(reason, now) if refused else self._junk_log.take(now)
            if left_out is not None:
                text = "KV connection from %s refused: %s (%d more like it before)"
                _log.warning(text, stream.remote, error, left_out)

    def _close(self, stream: Stream) -> None:
        session = self._context.session
        stream.say_last_words()
        self._watch(stream, 0)
        for done in stream.abandon():
            session.run(partial(done, None))
        reason = stream.closing or ""
        if stream.is_up:
            session.run(partial(session.handler.peer_down, stream, reason))
        elif stream.address is not None and stream.main is None:
            failed = session.handler.dial_failed
            session.run(partial(failed, stream.address, reason, stream.detail))

    def _count(self) -> None:
        self._context.counters.connections = self.registry.num_peers
        self._context.counters.strangers = self.registry.strangers

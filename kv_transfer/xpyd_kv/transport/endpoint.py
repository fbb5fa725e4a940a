"""The Endpoint over sockets: one I/O thread that listens, dials and moves frames for all peers.

A turn of its loop: wait, sockets, calls of other threads, timers, output and closings, the
session's tick. The thread ends by `close` only. The handshake and the frames are xpyd_kv.wire's,
transfers are the Handler's.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from xpyd_core.errors import UserError
from xpyd_core.keys import INSECURE_KEYS, Keys
from xpyd_core.request_id import Address
from xpyd_kv.memory.device import View
from xpyd_kv.metrics import EndpointCounters
from xpyd_kv.transport.api import Done, Handler, Peer
from xpyd_kv.transport.body import ProbeSource
from xpyd_kv.transport.devices.staging import Staging
from xpyd_kv.transport.host.data_path import DataPath
from xpyd_kv.transport.host.striped import StripedPath
from xpyd_kv.transport.settings import (
    TRANSPORTS,
    Bounds,
    Identity,
    Timeouts,
    check_encrypted,
    offered,
)
from xpyd_kv.transport.stream import sockets
from xpyd_kv.transport.stream.listeners import Listeners, SocketFolder
from xpyd_kv.transport.stream.sockets import WakeableSelector
from xpyd_kv.transport.stream.stream import Stream
from xpyd_kv.transport.stream.streams import Context, SessionCalls, Streams
from xpyd_kv.transport.stream.tls import Encryption
from xpyd_kv.transport.stream.writer import DataFrame
from xpyd_kv.wire.errors import IllegalMoveError
from xpyd_kv.wire.handshake import DIALLER_ROLE, OVER_TCP, OVER_UNIX, Takes, Terms
from xpyd_kv.wire.messages import Data, Goaway, Hello, Layout, Message

_log = logging.getLogger(__name__)
# Of a close's deadline this share is for flushing; the rest for closing and ending the thread.
_FLUSH_SHARE = 0.75
# What is reported at the end may be answered, and that too; not for ever.
_END_ROUNDS = 8
_WRONG_THREAD = "only on the I/O thread: use call()"


def _random_nonce() -> bytes:
    return os.urandom(32)


def _woken() -> None:
    """The turn itself looks at what has been fetched."""


def _nothing(_checksum: bytes | None) -> None:
    """Nobody waits for a PROBE's bytes to be through."""


class TcpEndpoint:
    """See xpyd_kv.transport.api.Endpoint.

    `takes`: whose connections it takes. `listen` None: dials only. Port 0 takes a free one
    (`listen_address`). `source_host` is the literal ip that dialled connections come from ('' =
    the system's choice). `keys` are the fleet's (UserError when there is none). `transports`
    may be used, where they can be: `uds` and `shm` need `socket_dir`, the folder of Unix
    sockets that the instances of this machine share; all but `uds` and `tcp` need their data
    path in `paths`, which on P must have memory to lend, and `probe_room` is a piece of that
    memory for PROBEs. `connections` is how many further ones a P makes to each D (`striped`); 0
    (and with `staging`): none, and a D takes none.
    A cache on a GPU needs `staging` for the sockets, whose slabs on D hold the longest frame that
    `layout` allows and one read. `encrypted`: over TLS, which goes with the transport `tcp` alone
    and needs a key (UserError). `clock` and `nonce` (32 random bytes) are replaced in tests.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        identity: Identity,
        layout: Layout,
        keys: Keys,
        takes: Takes = "both",
        listen: Address | None = None,
        source_host: str = "",
        transports: tuple[str, ...] = TRANSPORTS,
        socket_dir: Path | None = None,
        paths: Sequence[DataPath] = (),
        staging: Staging | None = None,
        connections: int = 0,
        probe_room: memoryview | None = None,
        encrypted: bool = False,
        timeouts: Timeouts | None = None,
        bounds: Bounds | None = None,
        counters: EndpointCounters | None = None,
        clock: Callable[[], float] = time.monotonic,
        nonce: Callable[[], bytes] = _random_nonce,
    ) -> None:
        if not keys:
            raise UserError("KV transfer needs a key: give --kv-key-file, or --kv-insecure")
        if encrypted:
            check_encrypted(transports, connections=connections, insecure=INSECURE_KEYS[0] in keys)
        self._encryption = Encryption() if encrypted else None
        self.counters = counters or EndpointCounters()
        self._clock = clock
        self._listen = listen
        self._source_host = source_host
        # Its threads reach host memory only.
        if connections and staging is None:
            paths = (*paths, StripedPath(connections, partial(self.call, _woken)))
        self._transports = offered(
            transports,
            has_folder=socket_dir is not None,
            lent=[path.name for path in paths if path.lends or identity.role != DIALLER_ROLE],
        )
        self._socket_dir = socket_dir if set(OVER_UNIX) & set(self._transports) else None
        self._folder: SocketFolder | None = None
        self._timeouts = timeouts or Timeouts()
        self._bounds = bounds or Bounds()
        longest = max(layout.max_data_bytes, layout.block_bytes) + self._bounds.scratch_bytes
        if staging is not None and identity.role != DIALLER_ROLE and staging.slab_bytes < longest:
            raise UserError(f"staging: slabs of at least {longest} bytes are needed")
        self._probe = ProbeSource(probe_room)
        self._session = SessionCalls(handler)
        self._selector = WakeableSelector()
        by_name = {path.name: path for path in paths}

        def can_use(transport: str, theirs: Hello) -> bool:
            return transport not in by_name or by_name[transport].can_use(theirs)

        context = Context(
            terms=lambda usable, without, data: Terms(
                identity.hello(
                    nonce(),
                    tuple(name for name in self._transports if name not in without),
                    data=data,
                ),
                layout,
                keys,
                usable,
                can_use,
                takes,
            ),
            session=self._session,
            selector=self._selector,
            counters=self.counters,
            timeouts=self._timeouts,
            bounds=self._bounds,
            clock=clock,
            paths=by_name,
            staging=staging,
            connections=connections,
            source_host=source_host,
        )
        self._streams = Streams(context)
        self._listeners = Listeners(
            self._selector,
            lambda sock, now, remote: self._streams.add(
                self._encryption.accepted(sock) if self._encryption else sock, now, remote=remote
            ),
            per_turn=self._bounds.accepts_per_turn,
            pause_s=self._timeouts.listen_pause_s,
        )
        self._thread: threading.Thread | None = None
        self._ident = 0  # The thread's, while it runs.
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
        if self._socket_dir is not None:
            self._folder = SocketFolder(self._socket_dir)
        if self._listen is not None:
            self._listen = self._listeners.open(self._listen, self._folder)
        self._thread = threading.Thread(target=self._run, name="xpyd-kv-io", daemon=True)
        self._thread.start()

    def close(self, deadline_s: float) -> bool:
        if self._has_ended:
            return True
        if self._thread is None:
            self._release()
            return True
        if self._thread is threading.current_thread():
            raise RuntimeError("close() waits for the thread that it was called on")
        flush_by = self._clock() + deadline_s * _FLUSH_SHARE
        self.call(lambda: self._begin_close(flush_by))
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            _log.error("the KV I/O thread has not ended within %.1f s", deadline_s)
            return False
        return True

    def call(self, function: Callable[[], None]) -> None:
        if not self._has_ended:
            self._selector.call(function)

    # --- on the I/O thread, for the session

    def connect(self, address: Address, *, data: bool = False) -> Peer | None:
        if threading.get_ident() != self._ident:
            raise RuntimeError(_WRONG_THREAD)
        registry, now = self._streams.registry, self._clock()
        peer = registry.peer_at(address)
        if peer is not None or registry.is_dialling(address):
            return peer
        if self._flush_by is not None:
            self._report_dial(address, "closed")
        elif refusal := registry.refusal(address, now):
            self._report_dial(address, refusal)
        else:
            self._dial(address, now, data=data)
        return None

    def disconnect(self, peer: Peer, reason: str) -> None:
        stream = self._stream(peer)
        _log.info("KV connection with %s is closed: %s", stream.remote, reason)
        self._streams.end(stream, reason)

    def send(self, peer: Peer, message: Message, body: bytes = b"") -> None:
        stream = self._stream(peer)
        if stream.closing is None:
            self._streams.send(stream, stream.protocol.encode(message, len(body)) + body)

    def send_data(
        self,
        peer: Peer,
        make_header: Callable[[], Data | None],
        views: Sequence[View],
        done: Done,
    ) -> None:
        stream = self._stream(peer)
        if stream.closing is not None:
            self._session.run_later(partial(done, None))
            return
        if sum(map(len, views)) > stream.protocol.max_data_bytes:
            raise IllegalMoveError("DATA over the peer's limit")
        self._streams.send_data(stream, DataFrame(make_header, views, done))

    @property
    def probe_bytes(self) -> int:
        return sum(map(len, self._probe.views))

    def send_probe(self, peer: Peer, token: int) -> bytes:
        stream, source = self._stream(peer), self._probe
        if stream.closing is None:
            frame = DataFrame(source.header(token), source.views, _nothing)
            self._streams.send_data(stream, frame)
        return source.digest

    def _stream(self, peer: Peer) -> Stream:
        if threading.get_ident() != self._ident:
            raise RuntimeError(_WRONG_THREAD)
        if not isinstance(peer, Stream):
            raise TypeError("not a peer of this endpoint")
        return peer

    # --- the loop

    def _run(self) -> None:
        self._ident = threading.get_ident()
        try:
            while self._flush_by is None or not self._is_flushed(self._flush_by):
                self._turn()
        except Exception:
            # A defect of the loop itself: the session must hear of it as closed peers.
            _log.exception("the KV I/O loop has failed")
        finally:
            self._end()

    def _turn(self) -> None:
        calls, session, streams = self._selector.calls, self._session, self._streams
        timeout_s: float | None = 0.0
        if not (session.calls_later or streams.dirty or streams.to_close):
            until = min(streams.timers_at, session.tick_at, self._listeners.due)
            if self._flush_by is not None:
                until = min(until, self._flush_by)
            timeout_s = None if until == math.inf else max(0.0, until - self._clock())
        for ready, mask in self._selector.select(timeout_s):
            ready(mask, self._clock())
        if calls:
            session.run_all(calls)
        now = self._clock()
        if now >= streams.timers_at:
            streams.run_timers(now)
        if now >= self._listeners.due:
            self._listeners.run_timers(now)
        if session.calls_later:
            session.run_all(session.calls_later)
        if streams.dirty or streams.to_close:
            streams.settle()
        # Last: what has run above may have set the session's deadlines.
        session.tick(now)

    # --- dialling

    def _dial(self, address: Address, now: float, *, data: bool) -> None:
        sock = self._folder.dial(address) if self._folder is not None else None
        try:
            if sock is None and not set(OVER_TCP) & set(self._transports):
                raise FileNotFoundError(f"no socket of {address} in --kv-socket-dir")
            sock = sock or sockets.dial(address, self._source_host)
            if self._encryption is not None:
                sock = self._encryption.dialled(sock)
        except ValueError:
            self._report_dial(address, "refused:address")
        except FileNotFoundError as error:
            self._report_dial(address, "no_socket", str(error))
        except OSError as error:
            self._report_dial(address, "unreachable", str(error))
        else:
            self._streams.add(sock, now, remote=str(address), address=address, data=data)

    def _report_dial(self, address: Address, reason: str, detail: str = "") -> None:
        self._session.run_later(partial(self._session.handler.dial_failed, address, reason, detail))

    # --- the end

    def _begin_close(self, flush_by: float) -> None:
        self._flush_by = flush_by
        self._listeners.close()
        for stream in self._streams.registry:
            if stream.is_up:
                self.send(stream, Goaway(reason="closing"))
            else:
                self._streams.end(stream, "closed")

    def _is_flushed(self, flush_by: float) -> bool:
        streams = self._streams.registry
        return self._clock() >= flush_by or not any(stream.has_output for stream in streams)

    def _end(self) -> None:
        self._flush_by = self._clock()
        self._listeners.close()
        for stream in self._streams.registry:
            self._streams.end(stream, "closed")
        for _ in range(_END_ROUNDS):
            self._session.run_all(self._session.calls_later)
            self._streams.settle()
        self._release()

    def _release(self) -> None:
        self._has_ended = True
        self._selector.close()
        if self._folder is not None:
            self._folder.close()

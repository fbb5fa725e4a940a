"""The seam between transfers (session) and connections (transport). Documented here and only here.

One I/O thread per process runs an Endpoint. Everything on this page happens on that thread, except
`start`, `close` and `call`. The Endpoint does HELLO, AUTH, LAYOUT, PING and their deadlines by
itself; the Handler sees a peer only when the handshake has succeeded, and never after `peer_down`.

Calls into the session (Handler's methods, `done`, functions given to `call`) never nest: what
`connect`, `send` and `send_data` cause is reported after the call they were made in has returned.
An exception out of one of them that is not ProtocolError is logged and closes the peer it was
about; the thread lives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from xpyd_core.request_id import Address
from xpyd_kv.memory.device import View
from xpyd_kv.plan.pairs import Pair
from xpyd_kv.wire.messages import Data, Hello, Layout, Message

Done = Callable[[bytes | None], None]
"""Called once for a DATA frame: with its checksum when the last byte is with the kernel, or was
copied by the peer to which it was lent (then with eight zero bytes); with None when the frame was
dropped or the connection closed first."""


class Peer(Protocol):
    """One authenticated connection. A restarted process is another Peer. Compared by identity."""

    @property
    def address(self) -> Address | None:
        """The address that we dialled; None for a connection that the peer opened."""
        ...

    @property
    def transport(self) -> str:
        """The transport that moves DATA between the two: `shm`, `uds` or `tcp`."""
        ...

    @property
    def hello(self) -> Hello: ...

    @property
    def layout(self) -> Layout:
        """The LAYOUT that the peer announced. OFFER must not exceed its `max_tokens`, the KV bytes
        of a DATA frame not its `max_data_bytes`. Its cache fits ours; the block size may differ."""
        ...

    @property
    def is_data(self) -> bool:
        """Whether the connection is one of two ranks; else it is one of two engines."""
        ...

    @property
    def pair(self) -> Pair | None:
        """The pair of ranks whose DATA moves on this connection. None: no DATA, which moves between
        the engines' ranks."""
        ...


class Handler(Protocol):
    """The callbacks that a session gives to the Endpoint. Calls come one at a time, on the I/O
    thread. What a side never needs does nothing: a D dials no address, and to a P no DATA is
    stored."""

    def peer_up(self, peer: Peer) -> None:
        """The handshake with it has succeeded."""

    def dial_failed(self, address: Address, reason: str, detail: str = "") -> None:
        """`connect(address)` came to nothing: `unreachable` (refused, no route), `no_answer` (to
        connecting), `no_socket` (in the folder, where TCP is not to be used), `auth`,
        `incompatible:<factor>`, `refused:<reason>`, `timeout` (of the handshake), `protocol`,
        `closed` (by our own close). `detail`: more of it, for people."""

    def peer_down(self, peer: Peer, reason: str) -> None:
        """The connection is closed; no byte of it lands any more, none of ours will be sent."""
        ...

    def message(self, peer: Peer, message: Message, body: bytes) -> None:
        """A control frame (not HELLO, AUTH, LAYOUT, REFUSE, PING, PONG, DATA), its body whole, its
        sender's role right, its body's length agreeing with its header. ProtocolError from here
        closes the connection."""
        ...

    def data_begin(self, peer: Peer, header: Data, length: int) -> Sequence[View] | None:
        """A DATA frame with `length` KV bytes begins; `length` agrees with the header's ranges and
        P's layout. Where do its bytes go: writable flat byte views, `length` bytes in
        all, theirs until `data_end` or `peer_down`; None reads them to nowhere."""
        ...

    def data_end(
        self, peer: Peer, header: Data, checksum: bytes, *, stored: bool, intact: bool
    ) -> None:
        """The frame's last byte has come. `checksum`: what P says that it is; eight zero bytes
        where DATA moves beside the socket. `stored`: data_begin gave views. `intact`: stored, and
        the checksum agrees."""

    def tick(self, now: float) -> float | None:
        """Deadlines. Called after every turn of the loop that called the session, and at least when
        the time that the last call returned has come (None: no deadline)."""
        ...


class Endpoint(Protocol):
    """Listens on the KV port, dials peers, moves frames."""

    def start(self) -> None:
        """Bind, listen and start the I/O thread. UserError when the address cannot be bound."""
        ...

    def close(self, deadline_s: float) -> bool:
        """Send GOAWAY and what is queued, close all connections (peer_down for each), end the
        thread, all within `deadline_s`. False when it has not ended, and may still use all that it
        was given. Not to be called on the I/O thread."""
        ...

    def call(self, function: Callable[[], None]) -> None:
        """From any thread: run `function` on the I/O thread, in order, soon. Dropped once the
        thread has ended."""
        ...

    def connect(self, address: Address, *, data: bool = False) -> Peer | None:
        """The peer at `address` if connected; else dial it (once at a time) and return None:
        peer_up or dial_failed follows. A failed AUTH and a quarantine are remembered for 30 s.
        `data`: as one rank does another; an address is dialled in one of the two ways."""
        ...

    def disconnect(self, peer: Peer, reason: str) -> None:
        """Close this connection; `peer_down` with `reason` follows (not before this call returns).
        For a peer that answers PING but leaves a CANCEL unanswered: only so its writes are known
        to have ended."""
        ...

    def send(self, peer: Peer, message: Message, body: bytes = b"") -> None:
        """Queue a control frame; control frames go before queued DATA. A peer that does not read
        its control frames (bounded queue) is closed. Nothing happens where the peer is down.
        IllegalMoveError: our role may not send it, or the body is over the peer's limits."""
        ...

    def send_data(
        self,
        peer: Peer,
        make_header: Callable[[], Data | None],
        views: Sequence[View],
        done: Done,
    ) -> None:
        """Queue one DATA frame of `views` (flat byte views). When its turn comes `make_header` is
        called, which may return None to drop a frame whose transfer was cancelled meanwhile. The
        views are read until `done` is called (`done(None)` comes before `peer_down`). The queue is
        as long as the caller's leased blocks make it. IllegalMoveError: more KV bytes than the
        peer takes."""
        ...

    @property
    def probe_bytes(self) -> int:
        """Length of a PROBE's bytes."""
        ...

    def send_probe(self, peer: Peer, token: int) -> bytes:
        """Queue a PROBE, which goes the way of DATA; the SHA-256 that PROBED must bring with
        `token`. P only."""
        ...


MakeEndpoint = Callable[[Handler], Endpoint]
"""An Endpoint for this Handler, not started: `lambda handler: TcpEndpoint(handler, ...)`."""

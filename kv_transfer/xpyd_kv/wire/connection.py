"""One connection of the KV protocol as a state machine: bytes and time in, events and bytes out.

It owns the decoder, the handshake and the PINGs, and says which move is legal for whom. A shell
(xpyd_kv.transport) owns the socket: it feeds what it reads, sends what `outgoing` returns, and
calls `tick` when `due` has come. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from xpyd_kv.plan.pairs import Pair
from xpyd_kv.wire.errors import IllegalMoveError, RefusedError, SilentPeerError
from xpyd_kv.wire.frames import (
    DataBegin,
    DataChunk,
    DataEnd,
    Decoder,
    Frame,
    Limits,
    encode,
)
from xpyd_kv.wire.handshake import ACCEPTOR_ROLE, DIALLER_ROLE, LENT, Handshake, Terms
from xpyd_kv.wire.messages import (
    Cancel,
    Cancelled,
    Commit,
    Copied,
    Data,
    Done,
    Goaway,
    Grant,
    Hello,
    Layout,
    Lease,
    Message,
    Nack,
    Offer,
    Ping,
    Pong,
    Probe,
    Probed,
    Pull,
    Refuse,
    Region,
    Shared,
)

PING_S = 2.0
MISSED_PINGS = 3
_TOKEN_RANGE = 2**32

# Who sends what on an open connection; what is not here belongs to the handshake.
_FROM_EITHER: frozenset[type[Message]] = frozenset(
    (Cancel, Cancelled, Ping, Pong, Goaway, Refuse),
)
_FROM: dict[str, frozenset[type[Message]]] = {
    DIALLER_ROLE: _FROM_EITHER | {Probe},
    ACCEPTOR_ROLE: _FROM_EITHER | {Probed},
}
# More of it: between engines, where DATA moves, and where it moves beside the socket.
_FROM_ENGINE: dict[str, frozenset[type[Message]]] = {
    DIALLER_ROLE: frozenset((Offer,)),
    ACCEPTOR_ROLE: frozenset((Grant, Pull, Lease)),
}
_FROM_RANK: dict[str, frozenset[type[Message]]] = {
    DIALLER_ROLE: frozenset((Data, Commit)),
    ACCEPTOR_ROLE: frozenset((Done, Nack)),
}
_FROM_LENT: dict[str, frozenset[type[Message]]] = {
    DIALLER_ROLE: frozenset((Region, Shared)),
    ACCEPTOR_ROLE: frozenset((Copied,)),
}
_OWN_FRAMES: frozenset[type[Message]] = frozenset((Ping, Pong, Refuse))


class Opened(NamedTuple):
    """The handshake has succeeded."""

    hello: Hello
    layout: Layout


class Received(NamedTuple):
    """A control frame for the session."""

    message: Message
    body: bytes


Event = Opened | Received | DataBegin | DataChunk | DataEnd


@dataclass(frozen=True)
class Pulse:
    """After `ping_s` seconds of silence a PING goes out, and again; when `missed` of them stay
    unanswered for as long, the peer is taken for dead."""

    ping_s: float = PING_S
    missed: int = MISSED_PINGS


class Connection:
    """One side of one connection. `deadline` is when it must be open, on the clock of `now`."""

    def __init__(
        self, ours: Terms, *, dialler: bool, deadline: float, pulse: Pulse | None = None
    ) -> None:
        self._pulse = pulse or Pulse()
        self._handshake = Handshake(ours, dialler=dialler)
        self.ours = ours.hello
        """Our HELLO."""
        self._role = ours.hello.role
        self._is_dialler = dialler
        self._layout = ours.layout
        # Nothing of the handshake has a body: no limit is needed before the peer's LAYOUT.
        self.decoder = Decoder(Limits(), frozenset((Hello,)))
        """Decodes the peer's frames. The shell may read the `data_left` KV bytes of the DATA frame
        under way elsewhere."""
        self._peer_limits = Limits()
        self.own_frames = bytearray(self._handshake.begin())
        """The bytes that `outgoing` returns next."""
        self._opened: Opened | None = None
        self.is_open = False
        self._may_send: frozenset[type[Message]] = frozenset()
        self._due = deadline
        self._unanswered = 0
        self._pings = 0

    @property
    def is_proved(self) -> bool:
        """Whether the peer has shown that it holds a key of the fleet."""
        return self._handshake.is_proved

    @property
    def transport(self) -> str:
        """The transport that moves DATA on this connection; '' before both HELLOs."""
        return self._handshake.transport

    @property
    def peer(self) -> Opened:
        """The peer's HELLO. Only once the connection is open."""
        if self._opened is None:
            raise IllegalMoveError("the connection is not open")
        return self._opened

    @property
    def is_data(self) -> bool:
        """Whether it is between two ranks, as the dialler's HELLO says. Not before that has
        come."""
        hello = self.ours if self._is_dialler else self._handshake.hello
        return hello is not None and hello.data

    @property
    def pair(self) -> Pair | None:
        """The pair of ranks whose DATA moves here, once open; None: no DATA comes here."""
        return self._handshake.pair

    @property
    def kept_bytes(self) -> int:
        """Bytes held for the frame under way."""
        return self.decoder.kept_bytes

    @property
    def wanted_bytes(self) -> int:
        """The number of bytes that belong to the control frame under way, or to the next, or to
        DATA's checksum behind its last KV byte: a read of no more takes nothing of what follows. At
        least 1."""
        return self.decoder.wanted_bytes

    @property
    def due(self) -> float:
        """When `tick` has something to do."""
        return self._due

    def outgoing(self) -> bytes:
        """The handshake's, PING's and REFUSE's frames made since the last call; send them, also
        after an error."""
        frames, self.own_frames = bytes(self.own_frames), bytearray()
        return frames

    def feed(self, data: bytes | bytearray | memoryview, now: float) -> Iterator[Event]:
        """The events that `data` completes: consume all of them before the next feed. Errors come
        at their place: ProtocolError, or RefusedError."""
        self._heard(now)
        for event in self.decoder.feed(data):
            if not isinstance(event, Frame):
                yield event
                continue
            result = self._receive(event) if self.is_open else self._shake(event, now)
            if result is not None:
                yield result

    def data_read(self, count: int, now: float) -> None:
        """Count KV bytes that the shell has read itself."""
        self._heard(now)
        self.decoder.data_read(count)

    def encode(self, message: Message, body_bytes: int = 0) -> bytes:
        """Prefix and header of a frame of the session. IllegalMoveError: we may not send it."""
        kind = type(message)
        if kind not in self._may_send:
            raise IllegalMoveError(f"{self._role} may not send {kind.__name__.upper()} now")
        fault = self._peer_limits.fault(message, body_bytes)
        if fault:
            raise IllegalMoveError(fault)
        return encode(message, body_bytes)

    def data_bytes(self, header: Shared) -> int:
        """Return the number of KV bytes that a SHARED frame of the peer names."""
        return self.decoder.limits.data_bytes(header)

    @property
    def block_bytes(self) -> int:
        """The bytes of one block of one layer in DATA: P's block, or the share of it for D's
        rank."""
        return self._peer_limits.block_bytes

    @property
    def max_own_data_bytes(self) -> int:
        """The most KV bytes in a DATA frame that we take."""
        return self.decoder.limits.max_data_bytes

    @property
    def max_data_bytes(self) -> int:
        """The most KV bytes in a DATA frame that the peer takes."""
        return self._peer_limits.max_data_bytes

    def refuse(self, reason: str, *, factor: str = "") -> RefusedError:
        """Queue a REFUSE if the peer is one of the fleet; the error to close with."""
        if self.is_proved:
            self.own_frames += encode(Refuse(reason=reason, factor=factor))
        return RefusedError(reason, factor=factor)

    def tick(self, now: float) -> None:
        """Send a PING where it is time, or raise SilentPeerError."""
        if now < self._due:
            return
        if not self.is_open:
            raise SilentPeerError("the handshake was not done in time")
        # PINGs are counted, not seconds: after a pause of our own process the peer gets its time.
        if self._unanswered >= self._pulse.missed:
            raise SilentPeerError(f"no answer to {self._unanswered} PINGs")
        self._unanswered += 1
        self._pings = (self._pings + 1) % _TOKEN_RANGE
        self.own_frames += encode(Ping(token=self._pings))
        self._due = now + self._pulse.ping_s

    def _legal(self, role: str) -> frozenset[type[Message]]:
        legal = _FROM[role]
        if not self.is_data:
            legal |= _FROM_ENGINE[role]
        if self.pair is None:
            return legal
        legal |= _FROM_RANK[role]
        return legal | _FROM_LENT[role] if self.transport in LENT else legal

    def _heard(self, now: float) -> None:
        if self._opened is not None:
            self._unanswered = 0
            self._due = now + self._pulse.ping_s

    def _shake(self, frame: Frame, now: float) -> Opened | None:
        shake = self._handshake
        self.own_frames += shake.receive(frame)
        if shake.refusal is not None:
            raise shake.refusal
        if not shake.is_done:
            self.decoder.allowed = frozenset((shake.expected, Refuse))
            return None
        assert shake.hello is not None
        assert shake.layout is not None
        self._opened = Opened(shake.hello, shake.layout)
        self.is_open = True
        self._may_send = self._legal(self._role) - _OWN_FRAMES
        self.decoder.limits = Limits.of(self._layout, shake.pair)
        self._peer_limits = Limits.of(shake.layout, shake.pair)
        # None: what a later minor version adds is skipped where it says that it may be.
        self.decoder.allowed = self._legal(shake.hello.role) | {None}
        self._heard(now)
        return self._opened

    def _receive(self, frame: Frame) -> Received | None:
        message = frame.message
        if isinstance(message, Refuse):
            raise RefusedError(message.reason, factor=message.factor, by_peer=True)
        if isinstance(message, Ping):
            self.own_frames += encode(Pong(token=message.token))
            return None
        if isinstance(message, Pong):
            return None
        return Received(message, frame.body)

"""Proof that both ends of a connection hold a key of the fleet. Pure.

Each side signs both HELLOs to the byte and its own side of the connection. The HELLOs' nonces make
a recorded proof worthless, the side makes a reflected one worthless. No address is signed: a
connection may pass a relay or NAT. What follows AUTH is not encrypted or signed, except over TLS,
whose channel the proof is bound to (docs/wire.md).
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

import msgspec

from xpyd_core.compat import differing_factors
from xpyd_core.errors import ProtocolError
from xpyd_core.keys import Keys
from xpyd_kv.plan.engine_layout import LayoutError
from xpyd_kv.plan.pairs import Pair
from xpyd_kv.wire import errors
from xpyd_kv.wire.errors import RefusedError
from xpyd_kv.wire.fit import pair_on
from xpyd_kv.wire.frames import Frame, encode
from xpyd_kv.wire.messages import MAJOR, Auth, Hello, Layout, Message, Refuse

_CONTEXT = b"xpyd-kv-auth/1 "


def auth_mac(
    key: bytes,
    *,
    by_dialler: bool,
    dialler_hello: bytes,
    acceptor_hello: bytes,
    binding: bytes = b"",
) -> bytes:
    """HMAC-SHA256 that the dialler (or acceptor) sends; the HELLOs are whole frames. `binding` is
    the digest of the acceptor's certificate over TLS."""
    digest = hmac.new(key, _CONTEXT, sha256)
    digest.update(b"dialler" if by_dialler else b"acceptor")
    for hello in (dialler_hello, acceptor_hello):
        digest.update(len(hello).to_bytes(4, "little") + hello)
    if binding:
        digest.update(b"tls-server-end-point:" + binding)
    return digest.digest()


# P dials D in every mode.
DIALLER_ROLE = "P"
ACCEPTOR_ROLE = "D"
# What moves DATA, by the kind of socket; the first that both sides name is taken.
OVER_TCP = ("cuda_ipc", "nixl", "nccl", "striped", "tcp")
OVER_UNIX = ("cuda_ipc", "nixl", "nccl", "shm", "uds")
# Those of them that move DATA beside the socket, by REGION, SHARED and COPIED.
LENT = frozenset(("cuda_ipc", "nixl", "nccl", "shm", "striped"))


_MOST_SHOWN = 100
Takes = Literal["engines", "ranks", "both"]


@dataclass(frozen=True)
class Terms:
    """The part of one side in a handshake: its HELLO (with this connection's nonce), its LAYOUT,
    the fleet's keys (the first signs, each is accepted), and what can move DATA on this socket,
    best first. An acceptor names in its HELLO only what `can_use` says yes to for that dialler, so
    that both sides choose alike."""

    hello: Hello
    layout: Layout
    keys: Keys
    usable: tuple[str, ...] = ("tcp",)
    can_use: Callable[[str, Hello], bool] = lambda transport, theirs: True
    takes: Takes = "both"
    """Whose connections an acceptor takes: those of engines, of ranks (HELLO's `data`), or both."""
    binding: Callable[[], bytes] = bytes
    """What AUTH is bound to beside the HELLOs: of the TLS channel, once its handshake is done."""


def common_transport(usable: Iterable[str], ours: Hello, theirs: Hello) -> str:
    """The first of `usable` that both sides name, or ''."""
    both = {*ours.transports} & {*theirs.transports}
    return next((name for name in usable if name in both), "")


def fitting(source: Layout, destination: Layout, *, dialler: Hello, acceptor: Hello) -> Pair | None:
    """Return the pair of ranks whose DATA moves on this connection from P to D; None: none, it is
    the control connection of engines with ranks. RefusedError names the factor, or else the part of
    the shape, by which no KV can move."""
    factors = differing_factors(source.factors, destination.factors)
    if factors:
        name = factors[0]
        values = (_shown(side.factors.get(name)) for side in (source, destination))
        detail = "{}: P has {}, D has {}".format(name, *values)
        raise RefusedError(errors.INCOMPATIBLE, factor=name, detail=detail)
    try:
        return pair_on(source, destination, dialler=dialler, acceptor=acceptor)
    except LayoutError as error:
        raise RefusedError(errors.INCOMPATIBLE, factor=error.factor, detail=error.detail) from error


def _shown(value: str | None) -> str:
    """A factor's value for people: the peer has proved the key, yet it may be long."""
    if value is None:
        return "none"
    text = "".join(c for c in value if c.isprintable())
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


class Handshake:
    """One side's progress. `begin` and `receive` return the frames to send next; errors to be
    raised after them are in `refusal`."""

    def __init__(self, ours: Terms, *, dialler: bool) -> None:
        self._ours = ours
        # The acceptor's is not said before the dialler's has come.
        self._hello = ours.hello
        self._dialler = dialler
        self._our_hello = encode(ours.hello)
        self._their_hello = b""
        self.hello: Hello | None = None
        self.transport = ""
        self.layout: Layout | None = None
        self.pair: Pair | None = None
        """The pair of ranks whose DATA moves on this connection, once done; None: no DATA comes
        here."""
        self.refusal: RefusedError | None = None
        self.expected: type[Message] = Hello

    @property
    def is_done(self) -> bool:
        return self.layout is not None and self.refusal is None

    @property
    def is_proved(self) -> bool:
        """Whether the peer has shown that it holds a key."""
        return self.expected is Layout

    def begin(self) -> bytes:
        """The dialler's HELLO; the acceptor waits for it."""
        return self._our_hello if self._dialler else b""

    def receive(self, frame: Frame) -> bytes:
        """The frames to send after this one. ProtocolError when it has no place here."""
        message = frame.message
        if isinstance(message, Refuse):
            raise RefusedError(message.reason, factor=message.factor, by_peer=True)
        if isinstance(message, Hello) and self.expected is Hello:
            return self._receive_hello(message, frame.raw)
        if isinstance(message, Auth) and self.expected is Auth:
            return self._receive_auth(message)
        if isinstance(message, Layout) and self.expected is Layout and self.layout is None:
            return self._receive_layout(message)
        raise ProtocolError(f"{type(message).__name__.upper()} out of order")

    def _receive_hello(self, hello: Hello, raw: bytes) -> bytes:
        self.hello = hello
        self._their_hello = raw
        self.expected = Auth
        if not self._dialler:
            self._adapt(hello)
        reply = b"" if self._dialler else self._our_hello
        reason = self._hello_fault(hello)
        if reason:
            # The acceptor's HELLO still goes out: by it the dialler sees the same fault itself.
            self.refusal = RefusedError(reason)
            return reply
        return self._auth(self._ours.keys[0]) if self._dialler else reply

    def _adapt(self, theirs: Hello) -> None:
        """Name only what can be used with this dialler."""
        named = self._hello.transports
        usable = tuple(name for name in named if self._ours.can_use(name, theirs))
        if usable != named:
            self._hello = msgspec.structs.replace(self._hello, transports=usable)
            self._our_hello = encode(self._hello)

    def _hello_fault(self, theirs: Hello) -> str:
        ours = self._hello
        if theirs.major != MAJOR:
            return errors.VERSION
        if theirs.incarnation == ours.incarnation:
            return errors.SELF
        dialling, accepting = (ours, theirs) if self._dialler else (theirs, ours)
        if (dialling.role, accepting.role) != (DIALLER_ROLE, ACCEPTOR_ROLE):
            return errors.ROLE
        self.transport = common_transport(self._ours.usable, ours, theirs)
        return "" if self.transport else errors.TRANSPORT

    def _receive_auth(self, auth: Auth) -> bytes:
        # All keys are tried, each in constant time.
        shown = [
            key
            for key in self._ours.keys
            if hmac.compare_digest(self._mac(key, by_dialler=not self._dialler), auth.mac)
        ]
        if not shown:
            self.refusal = RefusedError(errors.AUTH)
            return b"" if self._dialler else encode(Refuse(reason=errors.AUTH))
        self.expected = Layout
        layout = encode(self._ours.layout)
        # The acceptor signs with the key that the dialler has shown to hold: so a fleet whose
        # first key is being changed talks in every mixture in which the dialler's is accepted.
        return layout if self._dialler else self._auth(shown[-1]) + layout

    def _receive_layout(self, layout: Layout) -> bytes:
        assert self.hello is not None
        self.layout = layout
        ours = self._ours.layout
        layouts = (ours, layout) if self._dialler else (layout, ours)
        hellos = (self._hello, self.hello) if self._dialler else (self.hello, self._hello)
        try:
            if not self._dialler and self._ours.takes not in ("both", _kind(self.hello)):
                raise RefusedError(errors.ROLE)
            self.pair = fitting(*layouts, dialler=hellos[0], acceptor=hellos[1])
        except RefusedError as refusal:
            self.refusal = refusal
            return encode(Refuse(reason=refusal.reason, factor=refusal.factor))
        return b""

    def _auth(self, key: bytes) -> bytes:
        return encode(Auth(mac=self._mac(key, by_dialler=self._dialler)))

    def _mac(self, key: bytes, *, by_dialler: bool) -> bytes:
        hellos = (self._our_hello, self._their_hello)
        dialler, acceptor = hellos if self._dialler else reversed(hellos)
        return auth_mac(
            key,
            by_dialler=by_dialler,
            dialler_hello=dialler,
            acceptor_hello=acceptor,
            binding=self._ours.binding(),
        )


def _kind(dialler: Hello) -> Takes:
    return "ranks" if dialler.data else "engines"

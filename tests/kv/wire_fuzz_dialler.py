"""Attacks on a P by the D that it dials: one without the key, or with it and lying about what it
has got and copied.

Whoever makes P dial him (the address stands in a request) is the first; the second is a D gone
mad. Each attack is one connection that P opens because it has a prompt to send.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kv.pods import KEY, WIRE_LAYOUT, until
from tests.kv.transport_kit import Puppet
from tests.kv.wire_fuzz import PATIENCE_S, Fuzzed, Tap, half_close, reset
from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.errors import IllegalMoveError
from xpyd_kv.wire.frames import encode

_ports = itertools.count(30_000)
_ADDRESSES = 4


@dataclass
class Acceptor(Fuzzed):
    """The D. `recorded` is all that a good D has once said."""

    transport: str = "tcp"
    folder: Path = Path()
    recorded: bytes = b""
    opened: int = 0
    """Attackers that P took for peers, since they had the key."""
    rest_s: float = 0.0
    _listeners: list[tuple[float, socket.socket]] = field(default_factory=list)

    @property
    def kinds(self) -> list[Callable[[socket.socket], bool]]:
        return [
            self.nothing,
            self.noise,
            self.cut,
            self.flipped,
            self.sizes,
            self.wrong_key,
            self.replayed,
            self.peer_noise,
            self.peer_sizes,
            self.peer_frames,
            self.peer_flipped_frames,
            self.granted_frames,
            self.granted_frames,
            self.granted_flipped_frames,
            self.granted_deaf,
            self.copied,
            self.nacked,
        ]

    @contextlib.contextmanager
    def listening(self) -> Iterator[socket.socket]:
        """Where P is to dial: `address_of` it. A few addresses serve all attacks, since P keeps a
        bounded memory of those that failed; where P was not shown the key it stays away for
        `rest_s`."""
        if len(self._listeners) < _ADDRESSES:
            self._listeners.append((0.0, self._listen()))
        at, listener = self._listeners.pop(0)
        until(lambda: time.monotonic() > at)
        opened = self.opened
        try:
            yield listener
        finally:
            rest_s = 0.0 if self.opened > opened else self.rest_s
            self._listeners.append((time.monotonic() + rest_s, listener))
            self._listeners.sort(key=lambda pair: pair[0])

    def _listen(self) -> socket.socket:
        if self.transport == "tcp":
            listener = socket.create_server(("127.0.0.1", 0))
        else:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(self.folder / f"127.0.0.1-{next(_ports)}"))
            listener.listen()
        listener.settimeout(PATIENCE_S)
        return listener

    def close(self) -> None:
        for _, listener in self._listeners:
            listener.close()

    def attack(self, listener: socket.socket, kind: Callable[[socket.socket], bool]) -> None:
        """One attack on the P that dials; an error when it does not close its connection."""
        with listener.accept()[0] as sock, contextlib.suppress(ConnectionError):
            sock.settimeout(PATIENCE_S)
            if not kind(sock):
                half_close(sock)
            while sock.recv(65536):
                pass

    # --- without the key. True: P ends it by itself

    def nothing(self, sock: socket.socket) -> bool:
        if self.rng.random() < 0.5:
            reset(sock)
        return False

    def wrong_key(self, sock: socket.socket) -> bool:
        """Its own view: P's AUTH is wrong. It says what it would say to a right one."""
        hello, auth = self.recorded[: self._first()], self.recorded[self._first() :]
        sock.recv(65536)
        sock.sendall(hello)
        sock.recv(65536)
        sock.sendall(auth[: -len(encode(WIRE_LAYOUT))] if self.rng.random() < 0.5 else auth)
        return True

    def _first(self) -> int:
        """Where the recording's second frame begins."""
        return self.recorded.index(b"XKV1", 4)

    # --- with the key

    def peer(self, sock: socket.socket) -> Puppet:
        puppet = Puppet(sock, "D", key=KEY, layout=WIRE_LAYOUT, transports=(self.transport,)).open()
        self.opened += 1
        return puppet

    def peer_noise(self, sock: socket.socket) -> bool:
        self.peer(sock)
        return self.noise(sock)

    def peer_sizes(self, sock: socket.socket) -> bool:
        self.peer(sock)
        return self.sizes(sock)

    def peer_frames(self, sock: socket.socket) -> bool:
        self.peer(sock)
        return self._frames(sock, self._names("c" * 32))

    def peer_flipped_frames(self, sock: socket.socket) -> bool:
        self.peer(sock)
        return self._flipped_frame(sock, self._names("c" * 32))

    def granted(self, sock: socket.socket) -> tuple[Puppet, dict[str, Any]]:
        """P has offered, and may send: the names of its transfer."""
        puppet = self.peer(sock)
        (offer,) = [event.message for event in puppet.read()]
        of = {"uuid": offer.uuid, "prompt_index": offer.prompt_index, "epoch": offer.epoch}
        # GRANT is for the modes that send by themselves, PULL for get: here each answers any.
        kind = self.rng.choice([wire.Grant, wire.Pull])
        if self.rng.random() < 0.8:
            sock.sendall(encode(kind(**of, skip_tokens=self.rng.choice([0, 0, 4, 3, 20, 24]))))
        return puppet, of

    def granted_frames(self, sock: socket.socket) -> bool:
        _, of = self.granted(sock)
        return self._frames(sock, of)

    def granted_flipped_frames(self, sock: socket.socket) -> bool:
        _, of = self.granted(sock)
        return self._flipped_frame(sock, of)

    def granted_deaf(self, sock: socket.socket) -> bool:
        """Reads some of what it was promised, and goes."""
        self.granted(sock)
        sock.recv(self.rng.randrange(1, 400))
        reset(sock)
        return True

    def copied(self, sock: socket.socket) -> bool:
        """More frames than were lent, or the same ones twice. Legal over `shm` only."""
        self.granted(sock)
        sock.recv(self.rng.randrange(1, 1000))
        for _ in range(self.rng.randrange(1, 5)):
            sock.sendall(encode(wire.Copied(frames=self.rng.choice([1, 1, 2, 3, 2**32 - 1]))))
        return False

    def nacked(self, sock: socket.socket) -> bool:
        """Frames that were not sent, or all of them for ever."""
        _, of = self.granted(sock)
        for _ in range(self.rng.randrange(1, 20)):
            count = self.rng.choice([1, 1, 2, 16_384])
            body = b"".join(
                self.rng.choice([0, 0, 1, 2, 2**32 - 1]).to_bytes(4, "little") for _ in range(count)
            )
            sock.sendall(encode(wire.Nack(**of, frames=count), len(body)) + body)
        return False

    # --- frames

    def _names(self, uuid: str) -> dict[str, Any]:
        return {"uuid": uuid, "prompt_index": self.rng.randrange(2), "epoch": self.number()}

    def _frames(self, sock: socket.socket, of: dict[str, Any]) -> bool:
        for _ in range(self.rng.randrange(1, 12)):
            sock.sendall(self._frame(of))
        return False

    def _flipped_frame(self, sock: socket.socket, of: dict[str, Any]) -> bool:
        sock.sendall(self.flip_inside(self._frame(of)))
        return False

    def _frame(self, of: dict[str, Any]) -> bytes:
        while True:
            message, body = self._message(of)
            with contextlib.suppress(IllegalMoveError):
                return encode(message, len(body)) + body

    def _message(self, of: dict[str, Any]) -> tuple[wire.Message, bytes]:
        rng, number = self.rng, self.number
        numbers = b"".join(number().to_bytes(4, "little") for _ in range(rng.randrange(1, 9)))
        messages: list[tuple[wire.Message, bytes]] = [
            (wire.Grant(**of, skip_tokens=number()), b""),
            (wire.Pull(**of, skip_tokens=number()), b""),
            (wire.Done(**of), b""),
            (wire.Nack(**of, frames=len(numbers) // 4), numbers),
            (wire.Nack(**of, frames=max(1, number())), numbers),
            (wire.Lease(**of, ttl_ms=number()), b""),
            (wire.Cancel(**of, reason="fuzz"), b""),
            (wire.Cancelled(**of), b""),
            (wire.Copied(frames=max(1, number())), b""),
            (wire.Ping(token=number()), b""),
            (wire.Goaway(reason="fuzz"), b""),
            # What D may not send, or not now.
            (wire.Commit(**of, frames=1, total_bytes=number(), digest=bytes(32)), b""),
            (wire.Region(size_bytes=2**40), b""),
            (wire.Auth(mac=rng.randbytes(32)), b""),
            (wire.Refuse(reason="fuzz"), b""),
            (WIRE_LAYOUT, b""),
        ]
        return rng.choice(messages)


def record(listener: socket.socket) -> bytes:
    """All that a good D says to the P that dials, from HELLO to GRANT."""
    with listener.accept()[0] as sock:
        sock.settimeout(PATIENCE_S)
        tap = Tap(sock)
        puppet = Puppet(tap, "D", key=KEY, layout=WIRE_LAYOUT).open()  # type: ignore[arg-type]
        (offer,) = [event.message for event in puppet.read()]
        grant = wire.Grant(
            uuid=offer.uuid, prompt_index=offer.prompt_index, epoch=offer.epoch, skip_tokens=0
        )
        tap.sendall(encode(grant))
        assert puppet.read()
        return tap.sent

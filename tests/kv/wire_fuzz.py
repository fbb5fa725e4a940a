"""Attacks on a D's KV port, each a function of a random generator: strangers without the key, and
peers with it that break the protocol or lie.

An attack sends what it likes over one connection of its own and says how it ends: by D, which must
close it, or by its own half-close, after which D must.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.kv.kvfakes import BLOCK_SIZE, LAYOUT
from tests.kv.pods import KEY, MAX_TOKENS, WIRE_LAYOUT
from tests.kv.transport_kit import Puppet
from xpyd_core.blocks import token_bytes
from xpyd_core.errors import ProtocolError
from xpyd_core.request_id import Address
from xpyd_kv.transport.body import checksum
from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.errors import IllegalMoveError
from xpyd_kv.wire.frames import encode

PATIENCE_S = 10.0
_PREFIX = struct.Struct("<4sBBHII")
_ALL = {"first_layer": 0, "end_layer": len(LAYOUT.layers)}


@dataclass(frozen=True)
class Door:
    """How to reach a D: over TCP, or by its socket in `folder`; what moves DATA there."""

    target: Address
    transport: str = "tcp"
    folder: Path = Path()

    def open(self) -> socket.socket:
        if self.transport == "tcp":
            return socket.create_connection(self.target, timeout=PATIENCE_S)
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(PATIENCE_S)
        sock.connect(str(self.folder / f"{self.target.host}-{self.target.port}"))
        return sock

    def puppet(self, sock: Any, key: bytes = KEY) -> Puppet:
        """A P that has shaken hands."""
        over = (self.transport,)
        return Puppet(sock, "P", key=key, layout=WIRE_LAYOUT, transports=over).open()


class Tap:
    """A socket that keeps what is sent."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.family = sock.family
        self.sent = b""

    def sendall(self, data: bytes) -> None:
        self.sent += data
        self.sock.sendall(data)

    def recv(self, count: int) -> bytes:
        return self.sock.recv(count)


@dataclass
class Fuzzed:
    """Bytes that nobody should send."""

    rng: random.Random

    def cuts(self, data: bytes) -> list[tuple[int, int]]:
        """The beginning of `data`, in a few pieces."""
        ends = sorted(self.rng.randrange(1, len(data)) for _ in range(3))
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def flip(self, data: bytes) -> bytes:
        flipped = bytearray(data)
        for _ in range(self.rng.randrange(1, 8)):
            flipped[self.rng.randrange(len(flipped))] ^= 1 << self.rng.randrange(8)
        return bytes(flipped)

    def flip_inside(self, frame: bytes) -> bytes:
        """Behind the prefix: the header's CRC agrees, so what is broken reaches the schema."""
        flipped = bytearray(self.flip(frame))
        header_bytes = int.from_bytes(flipped[6:8], "little")
        flipped[:4] = b"XKV1"
        flipped[12:16] = zlib.crc32(flipped[16 : 16 + header_bytes]).to_bytes(4, "little")
        return bytes(flipped)

    def wild_prefix(self) -> bytes:
        rng = self.rng
        size = rng.choice([0, 1, 2**16, 2**24, 2**31, 2**32 - 1])
        header = rng.choice([0, 1, 1000, 65_535])
        return _PREFIX.pack(
            b"XKV1", rng.randrange(256), rng.randrange(256), header, size, rng.randrange(2**32)
        )

    def number(self) -> int:
        return self.rng.choice([0, 0, 1, 2, 3, 7, 255, 65_535, 2**31, 2**32 - 1])

    # Attacks without the key that suit either side; `recorded` is the subclass's. True: the other
    # side ends the connection by itself.

    def noise(self, sock: socket.socket) -> bool:
        data = self.rng.randbytes(self.rng.choice([1, 4, 16, 200, 70_000]))
        sock.sendall(b"Y" + data if data[:1] == b"X" else data)
        return True

    def cut(self, sock: socket.socket) -> bool:
        for start, end in self.cuts(self.recorded):
            sock.sendall(self.recorded[start:end])
        return False

    def flipped(self, sock: socket.socket) -> bool:
        sock.sendall(self.flip(self.recorded))
        return False

    def sizes(self, sock: socket.socket) -> bool:
        sock.sendall(self.wild_prefix() + self.rng.randbytes(self.rng.randrange(40)))
        return False

    def replayed(self, sock: socket.socket) -> bool:
        sock.sendall(self.recorded)
        return True


@dataclass
class Fuzzer(Fuzzed):
    """Attacks at `door`. `recorded` is all that a good P has once said, `known` are uuids that D
    knows, of transfers under way or over."""

    door: Door
    recorded: bytes = b""
    known: list[str] = field(default_factory=list[str])
    opened: int = 0
    """Attackers that D took for peers, since they had the key."""

    @property
    def kinds(self) -> list[Callable[[socket.socket], bool]]:
        return [
            self.noise,
            self.noise_behind_the_magic,
            self.cut,
            self.cut_hard,
            self.flipped,
            self.sizes,
            self.wrong_key,
            self.replayed,
            self.peer_noise,
            self.peer_frames,
            self.peer_flipped_frames,
            self.peer_cut,
            self.peer_replay,
            self.peer_sizes,
        ]

    def attack(self, kind: Callable[[socket.socket], bool]) -> None:
        """One attack; AssertionError when D does not close its connection."""
        with (
            self.door.open() as sock,
            # D may close before all is sent, which is its right.
            contextlib.suppress(ConnectionError),
        ):
            if not kind(sock):
                half_close(sock)
            while sock.recv(65536):
                pass

    # --- without the key. True: D ends it by itself

    def noise_behind_the_magic(self, sock: socket.socket) -> bool:
        sock.sendall(b"XKV1" + self.rng.randbytes(self.rng.choice([1, 11, 12, 300, 70_000])))
        return False

    def cut_hard(self, sock: socket.socket) -> bool:
        self.cut(sock)
        reset(sock)
        return True

    def wrong_key(self, sock: socket.socket) -> bool:
        with contextlib.suppress(ProtocolError):
            self.door.puppet(sock, self.rng.randbytes(32))
        return True

    # --- with the key

    def peer(self, sock: socket.socket) -> Puppet:
        puppet = self.door.puppet(sock)
        self.opened += 1
        return puppet

    def peer_noise(self, sock: socket.socket) -> bool:
        self.peer(sock)
        return self.noise(sock)

    def peer_frames(self, sock: socket.socket) -> bool:
        self.peer(sock)
        for _ in range(self.rng.randrange(1, 12)):
            sock.sendall(self._frame())
        return False

    def peer_flipped_frames(self, sock: socket.socket) -> bool:
        self.peer(sock)
        sock.sendall(self.flip_inside(self._frame()))
        return False

    def peer_cut(self, sock: socket.socket) -> bool:
        """Offer a prompt, be granted room, and leave in the middle of its bytes."""
        puppet = self.peer(sock)
        uuid = self.rng.randbytes(16).hex()
        tokens = self.rng.randrange(1, 40)
        transfer = good_transfer(uuid, tokens, self.rng)
        sock.sendall(transfer[0])
        assert puppet.read(), "D has said nothing to an OFFER"
        rest = b"".join(transfer[1:])
        sock.sendall(rest[: self.rng.randrange(len(rest))])
        if self.rng.random() < 0.5:
            reset(sock)
            return True
        return False

    def peer_replay(self, sock: socket.socket) -> bool:
        """A whole transfer, and all of it again; or the frames of another's."""
        puppet = self.peer(sock)
        uuid = self.rng.choice([*self.known, self.rng.randbytes(16).hex()])
        frames = good_transfer(uuid, self.rng.randrange(1, 40), self.rng)
        for frame in [*frames, *frames]:
            sock.sendall(frame)
        assert puppet.read(), "D has said nothing to an OFFER"
        return False

    def peer_sizes(self, sock: socket.socket) -> bool:
        self.peer(sock)
        sock.sendall(self.wild_prefix() + self.rng.randbytes(self.rng.randrange(40)))
        return False

    # --- bytes

    def _frame(self) -> bytes:
        """A well-formed frame that nobody has asked for."""
        while True:
            message, body = self._message()
            # Most numbers are legal in some fields only.
            with contextlib.suppress(IllegalMoveError):
                return encode(message, len(body)) + body

    def _message(self) -> tuple[wire.Message, bytes]:
        rng, number = self.rng, self.number
        uuid = rng.choice([*self.known, rng.randbytes(16).hex()])
        of: dict[str, Any] = {"uuid": uuid, "prompt_index": rng.randrange(3), "epoch": number()}
        body = rng.randbytes(rng.choice([0, 4, 64, LAYOUT.bytes_per_block]))
        kinds = [wire.Offer, wire.Data, wire.Commit, wire.Cancel, wire.Ping, wire.Probe, None]
        kind = rng.choice(kinds)
        if kind is wire.Offer:
            tokens = rng.choice([1, BLOCK_SIZE, MAX_TOKENS, MAX_TOKENS + 1, number()])
            digest = sha256(body).digest()
            return wire.Offer(
                **of, tokens=tokens, prompt_tokens=tokens, digest=digest, total_bytes=number()
            ), body
        if kind is wire.Data:
            ends = {"first_block": number(), "end_block": number()}
            layers = {"first_layer": number(), "end_layer": number()}
            return wire.Data(**of, **ends, **layers, seq=number()), body + bytes(8)
        if kind is wire.Commit:
            return wire.Commit(
                **of, frames=number(), total_bytes=number(), digest=rng.randbytes(32)
            ), b""
        if kind is wire.Cancel:
            return wire.Cancel(**of, reason="fuzz"), b""
        if kind is wire.Ping:
            return wire.Ping(token=number()), b""
        if kind is wire.Probe:
            size = rng.choice([len(body), number()])
            shared = rng.random() < 0.3
            return wire.Probe(
                token=number(), size_bytes=size, checksum=bytes(8), shared=shared
            ), body
        # What P may not send, or not now.
        others: Sequence[wire.Message] = (
            wire.Grant(**of, skip_tokens=0),
            wire.Pull(**of, skip_tokens=0),
            wire.Done(**of),
            wire.Cancelled(**of),
            wire.Region(size_bytes=2**40),
            wire.Shared(**of, **_ALL, seq=0, first_block=0, end_block=1),
            wire.Copied(frames=1),
            wire.Probed(token=number(), digest=bytes(32), transport="tcp"),
            wire.Auth(mac=rng.randbytes(32)),
            wire.Goaway(reason="fuzz"),
            wire.Refuse(reason="fuzz"),
            WIRE_LAYOUT,
        )
        return rng.choice(others), b""


def half_close(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_WR)
    except OSError as error:
        if error.errno != errno.ENOTCONN:  # Reset by D already.
            raise


def reset(sock: socket.socket) -> None:
    """Close, over TCP with RST instead of FIN."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    raise ConnectionError("reset by the attacker")


def good_transfer(uuid: str, tokens: int, rng: random.Random) -> list[bytes]:
    """OFFER, DATA of all layers, COMMIT of a prompt of so many tokens."""
    of: dict[str, Any] = {"uuid": uuid, "prompt_index": 0, "epoch": 0}
    ids = token_bytes([rng.randrange(5000) for _ in range(tokens)])
    blocks = -(-tokens // BLOCK_SIZE)
    body = rng.randbytes(blocks * LAYOUT.bytes_per_block)
    digest = checksum([memoryview(body)])
    offer = wire.Offer(
        **of,
        tokens=tokens,
        prompt_tokens=tokens,
        digest=sha256(ids).digest(),
        total_bytes=len(body),
    )
    data = wire.Data(**of, **_ALL, first_block=0, end_block=blocks, seq=0)
    commit = wire.Commit(**of, frames=1, total_bytes=len(body), digest=sha256(digest).digest())
    return [
        encode(offer, len(ids)) + ids,
        encode(data, len(body) + len(digest)) + body + digest,
        encode(commit),
    ]


def record(door: Door, uuid: str) -> bytes:
    """All bytes that a good P sends, from HELLO to COMMIT, D having taken its KV."""
    with door.open() as sock:
        tap = Tap(sock)
        puppet = door.puppet(tap)
        frames = good_transfer(uuid, 20, random.Random(uuid))
        tap.sendall(frames[0])
        answers = puppet.read()
        for frame in frames[1:]:
            tap.sendall(frame)
        answers += puppet.read()
        names = [type(answer.message).__name__ for answer in answers]
        assert names == ["Grant", "Done"], names
        return tap.sent

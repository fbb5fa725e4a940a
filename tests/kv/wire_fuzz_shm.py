"""More attacks on a D: what only a Unix socket can carry, descriptors, and the frames of shared
memory that lie about it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Callable, Iterator

from tests.kv.kvfakes import LAYOUT
from tests.kv.transport_kit import Puppet
from tests.kv.wire_fuzz import Door, Fuzzer, good_transfer, reset
from xpyd_kv.spans import Span
from xpyd_kv.transport.host.data_path import pack
from xpyd_kv.transport.host.shared_memory import SharedMemory
from xpyd_kv.wire.frames import encode
from xpyd_kv.wire.messages import Ping, Pong, Region, Shared

# More than the kernel passes at once are no attack on D: sendmsg refuses them.
_MOST_DESCRIPTORS = 250
_PONG_BYTES = len(encode(Pong(token=1)))
_LAYERS = len(LAYOUT.layers)
_UNIT = LAYOUT.bytes_per_block
SIZE = 64 * 4096


class UnixFuzzer(Fuzzer):
    """As a Fuzzer, and with descriptors. Over `shm` also with memory to lend; close it."""

    def __init__(self, rng: random.Random, door: Door, recorded: bytes) -> None:
        super().__init__(rng, door, recorded)
        self._memory = SharedMemory(SIZE)

    def close(self) -> None:
        self._memory.close()

    @property
    def kinds(self) -> list[Callable[[socket.socket], bool]]:
        mine = [self.descriptors_of_a_stranger, self.descriptors_of_a_peer]
        if self.door.transport == "shm":
            mine += [
                self.regions,
                self.regions,
                self.runs,
                self.runs,
                self.too_much,
                self.region_cut,
                self.shared_cut,
                self.shared_replay,
            ]
        return [*super().kinds, *mine]

    def peer(self, sock: socket.socket) -> Puppet:
        """One that D has told its session of: descriptors may end a connection before the frames
        that came with them are read."""
        puppet = super().peer(sock)
        sock.sendall(encode(Ping(token=1)))
        answer = b""
        while len(answer) < _PONG_BYTES:
            answer += sock.recv(_PONG_BYTES - len(answer))
        return puppet

    # --- descriptors

    def descriptors_of_a_stranger(self, sock: socket.socket) -> bool:
        with self._descriptors() as fds:
            start = self.rng.randrange(len(self.recorded))
            sock.sendall(self.recorded[:start])
            socket.send_fds(sock, [self.recorded[start : start + 300]], fds)
        return False

    def descriptors_of_a_peer(self, sock: socket.socket) -> bool:
        """With frames that bring none. Over `uds` and after REGION the kernel drops them."""
        self.peer(sock)
        with self._descriptors() as fds:
            for _ in range(self.rng.randrange(1, 4)):
                socket.send_fds(sock, [self._frame()], fds)
        return False

    # --- shared memory

    def regions(self, sock: socket.socket) -> bool:
        """REGION without, with a wrong, or with too many descriptors; or one of another size."""
        self.peer(sock)
        size = self.rng.choice([1, 4096, SIZE - 1, SIZE, SIZE + 1, 2**40, 2**63 - 1])
        body = self.rng.randbytes(self.rng.choice([0, 0, 0, 1, 40]))
        with self._descriptors() as fds:
            frame = encode(Region(size_bytes=size), len(body)) + body
            socket.send_fds(sock, [frame], fds)
            if self.rng.random() < 0.3:
                socket.send_fds(sock, [frame], fds)
        return False

    def runs(self, sock: socket.socket) -> bool:
        """SHARED whose runs lie; some are true by chance."""
        self.peer(sock)
        self._lend(sock)
        for _ in range(self.rng.randrange(1, 4)):
            header = self._shared(self.rng.choice([*self.known, "e" * 32]))
            body = self._runs(header)
            sock.sendall(encode(header, len(body)) + body)
        return False

    def too_much(self, sock: socket.socket) -> bool:
        """SHARED without end, COPIED unread: over the window, or to the half-close."""
        self.peer(sock)
        self._lend(sock)
        header = self._shared("d" * 32)
        body = pack([Span(0, _UNIT * (header.end_block - header.first_block))])
        for _ in range(self.rng.randrange(200)):
            sock.sendall(encode(header, len(body)) + body)
        return False

    def region_cut(self, sock: socket.socket) -> bool:
        """The descriptor has come, the rest of its frame never does."""
        self.peer(sock)
        frame = encode(Region(size_bytes=SIZE))
        socket.send_fds(sock, [frame[: self.rng.randrange(1, len(frame))]], [self._memory.fd])
        return self._leave(sock)

    def shared_cut(self, sock: socket.socket) -> bool:
        """Offer, be granted, lend, and leave somewhere in the middle."""
        puppet = self.peer(sock)
        self._lend(sock)
        frames = self._transfer(self.rng.randbytes(16).hex())
        sock.sendall(frames[0])
        assert puppet.read(), "D has said nothing to an OFFER"
        rest = b"".join(frames[1:])
        sock.sendall(rest[: self.rng.randrange(len(rest))])
        return self._leave(sock)

    def shared_replay(self, sock: socket.socket) -> bool:
        """A whole transfer over shared memory, and all of it again, perhaps REGION too."""
        puppet: Puppet = self.peer(sock)
        self._lend(sock)
        frames = self._transfer(self.rng.choice([*self.known, self.rng.randbytes(16).hex()]))
        for frame in frames:
            sock.sendall(frame)
        assert puppet.read(), "D has said nothing to an OFFER"
        if self.rng.random() < 0.5:
            self._lend(sock)
        for frame in frames:
            sock.sendall(frame)
        return False

    # --- parts

    def _lend(self, sock: socket.socket) -> None:
        socket.send_fds(sock, [encode(Region(size_bytes=SIZE))], [self._memory.fd])

    def _leave(self, sock: socket.socket) -> bool:
        if self.rng.random() < 0.5:
            reset(sock)
        return False

    def _shared(self, uuid: str) -> Shared:
        first, blocks = self.rng.randrange(3), self.rng.randrange(1, 8)
        return Shared(
            uuid=uuid,
            prompt_index=0,
            epoch=0,
            seq=self.number(),
            first_layer=0,
            end_layer=_LAYERS,
            first_block=first,
            end_block=first + blocks,
        )

    def _runs(self, header: Shared) -> bytes:
        rng = self.rng
        blocks = header.end_block - header.first_block
        if rng.random() < 0.2:
            return rng.randbytes(rng.randrange(12 * blocks * _LAYERS + 2))
        offsets = [0, 1, SIZE - 1, SIZE - _UNIT, SIZE, 2**32, 2**63, 2**64 - _UNIT, 2**64 - 1]
        lengths = [0, 1, _UNIT - 1, _UNIT, blocks * _UNIT, SIZE, 2**32 - 1]
        count = rng.choice([0, 1, 1, 2, blocks])
        return pack(Span(rng.choice(offsets), rng.choice(lengths)) for _ in range(count))

    def _transfer(self, uuid: str) -> list[bytes]:
        """OFFER, SHARED, COMMIT as they should be, but for the bytes, which nobody computed."""
        offer, data, commit = good_transfer(uuid, self.rng.randrange(1, 40), self.rng)
        blocks = (len(data) - 1) // _UNIT
        header = Shared(
            uuid=uuid, prompt_index=0, epoch=0, seq=0,
            first_layer=0, end_layer=_LAYERS, first_block=0, end_block=blocks,
        )  # fmt: skip
        body = pack([Span(0, blocks * _UNIT)])
        return [offer, encode(header, len(body)) + body, commit]

    @contextlib.contextmanager
    def _descriptors(self) -> Iterator[list[int]]:
        """None, one or many of: memory as it should be, memory that may shrink, with other seals or
        none, a file, a pipe, a socket, a folder."""
        made = [self._make() for _ in range(self.rng.choice([0, 1, 1, 1, 2, 3, _MOST_DESCRIPTORS]))]
        try:
            yield made
        finally:
            for fd in made:
                os.close(fd)

    def _make(self) -> int:
        kind = self.rng.randrange(7)
        if kind == 0:
            return os.dup(self._memory.fd)
        if kind == 1:
            return os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR)
        if kind == 2:
            ends = os.pipe()
            os.close(ends[0])
            return ends[1]
        if kind == 3:
            return socket.socket(socket.AF_UNIX).detach()
        if kind == 4:
            return os.open("/", os.O_RDONLY)
        fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING if kind == 5 else 0)
        os.ftruncate(fd, SIZE)
        if kind == 5:
            seals = self.rng.choice([0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_SEAL])
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd

"""Bytes <-> frames: the prefix, its limits, the header's schema, the body's length. Pure.

Lowest layer of the wire: it knows no handshake, no roles and no sockets. Bodies of DATA pass
through without being kept, so that a shell can read them straight to where they belong.
docs/wire.md is the description to the byte.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec

from xpyd_core.errors import ProtocolError
from xpyd_kv.plan.pairs import Pair
from xpyd_kv.wire.errors import IllegalMoveError
from xpyd_kv.wire.messages import (
    CHECKSUM_BYTES,
    DEFAULT_MAX_DATA_BYTES,
    MAX_PROBE_BYTES,
    TYPE_NUMBERS,
    Data,
    Layout,
    Message,
    Nack,
    Offer,
    Probe,
    Region,
    Shared,
)

MAGIC = b"XKV1"
MUST = 0x01
"""Flag: who does not know the frame's type must close the connection instead of skipping it."""
# magic, type, flags, header length, body length, CRC-32 of the header; little-endian like bodies.
_PREFIX = struct.Struct("<4sBBHII")
PREFIX_BYTES = _PREFIX.size  # 16
MAX_HEADER_BYTES = 0xFFFF
_MAX_BODY_BYTES = 0xFFFF_FFFF
TOKEN_BYTES = 4
RUN_BYTES = 12
MAX_NACK_FRAMES = 16_384
MAX_REGION_BODY_BYTES = 64 * 1024
# Room for what a later minor version may add; read and dropped, never kept.
MAX_SKIPPED_BODY_BYTES = 64 * 1024

_TYPES: dict[int, type[Message]] = {number: kind for kind, number in TYPE_NUMBERS.items()}
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[type[Message], msgspec.msgpack.Decoder[Message]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in TYPE_NUMBERS
}


class Frame(NamedTuple):
    """A whole control frame. `raw` is its prefix and header as they came (HELLO's are signed)."""

    message: Message
    body: bytes
    raw: bytes


class DataBegin(NamedTuple):
    """A DATA frame's header has come; `length` KV bytes follow, and their checksum."""

    header: Data
    length: int


class DataChunk(NamedTuple):
    """The next KV bytes. `data` is valid until the next event is asked for."""

    data: memoryview


class DataEnd(NamedTuple):
    """The frame's last byte has come. `checksum` is what P says that the KV bytes have."""

    header: Data
    checksum: bytes


Allowed = frozenset[type[Message] | None] | None
"""Types that may come now; the element None stands for all unknown ones."""

FrameEvent = Frame | DataBegin | DataChunk | DataEnd


@dataclass(frozen=True)
class Limits:
    """What one side takes, from the LAYOUT that it announced. The blocks of DATA are P's, or the
    part of them that is for D's rank."""

    max_tokens: int = 0
    max_data_bytes: int = DEFAULT_MAX_DATA_BYTES
    block_bytes: int = 0
    layers: int = 0

    @classmethod
    def of(cls, receiver: Layout, pair: Pair | None) -> Limits:
        """What `receiver` takes of a connection on which `pair` moves; None: no DATA."""
        block_bytes = 0 if pair is None else pair.block_bytes
        # One block must always fit, however small the limit was set.
        data_bytes = max(receiver.max_data_bytes, block_bytes)
        return cls(
            max_tokens=receiver.max_tokens,
            max_data_bytes=min(data_bytes, _MAX_BODY_BYTES - CHECKSUM_BYTES),
            block_bytes=block_bytes,
            layers=0 if pair is None else pair.layers,
        )

    @cached_property
    def max_body_bytes(self) -> Mapping[type[Message], int]:
        """The longest body of a frame by its type, known before its header is; others have none."""
        blocks = self.max_data_bytes // self.block_bytes if self.block_bytes else 0
        return {
            Data: self.max_data_bytes + CHECKSUM_BYTES,
            Offer: TOKEN_BYTES * self.max_tokens,
            Nack: TOKEN_BYTES * MAX_NACK_FRAMES,
            Region: MAX_REGION_BODY_BYTES,
            Probe: MAX_PROBE_BYTES,
            Shared: RUN_BYTES * blocks,
        }

    def fault(self, message: Message, body_bytes: int) -> str:
        """What is wrong with a body of this length behind this header; '' when nothing is."""
        name = type(message).__name__.upper()
        if body_bytes > self.max_body_bytes.get(type(message), 0):
            return f"{name} with a body of {body_bytes} bytes, over its limit"
        if isinstance(message, Data):
            length = self.data_bytes(message)
            if not length:
                return "DATA with an empty or impossible range of layers or blocks"
            agrees = body_bytes == length + CHECKSUM_BYTES
        elif isinstance(message, Shared):
            return self._shared_fault(message, body_bytes)
        elif isinstance(message, Offer):
            if message.prompt_tokens > message.tokens:
                return "OFFER with more prompt tokens than tokens"
            agrees = body_bytes == TOKEN_BYTES * message.tokens
        elif isinstance(message, Nack):
            agrees = body_bytes == TOKEN_BYTES * message.frames
        elif isinstance(message, Probe):
            agrees = body_bytes > 0 if message.shared else body_bytes == message.size_bytes
        else:
            agrees = True
        return "" if agrees else f"{name} whose body's length disagrees with its header"

    def data_bytes(self, header: Data | Shared) -> int:
        """KV bytes that the header's ranges mean; 0 when they are empty or impossible."""
        layers = header.end_layer - header.first_layer
        blocks = header.end_block - header.first_block
        if layers <= 0 or blocks <= 0 or header.end_layer > self.layers:
            return 0
        return layers * blocks * self.block_bytes

    def _shared_fault(self, header: Shared, body_bytes: int) -> str:
        length = self.data_bytes(header)
        if not 0 < length <= self.max_data_bytes:
            return "SHARED with an empty, impossible or too large range of layers or blocks"
        runs, rest = divmod(body_bytes, RUN_BYTES)
        if rest or not 0 < runs <= length // self.block_bytes:
            return "SHARED with half a run, or no run, or more runs than blocks"
        return ""


def encode(message: Message, body_bytes: int = 0) -> bytes:
    """Prefix and header of a frame whose body has `body_bytes` bytes; the body is sent behind it.

    IllegalMoveError when the message breaks its own schema, or no prefix can say the body's length:
    what this returns, `Decoder` accepts (within the receiver's Limits).
    """
    header = _ENCODER.encode(message)
    name = type(message).__name__.upper()
    if body_bytes > _MAX_BODY_BYTES:
        raise IllegalMoveError(f"{name}: a body of {body_bytes} bytes is too long")
    if len(header) > MAX_HEADER_BYTES:
        raise IllegalMoveError(f"{name}: a header of {len(header)} bytes is too long")
    try:
        _DECODERS[type(message)].decode(header)
    except msgspec.ValidationError as error:
        raise IllegalMoveError(f"{name}: {error}") from error
    number = TYPE_NUMBERS[type(message)]
    prefix = _PREFIX.pack(MAGIC, number, MUST, len(header), body_bytes, zlib.crc32(header))
    return prefix + header


class Decoder:
    """Cuts a stream of bytes into frames. Keeps at most one control frame's bytes.

    `limits` bounds bodies; `allowed` (None = all types) is looked at as soon as a prefix has come.
    Both may be changed between events.
    After ProtocolError the stream is lost, and so is the connection.
    """

    def __init__(self, limits: Limits, allowed: Allowed = None) -> None:
        self.limits = limits
        self.allowed = allowed
        self._buffer = bytearray()
        self._prefix: tuple[type[Message] | None, int, int, int] | None = None
        self._message: Message | None = None
        self._need: int = PREFIX_BYTES
        self._skip_left = 0
        # Takes what `_need` bytes are: prefix, header, body or DATA's checksum.
        self._step: Callable[[], FrameEvent | None] = self._read_prefix
        self.data_left = 0
        """KV bytes still missing of the DATA frame under way, 0 when there are none."""

    @property
    def kept_bytes(self) -> int:
        """Bytes held for the frame under way."""
        return len(self._buffer)

    @property
    def wanted_bytes(self) -> int:
        """Bytes missing of the control frame or DATA's checksum under way, as far as its length is
        known."""
        return self._need - len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[FrameEvent]:
        """The events that `data` completes, one at a time: consume all of them before the next
        feed. ProtocolError is raised at its place in the order."""
        rest = memoryview(data)
        while len(rest):
            if self.data_left:
                chunk, rest = rest[: self.data_left], rest[self.data_left :]
                yield DataChunk(chunk)
                self.data_read(len(chunk))
            elif self._skip_left:
                skipped = min(self._skip_left, len(rest))
                self._skip_left -= skipped
                rest = rest[skipped:]
            else:
                missing = self._need - len(self._buffer)
                self._buffer += rest[:missing]
                rest = rest[missing:]
                if self._prefix is None and not MAGIC.startswith(self._buffer[: len(MAGIC)]):
                    raise ProtocolError("not a frame: wrong magic")
                while len(self._buffer) == self._need:
                    event = self._step()
                    if event is not None:
                        yield event

    def data_read(self, count: int) -> None:
        """Count `count` KV bytes that the caller has read without `feed`."""
        if not 0 < count <= self.data_left:
            raise IllegalMoveError("more bytes read than the DATA frame has")
        self.data_left -= count

    def _read_prefix(self) -> None:
        fields: tuple[bytes, int, int, int, int, int] = _PREFIX.unpack(self._buffer)
        _, number, flags, header_bytes, body_bytes, crc = fields
        kind = _TYPES.get(number)
        if self.allowed is not None and kind not in self.allowed:
            raise ProtocolError(f"type {number} is not allowed now")
        if kind is None:
            if flags & MUST:
                raise ProtocolError(f"unknown type {number} that must be understood")
            limit = MAX_SKIPPED_BODY_BYTES
        else:
            limit = self.limits.max_body_bytes.get(kind, 0)
        if body_bytes > limit:
            raise ProtocolError(f"type {number} with a body of {body_bytes} bytes, over its limit")
        self._prefix = (kind, header_bytes, body_bytes, crc)
        self._need = PREFIX_BYTES + header_bytes
        self._step = self._read_header

    def _read_header(self) -> FrameEvent | None:
        assert self._prefix is not None
        kind, _, body_bytes, crc = self._prefix
        header = memoryview(self._buffer)[PREFIX_BYTES:]
        try:
            if zlib.crc32(header) != crc:
                raise ProtocolError("a header's CRC is wrong")
            message = None if kind is None else _DECODERS[kind].decode(header)
        except (ValueError, RecursionError) as error:
            # The error holds nothing of the header: a stranger may have written it.
            name = "" if kind is None else kind.__name__.upper()
            raise ProtocolError(f"{name} header breaks its schema") from error
        finally:
            header.release()
        if message is None:
            self._skip_left = body_bytes
            self._reset()
            return None
        fault = self.limits.fault(message, body_bytes)
        if fault:
            raise ProtocolError(fault)
        self._message = message
        self._step = self._finish
        if isinstance(message, Data):
            self._buffer = bytearray()
            self._need = CHECKSUM_BYTES
            self.data_left = body_bytes - CHECKSUM_BYTES
            return DataBegin(message, self.data_left)
        if not body_bytes:
            return self._finish()
        self._need += body_bytes
        return None

    def _finish(self) -> FrameEvent:
        message = self._message
        assert self._prefix is not None
        assert message is not None
        if isinstance(message, Data):
            event = DataEnd(message, bytes(self._buffer))
        else:
            header_end = PREFIX_BYTES + self._prefix[1]
            raw, body = bytes(self._buffer[:header_end]), bytes(self._buffer[header_end:])
            event = Frame(message, body, raw)
        self._reset()
        return event

    def _reset(self) -> None:
        self._buffer = bytearray()
        self._prefix = self._message = None
        self._need = PREFIX_BYTES
        self._step = self._read_prefix

"""Bytes <-> frames: the prefix, its limits, the header's schema, the body's length. Pure.

Lowest layer of the wire: it knows no handshake, no roles and no sockets. Bodies of DATA pass
through without being kept, so that a shell can read them straight to where they belong.
docs/wire.md is the description to the byte.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
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
"""Types that may come now; the element None means all unknown ones."""

FrameEvent = Frame | DataBegin | DataChunk | DataEnd


@dataclass(frozen=True)
class Limits:
    """The limits of what one side accepts, from the LAYOUT that it announced. The blocks of DATA
    are P's, or the part of them that is for D's rank."""

    max_tokens: int = 0
    max_data_bytes: int = DEFAULT_MAX_DATA_BYTES
    block_bytes: int = 0
    layers: int = 0

    @classmethod
    def of(cls, receiver: Layout, pair: Pair | None) -> Limits:
        """Return what `receiver` accepts on a connection on which `pair` moves; None: no DATA."""
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
        """Return what is wrong with a body of this length behind this header; '' when nothing is.
        Hot path: most types have no body."""
        limit = self.max_body_bytes.get(type(message))
        if body_bytes > (limit or 0):
            return f"{_name(message)} with a body of {body_bytes} bytes, over its limit"
        if limit is None:
            return ""
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
        return "" if agrees else f"{_name(message)} whose body's length disagrees with its header"

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
    if body_bytes > _MAX_BODY_BYTES:
        raise IllegalMoveError(f"{_name(message)}: a body of {body_bytes} bytes is too long")
    if len(header) > MAX_HEADER_BYTES:
        raise IllegalMoveError(f"{_name(message)}: a header of {len(header)} bytes is too long")
    try:
        _DECODERS[type(message)].decode(header)
    except msgspec.ValidationError as error:
        raise IllegalMoveError(f"{_name(message)}: {error}") from error
    number = TYPE_NUMBERS[type(message)]
    prefix = _PREFIX.pack(MAGIC, number, MUST, len(header), body_bytes, zlib.crc32(header))
    return prefix + header


def _name(message: Message) -> str:
    return type(message).__name__.upper()


_TLS_HANDSHAKE = b"\x16\x03"


class Decoder:
    """Cuts a stream of bytes into frames. Keeps at most one control frame's bytes.

    `limits` bounds bodies; `allowed` (None = all types) is looked at as soon as a prefix has come.
    Both may be changed between events.
    After ProtocolError the stream is lost, and so is the connection.
    """

    def __init__(self, limits: Limits, allowed: Allowed = None) -> None:
        self.limits = limits
        self.allowed = allowed
        # The beginning of a frame (or of DATA's checksum) whose rest has not come; so many bytes of
        # it are needed to go on.
        self._buffer = bytearray()
        self._need = PREFIX_BYTES
        self._data: Data | None = None
        """The header of the DATA frame under way."""
        self.data_left = 0
        """KV bytes still missing of the DATA frame under way, 0 when there are none."""
        self._skip_left = 0

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
        feed. ProtocolError is raised at its place in the order. Hot path: a frame that is whole in
        `data` is read in one step, without a copy in between."""
        rest = memoryview(data)
        while len(rest):
            if self.data_left:
                chunk, rest = rest[: self.data_left], rest[self.data_left :]
                yield DataChunk(chunk)
                self.data_read(len(chunk))
                continue
            if self._skip_left:
                skipped = min(self._skip_left, len(rest))
                self._skip_left -= skipped
                rest = rest[skipped:]
                continue
            if not self._buffer:
                event, taken = self._read(rest)
                if not taken:
                    self._buffer += rest[: self._need]
                    taken = len(self._buffer)
                rest = rest[taken:]
            else:
                missing = self._need - len(self._buffer)
                self._buffer += rest[:missing]
                rest = rest[missing:]
                if PREFIX_BYTES <= len(self._buffer) < self._need:
                    continue  # Of what is here, all is known.
                event, taken = self._read(memoryview(self._buffer))
                if taken:
                    self._buffer = bytearray()
            if event is not None:
                yield event

    def data_read(self, count: int) -> None:
        """Count `count` KV bytes that the caller has read without `feed`."""
        if not 0 < count <= self.data_left:
            raise IllegalMoveError("more bytes read than the DATA frame has")
        self.data_left -= count

    def _read(self, data: memoryview) -> tuple[FrameEvent | None, int]:
        """The event that `data` begins with, if it makes one, and how many bytes of it that took;
        0: `_need` bytes are needed."""
        size = len(data)
        if self._data is not None:
            return self._read_checksum(self._data, data)
        if size < PREFIX_BYTES:
            if not MAGIC.startswith(data[: len(MAGIC)]):
                raise _no_frame(data)
            return None, 0
        fields: tuple[bytes, int, int, int, int, int] = _PREFIX.unpack_from(data)
        magic, number, flags, header_bytes, body_bytes, crc = fields
        if magic != MAGIC:
            raise _no_frame(data)
        kind = self._kind_of(number, flags, body_bytes)
        header_end = PREFIX_BYTES + header_bytes
        if size < header_end:
            self._need = header_end
            return None, 0
        raw = bytes(data[:header_end])
        message = _message_of(kind, raw, crc)
        if message is None:
            self._skip_left = body_bytes
            self._need = PREFIX_BYTES
            return None, header_end
        fault = self.limits.fault(message, body_bytes)
        if fault:
            raise ProtocolError(fault)
        if isinstance(message, Data):
            self._data = message
            self._need = CHECKSUM_BYTES
            self.data_left = body_bytes - CHECKSUM_BYTES
            return DataBegin(message, self.data_left), header_end
        end = header_end + body_bytes
        if size < end:
            self._need = end
            return None, 0
        self._need = PREFIX_BYTES
        return Frame(message, bytes(data[header_end:end]), raw), end

    def _read_checksum(self, header: Data, data: memoryview) -> tuple[DataEnd | None, int]:
        if len(data) < CHECKSUM_BYTES:
            return None, 0
        self._data = None
        self._need = PREFIX_BYTES
        return DataEnd(header, bytes(data[:CHECKSUM_BYTES])), CHECKSUM_BYTES

    def _kind_of(self, number: int, flags: int, body_bytes: int) -> type[Message] | None:
        """The type of a frame whose prefix says so; None: unknown, to be skipped."""
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
        return kind


def _message_of(kind: type[Message] | None, raw: bytes, crc: int) -> Message | None:
    """The header behind the prefix; None where its type is unknown."""
    header = memoryview(raw)[PREFIX_BYTES:]
    if zlib.crc32(header) != crc:
        raise ProtocolError("a header's CRC is wrong")
    try:
        return None if kind is None else _DECODERS[kind].decode(header)
    except (ValueError, RecursionError) as error:
        # The error holds nothing of the header: a stranger may have written it.
        name = "" if kind is None else kind.__name__.upper()
        raise ProtocolError(f"{name} header breaks its schema") from error


def _no_frame(data: bytes | bytearray | memoryview) -> ProtocolError:
    is_tls = bytes(data[: len(_TLS_HANDSHAKE)]) == _TLS_HANDSHAKE
    why = "TLS: the peer has --kv-encryption tls and this side has not" if is_tls else "wrong magic"
    return ProtocolError(f"not a frame: {why}")

"""The receiving end of ZMTP 3, the wire of ZMQ: bytes in, messages and bytes out. Pure.

`discovery` owns one Receiver per connection. It takes what a DEALER says to a ROUTER that rarely
replies (`message`), by the NULL mechanism. libzmq itself is not used here: it bounds a frame and
counts whole messages, so that one peer whose message never ends fills the memory (docs/adr/0026).

    greeting (64 bytes) -> READY -> frames; a message is all frames up to the first without MORE

Source: rfc.zeromq.org/spec/23 (3.0) and spec/37 (3.1, whose PING and PONG are answered).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from xpyd_core.errors import ProtocolError

MAX_KEPT_FRAMES = 2
"""Frames of a message that are kept; those behind them are read and dropped."""
MAX_FRAMES = 16
MAX_COMMAND_BYTES = 2048
"""A READY with an identity of 255 bytes and some metadata is shorter."""
_GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4
_NULL = b"NULL".ljust(20, b"\0")
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER\x08Identity\x00\x00\x00\x00"
_SENDERS = (b"DEALER", b"REQ", b"ROUTER")
_MAX_PING_CONTEXT_BYTES = 16


class Message(NamedTuple):
    """The first frames of a message, at most MAX_KEPT_FRAMES."""

    frames: tuple[bytes, ...]


class Command(NamedTuple):
    """Something between the two ends; `answer` is what to send, perhaps nothing."""

    answer: bytes = b""


def _frame(flags: int, body: bytes) -> bytes:
    return bytes((flags, len(body))) + body


_SHORT_BYTES = 255


def message(frames: Sequence[bytes]) -> bytes:
    """A message of these frames, each of at most 255 bytes, as it goes to the peer."""
    assert all(len(frame) <= _SHORT_BYTES for frame in frames), "a long frame has another head"
    last = len(frames) - 1
    return b"".join(_frame(0 if at == last else _MORE, one) for at, one in enumerate(frames))


class Receiver:
    """One connection. `max_frame_bytes` bounds each frame, and so what is held of it."""

    HELLO = b"\xff" + bytes(8) + b"\x7f\x03\x01" + _NULL + bytes(32) + _frame(_COMMAND, _READY)
    """All that is sent unasked, at once: neither side waits for the other here."""

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()
        self._offset = 0
        self._has_greeting = False
        self._frames: list[bytes] = []
        self._frame_count = 0
        self.is_ready = False
        """The handshake is over: messages may come."""

    @property
    def held_bytes(self) -> int:
        """What is kept of frames and messages that have not ended."""
        return len(self._buffer) - self._offset + sum(map(len, self._frames))

    def feed(self, data: bytes) -> None:
        """Take bytes; `next` says what they mean."""
        del self._buffer[: self._offset]
        self._offset = 0
        self._buffer += data

    def next(self) -> Message | Command | None:
        """The next thing that is complete, None for none. Raises ProtocolError: then the
        connection is to be closed, nothing more can be read from it."""
        if not self._has_greeting and not self._take_greeting():
            return None
        while True:
            taken = self._take_frame()
            if taken is None:
                return None
            flags, body = taken
            if flags & _COMMAND:
                return self._take_command(body)
            if not self.is_ready:
                raise ProtocolError("a message before READY")
            self._frame_count += 1
            if len(self._frames) < MAX_KEPT_FRAMES:
                self._frames.append(body)
            if not flags & _MORE:
                message = Message(tuple(self._frames))
                self._frames, self._frame_count = [], 0
                return message
            if self._frame_count == MAX_FRAMES:
                raise ProtocolError(f"a message of more than {MAX_FRAMES} frames")

    def _take_greeting(self) -> bool:
        greeting = bytes(self._buffer[:_GREETING_BYTES])
        if greeting[:1] not in (b"", b"\xff") or greeting[9:10] not in (b"", b"\x7f"):
            raise ProtocolError("not ZMQ")
        if greeting[10:11] and greeting[10] < 3:
            raise ProtocolError("a ZMQ from before version 4")
        if len(greeting) < _GREETING_BYTES:
            return False
        if greeting[12:32] != _NULL:
            raise ProtocolError("a ZMQ mechanism other than NULL")
        self._offset = _GREETING_BYTES
        self._has_greeting = True
        return True

    def _take_frame(self) -> tuple[int, bytes] | None:
        buffer, start = self._buffer, self._offset
        if len(buffer) < start + 2:
            return None
        flags = buffer[start]
        if flags > _MORE | _LONG | _COMMAND or (flags & _MORE and flags & _COMMAND):
            raise ProtocolError(f"frame flags {flags:#x}")
        begin = start + (9 if flags & _LONG else 2)
        if len(buffer) < begin:
            return None
        size = int.from_bytes(buffer[start + 1 : begin], "big")
        most = MAX_COMMAND_BYTES if flags & _COMMAND else self._max_frame_bytes
        if size > most:
            raise ProtocolError(f"a frame of {size} bytes, more than {most}")
        if len(buffer) < begin + size:
            return None
        self._offset = begin + size
        return flags, bytes(buffer[begin : begin + size])

    def _take_command(self, body: bytes) -> Command:
        name = body[1 : 1 + body[0]] if body else b""
        if not self.is_ready:
            if name != b"READY":
                raise ProtocolError("expected READY")
            if _properties(body[6:]).get(b"socket-type") not in _SENDERS:
                raise ProtocolError("a ZMQ socket that sends no messages here")
            self.is_ready = True
        elif name == b"PING":
            # Behind the name: the peer's patience (2 bytes), then a context to give back.
            context = body[7:]
            if len(context) > _MAX_PING_CONTEXT_BYTES:
                raise ProtocolError("a PING with a long context")
            return Command(_frame(_COMMAND, b"\x04PONG" + context))
        return Command()


def _properties(data: bytes) -> dict[bytes, bytes]:
    """READY's: length (1) and name, length (4) and value. Names are of either case."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        name_end = at + 1 + data[at]
        value_begin = name_end + 4
        value_end = value_begin + int.from_bytes(data[name_end:value_begin], "big")
        if value_end > len(data):
            raise ProtocolError("READY: a property is cut off")
        found[data[at + 1 : name_end].lower()] = data[value_begin:value_end]
        at = value_end
    return found

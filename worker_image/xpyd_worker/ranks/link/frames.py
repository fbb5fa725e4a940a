"""Frames between the processes of an instance, as bytes. Pure.

Four bytes of length, one of kind, two of the rank that the frame is from or for, then the rest. The
two sides are of one version: they come from one command, or the handshake has made sure.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from xpyd_core.errors import ProtocolError
from xpyd_worker.ranks.link.ring import MAX_MESSAGE_BYTES

MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + 1
HEAD = struct.Struct("<IBH")


class Kind(IntEnum):
    """What a frame is for."""

    CONTROL = 0
    """Start-up, and why a rank ends (messages.py)."""
    CHANNEL = 1
    """KV transfer's own; opaque."""
    STEP = 2
    """A frame between pods: a step for all ranks of the pod."""
    RESPONSE = 3
    """A frame between pods: what a rank wrote into its response ring."""
    POD = 4
    """A frame between pods: about the pod itself (pods.messages)."""


class Frame(NamedTuple):
    """One frame."""

    kind: Kind
    rank: int
    body: bytes


def encode_frame(frame: Frame) -> bytes:
    """Its bytes. ProtocolError where it is too long for the other side."""
    if len(frame.body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame.body)} bytes; {MAX_FRAME_BYTES} are allowed")
    return HEAD.pack(len(frame.body), frame.kind, frame.rank) + frame.body


class FrameReader:
    """Bytes as they come in, frames out. Holds at most one frame that is not whole."""

    def __init__(self, most_bytes: int = MAX_FRAME_BYTES) -> None:
        self.most_bytes = most_bytes
        self._buffer = bytearray()

    def receive(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes. ProtocolError for what is none."""
        buffer = self._buffer
        buffer += data
        frames: list[Frame] = []
        at = 0
        while len(buffer) - at >= HEAD.size:
            length, kind, rank = HEAD.unpack_from(buffer, at)
            if length > self.most_bytes:
                raise ProtocolError(f"a frame of {length} bytes; {self.most_bytes} are allowed")
            end = at + HEAD.size + length
            if len(buffer) < end:
                break
            try:
                known = Kind(kind)
            except ValueError as error:
                raise ProtocolError(f"a frame of kind {kind}, which is none") from error
            frames.append(Frame(known, rank, bytes(buffer[at + HEAD.size : end])))
            at = end
        del buffer[:at]
        return frames

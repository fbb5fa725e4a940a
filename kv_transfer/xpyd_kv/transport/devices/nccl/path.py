"""The data path `nccl`: P sends a frame's blocks in one group, D receives them where they belong.

REGION names a communicator, which both sides then make; SHARED says which messages come through it
now, also those that D discards: D receives them into scratch memory, so that P's send ends.
Fills the seam of `data_path`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence

from xpyd_core.errors import ProtocolError
from xpyd_kv.memory.device import DeviceView, View
from xpyd_kv.spans import Span
from xpyd_kv.transport.devices.nccl.communicators import Communicator, Communicators, NcclFrame
from xpyd_kv.transport.devices.nccl.library import (
    ID_BYTES,
    RECEIVER,
    SENDER,
    NcclError,
    communicator_bytes,
)
from xpyd_kv.transport.host.data_path import Borrower, DataPath, Fetch, Lender, Lent, pack, unpack

NAME = "nccl"
_HEAD = struct.Struct("<I")
# So long P uses the socket where there was no room for a communicator.
_RETRY_S = 1.0


class NcclPath(DataPath):
    """`unit_bytes`: one block of one layer; `lends`: whether we are a P with its
    cache on the GPU of `communicators`. Close it when no peer is left."""

    name = NAME

    def __init__(self, communicators: Communicators, *, unit_bytes: int, lends: bool) -> None:
        self._communicators = communicators
        self._unit_bytes = unit_bytes
        self._lends = lends

    @property
    def lends(self) -> bool:
        return self._lends

    def lender(self) -> NcclLender:
        return NcclLender(self._communicators, self._unit_bytes)

    def borrower(self) -> NcclBorrower:
        return NcclBorrower(self._communicators)

    def close(self) -> None:
        """End all communicators."""
        self._communicators.close()


class NcclLender(Lender):
    def __init__(self, communicators: Communicators, unit_bytes: int) -> None:
        self._communicators = communicators
        self._unit_bytes = unit_bytes
        self._communicator: Communicator | None = None
        self._number = 0
        self._retry_at = -math.inf
        self._messages: list[DeviceView] = []

    @property
    def has_news(self) -> bool:
        now = self._communicators.clock()
        if self._communicator is None:
            return now >= self._retry_at
        return not self._communicator.keep(now)

    def lent(self) -> Lent:
        communicators = self._communicators
        comm_id = communicators.nccl.new_id()
        self._communicator = communicators.open(comm_id, SENDER)
        self._number += self._communicator is not None
        self._retry_at = communicators.clock() + _RETRY_S
        body = (
            b"" if self._communicator is None else _HEAD.pack(communicators.nccl.version) + comm_id
        )
        return Lent(communicator_bytes(communicators.limits.channels), body)

    def places(self, views: Sequence[View], *, at_most: int) -> bytes | None:
        communicator, device = self._communicator, self._communicators.device.index
        if communicator is None:
            return None
        whole: list[DeviceView] = []
        for view in views:
            if not isinstance(view, DeviceView) or view.device != device:
                return None
            _append(whole, view)
        # D's room for two neighbours may be in two places, so each message is one block.
        unit = self._unit_bytes
        messages = [
            view[start : start + unit] for view in whole for start in range(0, len(view), unit)
        ]
        if len(messages) > at_most:
            return None
        self._messages = messages
        return pack(Span(self._number, message.length) for message in messages)

    def sent(self) -> None:
        assert self._communicator is not None
        self._communicators.post(self._communicator, NcclFrame(self._messages))

    def close(self) -> None:
        if self._communicator is not None:
            # P may overwrite the blocks while they are read: D discards what it receives.
            self._communicators.end(self._communicator, "closed")


class NcclBorrower(Borrower):
    reopens = True

    def __init__(self, communicators: Communicators) -> None:
        self._communicators = communicators
        self._communicator: Communicator | None = None
        self._number = 0

    def open(self, size_bytes: int, body: bytes, descriptors: Sequence[int]) -> None:
        if descriptors or len(body) not in (0, _HEAD.size + ID_BYTES):
            raise ProtocolError("REGION does not name a communicator")
        if self._communicator is not None and self._communicator.has_frames:
            raise ProtocolError("REGION while messages come through the one before")
        self.close()
        if not body:
            return
        (version,) = _HEAD.unpack_from(body)
        ours = self._communicators.nccl.version
        if version != ours:
            raise NcclError(f"NCCL {version} of the peer and {ours} here do not mix")
        self._number += 1
        self._communicator = self._communicators.open(body[_HEAD.size :], RECEIVER)
        if self._communicator is None:
            raise NcclError("as many communicators as there may be")

    def prepare(self, body: bytes, length: int) -> Callable[[Sequence[View] | None], _Coming]:
        communicator = self._communicator
        numbers, lengths = unpack(body)
        if communicator is None or {*numbers} != {self._number} or not all(lengths):
            raise ProtocolError("SHARED names another communicator, or an empty message")
        if sum(lengths) != length:
            raise ProtocolError(f"messages of other than {length} bytes")

        def start(views: Sequence[View] | None) -> _Coming:
            device = self._communicators.device.index
            frame = NcclFrame(lengths) if views is None else place(lengths, views, device)
            self._communicators.post(communicator, frame)
            return _Coming(communicator, frame)

        return start

    def close(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            self._communicators.end_and_wait(communicator)


class _Coming(Fetch):
    def __init__(self, communicator: Communicator, frame: NcclFrame) -> None:
        self._communicator = communicator
        self._frame = frame

    def poll(self) -> bool:
        return self._communicator.is_through(self._frame)


def _append(views: list[DeviceView], view: DeviceView) -> None:
    """`view` behind the others, joined with its neighbour."""
    last = views[-1] if views else None
    if last is not None and last.address + last.length == view.address:
        views[-1] = DeviceView(view.device, last.address, last.length + view.length)
    elif view.length:
        views.append(view)


def place(lengths: Sequence[int], views: Sequence[View], device: int) -> NcclFrame:
    """Where messages of these lengths go, which fill `views` one after another: straight there
    where one lies in one view of our GPU, else through scratch memory."""
    rest = [view for view in views if len(view)]
    rest.reverse()
    messages: list[DeviceView | int] = []
    spill: list[View] = []
    for length in lengths:
        view = rest[-1]
        if isinstance(view, DeviceView) and view.device == device and len(view) >= length:
            messages.append(view[:length])
        else:
            messages.append(length)
        left = length
        while left:
            view = rest.pop()
            part = view[:left]
            if isinstance(messages[-1], int):
                spill.append(part)
            left -= len(part)
            if len(part) < len(view):
                rest.append(view[len(part) :])
    return NcclFrame(messages, spill)

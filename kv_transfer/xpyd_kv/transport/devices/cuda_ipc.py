"""The data path `cuda_ipc`: D's GPU copies from P's cache, on any GPU of the machine.

P exports its cache once; D opens the handle and copies each frame in one launch on a stream of its
own. A frame is through when its event is. Fills the seam of `data_path` over that of device.api; no
torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from xpyd_core.errors import ProtocolError
from xpyd_kv.memory.device import (
    Device,
    DeviceError,
    DeviceStream,
    DeviceView,
    Event,
    IpcHandle,
    View,
)
from xpyd_kv.spans import Span, join
from xpyd_kv.transport.devices.staging import CLOSE_S, DeviceFailedError, is_done, started
from xpyd_kv.transport.host.data_path import (
    Borrower,
    DataPath,
    Fetch,
    Lender,
    Lent,
    Through,
    check_runs,
    pack,
    unpack,
)
from xpyd_kv.wire.messages import Hello

_log = logging.getLogger(__name__)
NAME = "cuda_ipc"
HANDLE_BYTES = 64
PROCESS_BYTES = 16


class CudaIpcPath(DataPath):
    """`host` is our host token, also in our HELLO; `region` the allocation that a P
    lends, which its owner frees after `close`. Close it when no peer is left."""

    name = NAME

    def __init__(self, device: Device, *, host: bytes, region: DeviceView | None = None) -> None:
        self._device = device
        self._host = host
        self._region = region
        self._handle: IpcHandle | None = None
        self._stream: DeviceStream | None = None

    @property
    def lends(self) -> bool:
        return self._region is not None

    def can_use(self, theirs: Hello) -> bool:
        same_host = bool(self._host) and theirs.host == self._host
        return same_host and self._device.can_reach(theirs.gpu)

    def lender(self) -> CudaIpcLender:
        assert self._region is not None
        if self._handle is None:
            self._handle = self._device.export(self._region)
        return CudaIpcLender(self._region, self._handle)

    def borrower(self) -> CudaIpcBorrower:
        if self._stream is None:
            self._stream = self._device.stream()
        return CudaIpcBorrower(self._device, self._stream)

    def close(self) -> None:
        """Give the load stream back."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class CudaIpcLender(Lender):
    def __init__(self, region: DeviceView, handle: IpcHandle) -> None:
        self._region = region
        self._handle = handle

    def lent(self) -> Lent:
        handle = self._handle
        body = handle.handle + handle.process + handle.device_uuid.encode()
        return Lent(handle.size_bytes, body)

    def places(self, views: Sequence[View], *, at_most: int) -> bytes | None:
        runs = runs_in(self._region, views)
        return None if runs is None or len(runs) > at_most else pack(runs)


class CudaIpcBorrower(Borrower):
    def __init__(self, device: Device, stream: DeviceStream) -> None:
        self._device = device
        self._stream = stream
        self._region: DeviceView | None = None

    def open(self, size_bytes: int, body: bytes, descriptors: Sequence[int]) -> None:
        name = body[HANDLE_BYTES + PROCESS_BYTES :]
        if not name.isascii() or not 0 < len(name) <= 64 or descriptors:
            raise ProtocolError("REGION does not name a GPU's memory")
        handle = IpcHandle(
            handle=body[:HANDLE_BYTES],
            size_bytes=size_bytes,
            device_uuid=name.decode(),
            process=body[HANDLE_BYTES : HANDLE_BYTES + PROCESS_BYTES],
        )
        try:
            self._region = self._device.open_peer(handle)
        except DeviceError as error:
            raise DeviceFailedError(f"memory of {handle.device_uuid}: {error}") from error

    def prepare(self, body: bytes, length: int) -> Callable[[Sequence[View] | None], Fetch]:
        region = self._region
        assert region is not None
        runs = unpack(body)
        check_runs(runs, region.length, length)

        def start(views: Sequence[View] | None) -> Fetch:
            if views is None:
                return Through()
            sources = [region[at : at + size] for at, size in zip(*runs, strict=True)]
            return EventFetch(started(self._stream, views, sources))

        return start

    def close(self) -> None:
        region, self._region = self._region, None
        if region is None:
            return
        try:
            if self._stream.record().wait(CLOSE_S):
                self._device.close_peer(region)
                return
        except DeviceError as error:
            _log.error("the GPU has failed: %s", error)
            return
        # Unmapped now, it would be read all the same.
        _log.error("copies from a peer's GPU have not ended within %.0f s", CLOSE_S)


class EventFetch(Fetch):
    """A copy that is through when its event is."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def poll(self) -> bool:
        return is_done(self._event)


def runs_in(region: DeviceView, views: Sequence[View]) -> list[Span] | None:
    """Where in `region` these bytes are, neighbours joined; None when some are elsewhere."""
    offsets: list[int] = []
    for view in views:
        if not isinstance(view, DeviceView) or view.device != region.device:
            return None
        offset = view.address - region.address
        if view.length and not 0 <= offset <= region.length - view.length:
            return None
        offsets.append(offset)
    return join(offsets, map(len, views))

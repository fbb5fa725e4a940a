"""The seam's Device for CUDA, over torch and libcudart. Unverified on hardware.

Memory comes from cudaMalloc and not from torch's allocator, whose blocks cannot all be exported.
The few calls that torch does not offer go through ctypes, to the library that torch has loaded: so
both share contexts and the current device, which is each thread's own and set by the caller first.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from ctypes import byref, c_char, c_int, c_size_t, c_uint, c_void_p
from itertools import chain
from typing import Protocol, TypeVar, cast

import torch

from xpyd_core.errors import UserError
from xpyd_kv.memory import copy_kernel
from xpyd_kv.memory.device import DeviceError, DeviceStream, DeviceView, Event, IpcHandle, View
from xpyd_kv.spans import CopyRun, Span, copy_runs

HANDLE_BYTES = 64
_OUT_OF_MEMORY = 2
_PORTABLE_AND_MAPPED = 1 | 2
_NON_BLOCKING = 1
_LAZY_PEER_ACCESS = 1
_DEFAULT_KIND = 4
_NATIVE_ATOMICS = 3
_DRIVER = "libcuda.so.1"


class _MemHandle(ctypes.Structure):
    _fields_ = (("reserved", c_char * HANDLE_BYTES),)


class Cudart:
    """libcudart. DeviceError for every failure; UserError where memory is out."""

    def __init__(self) -> None:
        version = torch.version.cuda
        if version is None:
            raise UserError("this torch was built without CUDA")
        name = f"libcudart.so.{version.partition('.')[0]}"
        try:
            self._lib = ctypes.CDLL(name)
            # The runtime's library does not say what an address is part of; the driver's does.
            self._driver = ctypes.CDLL(_DRIVER)
        except OSError as error:
            raise UserError(f"{name}, which torch should have loaded: {error}") from error
        self._lib.cudaGetErrorString.restype = ctypes.c_char_p
        self._lib.cudaIpcOpenMemHandle.argtypes = (c_void_p, _MemHandle, c_uint)

    def malloc(self, size_bytes: int) -> int:
        """Address of new device memory."""
        address = c_void_p()
        self._call("cudaMalloc", byref(address), c_size_t(size_bytes))
        return address.value or 0

    def free(self, address: int) -> None:
        self._call("cudaFree", c_void_p(address))

    def range_of(self, address: int) -> tuple[int, int]:
        """Where the allocation that this address is in begins, and its size."""
        start, size = c_void_p(), c_size_t()
        status = self._driver.cuMemGetAddressRange_v2(byref(start), byref(size), c_void_p(address))
        if status:
            raise DeviceError(f"cuMemGetAddressRange: error {status} of the driver")
        return start.value or 0, size.value

    def host_alloc(self, size_bytes: int) -> int:
        """Address of new pinned memory, which all devices see at that address."""
        address = c_void_p()
        flags = c_uint(_PORTABLE_AND_MAPPED)
        self._call("cudaHostAlloc", byref(address), c_size_t(size_bytes), flags)
        return address.value or 0

    def free_host(self, address: int) -> None:
        self._call("cudaFreeHost", c_void_p(address))

    def stream_create(self) -> int:
        """A stream that does not wait for the default stream."""
        stream = c_void_p()
        self._call("cudaStreamCreateWithFlags", byref(stream), c_uint(_NON_BLOCKING))
        return stream.value or 0

    def stream_destroy(self, stream: int) -> None:
        self._call("cudaStreamDestroy", c_void_p(stream))

    def copy_async(self, target: int, source: int, length: int, stream: int) -> None:
        """Enqueue one copy; the addresses say where from and where to."""
        self._call(
            "cudaMemcpyAsync",
            c_void_p(target),
            c_void_p(source),
            c_size_t(length),
            c_int(_DEFAULT_KIND),
            c_void_p(stream),
        )

    def ipc_handle(self, address: int) -> bytes:
        """The handle of the allocation that begins at `address`."""
        handle = _MemHandle()
        self._call("cudaIpcGetMemHandle", byref(handle), c_void_p(address))
        return bytes(handle)

    def ipc_open(self, handle: bytes) -> int:
        """Map a peer's allocation; peer access is enabled where it needs that."""
        address = c_void_p()
        its = _MemHandle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", byref(address), its, c_uint(_LAZY_PEER_ACCESS))
        return address.value or 0

    def ipc_close(self, address: int) -> None:
        self._call("cudaIpcCloseMemHandle", c_void_p(address))

    def has_native_atomics(self, here: int, there: int) -> bool:
        """Whether all atomic operations of device `here` on memory of device `there` go over their
        link: over NVLink they do, over PCIe they do not."""
        value = c_int()
        kind = c_int(_NATIVE_ATOMICS)
        self._call("cudaDeviceGetP2PAttribute", byref(value), kind, c_int(here), c_int(there))
        return bool(value.value)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._lib, name)(*arguments)
        if not status:
            return
        self._lib.cudaGetLastError()  # Or torch would raise it at its next call.
        text = f"{name}: {self._lib.cudaGetErrorString(c_int(status)).decode()}"
        raise UserError(text) if status == _OUT_OF_MEMORY else DeviceError(text)


# Fewer pieces than this go through the copy engines, which leave the SMs to the model.
_LEAST_FOR_KERNEL = 5
_POLL_S = 50e-6
_Result = TypeVar("_Result")


class CudaProcess:
    """The state that all CudaDevices of this process share."""

    def __init__(self) -> None:
        self.token = os.urandom(16)
        self.exported: dict[bytes, DeviceView] = {}
        """The driver opens no handle of its own process."""


class CudaEvent:
    """See xpyd_kv.memory.device.Event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_done(self) -> bool:
        return _guarded(self.event.query)

    def wait(self, timeout_s: float) -> bool:
        if not math.isfinite(timeout_s):
            raise ValueError("a wait has a deadline")
        end = time.monotonic() + timeout_s
        while not self.is_done():
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL_S)
        return True


class _Table:
    """Where a launch finds its pieces: filled here, read there. Free again when `busy_until` is
    done."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = rows
        self.here = torch.empty((rows, 3), dtype=torch.int64, pin_memory=True)
        self.there = torch.empty((rows, 3), dtype=torch.int64, device=device)
        self.busy_until: Event | None = None


class CudaStream:
    """See xpyd_kv.memory.device.DeviceStream."""

    def __init__(self, device: CudaDevice, stream: torch.cuda.Stream, *, is_ours: bool) -> None:
        self._device = device
        self._stream = stream
        self._is_ours = is_ours
        self._tables: deque[_Table] = deque()

    @property
    def handle(self) -> int:
        return self._stream.cuda_stream

    def copy(self, targets: Sequence[View], sources: Sequence[View]) -> None:
        if not self._is_ours:
            raise DeviceError("a transfer on the model's stream")
        span = self._device.span_of
        pieces = copy_runs([span(view) for view in targets], [span(view) for view in sources])
        if len(pieces) < _LEAST_FOR_KERNEL:
            with self._device.current():
                for piece in pieces:
                    self._device.runtime.copy_async(*piece, self.handle)
        else:
            _guarded(lambda: self._launch(pieces))

    def wait(self, event: Event) -> None:
        if not isinstance(event, CudaEvent):
            raise TypeError("not an event of this device's kind")
        _guarded(lambda: self._stream.wait_event(event.event))

    def record(self) -> CudaEvent:
        event = torch.cuda.Event()
        _guarded(lambda: event.record(self._stream))
        return CudaEvent(event)

    def close(self) -> None:
        if self._is_ours:
            with self._device.current():
                self._device.runtime.stream_destroy(self.handle)

    def _launch(self, pieces: list[CopyRun]) -> None:
        word = copy_kernel.word_bytes(pieces)
        rows = copy_kernel.rows_of(pieces, word)
        with torch.cuda.stream(self._stream):
            table = self._table(len(rows))
            flat = array("q", chain.from_iterable(rows))
            table.here[: len(rows)] = torch.frombuffer(flat, dtype=torch.int64).view(-1, 3)
            table.there[: len(rows)].copy_(table.here[: len(rows)], non_blocking=True)
            copy_kernel.launch(
                table.there,
                num_pieces=len(rows),
                most_words=max(words for _, _, words in rows),
                word=word,
            )
            table.busy_until = self.record()

    def _table(self, rows: int) -> _Table:
        """Return a table of at least `rows` rows that no launch reads: the oldest one, or a new
        one."""
        table = self._tables[0] if self._tables else None
        is_free = table is not None and table.busy_until is not None and table.busy_until.is_done()
        if table is None or not is_free or table.rows < rows:
            if is_free:
                self._tables.popleft()
            table = _Table(1 << max(10, rows.bit_length()), self._device.torch_device)
            self._tables.append(table)
        else:
            self._tables.rotate(-1)
        return table


class CudaDevice:
    """See xpyd_kv.memory.device.Device. UserError where there is no such GPU."""

    def __init__(self, index: int, process: CudaProcess | None = None) -> None:
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise UserError(f"no CUDA device {index}")
        self.runtime = Cudart()
        self.torch_device = torch.device("cuda", index)
        self._index = index
        self._uuid = _uuid_of(index)
        self._process = process or CudaProcess()
        self._pinned: dict[int, int] = {}

    @property
    def index(self) -> int:
        return self._index

    @property
    def uuid(self) -> str:
        return self._uuid

    def current(self) -> AbstractContextManager[None]:
        """Makes this the calling thread's device for a while."""
        return torch.cuda.device(self._index)

    def span_of(self, view: View) -> Span:
        """Where these bytes are. ValueError for host memory that no stream can reach."""
        if isinstance(view, DeviceView):
            return Span(view.address, view.length)
        if not len(view):
            return Span(0, 0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        for start, size in self._pinned.items():
            if start <= address <= start + size - len(view):
                return Span(address, len(view))
        raise ValueError("a copy to or from memory that is not pinned")

    def allocate(self, size_bytes: int) -> DeviceView:
        with self.current():
            return DeviceView(self._index, self.runtime.malloc(size_bytes), size_bytes)

    def allocation_of(self, address: int) -> DeviceView:
        """The allocation that this address is in, also one of torch's."""
        with self.current():
            start, size = self.runtime.range_of(address)
        return DeviceView(self._index, start, size)

    def free(self, memory: DeviceView) -> None:
        exported = self._process.exported
        for handle in [h for h, view in exported.items() if view == memory]:
            del exported[handle]
        with self.current():
            self.runtime.free(memory.address)

    def allocate_pinned(self, size_bytes: int) -> memoryview:
        with self.current():
            address = self.runtime.host_alloc(size_bytes)
        self._pinned[address] = size_bytes
        return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")

    def free_pinned(self, memory: memoryview) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        del self._pinned[address]
        with self.current():
            self.runtime.free_host(address)

    def stream(self) -> DeviceStream:
        with self.current():
            handle = self.runtime.stream_create()
        outer = torch.cuda.ExternalStream(handle, device=self.torch_device)
        return CudaStream(self, outer, is_ours=True)

    def compute_stream(self) -> DeviceStream:
        return CudaStream(self, torch.cuda.current_stream(self.torch_device), is_ours=False)

    def can_reach(self, device_uuid: str) -> bool:
        if device_uuid == self._uuid:
            return True
        other = _index_of(device_uuid)
        return other is not None and torch.cuda.can_device_access_peer(self._index, other)

    def has_atomics_on(self, device_uuid: str) -> bool:
        """Whether this GPU's atomic operations work on memory of that one."""
        if device_uuid == self._uuid:
            return True
        other = _index_of(device_uuid)
        return other is not None and self.runtime.has_native_atomics(self._index, other)

    def export(self, memory: DeviceView) -> IpcHandle:
        with self.current():
            handle = self.runtime.ipc_handle(memory.address)
        self._process.exported[handle] = memory
        return IpcHandle(handle, memory.length, self._uuid, self._process.token)

    def open_peer(self, handle: IpcHandle) -> DeviceView:
        if len(handle.handle) != HANDLE_BYTES:
            raise DeviceError(f"an IPC handle of {len(handle.handle)} bytes")
        if handle.process == self._process.token:
            own = self._process.exported.get(handle.handle)
            if own is None:
                raise DeviceError("a handle of this process for memory that is gone")
            return DeviceView(self._index, own.address, own.length)
        with self.current():
            address = self.runtime.ipc_open(handle.handle)
        return DeviceView(self._index, address, handle.size_bytes)

    def close_peer(self, memory: DeviceView) -> None:
        if any(memory.address == own.address for own in self._process.exported.values()):
            return
        with self.current():
            self.runtime.ipc_close(memory.address)


def tensor_over(view: DeviceView, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that is these bytes; they must live as long as it is used."""
    flat = torch.as_tensor(_ArrayInterface(view), device=torch.device("cuda", view.device))
    return flat.view(dtype).view(*shape)


class _Properties(Protocol):
    uuid: object


class _ArrayInterface:
    def __init__(self, view: DeviceView) -> None:
        self.__cuda_array_interface__ = {
            "shape": (view.length,),
            "typestr": "|u1",
            "data": (view.address, False),
            "version": 3,
        }


def _uuid_of(index: int) -> str:
    # torch's stubs do not know these properties.
    found = cast("_Properties", torch.cuda.get_device_properties(index))  # pyright: ignore
    return str(found.uuid)


def _index_of(device_uuid: str) -> int | None:
    """Return the number of that GPU in this process, or None where this process does not see it."""
    found = (i for i in range(torch.cuda.device_count()) if _uuid_of(i) == device_uuid)
    return next(found, None)


def _guarded(call: Callable[[], _Result]) -> _Result:
    try:
        return call()
    except RuntimeError as error:
        raise DeviceError(f"CUDA: {error}") from error

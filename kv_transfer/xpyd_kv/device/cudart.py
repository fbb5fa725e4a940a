"""The few calls of CUDA's runtime library that torch does not offer, through ctypes.

The library is the one that torch has loaded, so both share contexts and the current device, which
is each thread's own: callers set it first.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char, c_int, c_size_t, c_uint, c_void_p

import torch

from xpyd_core.errors import UserError
from xpyd_kv.device.api import DeviceError

HANDLE_BYTES = 64
_OUT_OF_MEMORY = 2
_PORTABLE_AND_MAPPED = 1 | 2
_NON_BLOCKING = 1
_LAZY_PEER_ACCESS = 1
_DEFAULT_KIND = 4
_NATIVE_ATOMICS = 3


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

"""GPUs for tests without one, of ranks that are processes: a GPU's memory is an anonymous file that
the others map, at other addresses than its owner. Kernels run in Triton's interpreter, whose loads,
stores and atomic operations go to real addresses."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.conftest import interpreted, interpreted_library
from xpyd_kv.memory.device import DeviceError, DeviceView, IpcHandle
from xpyd_worker.kernels.gpu.reduce_shape import MOST_RANKS


class SharedGpu:
    """See PeerDevice. `log`: what was done, in order."""

    def __init__(self, number: int) -> None:
        self.uuid = f"GPU-{number}"
        self.log: list[str] = []
        self.unreachable: set[str] = set()
        self.has_room = self.opens = True
        self.is_stuck = False
        self._files: dict[int, int] = {}
        self._mapped: dict[int, mmap.mmap] = {}

    def allocate(self, size_bytes: int) -> DeviceView:
        if not self.has_room:
            raise DeviceError("out of memory")
        descriptor = os.memfd_create("xpyd-test-gpu", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size_bytes)
        self.log.append("allocate")
        view = self._map(descriptor, size_bytes)
        self._files[view.address] = descriptor
        return view

    def free(self, memory: DeviceView) -> None:
        self.log.append("free")
        os.close(self._files.pop(memory.address))
        self._mapped.pop(memory.address).close()

    def export(self, memory: DeviceView) -> IpcHandle:
        where = f"/proc/{os.getpid()}/fd/{self._files[memory.address]}"
        return IpcHandle(where.encode(), memory.length, self.uuid, b"")

    def lacks(self, uuid: str) -> str:
        return f"no NVLink to {uuid}" if uuid in self.unreachable else ""

    def open_peer(self, handle: IpcHandle) -> DeviceView:
        if not self.opens:
            raise DeviceError("cannot open")
        descriptor = os.open(handle.handle, os.O_RDWR)
        self.log.append(f"open {handle.device_uuid}")
        try:
            return self._map(descriptor, handle.size_bytes)
        finally:
            os.close(descriptor)

    def close_peer(self, memory: DeviceView) -> None:
        self.log.append("close")
        self._mapped.pop(memory.address).close()

    def put(self, x: Tensor) -> Tensor:
        return x.clone()

    def is_done(self, within_s: float) -> bool:
        return not self.is_stuck

    @property
    def is_empty(self) -> bool:
        """Whether all was given back."""
        return not self._mapped and not self._files

    def own_words(self) -> Tensor:
        """Where the ranks' words for the first program arrive."""
        (address,) = self._files
        return torch.frombuffer(self._mapped[address], dtype=torch.int64, count=MOST_RANKS)

    def _map(self, descriptor: int, size_bytes: int) -> DeviceView:
        mapped = mmap.mmap(descriptor, size_bytes)
        at = ctypes.c_char.from_buffer(mapped)
        address = ctypes.addressof(at)
        del at
        self._mapped[address] = mapped
        return DeviceView(0, address, size_bytes)


@contextmanager
def interpreter() -> Generator[Any]:
    """The GPU's kernels in this process. Who looks whether the others have come lets them run."""
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    rmw = builder.create_atomic_rmw

    def rmw_and_yield(*args: Any) -> Any:
        done = rmw(*args)
        os.sched_yield()
        return done

    with (
        pytest.MonkeyPatch.context() as patch,
        interpreted_library(),
        torch.inference_mode(),
    ):
        patch.setattr(builder, "create_atomic_rmw", rmw_and_yield)
        yield interpreted()

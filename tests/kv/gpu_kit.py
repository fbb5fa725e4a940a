"""GPUs for the transport's tests: the fake here, a real one where there is one. Both hand out the
seam's Device, and read and write what the CPU cannot see."""

from __future__ import annotations

from typing import Any, Protocol

import pytest

from tests.kv.device_fake import Machine
from xpyd_kv.memory.device import Device, DeviceView

REGION_BYTES = 64 * 2**20
"""P's cache: what a test may share in all."""


class Gpus(Protocol):
    """The machine of one test: P's device and D's."""

    p: Device
    d: Device

    def fill(self, device: Any, view: DeviceView, body: bytes) -> None: ...

    def read(self, device: Any, view: DeviceView) -> bytes: ...

    def check(self) -> None:
        """Nothing was done wrong, and all was given back."""
        ...


class FakeGpus:
    """One fake GPU, two processes."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.p = self.machine.device("p")
        self.d = self.machine.device("d")

    def fill(self, device: Any, view: DeviceView, body: bytes) -> None:
        device.fill(view, body)

    def read(self, device: Any, view: DeviceView) -> bytes:
        return device.read(view)

    def check(self) -> None:
        self.machine.check()


class RealGpus:
    """The first GPU, by two devices of this process; or the first for P and `second` for D."""

    def __init__(self, second: int = 0) -> None:
        import torch

        from xpyd_kv.memory.cuda import CudaDevice, CudaProcess

        if torch.cuda.device_count() <= second:
            pytest.skip("NCCL needs two GPUs")
        process = CudaProcess()
        self.p = CudaDevice(0, process)
        self.d = CudaDevice(second, process)

    def fill(self, device: Any, view: DeviceView, body: bytes) -> None:
        import torch

        if body:
            source = torch.frombuffer(bytearray(body), dtype=torch.uint8)
            _tensor(view).copy_(source)
            torch.cuda.synchronize()

    def read(self, device: Any, view: DeviceView) -> bytes:
        return _tensor(view).cpu().numpy().tobytes() if len(view) else b""

    def check(self) -> None:
        """The driver would have failed by now."""


def _tensor(view: DeviceView) -> Any:
    import torch

    from xpyd_kv.memory.cuda import tensor_over

    return tensor_over(view, (len(view),), torch.uint8)

"""A rank's GPU for peer_memory.py, over the driver's memory of KV transfers' device seam.

Unverified on hardware.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpyd_kv.memory.cuda import CudaDevice, tensor_over
from xpyd_kv.memory.device import DeviceError, DeviceView, IpcHandle

_ZERO_S = 30.0
"""For the first work on a device, its context included."""


class GpuPeers:
    """See PeerDevice. Nothing is asked of the driver before `allocate`."""

    def __init__(self, device: torch.device) -> None:
        """`device` has an index."""
        self._torch_device = device
        self._gpu: CudaDevice | None = None

    def allocate(self, size_bytes: int) -> DeviceView:
        """See PeerDevice."""
        self._gpu = CudaDevice(self._torch_device.index)
        memory = self._gpu.allocate(size_bytes)
        tensor_over(memory, (size_bytes,), torch.uint8).zero_()
        if not self.is_done(_ZERO_S):
            raise DeviceError(f"{self._torch_device} did not fill memory within {_ZERO_S:g} s")
        return memory

    def free(self, memory: DeviceView) -> None:
        """See PeerDevice."""
        self._open.free(memory)

    def export(self, memory: DeviceView) -> IpcHandle:
        """See PeerDevice."""
        return self._open.export(memory)

    def lacks(self, uuid: str) -> str:
        """See PeerDevice. Words arrive by atomic operations, which PCIe does not carry."""
        gpu = self._open
        if uuid == gpu.uuid:
            return ""
        if not gpu.can_reach(uuid):
            return f"no peer access from GPU {gpu.uuid} to GPU {uuid}"
        if not gpu.has_atomics_on(uuid):
            return f"no NVLink from GPU {gpu.uuid} to GPU {uuid}, or one without atomic operations"
        return ""

    def open_peer(self, handle: IpcHandle) -> DeviceView:
        """See PeerDevice."""
        return self._open.open_peer(handle)

    def close_peer(self, memory: DeviceView) -> None:
        """See PeerDevice."""
        self._open.close_peer(memory)

    def put(self, x: Tensor) -> Tensor:
        """See PeerDevice."""
        return x.to(self._torch_device)

    def is_done(self, within_s: float) -> bool:
        """See PeerDevice."""
        return self._gpu is None or self._gpu.compute_stream().record().wait(within_s)

    @property
    def _open(self) -> CudaDevice:
        assert self._gpu is not None, "allocate comes before"
        return self._gpu

"""A rank's KV cache on a GPU: what vLLM has allocated, as the transfer gets to it.

vLLM cuts all layers from one tensor of torch's allocator, and runs its model on a stream of its
own, which only the thread of its worker knows. See docs/adr/0056.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xpyd_core.errors import UserError
from xpyd_kv.memory.device import Device, DeviceError, DeviceStream, DeviceView, Event
from xpyd_kv.memory.paged import DevicePagedMemory, layout_of
from xpyd_kv.transport.devices.nccl.library import Nccl
from xpyd_kv.transport.devices.paths import warm_up
from xpyd_kv.values import KvLayout
from xpyd_kv.vllm import engine_api

if TYPE_CHECKING:
    from xpyd_kv.memory.cuda import CudaProcess
    from xpyd_kv.vllm.engine_api import Tensor

# torch rounds a large tensor up to this; what is left behind it may be another small tensor's.
_ROUNDING_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True)
class Gpu:
    """The GPU of a rank. `view_of` says where a tensor is; `allocation_of` what of the driver's
    allocations that is in; `load_nccl` finds the library (UserError where there is none)."""

    device: Device
    device_type: str
    """What torch calls it."""
    view_of: Callable[[Tensor], DeviceView]
    allocation_of: Callable[[DeviceView], DeviceView]
    load_nccl: Callable[[], Nccl]


OpenGpu = Callable[["Tensor"], Gpu | None]
"""Returns the GPU that a cache is on; None for the host's memory. UserError for another device."""


def open_gpu(tensor: Tensor, process: CudaProcess | None = None) -> Gpu | None:
    """See OpenGpu. `process`: shared where several ranks are in one process."""
    if tensor.device.type == "cpu":
        return None
    if tensor.device.type != "cuda":
        raise UserError(
            f"XpydConnector: a KV cache on {tensor.device.type} is not supported; on a CPU or on "
            "CUDA it is"
        )
    # torch stays out of processes that have no GPU.
    from xpyd_kv.memory.cuda import CudaDevice
    from xpyd_kv.transport.devices.nccl.library import load

    device = CudaDevice(tensor.device.index or 0, process)
    return Gpu(
        device,
        "cuda",
        view_of=lambda one: DeviceView(device.index, one.data_ptr(), one.nbytes),
        allocation_of=lambda view: device.allocation_of(view.address),
        load_nccl=lambda: load(device.current),
    )


class VllmDeviceMemory(DevicePagedMemory):
    """vLLM's cache on a GPU. `follow` is called on vLLM's thread while the stream that its model
    runs on is current there; `written` on any thread, also one to which that stream is not known:
    there torch's current stream is the default one, on which vLLM runs nothing."""

    def __init__(self, device: Device, layers: Sequence[DeviceView], *, layout: KvLayout) -> None:
        first = min(layers, key=lambda view: view.address)
        end = max(view.address + view.length for view in layers)
        region = DeviceView(first.device, first.address, end - first.address)
        super().__init__(device, layers, layout=layout, region=region)
        self._stream: DeviceStream = device.compute_stream()

    def follow(self) -> None:
        """Note the stream that the model runs on now. Hot path."""
        self._stream = self.device.compute_stream()

    def written(self) -> Event:
        """When all that the model has enqueued by now is in the cache. Any thread: recording is the
        one thing that two threads may do on a stream at once."""
        return self._stream.record()


def device_memory(gpu: Gpu, tensors: Sequence[Tensor], layers: Sequence[int]) -> VllmDeviceMemory:
    """The caches as the transfer sees them. XpydError for tensors that are not alike and
    contiguous."""
    layout = layout_of(tensors, layers=layers, device_type=gpu.device_type)
    return VllmDeviceMemory(gpu.device, [gpu.view_of(one) for one in tensors], layout=layout)


def lendable(gpu: Gpu, memory: VllmDeviceMemory, transports: tuple[str, ...]) -> DeviceView | None:
    """The allocation of the cache, where peers of this machine may open it: they open it whole, so
    nothing else may be in it. UserError, with the reason, where cuda_ipc is all that was asked
    for."""
    if "cuda_ipc" not in transports:
        return None
    whole = gpu.allocation_of(memory.region)
    reason = ""
    if len(whole) - len(memory.region) >= _ROUNDING_BYTES:
        reason = (
            f"vLLM's KV cache is {len(memory.region)} bytes in an allocation of {len(whole)} that "
            "other tensors are in, too"
        )
    else:
        try:
            gpu.device.export(whole)
        except DeviceError as error:
            reason = (
                "vLLM's KV cache cannot be exported (with expandable_segments in "
                f"PYTORCH_CUDA_ALLOC_CONF it cannot): {error}"
            )
    if not reason:
        return whole
    if transports == ("cuda_ipc",):
        raise UserError(f"XpydConnector: transports: cuda_ipc: {reason}")
    engine_api.log().warning("KV transfer goes without cuda_ipc: %s", reason)
    return None


def open_device(open_it: OpenGpu, tensor: Tensor) -> Gpu | None:
    """Open the GPU of this cache, ready to copy. UserError where it does not."""
    gpu = open_it(tensor)
    if gpu is not None:
        warm_up(gpu.device)
    return gpu


def check_transports(transports: tuple[str, ...], *, on_gpu: bool, socket_dir: str) -> None:
    """UserError, with the reason, for a transport that cannot move KV of this cache."""
    refused: dict[str, str] = {
        "shm": "vLLM allocates its KV cache itself, not in memory that processes share"
    }
    if not on_gpu:
        for name in ("cuda_ipc", "nccl", "nixl"):
            refused[name] = "needs a KV cache on a GPU"
    if not socket_dir:
        refused["uds"] = "needs socket_dir"
    for name in transports:
        if name in refused:
            fix = "cuda_ipc, nixl, nccl, uds or tcp" if on_gpu else "uds or tcp"
            raise UserError(
                f"kv_connector_extra_config: transports: {name}: {refused[name]}; take {fix}"
            )
    if len(transports) == 1:
        return
    if "nccl" in transports:
        raise UserError(
            'kv_connector_extra_config: transports: nccl goes alone; give ["nccl"] to P and D'
        )
    if not {"tcp", "uds"} & set(transports):
        raise UserError(
            "kv_connector_extra_config: transports: expected tcp or uds among several; or one alone"
        )

"""The memory of the KV cache of a process whose KV moves: on a GPU, or shared on the host.

Between the runner, which cuts its layers from one flat tensor, and the transfer, which moves the
same bytes. On a GPU the memory is one allocation of the driver's, not of torch's allocator: a peer
on this machine opens an allocation whole, and torch may have other things in its own. Which
transports move it is decided in `transports`.

See docs/adr/0024.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import torch

from xpyd_core.errors import UserError, XpydError
from xpyd_core.sizes import format_bytes
from xpyd_kv.memory.device import Device, DeviceView
from xpyd_kv.memory.paged import DevicePagedMemory, PagedMemory, paged_over
from xpyd_kv.transport.devices.nccl.library import Nccl, NcclLimits
from xpyd_kv.transport.devices.paths import warm_up
from xpyd_kv.transport.host.shared_memory import SharedMemory
from xpyd_kv.wire.messages import MAX_PROBE_BYTES
from xpyd_worker.config import WorkerConfig
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.runner.gpu_memory import GpuLimits
from xpyd_worker.runner.kv_cache import host_memory

_log = logging.getLogger(__name__)
WHOLE = Fraction(1)
"""The share of an instance's cache that its only rank has."""


class DeviceCache:
    """The memory, and the device as the transfer uses it. One thread at a time: the loading one,
    then the one that ends the process.

    `tensor_over` makes a flat uint8 tensor that is a piece of the device's memory; `load_nccl`
    finds the library (UserError where there is none).
    """

    def __init__(
        self,
        device: Device,
        *,
        tensor_over: Callable[[DeviceView], torch.Tensor],
        load_nccl: Callable[[], Nccl],
    ) -> None:
        self.device = device
        self.load_nccl = load_nccl
        self._tensor_over = tensor_over
        self._memory: tuple[DeviceView, torch.Tensor] | None = None

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """The cache's memory, once: uint8 [size_bytes], zeros, since what was never written
        travels to peers in half-full blocks. It is valid until `close`. UserError when the GPU has
        less."""
        if self._memory is not None:
            raise XpydError("the cache's memory is allocated once")
        try:
            region = self.device.allocate(size_bytes)
        except UserError as error:
            size = format_bytes(size_bytes)
            raise UserError(
                f"the GPU has no {size} in one piece for the KV cache ({error}); lower "
                "--gpu-memory-utilization or --kv-cache-memory"
            ) from error
        flat = self._tensor_over(region)
        flat.zero_()
        self._memory = (region, flat)
        return flat

    def paged(self, tensors: Sequence[torch.Tensor], *, layers: Sequence[int]) -> DevicePagedMemory:
        """The transfer's sight of the cache tensors that were cut from `allocate`'s; `layers`:
        their absolute indices."""
        if self._memory is None:
            raise XpydError("the cache's memory is not allocated")
        return paged_over(self.device, *self._memory, tensors, layers=layers)

    def close(self, deadline_s: float) -> None:
        """Give the memory back. Neither it nor tensors in it may be used any more; if the model's
        stream is not empty within `deadline_s` it is left to the end of the process."""
        if self._memory is None:
            return
        region, self._memory = self._memory[0], None
        if self.device.compute_stream().record().wait(deadline_s):
            self.device.free(region)
        else:
            _log.error("the GPU's work has not ended within %.1f s", deadline_s)


class CacheMemory:
    """Memory for the KV cache of a process whose KV moves: of its `gpu`, or memory that other
    processes may read where --kv-transport allows that."""

    def __init__(self, config: WorkerConfig, gpu: DeviceCache | None) -> None:
        self._is_shared = config.shares_kv
        self.gpu = gpu
        self.shared: SharedMemory | None = None

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """See MakeMemory. UserError when there is less."""
        if self.gpu is not None:
            return self.gpu.allocate(size_bytes)
        if not self._is_shared:
            return host_memory(size_bytes)
        # Its end is for PROBEs.
        size = size_bytes + MAX_PROBE_BYTES
        try:
            self.shared = SharedMemory(size)
        except UserError as error:
            raise UserError(f"--kv-cache-memory: {format_bytes(size)}: {error}") from error
        return torch.frombuffer(self.shared.buffer, dtype=torch.uint8)


def open_cache(config: WorkerConfig, device: torch.device) -> DeviceCache | None:
    """What a Prefill or Decode instance on a GPU keeps its cache in; None for all others, whose
    cache is the runner's own. Before the model is loaded: it also says what cannot work there.
    UserError naming the flag."""
    if device.type != "cuda" or not config.moves_kv:
        return None
    check(config)
    from xpyd_kv.memory.cuda import CudaDevice, tensor_over
    from xpyd_kv.transport.devices.nccl.library import load

    gpu = CudaDevice(device.index or 0)
    warm_up(gpu)
    return DeviceCache(
        gpu,
        tensor_over=lambda view: tensor_over(view, (len(view),), torch.uint8),
        load_nccl=lambda: load(gpu.current),
    )


def check(config: WorkerConfig) -> None:
    """UserError, naming the flag, for what a cache on a GPU cannot do."""
    if config.kv_transports == ("shm",):
        raise UserError(
            "--kv-transport shm: a KV cache on a GPU is not in memory that processes share; take "
            "auto, cuda_ipc, nixl, nccl, uds or tcp"
        )
    if config.kv_connections > 1:
        raise UserError(
            f"--kv-connections {config.kv_connections}: further connections are for KV caches in "
            "ordinary memory; with the cache on a GPU give 1"
        )


class KvOverhead(NamedTuple):
    """Memory of a GPU that moving KV takes besides the cache: `size_bytes`, and `percent` of the
    cache's size."""

    size_bytes: int
    percent: int


def kv_overhead(config: WorkerConfig, *, share: Fraction = WHOLE) -> KvOverhead:
    """What moving KV takes, at most, of the GPU of a rank that has this share of the instance's
    cache, and so of its buffer. The memory for the cache is smaller by that."""
    size = NcclLimits().most_bytes if config.kv_transports == ("nccl",) else 0
    if not config.lands_kv:
        return KvOverhead(size if config.moves_kv else 0, 0)
    if config.kv_buffer_bytes is not None:
        return KvOverhead(size + math.ceil(config.kv_buffer_bytes * share), 0)
    return KvOverhead(size, config.kv_buffer_percent)


def gpu_limits(config: WorkerConfig, model: ModelConfig, *, share: Fraction = WHOLE) -> GpuLimits:
    """What a GPU of this engine is to hold, with this share of the instance's KV cache."""
    kept = kv_overhead(config, share=share)
    return GpuLimits(
        utilization=config.gpu_memory_utilization,
        cache_bytes=config.kv_cache_bytes,
        kv_overhead_bytes=kept.size_bytes,
        kv_overhead_percent=kept.percent,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.batched_tokens(on_gpu=True),
        max_model_len=config.max_model_len or model.max_positions,
        # A graph does not report its layers one by one, and D waits for those of P.
        use_graphs=not config.enforce_eager and config.role != "Prefill",
    )


def paged(
    tensors: Sequence[torch.Tensor], gpu: DeviceCache | None, *, layers: Sequence[int]
) -> PagedMemory | DevicePagedMemory:
    """The transfer's sight of a runner's cache, in the memory of `gpu` or (None) of the host;
    `layers`: their absolute indices."""
    if gpu is None:
        return PagedMemory(tensors, layers=layers)
    return gpu.paged(tensors, layers=layers)

"""How much of a GPU's memory the KV cache gets, from a run of the largest step.

The share that `--gpu-memory-utilization` names is for all that the engine has on the device:
weights, the largest step's activations, what libraries take beside torch, CUDA graphs, KV. The rest
of the share is the KV cache's. Arithmetic, and a seam to the device's counters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from xpyd_core.errors import UserError
from xpyd_core.sizes import format_bytes


class MemoryCounters(Protocol):
    """What a device tells of its memory, in bytes."""

    def total(self) -> int:
        """Of the device."""
        ...

    def free(self) -> int:
        """That no process has now."""
        ...

    def reserved(self) -> int:
        """That this process's allocator of tensors has from the device now."""
        ...

    def release(self) -> None:
        """Give back what the allocator has and no tensor uses, and forget the peak."""
        ...

    def peak(self) -> int:
        """The most that tensors took at once since `release`."""
        ...


class CudaCounters:
    """Those of a CUDA device, of the driver and of torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        # Partly untyped in torch.
        self._cuda, self._device = cast("Any", torch.cuda), device

    def total(self) -> int:
        """See MemoryCounters."""
        return int(self._cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        """See MemoryCounters."""
        return int(self._cuda.mem_get_info(self._device)[0])

    def reserved(self) -> int:
        """See MemoryCounters."""
        return int(self._cuda.memory_reserved(self._device))

    def release(self) -> None:
        """See MemoryCounters."""
        # What is still under way would give its memory back later.
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()
        self._cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """See MemoryCounters."""
        return int(self._cuda.max_memory_allocated(self._device))


@dataclass(frozen=True)
class Profile:
    """Where a device's memory goes without a KV cache, in bytes."""

    total: int
    others: int
    """Of other processes."""
    tensors: int
    """Weights and, at their peak, the activations of the largest step."""
    beside: int
    """Of this process, beside its tensors: compiled kernels, libraries' workspaces."""


@dataclass(frozen=True)
class GpuUse:
    """Where a device's memory goes: the same, and `graphs`, the bytes of CUDA graphs."""

    found: Profile
    graphs: int


def lacks_memory(error: RuntimeError) -> bool:
    """Whether it says that the device has no more memory, and nothing else is wrong: torch's own
    kind is for its allocator, what graphs and cuBLAS ask the driver for comes as another."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return "out of memory" in str(error) or "ALLOC_FAILED" in str(error)


def profile(
    counters: MemoryCounters, free_at_start: int, largest_step: Callable[[], None]
) -> Profile:
    """Run the largest step that the scheduler may make. `free_at_start` was free before this
    process put anything on the device but the driver's context, without which nobody tells: that
    counts as another process'. Those are taken to stand still meanwhile."""
    counters.release()
    largest_step()
    tensors = counters.peak()
    beside = max(0, free_at_start - counters.free() - counters.reserved())
    counters.release()
    total = counters.total()
    return Profile(total, total - free_at_start, tensors, beside)


def kv_cache_bytes(found: Profile, *, utilization: float, graphs: int, beside: int = 0) -> int:
    """What is left for KV of the share `utilization` (above 0, at most 1) of the device's memory,
    with `graphs` bytes kept for CUDA graphs and `beside` for what moves KV. Raises UserError where
    nothing is."""
    share = min(int(found.total * utilization), found.total - found.others)
    left = share - found.tensors - found.beside - graphs - beside
    if left <= 0:
        raise UserError(
            f"--gpu-memory-utilization {utilization:g} is {format_bytes(share)} of "
            f"{format_bytes(found.total)} ({format_bytes(found.others)} are other processes'); the "
            f"model and its largest step need {format_bytes(found.tensors)}, CUDA "
            f"{format_bytes(found.beside)}, its graphs {format_bytes(graphs)}, KV transfer "
            f"{format_bytes(beside)}: nothing is left for KV. Raise it, or lower "
            "--max-num-batched-tokens"
        )
    return left

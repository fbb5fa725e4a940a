"""How much of a GPU's memory the KV cache gets, from a run of the largest step.

The share that `--gpu-memory-utilization` names is for all that the engine has on the device:
weights, the largest step's activations, what libraries take besides torch, CUDA graphs, KV. The KV
cache gets the rest of the share. Here are the arithmetic, the device's memory counters, and the
steps that are run to measure: the largest, and one of each form that kernels are compiled in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from xpyd_core.errors import UserError
from xpyd_core.sizes import format_bytes
from xpyd_worker.engine.executor import KnownTokens, SampleSpec, ScheduledSequence, StepInput
from xpyd_worker.engine.request import SamplingParams
from xpyd_worker.model.config import ModelConfig

# The GPU's attention keeps whole heads in a program's shared memory; wider ones do not fit there.
_MOST_HEAD_DIM = 256


def check_gpu_heads(config: ModelConfig) -> None:
    """UserError where a model's heads are too wide for a GPU's kernels."""
    if config.head_dim > _MOST_HEAD_DIM:
        raise UserError(
            f"config.json: head_dim: {config.head_dim}; on a GPU heads have at most "
            f"{_MOST_HEAD_DIM} numbers; use --device cpu"
        )


class CudaCounters:
    """The memory of a CUDA device in bytes, by the driver and by torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        # Partly untyped in torch.
        self._cuda, self._device = cast("Any", torch.cuda), device

    def total(self) -> int:
        """Bytes of the device's memory."""
        return int(self._cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        """Bytes that no process has now."""
        return int(self._cuda.mem_get_info(self._device)[0])

    def reserved(self) -> int:
        """Bytes that this process's allocator of tensors has from the device now."""
        return int(self._cuda.memory_reserved(self._device))

    def release(self) -> None:
        """Give back what the allocator has and no tensor uses, and forget the peak."""
        # What is still under way would give its memory back later.
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()
        self._cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """The most that tensors took at once since `release`."""
        return int(self._cuda.max_memory_allocated(self._device))


@dataclass(frozen=True)
class Profile:
    """Where a device's memory goes without a KV cache, in bytes."""

    total: int
    others: int
    """Bytes of other processes."""
    tensors: int
    """Weights and, at their peak, the activations of the largest step."""
    workspaces: int
    """Bytes of this process that are no tensors': compiled kernels, libraries' workspaces."""


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
    counters: CudaCounters, free_at_start: int, largest_step: Callable[[], None]
) -> Profile:
    """Run the largest step that the scheduler may make. `free_at_start` was free before this
    process put anything on the device but the driver's context, without which no counter can be
    read: that counts as another process'. Those are assumed not to change meanwhile."""
    counters.release()
    largest_step()
    tensors = counters.peak()
    workspaces = max(0, free_at_start - counters.free() - counters.reserved())
    counters.release()
    total = counters.total()
    return Profile(total, total - free_at_start, tensors, workspaces)


def kv_cache_bytes(found: Profile, *, utilization: float, graphs: int, kv_transfer: int = 0) -> int:
    """What is left for KV of the share `utilization` (above 0, at most 1) of the device's memory,
    with `graphs` bytes kept for CUDA graphs and `kv_transfer` for what moves KV. Raises UserError
    where nothing is."""
    share = min(int(found.total * utilization), found.total - found.others)
    left = share - found.tensors - found.workspaces - graphs - kv_transfer
    if left <= 0:
        raise UserError(
            f"--gpu-memory-utilization {utilization:g} is {format_bytes(share)} of "
            f"{format_bytes(found.total)} ({format_bytes(found.others)} are other processes'); the "
            f"model and its largest step need {format_bytes(found.tensors)}, CUDA "
            f"{format_bytes(found.workspaces)}, its graphs {format_bytes(graphs)}, KV transfer "
            f"{format_bytes(kv_transfer)}: nothing is left for KV. Raise it, or lower "
            "--max-num-batched-tokens"
        )
    return left


# Decode attention cuts contexts of 256 tokens and more, by powers of two, at most into 64 parts.
_CUT_CONTEXTS = tuple(256 << power for power in range(8))
# All that makes the sampler work at once: what a step draws takes the most memory then.
_ALL_OPTIONS = SamplingParams(
    max_tokens=2,
    seed=0,
    temperature=1.0,
    top_p=0.9,
    top_k=1000,
    min_p=0.01,
    repetition_penalty=1.1,
    logprobs=20,
)
_GREEDY = SamplingParams(max_tokens=2, seed=0, temperature=0.0)


@dataclass(frozen=True)
class GpuLimits:
    """What a GPU's engine is to hold.

    `utilization` is the share of the device's memory that it may use; `cache_bytes` is the KV
    cache's size where that is given instead (None: what is left of the share). For other memory
    `kv_overhead_bytes` of the share are kept, and `kv_overhead_percent` of the cache's size.
    """

    utilization: float
    cache_bytes: int | None
    kv_overhead_bytes: int
    kv_overhead_percent: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    use_graphs: bool

    @property
    def flag(self) -> str:
        """The one that decides the KV cache's size."""
        return "--gpu-memory-utilization" if self.cache_bytes is None else "--kv-cache-memory"


def largest(limits: GpuLimits, block_size: int) -> StepInput:
    """The step that takes the most memory: all tokens that a step may have, in as many sequences
    as may run, and all of them draw. All use block 0; the result has no meaning."""
    each, more = divmod(limits.max_num_batched_tokens, limits.max_num_seqs)
    counts = [each + (index < more) for index in range(limits.max_num_seqs)]
    return StepInput(
        0,
        tuple(
            _sequence(index, count, 0, block_size, _ALL_OPTIONS)
            for index, count in enumerate(counts)
        ),
    )


def warm_ups(limits: GpuLimits, block_size: int) -> Iterator[StepInput]:
    """A step for each form that kernels are compiled in, so that requests wait for no compiler:
    each size of a tile of rows, which grow with the powers of two, and each number of parts that a
    decode's context is cut into."""
    longest = min(limits.max_model_len, limits.max_num_batched_tokens)
    # Kernels are also compiled apart for counts that 16 divides.
    powers = [1 << power for power in range(4, longest.bit_length())]
    for count in (2, *powers, *(power + 1 for power in powers)):
        if count <= longest:
            yield StepInput(0, (_sequence(0, count, 0, block_size, _GREEDY),))
    for context in (1, *_CUT_CONTEXTS):
        if context <= limits.max_model_len:
            yield StepInput(0, (_sequence(0, 1, context - 1, block_size, _GREEDY),))


def _sequence(
    index: int, count: int, start: int, block_size: int, sampling: SamplingParams
) -> ScheduledSequence:
    blocks = -(-(start + count) // block_size)
    return ScheduledSequence(
        seq_id=index,
        token_ids=(0,) * count,
        start=start,
        block_ids=(0,) * blocks,
        sampling=sampling,
        prompt_tokens=start + count,
        samples=(SampleSpec(0, 0),),
        log_id="warm-up",
        known=KnownTokens((0,), ()),
    )

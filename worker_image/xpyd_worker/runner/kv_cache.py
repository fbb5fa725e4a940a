"""The paged KV cache of one rank: one tensor per layer, and its size from a byte budget.

Who owns which block is the block manager's matter; here are only tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch
from torch import Tensor

from xpyd_core.errors import UserError, XpydError
from xpyd_core.sizes import format_bytes
from xpyd_worker.kernels.api import KvShape
from xpyd_worker.runner.tensors import put_ints

MakeMemory = Callable[[int], Tensor]
"""Size in bytes -> zeros, uint8, on the runner's device: the memory of a KV cache."""


def blocks_in_budget(
    shape: KvShape,
    num_layers: int,
    budget_bytes: int,
    flag: str = "--kv-cache-memory",
    *,
    beside: int = 0,
) -> int:
    """Blocks over all layers that fit into `budget_bytes`, which `flag` decides; each has so many
    bytes `beside` it, a draft model's. Raises UserError when none does."""
    each = cache_bytes(shape, num_layers=num_layers, num_blocks=1) + beside
    if budget_bytes < each:
        raise UserError(
            f"{flag}: {format_bytes(budget_bytes)} hold no block; one takes {format_bytes(each)}"
        )
    return budget_bytes // each


class KvCache:
    """Keys and values of all tokens that have a block.

    `layers` are contiguous tensors [num_blocks, kv_heads, block_size, 2 * head_dim], K then V per
    token, one after another in `memory`: zeros, uint8 [at least cache_bytes], on any device, and
    its owner may let others read it. Without it the cache is in memory of the process' own.
    """

    def __init__(
        self, shape: KvShape, *, num_layers: int, num_blocks: int, memory: Tensor | None = None
    ) -> None:
        """Raises ValueError for memory that is too small."""
        self.shape = shape
        self.num_blocks = num_blocks
        size = (num_blocks, shape.kv_heads, shape.block_size, 2 * shape.head_dim)
        each = num_blocks * shape.block_bytes
        if memory is None:
            memory = host_memory(each * num_layers)
        if memory.numel() < each * num_layers:
            raise ValueError(f"{memory.numel()} bytes of {each * num_layers}")
        flat = memory.view(-1)

        def layer(index: int) -> Tensor:
            return flat[index * each : (index + 1) * each].view(shape.dtype).view(size)

        self.layers: tuple[Tensor, ...] = tuple(map(layer, range(num_layers)))

    @property
    def size_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block source -> destination in every layer, all sources read before any write. The
        device is not waited for. Raises XpydError for blocks that the cache has not."""
        if not pairs:
            return
        if not all(0 <= block < self.num_blocks for pair in pairs for block in pair):
            raise XpydError(f"a copy of a block outside the cache's {self.num_blocks}")
        sources, destinations = put_ints(
            [[source for source, _ in pairs], [destination for _, destination in pairs]],
            self.layers[0].device,
        )
        for layer in self.layers:
            layer.index_copy_(0, destinations, layer.index_select(0, sources))


def cache_bytes(shape: KvShape, *, num_layers: int, num_blocks: int) -> int:
    """What the layers of a cache take together."""
    return shape.block_bytes * num_blocks * num_layers


def agreed_blocks(fitting: int, agreed: int | None) -> int:
    """Blocks of a cache that has room for `fitting`, where several ranks agreed on a number (None:
    there is one rank). Raises ValueError for more than fit."""
    if agreed is None:
        return fitting
    if not 1 <= agreed <= fitting:
        raise ValueError(f"{agreed} blocks were agreed on; 1 to {fitting} fit here")
    return agreed


def host_memory(size_bytes: int) -> Tensor:
    """Zeros, uint8, that take memory when they are first written, in huge pages where there are
    some. UserError when the system does not give so many."""
    try:
        memory = mmap(-1, size_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--kv-cache-memory: the system does not give {format_bytes(size_bytes)} ({error}); "
            "give a smaller size"
        ) from error
    # A kernel may have none.
    with suppress(OSError):
        memory.madvise(MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)

"""The paged KV cache of one rank: one tensor per layer, and its size from a byte budget.

Who owns which block is the block manager's matter; here are only tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch
from torch import Tensor

from xpyd_core.errors import UserError
from xpyd_core.sizes import format_bytes
from xpyd_worker.kernels.api import KvShape


def blocks_in_budget(shape: KvShape, num_layers: int, budget_bytes: int) -> int:
    """Blocks over all layers that fit into `budget_bytes`. Raises UserError when none does."""
    each = shape.block_bytes * num_layers
    if budget_bytes < each:
        raise UserError(
            f"--kv-cache-memory: {format_bytes(budget_bytes)} hold no block; one takes "
            f"{format_bytes(each)}"
        )
    return budget_bytes // each


class KvCache:
    """Keys and values of all tokens that have a block.

    `layers` are contiguous tensors [num_blocks, kv_heads, block_size, 2 * head_dim], K then V per
    token, one after another in `memory` (zeros, at least as large): where it is given other
    processes may read it, else it is the process' own. Pages that were never written take none.
    """

    def __init__(
        self,
        shape: KvShape,
        *,
        num_layers: int,
        num_blocks: int,
        memory: mmap | None = None,
    ) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        size = (num_blocks, shape.kv_heads, shape.block_size, 2 * shape.head_dim)
        count = math.prod(size)

        memory = memory or _own_memory(count * shape.dtype.itemsize * num_layers)

        def layer(index: int) -> Tensor:
            start = index * count * shape.dtype.itemsize
            flat = torch.frombuffer(memory, dtype=shape.dtype, count=count, offset=start)
            return flat.view(size)

        self.layers: tuple[Tensor, ...] = tuple(map(layer, range(num_layers)))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block source -> destination in every layer, all sources read before any write."""
        if not pairs:
            return
        sources = torch.tensor([source for source, _ in pairs])
        destinations = torch.tensor([destination for _, destination in pairs])
        for layer in self.layers:
            layer.index_copy_(0, destinations, layer.index_select(0, sources))


def _own_memory(size: int) -> mmap:
    """Zeros that take memory when they are first written, in huge pages where there are some."""
    memory = mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    # A kernel may have none.
    with suppress(OSError):
        memory.madvise(MADV_HUGEPAGE)
    return memory

"""Where a step's tokens stand in the paged cache, as tensors on the device.

A step's tables are written to one host buffer and copied to the device at once. `make_plan` takes a
buffer of the step's own; a `StaticPlan` keeps one address for all steps of up to so many
sequences that decode, as CUDA graphs need it. No Triton in here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xpyd_worker.kernels.api import KvShape, Span

# Tables are padded to a multiple, so that kernels are compiled for few strides.
_TABLE_BLOCKS = 16
# Words: each table begins at a multiple of 16 bytes, whatever the step's sizes are. Kernels are
# compiled anew for each set of pointers that are or are not so aligned.
_ALIGNED = 4
# New tokens of a tile of the prefill kernel. tl.dot takes no fewer than 16 rows; 128 rows of
# float32 would not fit into shared memory.
_TILES = (16, 64, 128)
_TILES_FLOAT32 = (16, 32)

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class GpuPlan:
    """The first `decodes` sequences have one new token each, in the first rows; `tiles` cut up the
    others. int32 on the device unless said."""

    shape: KvShape
    slots: Tensor
    """[rows] int64: block * block_size + offset of each row's token; -1: stored nowhere."""
    block_tables: Tensor
    """[seqs, max_blocks]."""
    query_starts: Tensor
    """[seqs + 1]: the first row of each sequence."""
    contexts: Tensor
    """[seqs]: tokens of each sequence, new ones included; 0: a padded row."""
    tiles: Tensor
    """[count, 2]: sequence and first new token of a tile of `tile_tokens`."""
    decodes: int
    tile_tokens: int
    max_context: int
    """A bound of the contexts' lengths; known to the host, unlike `contexts`."""


class _Views(NamedTuple):
    """The tables in a buffer. Block tables and tiles are [n, columns]."""

    slots: Tensor
    query_starts: Tensor
    contexts: Tensor
    block_tables: Tensor
    tiles: Tensor


@dataclass(frozen=True)
class _Sizes:
    """Lengths of the tables in a buffer of int32."""

    rows: int
    sequences: int
    max_blocks: int
    tiles: int

    def cut(self, buffer: Tensor) -> _Views:
        """Views of all tables."""
        starts = itertools.accumulate(map(_padded, self._lengths), initial=0)
        slots, query_starts, contexts, tables, tiles = (
            buffer[start : start + length]
            for start, length in zip(starts, self._lengths, strict=False)
        )
        return _Views(
            slots.view(torch.int64),
            query_starts,
            contexts,
            tables.view(self.sequences, self.max_blocks),
            tiles.view(-1, 2),
        )

    @property
    def words(self) -> int:
        """Length of the buffer."""
        return sum(map(_padded, self._lengths))

    @property
    def words_before_tables(self) -> int:
        """The words that do not depend on how long contexts are."""
        return sum(map(_padded, self._lengths[:3]))

    @property
    def _lengths(self) -> list[int]:
        tables = self.sequences * self.max_blocks
        return [2 * self.rows, self.sequences + 1, self.sequences, tables, 2 * self.tiles]


def make_plan(spans: Sequence[Span], shape: KvShape, device: torch.device) -> GpuPlan:
    """The plan of a flat batch whose rows are the spans' one behind the other."""
    decodes = next((i for i, span in enumerate(spans) if span.count > 1), len(spans))
    longest = max((span.count for span in spans), default=0)
    tile_tokens = _tile_tokens(longest, shape.dtype)
    tiles = [
        (index, first)
        for index, span in enumerate(spans[decodes:], decodes)
        for first in range(0, span.count, tile_tokens)
    ]
    max_context = max((span.start + span.count for span in spans), default=0)
    sizes = _Sizes(
        rows=sum(span.count for span in spans),
        sequences=len(spans),
        max_blocks=_padded_blocks(max_context, shape.block_size),
        tiles=len(tiles),
    )
    host = _host_buffer(sizes.words, device)
    _write(host, sizes, spans, shape)
    if tiles:
        sizes.cut(host).tiles.copy_(torch.tensor(tiles, dtype=torch.int32))
    views = sizes.cut(host.to(device, non_blocking=True))
    return _plan_of(shape, views, decodes, tile_tokens, max_context)


def _plan_of(
    shape: KvShape, views: _Views, decodes: int, tile_tokens: int, max_context: int
) -> GpuPlan:
    return GpuPlan(
        shape,
        slots=views.slots,
        block_tables=views.block_tables,
        query_starts=views.query_starts,
        contexts=views.contexts,
        tiles=views.tiles,
        decodes=decodes,
        tile_tokens=tile_tokens,
        max_context=max_context,
    )


class StaticPlan:
    """The plan of up to `max_sequences` sequences that decode, always at the same addresses.

    `plan` is what kernels are given when a graph is captured. Rows without a sequence touch no
    block: their slot is -1 and their context is 0.
    """

    def __init__(
        self, shape: KvShape, device: torch.device, *, max_sequences: int, max_context: int
    ) -> None:
        blocks = _padded_blocks(max_context, shape.block_size)
        self._sizes = _Sizes(max_sequences, max_sequences, blocks, tiles=0)
        self._device = device
        self._buffer = torch.zeros(self._sizes.words, dtype=torch.int32, device=device)
        views = self._sizes.cut(self._buffer)
        self.plan = _plan_of(shape, views, max_sequences, _TILES[0], max_context)
        self.copy_([])

    def copy_(self, spans: Sequence[Span]) -> None:
        """Put this step's sequences in, one new token each. Raises ValueError for more of them, or
        longer ones, than there is room for."""
        if len(spans) > self._sizes.sequences:
            raise ValueError(f"{len(spans)} sequences; there is room for {self._sizes.sequences}")
        for span in spans:
            if span.count != 1 or span.start >= self.plan.max_context:
                raise ValueError(
                    f"{span.count} tokens from {span.start}; one below {self.plan.max_context} fits"
                )
        # Only the columns that are read: a context of 128 Ki tokens has 8,192, most steps have few.
        longest = max((span.start + 1 for span in spans), default=0)
        used = _padded_blocks(longest, self.plan.shape.block_size)
        sizes = replace(self._sizes, max_blocks=used)
        # A buffer of its own each time: the last one may still be on its way. The allocator of
        # pinned memory gives it out again when the copy is done.
        host = _host_buffer(sizes.words, self._device)
        _write(host, sizes, spans, self.plan.shape)
        head = sizes.words_before_tables
        self._buffer[:head].copy_(host[:head], non_blocking=True)
        self.plan.block_tables[:, :used].copy_(sizes.cut(host).block_tables, non_blocking=True)


def _write(host: Tensor, sizes: _Sizes, spans: Sequence[Span], shape: KvShape) -> None:
    """Write all tables but the tiles."""
    slots, starts, contexts, tables, _ = (view.numpy() for view in sizes.cut(host))
    slots[:] = -1
    tables[:] = 0
    contexts[:] = 0
    starts[0] = row = 0
    for index, span in enumerate(spans):
        context = span.start + span.count
        used = -(-context // shape.block_size)
        table = np.asarray(span.block_ids[:used], dtype=np.int64)
        position = np.arange(span.start, context)
        slots[row : row + span.count] = (
            table[position // shape.block_size] * shape.block_size + position % shape.block_size
        )
        tables[index, :used] = table
        contexts[index] = context
        row += span.count
        starts[index + 1] = row
    starts[len(spans) + 1 :] = row


def _host_buffer(words: int, device: torch.device) -> Tensor:
    return torch.empty(words, dtype=torch.int32, pin_memory=device.type == "cuda")


def _padded(words: int) -> int:
    return -(-words // _ALIGNED) * _ALIGNED


def _padded_blocks(tokens: int, block_size: int) -> int:
    blocks = max(1, -(-tokens // block_size))
    return -(-blocks // _TABLE_BLOCKS) * _TABLE_BLOCKS


def _tile_tokens(longest: int, dtype: torch.dtype) -> int:
    """The smallest tile that holds the longest chunk, or the largest there is."""
    tiles = _TILES_FLOAT32 if dtype == torch.float32 else _TILES
    return next((tile for tile in tiles if longest <= tile), tiles[-1])

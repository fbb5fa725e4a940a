# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001
"""The sum of a tensor over the GPUs of one host, in one launch over memory that all have opened.

Basic typing: Triton's language is untyped. Program p of a rank meets program p of the others and
no other. A meeting is a count: each writes into a word in the others' memory how many it has come
to, and waits until all have done so in its own. Counts only grow and are kept in the memory, so a
launch needs nothing that changes from call to call, and a CUDA graph may hold it. A tensor has two
places by turns: a rank at a call's first meeting has left the call before, so no rank reads the
place that the next call writes.

The sum is made in float32 in the order of the ranks and rounded once: the same bits on each rank,
and in one shot or two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xpyd_worker.kernels.gpu.reduce_shape import LINE_BYTES, MOST_RANKS, ReduceShape

_WORDS = tl.constexpr(LINE_BYTES // 8)
_RANKS = tl.constexpr(MOST_RANKS)
_WARPS = 16


@triton.jit
def _meet(table, rank, count, ranks: tl.constexpr):  # noqa: ANN202
    # What all threads have stored comes before the word that says so.
    tl.debug_barrier()
    line = tl.program_id(0) * _WORDS
    other = tl.arange(0, _RANKS)
    is_rank = other < ranks
    theirs = tl.load(table + other, mask=is_rank, other=0).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(theirs + line + rank, count, mask=is_rank, sem="release", scope="sys")
    words = tl.load(table + rank).to(tl.pointer_type(tl.int64)) + line + other
    # Until the slowest is here. A faster rank may be at the next meeting already.
    least = count - 1
    while least < count:
        said = tl.atomic_add(words, 0, mask=is_rank, sem="acquire", scope="sys")
        least = tl.min(tl.where(is_rank, said, count), 0)
    # And before what the others' threads have stored is read.
    tl.debug_barrier()


@triton.jit
def _place(table, rank, offset, kind: tl.constexpr):  # noqa: ANN202
    address = tl.multiple_of(tl.load(table + rank) + offset, 16)
    return tl.multiple_of(address.to(tl.pointer_type(kind)), 16)


@triton.jit
def _sum(table, offset, at, inside, ranks: tl.constexpr, kind: tl.constexpr):  # noqa: ANN202
    total = tl.zeros(at.shape, tl.float32)
    for rank in tl.static_range(ranks):
        theirs = _place(table, rank, offset, kind)
        total += tl.load(theirs + at, mask=inside, other=0).to(tl.float32)
    return total.to(kind)


@triton.jit(do_not_specialize=["rank"])
def _all_reduce(
    x,
    table,
    rank,
    elements,
    part,
    share,
    ranks: tl.constexpr,
    in_two: tl.constexpr,
    tile: tl.constexpr,
    head_bytes: tl.constexpr,
    place_bytes: tl.constexpr,
    part_bytes: tl.constexpr,
) -> None:
    kind: tl.constexpr = x.dtype.element_ty
    program = tl.program_id(0)
    counter = tl.load(table + rank).to(tl.pointer_type(tl.int64)) + program * _WORDS + _RANKS
    # Of meetings before; each call has two, or leaves the second out.
    count = tl.load(counter)
    offset = head_bytes + (count // 2) % 2 * place_bytes + program * part_bytes
    own = _place(table, rank, offset, kind)
    values = x + program * part
    size = tl.minimum(part, elements - program * part)
    column = tl.arange(0, tile)
    for begin in range(0, size, tile):
        at = begin + column
        tl.store(own + at, tl.load(values + at, mask=at < size), mask=at < size)
    _meet(table, rank, count + 1, ranks)
    if in_two:
        first = rank * share
        end = tl.minimum(first + share, size)
        for begin in range(first, end, tile):
            at = begin + column
            # No other rank reads this share of what this rank gave.
            tl.store(own + at, _sum(table, offset, at, at < end, ranks, kind), mask=at < end)
        _meet(table, rank, count + 2, ranks)
        for turn in tl.static_range(ranks):
            # Not all from the same rank at once.
            other = (rank + turn) % ranks
            theirs = _place(table, other, offset, kind)
            first = other * share
            end = tl.minimum(first + share, size)
            for begin in range(first, end, tile):
                at = begin + column
                tl.store(values + at, tl.load(theirs + at, mask=at < end), mask=at < end)
    else:
        for begin in range(0, size, tile):
            at = begin + column
            tl.store(values + at, _sum(table, offset, at, at < size, ranks, kind), mask=at < size)
    tl.store(counter, count + 2)


def all_reduce(
    x: torch.Tensor, table: torch.Tensor, *, rank: int, ranks: int, shape: ReduceShape
) -> None:
    """Add up all ranks' `x`, contiguous and such as `shape` takes, in place, on the current stream.

    `table` [MOST_RANKS] int64, on the device: where each rank's memory of `shape.memory_bytes`
    begins, as this rank has it; at multiples of 16, and zero before the first call. All ranks make
    the same calls in the same order; a rank that misses one waits for ever.
    """
    cut = shape.cut(x.numel(), x.element_size(), ranks)
    _all_reduce[(cut.programs,)](
        x,
        table,
        rank,
        x.numel(),
        cut.part,
        cut.share,
        ranks=ranks,
        in_two=cut.in_two,
        tile=shape.tile_bytes // x.element_size(),
        head_bytes=shape.head_bytes,
        place_bytes=shape.most_bytes,
        part_bytes=shape.part_bytes,
        num_warps=_WARPS,
        num_stages=1,
    )

# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN202
"""A layer's experts over the rows that chose them, while the host does not know which.

Basic typing: Triton's language is untyped. A pair is a row and one of its experts. Pairs are sorted
by expert and cut into tiles of one expert each; a tile's rows are multiplied with its expert's
weights (a grouped GEMM). A table on the device says which expert a tile has. The host only
knows how many tiles there are at most, and starts so many: nothing waits, and a CUDA graph holds
for any choice. Experts without pairs have no tile, so their weights are not read.

Tiles are chosen by shapes alone. Within a tile each row has sums of its own, and what a row's
experts made is added up in their order, so the batch changes no result, but that tiles of
another size may round otherwise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Rows of a tile: the fewest that tl.dot takes, then more where weights would be read for too few.
_TILES = (16, 64, 128)
_TILES_FLOAT32 = (16, 32)
# Weights of one load: outputs by inputs. float32 takes twice the shared memory.
_COLUMNS, _DEPTH = 64, 64
_COLUMNS_FLOAT32, _DEPTH_FLOAT32 = 32, 32
# Neighbouring tiles that go through the same columns before the next ones: those of one expert
# find its weights in the cache.
_GROUP = tl.constexpr(8)
# Lines of the table that one program writes, and columns of a row that one adds up.
_LINES = 64
_SUM_COLUMNS = 1024


@triton.jit
def _first_from(experts, pairs, wanted):
    """For each of `wanted` the first place of the ascending `experts` that is not below it."""
    low = tl.zeros_like(wanted)
    high = low + pairs
    while tl.max(high - low, 0) > 0:
        middle = (low + high) // 2
        is_open = low < high
        is_below = is_open & (tl.load(experts + middle, mask=is_open, other=0) < wanted)
        low = tl.where(is_below, middle + 1, low)
        high = tl.where(is_below, high, tl.where(is_open, middle, high))
    return low


# Pairs and tiles differ from step to step; of each size, of 1 and of what 16 divides, triton would
# compile a kernel of its own, in the middle of serving.
@triton.jit(do_not_specialize=["pairs", "tiles"])
def _fill_table(
    experts, table, pairs, tiles, rows: tl.constexpr, width: tl.constexpr, lines: tl.constexpr
) -> None:
    expert = tl.arange(0, width)
    begin = _first_from(experts, pairs, expert)
    end = _first_from(experts, pairs, expert + 1)
    of_expert = tl.cdiv(end - begin, rows)
    behind = tl.cumsum(of_expert, 0)
    first = behind - of_expert
    tile = tl.program_id(0) * lines + tl.arange(0, lines)
    number = tile[:, None] - first[None, :]
    is_its = (number >= 0) & (number < of_expert[None, :])
    # A tile that no expert has gets no pairs: from 0 to 0.
    own = tl.sum(tl.where(is_its, expert[None, :], 0), 1)
    start = tl.sum(tl.where(is_its, begin[None, :] + number * rows, 0), 1)
    stop = tl.sum(tl.where(is_its, end[None, :], 0), 1)
    is_line = tile < tiles
    tl.store(table + tile * 3, own, mask=is_line)
    tl.store(table + tile * 3 + 1, start, mask=is_line)
    tl.store(table + tile * 3 + 2, tl.minimum(stop, start + rows), mask=is_line)


@triton.jit
def _tile_and_block(tiles, blocks):
    """Which tile and which block of columns this program has."""
    number = tl.program_id(0)
    first = number // (blocks * _GROUP) * _GROUP
    within = number % (blocks * _GROUP)
    members = tl.minimum(tiles - first, _GROUP)
    return first + within % members, within // members


@triton.jit(do_not_specialize=["tiles"])
def _gate_up(
    x,
    weight,
    order,
    table,
    out,
    tiles,
    hidden,
    size,
    per_token,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
) -> None:
    tile, block = _tile_and_block(tiles, tl.cdiv(size, columns))
    begin = tl.load(table + tile * 3 + 1)
    end = tl.load(table + tile * 3 + 2)
    if begin >= end:
        return
    expert = tl.load(table + tile * 3).to(tl.int64)
    place = begin.to(tl.int64) + tl.arange(0, rows)
    is_row = place < end
    row = tl.load(order + place, mask=is_row, other=0) // per_token
    column = block * columns + tl.arange(0, columns)
    is_column = column < size
    source = x + row[:, None] * hidden
    gate_weight = weight + (expert * 2 * size + column)[None, :] * hidden
    up_weight = weight + ((expert * 2 + 1) * size + column)[None, :] * hidden
    gate = tl.zeros((rows, columns), tl.float32)
    up = tl.zeros((rows, columns), tl.float32)
    for at in range(0, hidden, depth):
        k = at + tl.arange(0, depth)
        is_k = k < hidden
        is_weight = is_k[:, None] & is_column[None, :]
        value = tl.load(source + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0)
        into_gate = tl.load(gate_weight + k[:, None], mask=is_weight, other=0)
        gate += tl.dot(value, into_gate, input_precision="ieee")
        into_up = tl.load(up_weight + k[:, None], mask=is_weight, other=0)
        up += tl.dot(value, into_up, input_precision="ieee")
    result = gate / (1 + tl.exp(-gate)) * up
    target = out + place[:, None] * size + column[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["tiles"])
def _down(
    inner,
    weight,
    order,
    table,
    out,
    tiles,
    hidden,
    size,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
) -> None:
    tile, block = _tile_and_block(tiles, tl.cdiv(hidden, columns))
    begin = tl.load(table + tile * 3 + 1)
    end = tl.load(table + tile * 3 + 2)
    if begin >= end:
        return
    expert = tl.load(table + tile * 3).to(tl.int64)
    place = begin.to(tl.int64) + tl.arange(0, rows)
    is_row = place < end
    pair = tl.load(order + place, mask=is_row, other=0)
    column = block * columns + tl.arange(0, columns)
    is_column = column < hidden
    source = inner + place[:, None] * size
    own_weight = weight + (expert * hidden + column)[None, :] * size
    total = tl.zeros((rows, columns), tl.float32)
    for at in range(0, size, depth):
        k = at + tl.arange(0, depth)
        is_k = k < size
        value = tl.load(source + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0)
        factor = tl.load(own_weight + k[:, None], mask=is_k[:, None] & is_column[None, :], other=0)
        total += tl.dot(value, factor, input_precision="ieee")
    # By pair, so that what belongs to a row is together.
    target = out + pair[:, None] * hidden + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _add_up(
    parts,
    weights,
    chosen,
    out,
    hidden,
    per_token,
    width: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    is_column = column < hidden
    pair = tl.arange(0, width)
    is_pair = pair < per_token
    expert = tl.load(chosen + row * per_token + pair, mask=is_pair, other=1 << 30)
    weight = tl.load(weights + row * per_token + pair, mask=is_pair, other=0)
    # The number of a pair among its row's, by expert; one that was chosen twice keeps its order.
    is_before = (expert[None, :] < expert[:, None]) | (
        (expert[None, :] == expert[:, None]) & (pair[None, :] < pair[:, None])
    )
    rank = tl.sum(is_before.to(tl.int32), 1)
    total = tl.zeros((columns,), tl.float32)
    for number in range(per_token):
        own = tl.sum(tl.where(rank == number, pair, 0), 0)
        share = tl.sum(tl.where(rank == number, weight, 0.0), 0)
        # The part of a pair without an expert was never written. A column, not a scalar: the
        # interpreter makes a number of a scalar that it joins to a mask.
        maker = tl.sum(tl.where(rank == number, expert, 0), 0) + tl.zeros_like(column)
        source = parts + (row * per_token + own) * hidden + column
        total += tl.load(source, mask=is_column & (maker >= 0), other=0).to(tl.float32) * share
    tl.store(out + row * hidden + column, total.to(out.dtype.element_ty), mask=is_column)


class GroupedExperts:
    """What `xpyd_worker.kernels.api.Experts` computes, without a plan. A call takes memory for
    rows * per_token * (size + hidden) numbers of x's dtype besides its result, whatever is
    chosen."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """The tensors are kept. Raises ValueError where they are not [experts, 2 * size, hidden]
        and [experts, hidden, size], or not contiguous."""
        experts, hidden, size = down.shape
        if gate_up.shape != (experts, 2 * size, hidden):
            raise ValueError(
                f"gate_up is {list(gate_up.shape)}; with down {list(down.shape)} it must be "
                f"{[experts, 2 * size, hidden]}"
            )
        if not (gate_up.is_contiguous() and down.is_contiguous()):
            raise ValueError("experts' weights are kept as they are and must be contiguous")
        self.gate_up, self.down = gate_up, down

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """See Experts; `chosen` may be NO_EXPERT. Nothing waits for the device."""
        x, weights, chosen = x.contiguous(), weights.contiguous(), chosen.contiguous()
        experts, hidden, size = self.down.shape
        pairs, per_token = chosen.numel(), chosen.shape[1]
        rows = tile_rows(pairs, experts, x.dtype)
        table, order = tile_table(chosen, experts=experts, rows=rows)
        tiles = table.shape[0]
        is_wide = x.dtype == torch.float32
        columns = _COLUMNS_FLOAT32 if is_wide else _COLUMNS
        launch = {
            "rows": rows,
            "columns": columns,
            "depth": _DEPTH_FLOAT32 if is_wide else _DEPTH,
            "num_warps": 8 if rows > 64 else 4,
            # A tile of few rows waits for its weights: one more of their loads is under way.
            "num_stages": 4 if rows == _TILES[0] else 3,
        }
        inner = torch.empty((pairs, size), dtype=x.dtype, device=x.device)
        _gate_up[(tiles * triton.cdiv(size, columns),)](
            x, self.gate_up, order, table, inner, tiles, hidden, size, per_token, **launch
        )
        parts = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
        _down[(tiles * triton.cdiv(hidden, columns),)](
            inner, self.down, order, table, parts, tiles, hidden, size, **launch
        )
        out = torch.empty_like(x)
        columns = min(_SUM_COLUMNS, triton.next_power_of_2(hidden))
        _add_up[(x.shape[0], triton.cdiv(hidden, columns))](
            parts,
            weights,
            chosen,
            out,
            hidden,
            per_token,
            width=triton.next_power_of_2(per_token),
            columns=columns,
        )
        return out


def tile_rows(pairs: int, experts: int, dtype: torch.dtype) -> int:
    """Rows of a tile: enough that an expert with its share of the pairs has one, or the most."""
    tiles = _TILES_FLOAT32 if dtype == torch.float32 else _TILES
    return next((rows for rows in tiles if pairs <= rows * experts), tiles[-1])


def tile_table(
    chosen: torch.Tensor, *, experts: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """How `chosen` [rows, per_token] int64 is cut up: a table [tiles, 3] int32, each line a tile's
    expert and its first and behind-last place in the order, and that order: the numbers of the
    pairs by expert, NO_EXPERT's first, and within one ascending. A tile has at most `rows` places;
    the last tiles may have none, for there are as many as any choice can ask for."""
    ordered, order = chosen.view(-1).sort(stable=True)
    pairs = ordered.numel()
    # Each expert that was chosen has at most one tile that is not full.
    tiles = (pairs + min(pairs, experts) * (rows - 1)) // rows
    table = torch.empty((tiles, 3), dtype=torch.int32, device=chosen.device)
    _fill_table[(triton.cdiv(tiles, _LINES),)](
        ordered,
        table,
        pairs,
        tiles,
        rows=rows,
        width=triton.next_power_of_2(experts),
        lines=_LINES,
    )
    return table, order

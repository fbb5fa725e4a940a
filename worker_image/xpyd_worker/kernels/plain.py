"""The operators in plain torch: on any device, in any dtype; the twin that tests the others.

`plan` turns block tables into index tensors once per step. Decoding sequences are attended in
groups that are padded to their longest, prompts one by one; keys and values are gathered from the
cache for torch's own scaled_dot_product_attention. It must not know weights, requests or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from xpyd_worker.kernels.api import (
    NO_EXPERT,
    KvShape,
    PackedExperts,
    PackedLinear,
    Plan,
    Span,
)

# A group of decoding sequences gathers at most so many bytes of KV per layer: more falls out of the
# cache between the gather and its use (and is given back to the system after each layer).
_GATHER_BYTES = 4 << 20
# Sequences of one group differ by at most so many blocks, or by a quarter: padding is wasted work.
_PADDING_BLOCKS = 4

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class _Part:
    """Sequences that are attended together, with `count` rows each, in neighbouring rows, padded to
    the longest: `tokens`.

    `gather` indexes the cache as rows of (block, head). `unused` are the gathered token rows that
    belong to no token: zeroed, for 0 * NaN is NaN; None where there are none. `starts` is the
    position of each sequence's first row.
    """

    first_row: int
    sequences: int
    count: int
    tokens: int
    starts: Ints
    gather: Tensor
    unused: Tensor | None
    masks: dict[int | None, Tensor | None] = field(default_factory=dict[int | None, Tensor | None])

    @property
    def rows(self) -> slice:
        """Its rows in the flat batch."""
        return slice(self.first_row, self.first_row + self.sequences * self.count)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """[sequences, 1, count, tokens], 0 or -inf; None where every row sees every token."""
        if window not in self.masks:
            self.masks[window] = self._make_mask(window, dtype)
        return self.masks[window]

    def _make_mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        rows = self.starts[:, None, None] + np.arange(self.count)[None, :, None]
        tokens = np.arange(self.tokens)
        hidden = tokens > rows
        if window is not None:
            hidden |= tokens <= rows - window
        if not hidden.any():
            return None
        mask = torch.zeros(hidden.shape, dtype=dtype)
        return mask.masked_fill_(_tensor(hidden), float("-inf")).unsqueeze(1)


@dataclass(frozen=True)
class PlainPlan:
    """`slots` indexes the cache as rows of (block, head, offset), for each row of the batch and
    each KV head."""

    shape: KvShape
    slots: Tensor
    parts: tuple[_Part, ...]


class ReadableLinear(PackedLinear, Protocol):
    """One on a CPU, whose weight can be had again: experts move to other ranks."""

    def weight(self) -> Tensor:
        """[out, in], unpacked."""
        ...


MakeLinear = Callable[[Tensor, Tensor | None], ReadableLinear]
"""Kernels.linear on a CPU."""


class PlainLinear:
    """torch's own linear over the weights as they are."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        return F.linear(x, self._weight, self._bias)

    def weight(self) -> Tensor:
        """See ReadableLinear."""
        return self._weight


class PlainKernels:
    """Implements `xpyd_worker.kernels.api.Kernels`."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> ReadableLinear:
        """The weights stay as they are."""
        return PlainLinear(weight, bias)

    def experts(self, gate_up: Tensor, down: Tensor) -> PackedExperts:
        """The experts, computed one after the other."""
        return ExpertByExpert(self.linear, self.silu_mul, gate_up, down)

    def count_chosen(self, counts: Tensor, chosen: Tensor, plan: Plan | None) -> None:
        """Count all: each row has a sequence."""
        count_chosen(counts, chosen)

    def plan(self, spans: Sequence[Span], shape: KvShape) -> Plan:
        """Index tensors for a flat batch; with one-row spans first, sorted by length, the groups
        are few."""
        slots = [_slots(span, shape) for span in spans]
        parts: list[_Part] = []
        row = 0
        for run in _runs(spans, shape):
            parts.append(_part(run, row, shape))
            row += sum(span.count for span in run)
        return PlainPlan(shape, _tensor(np.concatenate(slots)), tuple(parts))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalize; in float32 bit for bit what transformers computes."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add, then norm."""
        return self.rms_norm(residual.add_(x), weight, eps)

    def rotate_and_store(
        self,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor, float] | None,
        cache: Tensor,
        plan: Plan,
    ) -> Tensor:
        """Norms, rotation, and the write to the cache one after another."""
        shape = _own(plan).shape
        turned = qkv.shape[1] - shape.kv_heads
        heads = turned - shape.kv_heads
        if norms is None:
            query_key = rotate(qkv[:, :turned], angles)
            query, key = query_key[:, :heads], query_key[:, heads:]
        else:
            query_norm, key_norm, eps = norms
            query = rotate(self.rms_norm(qkv[:, :heads], query_norm, eps), angles)
            key = rotate(self.rms_norm(qkv[:, heads:turned], key_norm, eps), angles)
        width = 2 * shape.head_dim
        kv = torch.cat((key, qkv[:, turned:]), dim=-1)
        cache.view(-1, width).index_copy_(0, _own(plan).slots, kv.view(-1, width))
        return query

    def attention(self, query: Tensor, cache: Tensor, plan: Plan, window: int | None) -> Tensor:
        """Part by part."""
        shape, parts = _own(plan).shape, _own(plan).parts
        rows, heads, head_dim = query.shape
        out = torch.empty(rows, heads * head_dim, dtype=query.dtype)
        for part in parts:
            attend = _attend_one_row if part.count == 1 else _attend_rows
            out[part.rows] = attend(query[part.rows], cache, part, shape, window)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu in place, then the product."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn heads [rows, heads, head_dim] by `angles`, each [rows, head_dim / 2]."""
    cos, sin = (angle.to(x.dtype).unsqueeze(1) for angle in angles)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = torch.empty(x.shape, dtype=x.dtype)
    torch.mul(first, cos, out=out[..., :half])
    out[..., :half].addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:])
    out[..., half:].addcmul_(first, sin)
    return out


def _own(plan: Plan) -> PlainPlan:
    return cast("PlainPlan", plan)


def _gathered(cache: Tensor, part: _Part, shape: KvShape) -> tuple[Tensor, Tensor]:
    """Keys and values of the part's sequences, each [sequences, kv_heads, tokens, head_dim]."""
    width = 2 * shape.head_dim
    gathered = cache.view(-1, shape.block_size * width).index_select(0, part.gather)
    if part.unused is not None:
        gathered.view(-1, width).index_fill_(0, part.unused, 0)
    context = gathered.view(part.sequences, shape.kv_heads, -1, width)[:, :, : part.tokens]
    return context[..., : shape.head_dim], context[..., shape.head_dim :]


def _attend_one_row(
    query: Tensor, cache: Tensor, part: _Part, shape: KvShape, window: int | None
) -> Tensor:
    """[sequences, heads, head_dim] -> [sequences, heads * head_dim]. The heads of a KV head are the
    rows of one attention."""
    keys, values = _gathered(cache, part, shape)
    rows = query.reshape(part.sequences, shape.kv_heads, -1, shape.head_dim)
    mask = part.mask(window, query.dtype)
    out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask)
    return out.reshape(part.sequences, -1)


def _attend_rows(
    query: Tensor, cache: Tensor, part: _Part, shape: KvShape, window: int | None
) -> Tensor:
    """[count, heads, head_dim] of one sequence -> [count, heads * head_dim].

    The heads of a KV head are SDPA's batch, over which K and V are broadcast uncopied.
    """
    keys, values = _gathered(cache, part, shape)
    rows = query.reshape(part.count, shape.kv_heads, -1, shape.head_dim)
    heads = rows.shape[2]
    is_causal = part.tokens == part.count and window is None
    out = F.scaled_dot_product_attention(
        rows.permute(2, 1, 0, 3),
        keys.expand(heads, -1, -1, -1),
        values.expand(heads, -1, -1, -1),
        attn_mask=None if is_causal else part.mask(window, query.dtype),
        is_causal=is_causal,
    )
    return out.permute(2, 1, 0, 3).reshape(part.count, -1)


def _blocks(span: Span, shape: KvShape) -> int:
    """Blocks that hold the sequence up to its last new token."""
    return -(-(span.start + span.count) // shape.block_size)


def _slots(span: Span, shape: KvShape) -> Ints:
    """Cache rows (block, head, offset) of the span's tokens: [count * kv_heads]."""
    positions = np.arange(span.start, span.start + span.count)
    table = np.asarray(span.block_ids, dtype=np.int64)
    heads = np.arange(shape.kv_heads)
    block_heads = table[positions // shape.block_size, None] * shape.kv_heads + heads
    offsets = positions[:, None] % shape.block_size
    return (block_heads * shape.block_size + offsets).reshape(-1)


def _runs(spans: Sequence[Span], shape: KvShape) -> Iterator[list[Span]]:
    """Cut the batch into parts: neighbouring one-row spans of similar length whose gather stays
    small, and each longer span alone."""
    run: list[Span] = []
    shortest = longest = 0
    for span in spans:
        blocks = _blocks(span, shape)
        low, high = min(shortest, blocks), max(longest, blocks)
        fits = (
            span.count == 1
            and high - low <= max(_PADDING_BLOCKS, low // 4)
            and high * (len(run) + 1) * shape.block_bytes <= _GATHER_BYTES
        )
        if run and not (fits and run[0].count == 1):
            yield run
            run = []
        shortest, longest = (low, high) if run else (blocks, blocks)
        run.append(span)
    if run:
        yield run


def _part(spans: Sequence[Span], first_row: int, shape: KvShape) -> _Part:
    """One part of the plan; all its spans have as many rows."""
    count = spans[0].count
    starts = np.array([span.start for span in spans])
    tokens = int(starts.max()) + count
    blocks = -(-tokens // shape.block_size)
    tables = np.zeros((len(spans), blocks), dtype=np.int64)
    for index, span in enumerate(spans):
        used = _blocks(span, shape)
        tables[index, :used] = span.block_ids[:used]
    heads = np.arange(shape.kv_heads)
    gather = (tables[:, None, :] * shape.kv_heads + heads[:, None]).reshape(-1)
    is_unused = np.arange(blocks * shape.block_size) >= (starts + count)[:, None]
    padding = np.broadcast_to(is_unused[:, None], (len(spans), shape.kv_heads, is_unused.shape[1]))
    unused = np.flatnonzero(padding)
    return _Part(
        first_row,
        len(spans),
        count,
        tokens,
        starts,
        _tensor(gather),
        _tensor(unused) if len(unused) else None,
    )


def _tensor(array: Ints | Bools) -> Tensor:
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType] - untyped in torch


class ExpertByExpert:
    """Implements `xpyd_worker.kernels.api.PackedExperts`."""

    def __init__(
        self,
        linear: MakeLinear,
        silu_mul: Callable[[Tensor], Tensor],
        gate_up: Tensor,
        down: Tensor,
    ) -> None:
        """Each expert's weights become linears."""
        self._linear, self._silu_mul = linear, silu_mul
        self._mlps = [
            (linear(into, None), linear(out, None))
            for into, out in zip(gate_up.unbind(), down.unbind(), strict=True)
        ]

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor, plan: Plan | None) -> Tensor:
        """[rows, hidden] -> [rows, hidden]; no row is left out."""
        per_token = chosen.shape[1]
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, pairs in rows_by_expert(chosen, len(self._mlps)):
            gate_up, down = self._mlps[expert]
            rows = pairs // per_token
            part = down(self._silu_mul(gate_up(x.index_select(0, rows))))
            share = weights.view(-1).index_select(0, pairs).unsqueeze(-1)
            out.index_add_(0, rows, part * share)
        return out.to(x.dtype)

    def weights(self, expert: int) -> tuple[Tensor, Tensor]:
        """See PackedExperts."""
        gate_up, down = self._mlps[expert]
        return gate_up.weight(), down.weight()

    def replace(self, expert: int, gate_up: Tensor, down: Tensor) -> None:
        """See PackedExperts."""
        into, out = self._mlps[expert]
        self._mlps[expert] = self._with(into, gate_up), self._with(out, down)

    def _with(self, linear: ReadableLinear, weight: Tensor) -> ReadableLinear:
        if not isinstance(linear, PlainLinear):
            return self._linear(weight, None)
        # A part of one tensor, which the other experts keep whole.
        linear.weight().copy_(weight)
        return linear


def count_chosen(counts: Tensor, chosen: Tensor) -> None:
    """Add to `counts` [layers, experts] how often each is among `chosen` [layers, rows, per_token],
    on a CPU."""
    layers, experts = counts.shape
    places = chosen.view(layers, -1) + torch.arange(0, counts.numel(), experts).unsqueeze(1)
    counts += places.view(-1).bincount(minlength=counts.numel()).view(layers, experts)


def rows_by_expert(chosen: Tensor, experts: int) -> Iterator[tuple[int, Tensor]]:
    """Experts that were chosen, in their order, each with the indices into the flat `chosen` that
    name it, ascending; NO_EXPERT is none."""
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    binned = (flat - NO_EXPERT).bincount(minlength=experts + 1)
    first, *counts = cast("list[int]", cast("Any", binned).tolist())
    for expert, count in enumerate(counts):
        if count:
            yield expert, order[first : first + count]
            first += count

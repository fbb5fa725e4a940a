# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# ruff: noqa: ANN001
"""RMS norm, alone or with the addition of a residual; an MLP's activation silu(gate) * up; and from
a fused projection to rotated queries and stored keys and values, in one launch.

Basic typing: Triton's language is untyped. A norm has one program for each row; the mean square and
the product with the weight are taken in float32 and rounded once. Head norms, rotation and the
store into the paged cache are one pass over memory: each alone would read and write all of it
again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Elements for each warp of a program, so that a row of 4,096 takes 8 warps.
_PER_WARP = 512
_MOST_WARPS = 16
# Of an activation, by one program.
_COLUMNS = 1024
# Heads that one program turns: a program for each would be too short a life at a long prefill.
_HEADS_PER_PROGRAM = 8


@triton.jit
def _rms_norm(
    x, residual, weight, out, size, eps, width: tl.constexpr, has_residual: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, width)
    inside = column < size
    value = tl.load(x + row + column, mask=inside, other=0).to(tl.float32)
    if has_residual:
        value += tl.load(residual + row + column, mask=inside, other=0).to(tl.float32)
        # The norm is of what the residual holds from now on: rounded.
        kept = value.to(residual.dtype.element_ty)
        tl.store(residual + row + column, kept, mask=inside)
        value = kept.to(tl.float32)
    mean_square = tl.sum(value * value, 0) / size
    factor = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    result = value * tl.rsqrt(mean_square + eps) * factor
    tl.store(out + row + column, result.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """The norm of `x` [..., size] over its last dimension. With a contiguous `residual` of that
    shape: `x` is added to it in place, and the norm is its."""
    x = x.contiguous()
    if residual is not None and not residual.is_contiguous():
        raise ValueError("the residual is written in place and must be contiguous")
    out = torch.empty_like(x)
    size = x.shape[-1]
    width = triton.next_power_of_2(size)
    _rms_norm[(x.numel() // size,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        size,
        eps,
        width=width,
        has_residual=residual is not None,
        num_warps=min(max(width // _PER_WARP, 1), _MOST_WARPS),
    )
    return out


@triton.jit
def _silu_mul(gate_up, out, size, columns: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < size
    source = gate_up + row * 2 * size + column
    gate = tl.load(source, mask=inside, other=0).to(tl.float32)
    up = tl.load(source + size, mask=inside, other=0).to(tl.float32)
    result = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + row * size + column, result.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[rows, 2 n], gate then up -> [rows, n]."""
    gate_up = gate_up.contiguous()
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    columns = min(_COLUMNS, triton.next_power_of_2(size))
    _silu_mul[(rows, triton.cdiv(size, columns))](gate_up, out, size, columns=columns)
    return out


@triton.jit
def _rotate_and_store(
    qkv,
    cos,
    sin,
    query_norm,
    key_norm,
    out,
    cache,
    slots,
    heads,
    kv_heads,
    eps,
    half: tl.constexpr,
    width: tl.constexpr,
    block_size: tl.constexpr,
    has_norms: tl.constexpr,
    heads_per_program: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads_per_program + tl.arange(0, heads_per_program)
    column = tl.arange(0, width)[None, :]
    in_half = column < half
    all_heads = heads + 2 * kv_heads
    is_query = (head < heads)[:, None]
    is_value = (head >= heads + kv_heads)[:, None]
    inside = (head < all_heads)[:, None] & in_half

    source = qkv + (row * all_heads + head[:, None]) * (2 * half) + column
    first = tl.load(source, mask=inside, other=0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0).to(tl.float32)
    straight_first, straight_second = first, second
    if has_norms:
        squares = tl.sum(first * first + second * second, 1) / (2 * half)
        scale = tl.rsqrt(squares + eps)[:, None]
        query_first = tl.load(query_norm + column, mask=in_half, other=0).to(tl.float32)
        query_second = tl.load(query_norm + half + column, mask=in_half, other=0).to(tl.float32)
        key_first = tl.load(key_norm + column, mask=in_half, other=0).to(tl.float32)
        key_second = tl.load(key_norm + half + column, mask=in_half, other=0).to(tl.float32)
        first = first * scale * tl.where(is_query, query_first, key_first)
        second = second * scale * tl.where(is_query, query_second, key_second)
    turn_cos = tl.load(cos + row * half + column, mask=in_half, other=0)
    turn_sin = tl.load(sin + row * half + column, mask=in_half, other=0)
    turned_first = first * turn_cos - second * turn_sin
    turned_second = second * turn_cos + first * turn_sin
    result_first = tl.where(is_value, straight_first, turned_first).to(out.dtype.element_ty)
    result_second = tl.where(is_value, straight_second, turned_second).to(out.dtype.element_ty)

    target = out + (row * heads + head[:, None]) * (2 * half) + column
    tl.store(target, result_first, mask=inside & is_query)
    tl.store(target + half, result_second, mask=inside & is_query)
    # A column, not a scalar: the interpreter makes a number of a scalar that it joins to a mask.
    slot = tl.load(slots + row + tl.zeros_like(head))[:, None]
    kv_head = tl.where(is_value, head[:, None] - heads - kv_heads, head[:, None] - heads)
    token = ((slot // block_size) * kv_heads + kv_head) * block_size + slot % block_size
    # A token's key and value stand side by side. A padded row (slot -1) belongs to no block.
    stored = cache + token * (4 * half) + tl.where(is_value, 2 * half, 0) + column
    is_stored = inside & (head >= heads)[:, None] & (slot >= 0)
    tl.store(stored, result_first, mask=is_stored)
    tl.store(stored + half, result_second, mask=is_stored)


def rotate_and_store(
    qkv: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    cache: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """See Kernels.rotate_and_store; `slots` [rows] int64 is block * block_size + offset, or -1 for
    a row that is not stored."""
    qkv = qkv.contiguous()
    cos, sin = (angle.contiguous() for angle in angles)
    rows, all_heads, head_dim = qkv.shape
    _, kv_heads, block_size, _ = cache.shape
    heads = all_heads - 2 * kv_heads
    out = torch.empty((rows, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    query_norm, key_norm, eps = (cos, cos, 0.0) if norms is None else norms
    _rotate_and_store[(rows, triton.cdiv(all_heads, _HEADS_PER_PROGRAM))](
        qkv,
        cos,
        sin,
        query_norm,
        key_norm,
        out,
        cache,
        slots,
        heads,
        kv_heads,
        eps,
        half=head_dim // 2,
        width=triton.next_power_of_2(head_dim // 2),
        block_size=block_size,
        has_norms=norms is not None,
        heads_per_program=_HEADS_PER_PROGRAM,
        num_warps=2,
    )
    return out

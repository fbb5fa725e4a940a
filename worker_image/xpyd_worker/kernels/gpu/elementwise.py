# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# ruff: noqa: ANN001
"""RMS norm, alone or with the addition of a residual, and an MLP's activation silu(gate) * up.

Basic typing: Triton's language is untyped. A norm has one program for each row; the mean square and
the product with the weight are taken in float32 and rounded once.
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

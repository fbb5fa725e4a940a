# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# ruff: noqa: ANN001
"""The gated activation of an MLP, silu(gate) * up. Basic typing: Triton's language is untyped."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 1024


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

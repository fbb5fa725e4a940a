"""A layer's experts one after the other, over the linears of any kernels.

Rows are grouped by expert, so that an expert computes all of its rows at once and one without rows
is not touched: its weights are not read from memory. The groups are known to the host, which waits
for the device where that is another one; a GPU has an implementation of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from xpyd_worker.kernels.api import Kernels, Plan


class ExpertByExpert:
    """Implements `xpyd_worker.kernels.api.Experts`."""

    def __init__(self, kernels: Kernels, gate_up: Tensor, down: Tensor) -> None:
        """Each expert's weights become linears of `kernels`."""
        self._kernels = kernels
        self._mlps = [
            (kernels.linear(into, None), kernels.linear(out, None))
            for into, out in zip(gate_up.unbind(), down.unbind(), strict=True)
        ]

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor, plan: Plan) -> Tensor:
        """[rows, hidden] -> [rows, hidden]; no row is left out."""
        per_token = chosen.shape[1]
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, pairs in rows_by_expert(chosen, len(self._mlps)):
            gate_up, down = self._mlps[expert]
            rows = pairs // per_token
            part = down(self._kernels.silu_mul(gate_up(x.index_select(0, rows))))
            share = weights.view(-1).index_select(0, pairs).unsqueeze(-1)
            out.index_add_(0, rows, part * share)
        return out.to(x.dtype)


def rows_by_expert(chosen: Tensor, experts: int) -> Iterator[tuple[int, Tensor]]:
    """Experts that were chosen, in their order, each with the indices into the flat `chosen` that
    name it, ascending."""
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    counts = cast("list[int]", cast("Any", flat.bincount(minlength=experts)).tolist())
    first = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, order[first : first + count]
            first += count

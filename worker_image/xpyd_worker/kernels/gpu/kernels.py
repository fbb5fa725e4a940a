"""`Kernels` for one CUDA device: Triton for what is ours, cuBLAS for linear layers.

See xpyd_worker.kernels.api for what each method does. It must not know models, requests or graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

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
from xpyd_worker.kernels.gpu.decode import decode_attention
from xpyd_worker.kernels.gpu.elementwise import rms_norm, rotate_and_store, silu_mul
from xpyd_worker.kernels.gpu.experts import GroupedExperts
from xpyd_worker.kernels.gpu.plan import GpuPlan, StaticPlan, make_plan
from xpyd_worker.kernels.gpu.prefill import prefill_attention

# Programs for each multiprocessor that decode attention aims at: enough to hide a load's latency.
_PROGRAMS_PER_PROCESSOR = 4
# A part of a context has at least so many positions, or putting the parts together costs more.
_LEAST_SPLIT_TOKENS = 256
_MOST_SPLITS = 64
# What an interpreter is taken for: a small device, so that small tests split contexts, too.
_INTERPRETED_PROCESSORS = 4


class TritonKernels:
    """The operators of a forward on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._processors = _INTERPRETED_PROCESSORS
        if device.type == "cuda":
            # Untyped in torch.
            properties = cast("Any", torch.cuda).get_device_properties(device)
            self._processors = int(properties.multi_processor_count)

    def linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """A product of torch's, which is cuBLAS's; `weight` is kept as it is."""
        weight = weight.to(self._device)
        kept_bias = None if bias is None else bias.to(self._device)

        def apply(x: Tensor) -> Tensor:
            return F.linear(x, weight, kept_bias)

        return apply

    def experts(self, gate_up: Tensor, down: Tensor) -> PackedExperts:
        """Both are kept as they are. In a step that only decodes, rows that pad a graph's batch
        choose none: they would have more experts' weights read."""
        return TritonExperts(GroupedExperts(gate_up.to(self._device), down.to(self._device)))

    def count_chosen(self, counts: Tensor, chosen: Tensor, plan: Plan | None) -> None:
        """Rows that pad a graph's batch count nothing."""
        places = chosen + torch.arange(
            0, counts.numel(), counts.shape[1], device=chosen.device
        ).view(-1, 1, 1)
        ones = torch.ones((), dtype=counts.dtype, device=chosen.device)
        if plan is not None:
            ones = (_own(plan).slots >= 0).to(counts.dtype).unsqueeze(1)
        counts.view(-1).scatter_add_(0, places.view(-1), ones.expand(chosen.shape).reshape(-1))

    def plan(self, spans: Sequence[Span], shape: KvShape) -> GpuPlan:
        """The plan of a step, on the device."""
        return make_plan(spans, shape, self._device)

    def static_plan(self, shape: KvShape, *, max_sequences: int, max_context: int) -> StaticPlan:
        """A plan with fixed addresses, for CUDA graphs."""
        return StaticPlan(shape, self._device, max_sequences=max_sequences, max_context=max_context)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Kernels."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Kernels."""
        return rms_norm(x, weight, eps, residual)

    def rotate_and_store(
        self,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor, float] | None,
        cache: Tensor,
        plan: Plan,
    ) -> Tensor:
        """See Kernels."""
        return rotate_and_store(qkv, angles, norms, cache, _own(plan).slots)

    def attention(self, query: Tensor, cache: Tensor, plan: Plan, window: int | None) -> Tensor:
        """See Kernels. The result's last bits depend on the batch: contexts are split finer where
        there are fewer of them."""
        own = _own(plan)
        query = query.contiguous()
        out = torch.empty_like(query)
        if own.decodes:
            decode_attention(
                query[: own.decodes],
                cache,
                own.block_tables[: own.decodes],
                own.contexts[: own.decodes],
                out[: own.decodes],
                window=window,
                splits=self._splits(own, window),
            )
        if own.tiles.shape[0]:
            prefill_attention(
                query,
                cache,
                own.block_tables,
                own.query_starts,
                own.contexts,
                own.tiles,
                out,
                window=window,
                tile_tokens=own.tile_tokens,
            )
        return out.view(query.shape[0], -1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See Kernels."""
        return silu_mul(gate_up)

    def _splits(self, plan: GpuPlan, window: int | None) -> int:
        longest = plan.max_context if window is None else min(window, plan.max_context)
        programs = plan.decodes * plan.shape.kv_heads
        return splits(self._processors * _PROGRAMS_PER_PROCESSOR, programs, longest)


def splits(wanted_programs: int, programs: int, context: int) -> int:
    """Into how many parts, a power of two, `programs` contexts of this length are to be cut so that
    `wanted_programs` work at once."""
    most = min(wanted_programs // max(programs, 1), context // _LEAST_SPLIT_TOKENS, _MOST_SPLITS)
    return 1 << (max(most, 1).bit_length() - 1)


def _own(plan: Plan) -> GpuPlan:
    if not isinstance(plan, GpuPlan):
        raise TypeError(f"a plan of other kernels: {type(plan).__name__}")
    return plan


class TritonExperts:
    """See PackedExperts and TritonKernels.experts."""

    def __init__(self, grouped: GroupedExperts) -> None:
        self._grouped = grouped

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor, plan: Plan | None) -> Tensor:
        """[rows, hidden] -> [rows, hidden]."""
        own = None if plan is None else _own(plan)
        if own is not None and not own.tiles.shape[0]:
            chosen = chosen.masked_fill((own.slots < 0).unsqueeze(-1), NO_EXPERT)
        return self._grouped(x, weights, chosen)

    def weights(self, expert: int) -> tuple[Tensor, Tensor]:
        """See PackedExperts."""
        return self._grouped.gate_up[expert], self._grouped.down[expert]

    def replace(self, expert: int, gate_up: Tensor, down: Tensor) -> None:
        """See PackedExperts: in place, behind what was launched before."""
        self._grouped.gate_up[expert].copy_(gate_up)
        self._grouped.down[expert].copy_(down)

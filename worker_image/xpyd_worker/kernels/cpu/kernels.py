"""The operators of a forward on a CPU: `xpyd_worker.kernels.api` over the compiled library.

`choose_kernels` says which implementation a model gets. Attention reads the paged cache in place.
Short calls keep the interpreter's lock: giving it up may cost a wait for another thread that is
longer than the call.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xpyd_worker.kernels.api import Kernels, KvShape, PackedExperts, Plan, Span
from xpyd_worker.kernels.cpu.library import (
    HEAD_DIMS,
    LANES,
    TYPES,
    AttentionArguments,
    Turn,
    library,
)
from xpyd_worker.kernels.cpu.packed import FewRowsLinear, OneDnnLinear, can_pack
from xpyd_worker.kernels.plain import (
    ExpertByExpert,
    PlainKernels,
    PlainLinear,
    ReadableLinear,
    count_chosen,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CpuPlan:
    """One step's sequences. `attention` points into the other members."""

    shape: KvShape
    slots: npt.NDArray[np.int64]
    """[rows]: block * block_size + offset."""
    sequences: npt.NDArray[np.int64]
    """[3, sequences]: position of the first row, rows, first row in the batch."""
    tables: npt.NDArray[np.int32]
    attention: AttentionArguments


def choose_kernels(*, vector_sizes: Iterable[int], head_dim: int) -> Kernels:
    """The fastest that can do these sizes here: compiled operators, else plain torch.
    `vector_sizes`: of all that norms and activations work on, but for heads."""
    found, sizes = library(), tuple(vector_sizes)
    if found is None:
        _log.warning("slow operators: none were compiled; install a C++ compiler, and xpyd again")
    elif head_dim not in HEAD_DIMS or any(size % LANES for size in sizes):
        _log.warning(
            "slow operators: none are compiled for heads of %d and sizes %s", head_dim, sizes
        )
    else:
        return CpuKernels(found)
    return PlainKernels()


class CpuKernels:
    """Implements `xpyd_worker.kernels.api.Kernels`."""

    def __init__(self, operators: ctypes.CDLL) -> None:
        """The kernels use as many threads as torch has now."""
        self.operators = operators
        self._threads = torch.get_num_threads()

    def linear(self, weight: Tensor, bias: Tensor | None) -> ReadableLinear:
        """Packed where that is faster."""
        if not can_pack(weight.dtype):
            return PlainLinear(weight, bias)
        return FewRowsLinear.of(OneDnnLinear(weight, bias), self.operators, self._threads)

    def experts(self, gate_up: Tensor, down: Tensor) -> PackedExperts:
        """The experts, computed one after the other, each packed as a linear is."""
        return ExpertByExpert(self.linear, self.silu_mul, gate_up, down)

    def count_chosen(self, counts: Tensor, chosen: Tensor, plan: Plan | None) -> None:
        """Count all: each row has a sequence."""
        count_chosen(counts, chosen)

    def plan(self, spans: Sequence[Span], shape: KvShape) -> Plan:
        """Block tables and positions as arrays."""
        sequences = np.empty((3, len(spans)), dtype=np.int64)
        blocks = [-(-(span.start + span.count) // shape.block_size) for span in spans]
        tables = np.zeros((len(spans), max(blocks)), dtype=np.int32)
        slots: list[npt.NDArray[np.int64]] = []
        row = 0
        for index, span in enumerate(spans):
            sequences[:, index] = span.start, span.count, row
            tables[index, : blocks[index]] = span.block_ids[: blocks[index]]
            row += span.count
            positions = np.arange(span.start, span.start + span.count)
            first = tables[index, positions // shape.block_size].astype(np.int64)
            slots.append(first * shape.block_size + positions % shape.block_size)
        attention = AttentionArguments(
            tables=tables.ctypes.data,
            starts=sequences[0].ctypes.data,
            counts=sequences[1].ctypes.data,
            rows=sequences[2].ctypes.data,
            sequences=len(spans),
            table_width=tables.shape[1],
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            block_size=shape.block_size,
            scale=shape.head_dim**-0.5,
        )
        return CpuPlan(shape, np.concatenate(slots), sequences, tables, attention)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalize in two passes: one for the sum, one for the result."""
        x = x.contiguous()
        return self._norm(None, x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalize, with the addition in the first pass."""
        assert residual.is_contiguous(), "added to in place"
        return self._norm(x.contiguous(), residual, weight, eps)

    def _norm(self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(residual)
        size = residual.shape[-1]
        self.operators.xpyd_norm(
            TYPES[residual.dtype],
            None if x is None else x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            residual.numel() // size,
            size,
            eps,
            self._threads,
        )
        return out

    def rotate_and_store(
        self,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor, float] | None,
        cache: Tensor,
        plan: Plan,
    ) -> Tensor:
        """Rotate and store in one pass over `qkv`."""
        own, qkv = cast("CpuPlan", plan), qkv.contiguous()
        rows, all_heads, head_dim = qkv.shape
        heads = all_heads - 2 * own.shape.kv_heads
        query = torch.empty(rows, heads, head_dim, dtype=qkv.dtype)
        query_norm, key_norm, eps = norms or (None, None, 0.0)
        turn = Turn(
            qkv=qkv.data_ptr(),
            cos=angles[0].data_ptr(),
            sin=angles[1].data_ptr(),
            query_weight=None if query_norm is None else query_norm.data_ptr(),
            key_weight=None if key_norm is None else key_norm.data_ptr(),
            query=query.data_ptr(),
            cache=cache.data_ptr(),
            slots=own.slots.ctypes.data,
            rows=rows,
            heads=heads,
            kv_heads=own.shape.kv_heads,
            head_dim=head_dim,
            block_size=own.shape.block_size,
            eps=eps,
        )
        self.operators.xpyd_rotate(TYPES[qkv.dtype], ctypes.byref(turn), self._threads)
        return query

    def attention(self, query: Tensor, cache: Tensor, plan: Plan, window: int | None) -> Tensor:
        """Attend to the cache in place."""
        own = cast("CpuPlan", plan)
        rows, heads, head_dim = query.shape
        out = torch.empty(rows, heads * head_dim, dtype=query.dtype)
        call = own.attention
        call.query, call.cache, call.out = query.data_ptr(), cache.data_ptr(), out.data_ptr()
        call.heads, call.window = heads, window or 0
        failed = self.operators.xpyd_attention(
            TYPES[query.dtype], ctypes.byref(call), self._threads
        )
        assert not failed, f"no operator for heads of {head_dim}: see choose_kernels"
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Activate and multiply in one pass."""
        gate_up = gate_up.contiguous()
        rows, both = gate_up.shape
        out = torch.empty(rows, both // 2, dtype=gate_up.dtype)
        self.operators.xpyd_silu_mul(
            TYPES[gate_up.dtype],
            gate_up.data_ptr(),
            out.data_ptr(),
            rows,
            both // 2,
            self._threads,
        )
        return out

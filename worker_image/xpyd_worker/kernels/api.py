"""The seam between a model and the operators that its forward runs on. Documented here only. So is
what the sampler gives a kernel that draws tokens (xpyd_worker.runner.sampler has that seam).

A model says what is computed, in which order; a Kernels says how: in plain torch, in C on a CPU, in
Triton on a GPU. All tensors of one call are on one device and, but for float32 angles and integer
indices, of one dtype. Implementations agree to rounding; `plain` is the one others are tested by.

See docs/adr/0021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

NO_EXPERT = -1
"""The expert of a row's choice that is not computed here and adds nothing."""
NOT_FINITE = -1
"""The token id of a row with NaN or +inf, or with nothing but -inf."""


@dataclass(frozen=True)
class DrawParams:
    """What steers the draws of one kernel, each [rows] on the device. In CUDA graphs: fixed
    buffers."""

    temperature: Tensor
    """float32; below 1e-5 the row is greedy and the rest is not looked at."""
    top_k: Tensor
    """int32; 0 is off. All that equal the last of the k best are kept."""
    top_p: Tensor
    """float64; 1 is off."""
    min_p: Tensor
    """float32; 0 is off. Share of the best token's probability; goes before top_p."""
    uniform: Tensor
    """float64 in [0, 1): where the draw falls."""


@dataclass(frozen=True)
class KvShape:
    """Shape of one layer's paged cache: [num_blocks, kv_heads, block_size, 2 * head_dim], K then V
    per token."""

    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.kv_heads * self.block_size * 2 * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class Span:
    """One sequence's share of a flat batch: `count` rows at positions start, start + 1, ...

    `block_ids` is its block table, long enough for start + count tokens.
    """

    start: int
    count: int
    block_ids: Sequence[int]


class Plan(Protocol):
    """What every layer of one step needs to find the step's tokens in the cache. Opaque: made by
    the Kernels that it is given back to."""


class PackedLinear(Protocol):
    """y = x W^T + b with weights that were packed for the device."""

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]; the result is the caller's to write to."""
        ...


class PackedExperts(Protocol):
    """Gated MLPs of which each row goes through a few, with weights that were packed for the
    device."""

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor, plan: Plan | None) -> Tensor:
        """[rows, hidden] -> [rows, hidden]: for each row the sum of what its experts `chosen`
        [rows, per_token] (int64; NO_EXPERT adds nothing) make of it, down(silu(gate(x)) * up(x)),
        by their `weights` (float32, the same shape). Summed in float32 and in the experts' order,
        so that a row's result does not depend on what else is in the batch, but for the rounding of
        its linears. An expert without rows is not computed; rows that `plan` has no sequence for
        may be left out, and are zeros then. A `plan` of None: rows of other ranks' steps, too, all
        of which count."""
        ...

    def weights(self, expert: int) -> tuple[Tensor, Tensor]:
        """gate_up and down of the expert, as `Kernels.experts` got them, unpacked. To be read
        before the next `replace`."""
        ...

    def replace(self, expert: int, gate_up: Tensor, down: Tensor) -> None:
        """Another one takes its number, with weights of the same shape, which the caller drops. The
        calls before are not changed, nor where on a device the weights are."""
        ...


class Kernels(Protocol):
    """The operators of a forward."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """A linear layer over `weight` [out, in] and `bias` [out], once per weight after loading.
        It may keep a packed copy in place of the tensors: the caller drops its own."""
        ...

    def experts(self, gate_up: Tensor, down: Tensor) -> PackedExperts:
        """The experts over `gate_up` [experts, 2 * size, hidden], gate before up, and `down`
        [experts, hidden, size], once per layer after loading. As with `linear` the caller drops its
        tensors."""
        ...

    def count_chosen(self, counts: Tensor, chosen: Tensor, plan: Plan | None) -> None:
        """Add to `counts` [layers, experts] (int64) how many rows chose each expert in each layer;
        `chosen` is [layers, rows, per_token]. Rows that `plan` has no sequence for do not count;
        with None all do. Nothing waits for the device."""
        ...

    def plan(self, spans: Sequence[Span], shape: KvShape) -> Plan:
        """The plan of a flat batch whose rows are the spans' one behind the other. Any order is
        right; one-row spans first and sorted by length is fast."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[..., size] -> the same shape: x / rms(x) * weight, the mean square in float32."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `x` to `residual` in place, then the norm of `residual`; both [rows, size]."""
        ...

    def rotate_and_store(
        self,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor, float] | None,
        cache: Tensor,
        plan: Plan,
    ) -> Tensor:
        """Queries [rows, heads, head_dim] that are ready for `attention`, and the step's keys and
        values in `cache`.

        `qkv` is [rows, heads + 2 * kv_heads, head_dim]; `angles` are cos and sin, each float32
        [rows, head_dim / 2], dimension i pairs with i + head_dim / 2; `norms` (weights of the
        queries' and the keys' RMS norm over head_dim, eps) come before the rotation.
        """
        ...

    def attention(self, query: Tensor, cache: Tensor, plan: Plan, window: int | None) -> Tensor:
        """Causal attention of `query` [rows, heads, head_dim] over the cache, each sequence over
        its own tokens only, whatever is in unused slots (NaN included): [rows, heads *
        head_dim]. Scores are scaled by head_dim ** -0.5. With `window` a token sees the last
        `window` positions, its own included."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 n], gate then up -> silu(gate) * up, [rows, n]."""
        ...

"""The parts of a decoder layer: linears, norms, attention, gated MLP; positions' angles.

The loader fills the weights and the kernels pack them. No nn.Module: at batch 1 its call overhead
is a measurable share of a small model's step. A part is made without memory, so that a checkpoint
can be read and packed piece by piece. How an operator runs is the Kernels' matter
(xpyd_worker.kernels.api); a layer must not know requests or block management.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from xpyd_worker.kernels.api import Kernels, PackedLinear, Plan
from xpyd_worker.model.config import MlpNames, ModelConfig
from xpyd_worker.model.rope import Llama3Scaling, RopeConfig, YarnScaling
from xpyd_worker.model.shards import Cut, Stored, all_of, by_name, is_first, share, whole
from xpyd_worker.parallel.api import NO_GROUP, TensorGroup


@dataclass(frozen=True)
class StepContext:
    """What all layers of one forward share: operators, the step's angles, caches and plan.
    `chosen`: the experts that rows chose, [rows, per_token] of each layer with experts; each adds
    its own."""

    kernels: Kernels
    angles: tuple[Tensor, Tensor]
    caches: Sequence[Tensor]
    plan: Plan
    kv_stored: Callable[[int], None]
    chosen: list[Tensor] = field(default_factory=list[Tensor])


class Linear:
    """y = x W^T + b. `weight` [out, in] and `bias` [out] have no memory before `allocate` and after
    `pack`. Of inputs and outputs a rank may hold a part (see `shards`)."""

    def __init__(
        self, inputs: Cut, outputs: Sequence[Cut], *, bias: bool, dtype: torch.dtype
    ) -> None:
        """`outputs`: what is computed together, one behind the other."""
        self._inputs, self._outputs = inputs, outputs
        rows = sum(len(cut.held) for cut in outputs)
        self.weight = torch.empty(rows, len(inputs.held), dtype=dtype, device="meta")
        self.bias = torch.empty(rows, dtype=dtype, device="meta") if bias else None
        self._packed: PackedLinear | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in] -> [tokens, out]. Only after `pack`."""
        assert self._packed is not None, "not loaded"
        return self._packed(x)

    def allocate(self, device: torch.device) -> None:
        """Memory, uninitialised, for the loader to fill."""
        self.weight = unfilled(self.weight, device)
        self.bias = None if self.bias is None else unfilled(self.bias, device)

    def pack(self, kernels: Kernels) -> None:
        """Hand the weights to the kernels, which may keep them in another form."""
        self._packed = kernels.linear(self.weight, self.bias)
        self.weight = unfilled(self.weight, "meta")
        self.bias = None if self.bias is None else unfilled(self.bias, "meta")

    def checkpoint_tensors(self, prefix: str, names: Sequence[str]) -> dict[str, Stored]:
        """Checkpoint name -> where it goes: each of the outputs under its own of `names`, or all
        under one."""
        tensors = by_name(self.weight, prefix, names, rows=self._outputs, columns=self._inputs)
        if self.bias is not None:
            tensors |= by_name(self.bias, prefix, names, rows=self._outputs, kind="bias")
        return tensors


def unfilled(like: Tensor, device: torch.device | str) -> Tensor:
    """A contiguous tensor of the same shape and dtype. torch.empty_like of one on `meta` imports
    sympy, which takes each rank a second or two."""
    return torch.empty(like.shape, dtype=like.dtype, device=device)


class Norm:
    """The weight of a root mean square norm over the last dimension."""

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype) -> None:
        self.weight = torch.empty(size, dtype=dtype, device="meta")
        self.eps = eps

    def allocate(self, device: torch.device) -> None:
        """Memory, uninitialised, for the loader to fill."""
        self.weight = unfilled(self.weight, device)


class Attention:
    """Self-attention with grouped KV heads, rotary positions and, where configured, head norms."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        dtype: torch.dtype,
        *,
        place: int | None = None,
        group: TensorGroup = NO_GROUP,
        inputs: int | None = None,
    ) -> None:
        """Attention of layer `index` of the model, which is `place` of those here (None: the same),
        over vectors of `inputs` numbers (None: the hidden states').
        Each rank of `group` has a share of the heads; KV heads that are fewer than ranks are there
        several times, together with the queries that attend to them."""
        self._place = index if place is None else place
        self._window, self._group = config.layers[index].window, group
        self._names = config.names.qkv
        self._head_dim = config.head_dim
        queries = share(config.num_heads, group, config.head_dim)
        keys = share(config.num_kv_heads, group, config.head_dim)
        hidden = whole(config.hidden_size)
        entering = hidden if inputs is None else whole(inputs)
        self._qkv = Linear(entering, (queries, keys, keys), bias=config.qkv_bias, dtype=dtype)
        self._all_heads = self._qkv.weight.shape[0] // config.head_dim
        has_bias = config.output_bias and is_first(group)
        self._output = Linear(queries, (hidden,), bias=has_bias, dtype=dtype)
        self._norms: tuple[Norm, Norm] | None = None
        if config.qk_norm:
            eps = config.rms_norm_eps
            self._norms = (
                Norm(config.head_dim, eps=eps, dtype=dtype),
                Norm(config.head_dim, eps=eps, dtype=dtype),
            )

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[tokens, inputs] -> [tokens, hidden]; `step.kv_stored` is called on the way."""
        kernels, cache = step.kernels, step.caches[self._place]
        qkv = self._qkv(x).view(x.shape[0], self._all_heads, self._head_dim)
        norms = None
        if self._norms is not None:
            norms = (self._norms[0].weight, self._norms[1].weight, self._norms[0].eps)
        query = kernels.rotate_and_store(qkv, step.angles, norms, cache, step.plan)
        step.kv_stored(self._place)
        attended = kernels.attention(query, cache, step.plan, self._window)
        return self._group.all_reduce(self._output(attended))

    def allocate(self, device: torch.device) -> None:
        """Memory for all weights."""
        for part in (self._qkv, self._output, *(self._norms or ())):
            part.allocate(device)

    def pack(self, kernels: Kernels) -> None:
        """Hand the weights to the kernels, once all are read."""
        self._qkv.pack(kernels)
        self._output.pack(kernels)

    def checkpoint_tensors(self, prefix: str) -> dict[str, Stored]:
        """Checkpoint name -> where it goes."""
        tensors = {
            **self._qkv.checkpoint_tensors(prefix, self._names),
            **self._output.checkpoint_tensors(prefix, ("o_proj",)),
        }
        if self._norms is not None:
            tensors[f"{prefix}q_norm.weight"] = all_of(self._norms[0].weight)
            tensors[f"{prefix}k_norm.weight"] = all_of(self._norms[1].weight)
        return tensors


class Mlp:
    """down(silu(gate(x)) * up(x)), with gate and up in one linear."""

    def __init__(
        self,
        hidden: int,
        size: int,
        *,
        bias: bool,
        names: MlpNames,
        dtype: torch.dtype,
        group: TensorGroup = NO_GROUP,
    ) -> None:
        """Each rank of `group` has a share of the `size` numbers between the two linears."""
        self._names, self._group = names, group
        inner = share(size, group)
        self._gate_up = Linear(whole(hidden), (inner, inner), bias=bias, dtype=dtype)
        has_bias = bias and is_first(group)
        self._down = Linear(inner, (whole(hidden),), bias=has_bias, dtype=dtype)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return self._group.all_reduce(self._down(step.kernels.silu_mul(self._gate_up(x))))

    def allocate(self, device: torch.device) -> None:
        """Memory for all weights."""
        self._gate_up.allocate(device)
        self._down.allocate(device)

    def pack(self, kernels: Kernels) -> None:
        """Hand the weights to the kernels, once all are read."""
        self._gate_up.pack(kernels)
        self._down.pack(kernels)

    def checkpoint_tensors(self, prefix: str) -> dict[str, Stored]:
        """Checkpoint name -> where it goes."""
        return {
            **self._gate_up.checkpoint_tensors(prefix, self._names.gate_up),
            **self._down.checkpoint_tensors(prefix, (self._names.down,)),
        }


class Rotary:
    """Cosines and sines of the angles of a model's positions, which the kernels turn heads by. They
    are computed in float32 for the positions of each step (a table for a long context would cost
    more memory than the few sines per token cost time) and shared by all layers."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        """Rotate at positions on `device`."""
        # Computed on the CPU, so that every device has the same bits.
        self._frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)
        self._scale = angle_scale(config.rope)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [tokens] -> cos and sin, each float32 [tokens, head_dim / 2]."""
        angles = positions.to(torch.float32).unsqueeze(-1) * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._scale != 1.0:
            cos, sin = cos.mul_(self._scale), sin.mul_(self._scale)
        return cos, sin


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair of dimensions, [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    wavelengths = rope.theta**exponents
    match rope.scaling:
        case None:
            return 1.0 / wavelengths
        case Llama3Scaling():
            return _llama3(1.0 / wavelengths, rope.scaling)
        case YarnScaling():
            return _yarn(wavelengths, rope.theta, rope.scaling)


def angle_scale(rope: RopeConfig) -> float:
    """What cosines and sines are multiplied with: YaRN makes attention scores larger so."""
    return rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones stay, between them a blend."""
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_positions / scaling.low_freq_factor
    shortest = scaling.original_max_positions / scaling.high_freq_factor
    stretched = torch.where(wavelengths > longest, frequencies / scaling.factor, frequencies)
    blend = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * stretched / scaling.factor + blend * stretched
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(between, blended, stretched)


def _yarn(wavelengths: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """Section 3.2 of arXiv 2309.00071: by how often a dimension turns in the original context."""
    pairs = wavelengths.shape[0]
    head_dim = 2 * pairs

    def dimension_turning(times: float) -> float:
        length = scaling.original_max_positions / (times * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(theta))

    low, high = dimension_turning(scaling.beta_fast), dimension_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as transformers: a step instead of a division by zero
    ramp = (torch.arange(pairs, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    stretched = 1.0 / (scaling.factor * wavelengths)
    return stretched * (1 - kept) + (1.0 / wavelengths) * kept

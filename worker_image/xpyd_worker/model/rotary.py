"""Rotary position embedding: the angles of positions, which the kernels turn heads by.

Angles are computed in float32 for the positions of each step (a table for a long context would cost
more memory than the few sines per token cost time) and shared by all layers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.rope import Llama3Scaling, RopeConfig, YarnScaling


class Rotary:
    """Cosines and sines of the angles of a model's positions."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        """For positions on `device`."""
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

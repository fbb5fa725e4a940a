"""Rotary position embedding: the angles of positions, which the kernels turn heads by.

Angles are computed in float32 for the positions of each step (a table for a long context would cost
more memory than the few sines per token cost time) and shared by all layers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from xpyd_worker.model.config import ModelConfig


class Rotary:
    """Cosines and sines of the angles of a model's positions."""

    def __init__(self, config: ModelConfig) -> None:
        self._frequencies = inverse_frequencies(config)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [tokens] -> cos and sin, each float32 [tokens, head_dim / 2]."""
        angles = positions.to(torch.float32).unsqueeze(-1) * self._frequencies
        return angles.cos(), angles.sin()


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each pair of dimensions, [head_dim / 2] float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    # Llama 3: long wavelengths are stretched by `factor`, short ones stay, between them a blend.
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

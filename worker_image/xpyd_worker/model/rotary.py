"""Rotary position embedding: the angles of positions, which the kernels turn heads by.

Angles are computed in float32 for the positions of each step (a table for a long context would cost
more memory than the few sines per token cost time) and shared by all layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.frequencies import angle_scale, inverse_frequencies


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

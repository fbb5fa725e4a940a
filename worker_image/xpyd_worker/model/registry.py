"""Architecture name -> model, the one place that a new family is added to (with its field rules in
`config`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from xpyd_worker.kernels.api import Kernels
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.decoder import Decoder

_BUILDERS: Mapping[str, Callable[[ModelConfig, torch.dtype, Kernels], Decoder]] = MappingProxyType(
    {
        "LlamaForCausalLM": Decoder,
        "Qwen2ForCausalLM": Decoder,
        "Qwen3ForCausalLM": Decoder,
    }
)


def build_model(config: ModelConfig, dtype: torch.dtype, kernels: Kernels) -> Decoder:
    """The model for `config` in `dtype`, without weights."""
    return _BUILDERS[config.architecture](config, dtype, kernels)

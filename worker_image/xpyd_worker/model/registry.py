"""Architecture name -> model, the one place that a new family is added to (with its field rules in
`config`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.llama import Llama

_BUILDERS: Mapping[str, Callable[[ModelConfig, torch.dtype], Llama]] = MappingProxyType(
    {
        "LlamaForCausalLM": Llama,
        "Qwen2ForCausalLM": Llama,
        "Qwen3ForCausalLM": Llama,
    }
)


def build_model(config: ModelConfig, dtype: torch.dtype) -> Llama:
    """The model for `config` with uninitialised weights of `dtype`."""
    return _BUILDERS[config.architecture](config, dtype)

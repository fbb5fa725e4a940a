"""Which engine an advice is for, and which models its KV transfer takes. Pure.

What is said here of vLLM is what the API server, or the connector at its start, would refuse:
docs/vllm.md. vLLM itself knows which models it serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from xpyd_core.json_fields import Fields, Json

OWN, VLLM = "Xpyd", "VLLM"
TYPES = (OWN, VLLM)
"""spec.engine.type."""
CONNECTORS = ("Xpyd", "Nixl")
"""spec.engine.connector, for vLLM."""
_OF_STATES = (
    "hybrid_override_pattern",
    "layers_block_type",
    "linear_attn_config",
    "mamba_d_ssm",
    "mamba_d_state",
    "ssm_cfg",
    "state_size",
)
"""Fields that only models have which keep a state instead of KV, in all layers or in some."""
_FULL = "full_attention"


@dataclass(frozen=True)
class Engine:
    """spec.engine. `connector` and `image`: of vLLM; a connector is for Prefill and Decode."""

    type: Literal["Xpyd", "VLLM"] = "Xpyd"
    connector: Literal["Xpyd", "Nixl"] | None = None
    image: str = ""

    @property
    def is_vllm(self) -> bool:
        """Whether vLLM serves, not xpyd's own engine."""
        return self.type == VLLM

    @property
    def has_our_connector(self) -> bool:
        """Whether xpyd's transfer moves the KV inside vLLM."""
        return self.connector == "Xpyd"


OWN_ENGINE = Engine()


def unmoved(config: Json) -> str | None:
    """What of config.json xpyd's connector in vLLM refuses at its start; None: nothing that is
    known. It moves KV of one group of layers, which all attend to the whole context."""
    return next(_unmoved(Fields(config)), None)


def _unmoved(outer: Fields) -> Iterator[str]:
    is_inner = isinstance(outer.get("text_config"), dict)
    fields = outer.inner("text_config") if is_inner else outer
    if fields.get("kv_lora_rank") is not None:
        yield "kv_lora_rank: the KV is one latent (MLA)"
    for name in _OF_STATES:
        if fields.get(name) is not None:
            yield f"{name}: layers keep a state (Mamba, linear attention)"
    kinds = sorted({str(kind) for kind in fields.array("layer_types")} - {_FULL})
    if kinds:
        yield f"layer_types: {', '.join(kinds)} beside {_FULL}, or alone"
    if fields.get("attention_chunk_size") is not None:
        yield "attention_chunk_size: layers attend to a chunk"
    window = fields.get("sliding_window")
    # Qwen's models name a window that they do not use.
    is_used = fields.flag("use_sliding_window", default=True) and not fields.array("layer_types")
    if is_used and window not in (None, 0):
        yield f"sliding_window: layers attend to {window} tokens"

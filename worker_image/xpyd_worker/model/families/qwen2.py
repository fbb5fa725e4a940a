"""Qwen2 and Qwen2.5: biases on queries, keys and values; a sliding window in the upper layers."""

from __future__ import annotations

from xpyd_core.json_fields import Fields
from xpyd_worker.model.config import LayerConfig, ModelConfig, decoder_config
from xpyd_worker.model.families.family import Family

_DEFAULT_WINDOW = 4096
_DEFAULT_FIRST_WINDOWED_LAYER = 28


def read_window(fields: Fields) -> int | None:
    """The sliding window of a Qwen config.json, whatever its layers make of it; None: not in use.
    A `sliding_window` of null is none; where it is absent, it is transformers' 4096."""
    is_null = "sliding_window" in fields and fields.get("sliding_window") is None
    if is_null or not fields.flag("use_sliding_window"):
        return None
    return fields.whole("sliding_window", _DEFAULT_WINDOW)


def read_layers(fields: Fields) -> list[LayerConfig]:
    """Which layers have the window: `layer_types` says it, or all from `max_window_layers` on."""
    window, count = read_window(fields), fields.whole("num_hidden_layers")
    if fields.get("layer_types") is None:
        first = fields.get("max_window_layers")
        # 0 is right here, and no whole number above 0.
        first = (
            0 if first == 0 else fields.whole("max_window_layers", _DEFAULT_FIRST_WINDOWED_LAYER)
        )
        return [LayerConfig(window if layer >= first else None) for layer in range(count)]
    types = fields.array("layer_types")
    if len(types) != count or not all(
        kind in ("full_attention", "sliding_attention") for kind in types
    ):
        raise fields.refusal(
            "layer_types", f"{count} of full_attention and sliding_attention, one per layer"
        )
    if "sliding_attention" in types and window is None:
        raise fields.refusal("use_sliding_window", "true where layer_types has sliding_attention")
    return [LayerConfig(window if kind == "sliding_attention" else None) for kind in types]


def _read_config(fields: Fields) -> ModelConfig:
    return decoder_config(fields, layers=read_layers(fields), qkv_bias=True)


FAMILY = Family("Qwen2ForCausalLM", _read_config)

"""What of a checkpoint's config.json decides how its model can be divided. Pure.

For those who have the file and not the worker's reading of it, which knows every family; what is
missing or odd here is left to the worker to refuse.
"""

from __future__ import annotations

from collections.abc import Mapping

from xpyd_core.parallel.checks import Shape

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names that families give to how many experts a layer has."""


def shape_of(config: Mapping[str, object]) -> Shape | None:
    """The shape by Hugging Face's field names; None where they do not say it."""
    layers, heads = _whole(config, "num_hidden_layers"), _whole(config, "num_attention_heads")
    kv_heads = _whole(config, "num_key_value_heads") or heads
    sizes = _mlp_sizes(config)
    if not (layers and heads and kv_heads and sizes):
        return None
    return Shape(layers=layers, heads=heads, kv_heads=kv_heads, intermediate_sizes=sizes)


def _mlp_sizes(config: Mapping[str, object]) -> frozenset[int]:
    size = _whole(config, "intermediate_size")
    if not any(_whole(config, name) for name in _EXPERTS):
        return frozenset({size} - {0})
    experts = _whole(config, "moe_intermediate_size") or size
    has_plain_layers = (
        bool(config.get("mlp_only_layers"))
        or _whole(config, "decoder_sparse_step") > 1
        or _whole(config, "first_k_dense_replace") > 0
    )
    return frozenset(({experts, size} if has_plain_layers else {experts}) - {0})


def _whole(config: Mapping[str, object], name: str) -> int:
    """A field's whole number above 0, else 0."""
    value = config.get(name)
    return max(0, value) if isinstance(value, int) and not isinstance(value, bool) else 0

"""What the config.json of a draft head means: EAGLE-3 and Medusa, each in its published forms.

A head is trained for one model, the target, whose hidden states it reads. Whether it fits is said
here, before torch is imported; `eagle3` and `medusa` compute. What would change a head's result and
is not built is refused by name.

EAGLE-3 (arXiv 2503.01840) is published by its authors, by SpecForge and by vLLM's speculators, who
put the fields of its layer into an object of their own. Medusa (arXiv 2401.10774) by its authors,
and for vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from xpyd_core.json_fields import Fields, read_object
from xpyd_worker.model.config import ModelConfig, decoder_config

_ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
    "LlamaForCausalLM",
)
"""The last is what the authors' own training writes."""
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_FEATURES = "whole numbers from 0 to {last}, layers of the target"
# Later variants: what they add has weights, but a flag without weights would be overlooked.
_EAGLE3_NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "norm_before_fc": (False, None),
        "fc_norm": (False, None),
        "use_aux_norm": (False, None),
        "norm_output": (False, None),
        "parallel_drafting": (False, None),
        "logit_scale": (1, None),
    }
)


@dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 head. `layer` has the shapes of its one layer, and its vocabulary is the target's;
    what the head draws is one of `draft_vocab_size` of these. `feature_layers`: the target's layers
    whose inputs it reads, of `target_hidden_size` numbers each."""

    layer: ModelConfig
    draft_vocab_size: int
    feature_layers: tuple[int, ...]
    target_hidden_size: int
    norm_before_residual: bool
    """Whether the residual begins behind the norm of the hidden state, not before it."""


@dataclass(frozen=True)
class MedusaConfig:
    """A set of Medusa heads, each of `num_layers` residual blocks and a head over
    `draft_vocab_size` of the target's tokens. `is_vllms`: whose names its tensors have."""

    num_heads: int
    num_layers: int
    draft_vocab_size: int
    has_bias: bool
    is_vllms: bool


def read_eagle3(folder: Path, target: ModelConfig) -> Eagle3Config:
    """The configuration of the EAGLE-3 head in `folder`. UserError names the field that does not
    fit, or is not supported."""
    path = folder / "config.json"
    values = read_object(path, "model")
    fields = Fields(values, file=str(path))
    named = fields.array("architectures")
    if len(named) != 1 or named[0] not in _ARCHITECTURES:
        raise fields.refusal("architectures", f"one of {', '.join(_ARCHITECTURES)}")
    is_speculators = fields.get("transformer_layer_config") is not None
    layer_fields = fields
    if is_speculators:
        if fields.get("speculators_model_type") != "eagle3":
            raise fields.refusal("speculators_model_type", "eagle3")
        fields.inner("transformer_layer_config")  # refuses what is no object
        inner = {**values["transformer_layer_config"], "architectures": named}
        layer_fields = Fields(inner, file=f"{path}: transformer_layer_config")
    more = fields.inner("eagle_config")
    for one in (fields, more):
        for name, neutral in _EAGLE3_NEUTRAL.items():
            if name in one and one.get(name) not in neutral:
                raise one.refusal(name, str(neutral[0]).lower())
    if more.get("use_aux_hidden_state") not in (True, None):
        raise more.refusal("use_aux_hidden_state", "true")
    layer = _eagle3_layer(layer_fields)
    if layer.vocab_size != target.vocab_size:
        raise layer_fields.refusal(
            "vocab_size", f"the target's {target.vocab_size}; name a head of this model"
        )
    holder, width = fields, "target_hidden_size"
    if fields.get(width) is None:
        holder, width = layer_fields, "hidden_size"
    if holder.whole(width) != target.hidden_size:
        raise holder.refusal(width, f"the target's {target.hidden_size}; name a head of this model")
    draft = fields.whole("draft_vocab_size", layer.vocab_size)
    if draft > layer.vocab_size:
        raise fields.refusal("draft_vocab_size", f"at most vocab_size, {layer.vocab_size}")
    return Eagle3Config(
        layer=layer,
        draft_vocab_size=draft,
        feature_layers=_feature_layers(fields, target.num_layers),
        target_hidden_size=target.hidden_size,
        norm_before_residual=fields.flag("norm_before_residual", default=is_speculators),
    )


def _eagle3_layer(fields: Fields) -> ModelConfig:
    """Its one layer, which is Llama's but for what enters it."""
    if fields.whole("num_hidden_layers", 1) != 1:
        raise fields.refusal("num_hidden_layers", "1")
    if fields.get("model_type") not in ("llama", None):
        raise fields.refusal("model_type", "llama")
    if set(fields.array("layer_types")) - {"full_attention"}:
        raise fields.refusal("layer_types", "full_attention")
    bias = fields.flag("attention_bias")
    return decoder_config(fields, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def _feature_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """The layers whose inputs the head reads. vLLM's and speculators' field names these; the one in
    `eagle_config`, which SpecForge and ModelOpt write, layers whose outputs are read, the inputs of
    the next: their default is (1, n / 2 - 1, n - 4) where the authors' code, and vLLM, take the
    inputs of (2, n / 2, n - 3)."""
    found, holder, behind = fields.array(_LAYER_IDS), fields, 0
    if not found:
        holder = fields.inner("eagle_config")
        found, behind = holder.array(_LAYER_IDS), 1
    if not found:
        found, holder, behind = [2, layers // 2, layers - 3], fields, 0
    named: list[int] = []
    for layer in found:
        if not isinstance(layer, int) or isinstance(layer, bool):
            raise holder.refusal(_LAYER_IDS, _FEATURES.format(last=layers - 1 - behind))
        if not 0 <= layer + behind < layers:
            raise holder.refusal(_LAYER_IDS, _FEATURES.format(last=layers - 1 - behind))
        named.append(layer + behind)
    return tuple(named)


def read_medusa(folder: Path, target: ModelConfig) -> MedusaConfig:
    """The configuration of the Medusa heads in `folder`. UserError names the field that does not
    fit, or is not supported."""
    path = folder / "config.json"
    fields = Fields(read_object(path, "model"), file=str(path))
    is_vllms = fields.get("medusa_num_heads") is None
    for name, wanted in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        # The authors' form has neither: there the tensors say it.
        if (is_vllms or fields.get(name) is not None) and fields.whole(name) != wanted:
            raise fields.refusal(name, f"the target's {wanted}; name heads of this model")
    if fields.get("original_lm_head") not in (False, None):
        raise fields.refusal("original_lm_head", "false")
    if fields.get("logit_scale") not in (1, None):
        raise fields.refusal("logit_scale", "1")
    if not is_vllms:
        return MedusaConfig(
            num_heads=fields.whole("medusa_num_heads"),
            num_layers=fields.whole("medusa_num_layers", 1),
            draft_vocab_size=target.vocab_size,
            has_bias=True,
            is_vllms=False,
        )
    draft = fields.whole("truncated_vocab_size", target.vocab_size)
    if draft > target.vocab_size:
        raise fields.refusal("truncated_vocab_size", f"at most vocab_size, {target.vocab_size}")
    return MedusaConfig(
        num_heads=fields.whole("num_heads"),
        num_layers=fields.whole("num_hidden_layers", 1),
        draft_vocab_size=draft,
        has_bias=fields.flag("medusa_fc_bias"),
        is_vllms=True,
    )

"""The rotary embedding of a config.json: its base, and how it is stretched for long contexts.

Two generations of field names are read: `rope_parameters` (transformers 5), `rope_theta` and
`rope_scaling` before. Values only: `layers` computes with them. It must not know torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from xpyd_core.json_fields import Fields, Json

_MAX_POSITIONS = 2**31 - 1
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's stretching of the low rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): dimensions that turn less than `beta_slow` times in the original
    context are stretched by `factor`, those that turn more than `beta_fast` times stay.

    `truncate` widens the range between them to whole dimensions. Cosines and sines are multiplied
    with `attention_factor`.
    """

    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    original_max_positions: int


RopeScaling = Llama3Scaling | YarnScaling


@dataclass(frozen=True)
class RopeConfig:
    """Base of the rotary frequencies, and their scaling if there is one."""

    theta: float
    scaling: RopeScaling | None

    def context(self, max_positions: int) -> int:
        """Tokens that the embedding is made for, where `max_position_embeddings` is this.

        As in vLLM: with yarn the original context times the factor, whether the field holds the
        original one (Qwen2.5, Qwen3) or the stretched one (DeepSeek). Llama 3's field always holds
        the stretched one.
        """
        if not isinstance(self.scaling, YarnScaling):
            return max_positions
        stretched = self.scaling.original_max_positions * self.scaling.factor
        return max(max_positions, int(min(stretched, _MAX_POSITIONS)))


def read_rope(fields: Fields, *, default_theta: float) -> RopeConfig:
    """The rotary embedding of a config.json. UserError names what is not supported."""
    _check_same(fields)
    rope = fields.inner("rope_parameters" if fields.get("rope_parameters") else "rope_scaling")
    for kind in _LAYER_TYPES:
        if kind in rope:
            raise rope.refusal(kind, "one set of rotary parameters for all layers")
    base = rope if "rope_theta" in rope else fields
    theta = base.number("rope_theta", default_theta)
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise rope.refusal("partial_rotary_factor", "1")
    name, kind = _kind(rope)
    if kind == "default":
        return RopeConfig(theta, None)
    if kind not in ("llama3", "yarn"):
        raise rope.refusal(name, "default, llama3, yarn")
    # transformers prefers the outer field, and takes the whole context where neither is there.
    outer = "original_max_position_embeddings" in fields
    original = (fields if outer else rope).whole(
        "original_max_position_embeddings", fields.whole("max_position_embeddings")
    )
    if kind == "llama3":
        return RopeConfig(theta, _llama3(rope, original))
    if theta <= 1:
        raise base.refusal("rope_theta", "above 1 with yarn")
    return RopeConfig(theta, _yarn(rope, original, fields.whole("max_position_embeddings")))


def _kind(rope: Fields) -> tuple[str, object]:
    """The field that names the type, and the type."""
    name = "rope_type" if "rope_type" in rope or "type" not in rope else "type"
    return name, rope.get(name) or "default"


def _check_same(fields: Fields) -> None:
    """UserError where both generations of fields are there and say different things: programs
    differ in which of them they follow."""
    names = ("rope_parameters", "rope_scaling")
    new, old = (fields.inner(name) for name in names)
    given = [cast("Json", fields.get(name) or {}) for name in names]
    if not all(given):
        return
    keys = {key for values in given for key in values} - {"type", "rope_type", "rope_theta"}
    # Bases may be in one of them only.
    keys |= {"rope_theta"} if all("rope_theta" in values for values in given) else set()
    if _kind(new)[1] != _kind(old)[1] or any(new.get(key) != old.get(key) for key in keys):
        raise fields.refusal("rope_scaling", "what rope_parameters says, or one of the two alone")


def _llama3(rope: Fields, original_max_positions: int) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_positions=original_max_positions,
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.refusal("high_freq_factor", "> low_freq_factor")
    return scaling


def _yarn(rope: Fields, original_max_positions: int, max_positions: int) -> YarnScaling:
    factor = rope.number("factor", max_positions / original_max_positions)
    if rope.get("attention_factor") is not None:
        attention_factor = rope.number("attention_factor")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        attention_factor = _mscale(factor, rope.number("mscale")) / _mscale(
            factor, rope.number("mscale_all_dim")
        )
    else:
        attention_factor = _mscale(factor, 1.0)
    scaling = YarnScaling(
        factor=factor,
        attention_factor=attention_factor,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", default=True),
        original_max_positions=original_max_positions,
    )
    if scaling.beta_fast < scaling.beta_slow:
        raise rope.refusal("beta_fast", "beta_slow or more")
    return scaling


def _mscale(factor: float, weight: float) -> float:
    """How much larger attention scores get for a context `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

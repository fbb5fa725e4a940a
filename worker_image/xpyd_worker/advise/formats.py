"""How many bytes a parameter takes: types, formats of quantized weights, what says them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from xpyd_core.errors import UserError
from xpyd_worker.model.fields import Fields

DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
QUANTIZATIONS: Mapping[str, Fraction] = MappingProxyType(
    {
        "fp8": Fraction(8),
        "int8": Fraction(8),
        # A scale of 16 bits and a zero of 4 for each 128 weights.
        "int4": Fraction(4) + Fraction(20, 128),
        # A scale of 8 bits for each 32 weights, or for each 16.
        "mxfp4": Fraction(4) + Fraction(8, 32),
        "nvfp4": Fraction(4) + Fraction(8, 16),
    }
)
"""Bits of a layer's weight, its share of the scales included."""


@dataclass(frozen=True)
class Weights:
    """How parameters become bytes. `bits` of a layer's weight; embedding and head stay in 16 bits
    or more. `scale`: what `source` says of the total, as a share of what was computed."""

    label: str
    bits: Fraction
    outer_bits: int
    scale: Fraction = Fraction(1)
    source: str = "computed"

    def of_layers(self, params: int) -> Fraction:
        """Bytes of parameters in layers."""
        return params * self.bits / 8 * self.scale

    def of_outer(self, params: int) -> Fraction:
        """Bytes of parameters of embedding and head."""
        return params * self.outer_bits * self.scale / 8


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """What the user says instead of the files. None: the files are right."""

    dtype: str | None = None
    quantization: str | None = None
    """A name of QUANTIZATIONS, or `none`."""
    params: float | None = None
    """Parameters in all; each then counts as much as a layer's."""


def read_dtype(fields: Fields, outer: Fields) -> str:
    """The type of weights and KV: of the decoder, or of the model around it."""
    for place in (fields, outer):
        for name in ("dtype", "torch_dtype"):
            if (value := place.get(name)) is not None:
                found = str(value).removeprefix("torch.")
                if found not in DTYPE_BYTES:
                    raise place.refusal(name, f"{', '.join(DTYPE_BYTES)}; or say --dtype")
                return found
    return "float32"


def weights_of(dtype: str, quantization: str) -> Weights:
    """Unquantized weights of `dtype`, or quantized ones beside an embedding and a head of it."""
    bits = 8 * DTYPE_BYTES[dtype]
    if quantization == "none":
        return Weights(dtype, Fraction(bits), bits)
    return Weights(quantization, QUANTIZATIONS[quantization], bits)


def read_quantization(fields: Fields) -> str:
    """The name of the format that config.json names; `none` without one."""
    if fields.get("quantization_config") is None:
        return "none"
    inner = fields.inner("quantization_config")
    method = str(inner.get("quant_method")).lower()
    if method == "compressed-tensors":
        found = _of_compressed(inner)
    else:
        bits = inner.get("bits") or inner.get("w_bit")
        by_bits = {4: "int4", 8: "int8"}.get(bits) if isinstance(bits, int) else None
        by_method = {
            "fp8": "fp8",
            "fbgemm_fp8": "fp8",
            "mxfp4": "mxfp4",
            "awq": by_bits or "int4",
            "gptq": by_bits or "int4",
            "modelopt": str(inner.get("quant_algo")).lower(),
        }
        found = by_method.get(method)
    if found is None or found not in QUANTIZATIONS:
        known = ", ".join(("none", *QUANTIZATIONS))
        raise UserError(
            f"config.json: quantization_config of {method} is not known; say --quantization {known}"
        )
    return found


def _of_compressed(fields: Fields) -> str | None:
    groups = fields.inner("config_groups")
    weights = groups.inner("group_0").inner("weights")
    names = {(8, "float"): "fp8", (8, "int"): "int8", (4, "int"): "int4", (4, "float"): "nvfp4"}
    bits, kind = weights.get("num_bits"), weights.get("type")
    return names.get((bits, kind)) if isinstance(bits, int) and isinstance(kind, str) else None

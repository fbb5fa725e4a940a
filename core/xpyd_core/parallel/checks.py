"""Which models can be divided how. Pure; said before anything starts, with the numbers.

`xpyd up` asks it of the checkpoint's config.json (`shape_of`), the worker again of what it loads;
the worker's reading of the file knows every family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from xpyd_core.errors import UserError
from xpyd_core.parallel.partition import partition
from xpyd_core.parallel.ranks import Sizes

TENSOR, PIPELINE = "--tensor-parallel-size", "--pipeline-parallel-size"
SHORT_NAMES = {TENSOR: "-tp", PIPELINE: "-pp"}
"""The engine's other names of them; `engine.args` of a fleet document may use none of the four."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What of a model decides how it can be divided. `intermediate_sizes`: of the MLPs that it has,
    experts' included."""

    layers: int
    heads: int
    kv_heads: int
    intermediate_sizes: frozenset[int]


def check_parallel(shape: Shape, sizes: Sizes, override: Sequence[int] = ()) -> None:
    """UserError with all that keeps `shape` from being divided so. The vocabulary need not be
    divisible: it is padded."""
    found = list(_tensor_complaints(shape, sizes.tensor))
    try:
        partition(shape.layers, sizes.pipeline, override)
    except UserError as error:
        found.append(str(error))
    if found:
        raise UserError("\n".join(found))


def _tensor_complaints(shape: Shape, tensor: int) -> Iterator[str]:
    if shape.heads % tensor:
        yield f"{TENSOR}: {tensor} does not divide the model's {shape.heads} attention heads"
    kv_heads = shape.kv_heads
    if kv_heads % tensor and tensor % kv_heads:
        yield f"{TENSOR}: {tensor} ranks for {kv_heads} KV heads; one must divide the other"
    for size in sorted(shape.intermediate_sizes):
        if size % tensor:
            yield f"{TENSOR}: {tensor} does not divide the MLP's intermediate size of {size}"


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names that families give to how many experts a layer has."""


def shape_of(config: Mapping[str, object]) -> Shape | None:
    """The shape by a config.json with Hugging Face's field names; None where they do not say it.

    What is missing or odd is left to the worker to refuse.
    """
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

"""Which models can be divided how. Pure; said before anything starts, with the numbers.

`xpyd up` asks it of the checkpoint's config.json, the worker again of what it loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

"""Whether the fleet's model can be divided as its pools say, before anything starts.

Asked of a checkpoint on this machine; of another one the engines say it when they have it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from xpyd_core.errors import UserError
from xpyd_core.parallel.checks import PIPELINE, TENSOR, Shape, check_parallel
from xpyd_core.parallel.config import shape_of
from xpyd_core.parallel.partition import PARTITION_VARIABLE, parse_override
from xpyd_core.parallel.ranks import Sizes
from xpyd_operator.document import InferenceFleet, Pool
from xpyd_operator.up.checkpoint import read_config


def check_layouts(
    fleet: InferenceFleet, model: str, environ: Mapping[str, str] | None = None
) -> None:
    """UserError with all that keeps `model`, as locate_model() gives it, from being divided so."""
    shape = shape_of(read_config(model))
    if shape is None:
        return
    variables = {item.name: item.value for item in fleet.spec.engine.env if not item.value_from}
    inherited = (os.environ if environ is None else environ).get(PARTITION_VARIABLE, "")
    override = variables.get(PARTITION_VARIABLE, inherited)
    lines = [
        line
        for index, pool in enumerate(fleet.spec.pools)
        for line in _mistakes(f"spec.pools[{index}].parallelism", pool, shape, override)
    ]
    lines = list(dict.fromkeys(lines))  # a variable that is no list is one mistake for all pools
    if lines:
        count = f"{len(lines)} mistakes" if len(lines) > 1 else "1 mistake"
        raise UserError("\n  ".join([f"{model}/config.json: {count}", *lines]))


def _mistakes(path: str, pool: Pool, shape: Shape, override: str) -> Iterator[str]:
    """The worker's own words, with the document's fields in place of its flags."""
    parallelism = pool.parallelism
    sizes = Sizes(tensor=parallelism.tensor, pipeline=parallelism.pipeline)
    try:
        check_parallel(shape, sizes, parse_override(override))
    except UserError as error:
        for line in str(error).splitlines():
            words = line.replace(TENSOR, f"{path}.tensor").replace(PIPELINE, f"{path}.pipeline")
            yield words if words.startswith(path) else f"spec.engine.env: {words}"

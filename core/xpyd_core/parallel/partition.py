"""Which layers each pipeline stage holds, and which experts each rank of an expert group. Pure.

Each stage gets as many layers as there are stages' worth of; what remains goes one by one to the
stages before the last, from the last but one backwards, since the last also has norm, head and
sampling, and the first the embedding (the rule of vLLM's get_pp_indices).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from xpyd_core.errors import UserError
from xpyd_core.sizes import clipped, whole_number

PARTITION_VARIABLE = "VLLM_PP_LAYER_PARTITION"
"""vLLM's: layers of each stage, e.g. 5,6,5,6."""


def stage_sizes(layers: int, stages: int) -> list[int]:
    """Layers of each stage. UserError where a stage would have none."""
    if stages > layers:
        raise UserError(
            f"--pipeline-parallel-size: {stages} stages for {layers} layers; a stage needs one at "
            "least"
        )
    each, rest = divmod(layers, stages)
    sizes = [each] * stages
    for index in range(2, rest + 2):
        sizes[-index] += 1
    return sizes


def partition(layers: int, stages: int, override: Sequence[int] = ()) -> tuple[range, ...]:
    """The layers of each stage, half-open. `override`: how many instead of the rule's; one stage
    has nothing to override, and the variable may be for other engines of a fleet. UserError, with
    the numbers, where they do not go together."""
    is_given = bool(override) and stages > 1
    sizes = check_override(layers, stages, override) if is_given else stage_sizes(layers, stages)
    return tuple(range(*ends) for ends in pairwise(accumulate(sizes, initial=0)))


def check_override(layers: int, stages: int, override: Sequence[int]) -> list[int]:
    """`override` as it may be used."""
    given = f"{PARTITION_VARIABLE}={clipped(','.join(map(str, override)))}"
    if len(override) != stages:
        raise UserError(f"{given}: {len(override)} stages; --pipeline-parallel-size is {stages}")
    if min(override) < 1:
        raise UserError(f"{given}: a stage needs one layer at least")
    if sum(override) != layers:
        raise UserError(f"{given}: {sum(override)} layers; the model has {layers}")
    return list(override)


def parse_override(text: str) -> tuple[int, ...]:
    """The variable's value: numbers with commas; () where it is empty. UserError for others."""
    if not text:
        return ()
    found: list[int] = []
    for part in text.split(","):
        layers = whole_number(part.strip())
        if layers is None:
            raise UserError(
                f"{PARTITION_VARIABLE}={clipped(text)!r}: expected numbers with commas, e.g. "
                "5,6,6,5"
            )
        found.append(layers)
    return tuple(found)


def expert_shares(experts: int, ranks: int) -> tuple[range, ...]:
    """The experts that each rank of a group holds, as they follow each other; the first ranks have
    one more where the numbers do not divide (vLLM's determine_expert_map). At least one each: see
    check_parallel."""
    each, more = divmod(experts, ranks)
    ends = accumulate((each + (rank < more) for rank in range(ranks)), initial=0)
    return tuple(range(*pair) for pair in pairwise(ends))

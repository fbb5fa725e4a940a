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
EXPERT = "--enable-expert-parallel"
EPLB, EPLB_CONFIG = "--enable-eplb", "--eplb-config"
DATA = "--data-parallel-size"
LOCAL, START_RANK = "--data-parallel-size-local", "--data-parallel-start-rank"
ADDRESS, RPC_PORT = "--data-parallel-address", "--data-parallel-rpc-port"
HEADLESS = "--headless"
ELASTIC = "--enable-elastic-ep"
DATA_FILE = "--data-parallel-size-file"
ON_LOSS = "--on-rank-loss"
SHORT_NAMES = {TENSOR: "-tp", PIPELINE: "-pp", DATA: "-dp"}
"""The engine's other names of them; `engine.args` of a fleet document may use none of the six."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What of a model decides how it can be divided. `intermediate_sizes`: of its layers' MLPs;
    `expert_sizes`: of one expert's, and `experts`: how many experts a layer has that has any."""

    layers: int
    heads: int
    kv_heads: int
    intermediate_sizes: frozenset[int] = frozenset()
    experts: int = 0
    expert_sizes: frozenset[int] = frozenset()


def check_parallel(shape: Shape, sizes: Sizes, override: Sequence[int] = ()) -> None:
    """UserError with all that keeps `shape` from being divided so. The vocabulary need not be
    divisible: it is padded."""
    found = [*_tensor_complaints(shape, sizes), *_expert_complaints(shape, sizes)]
    try:
        partition(shape.layers, sizes.pipeline, override)
    except UserError as error:
        found.append(str(error))
    if found:
        raise UserError("\n".join(found))


def _tensor_complaints(shape: Shape, sizes: Sizes) -> Iterator[str]:
    tensor = sizes.tensor
    if shape.heads % tensor:
        yield f"{TENSOR}: {tensor} does not divide the model's {shape.heads} attention heads"
    kv_heads = shape.kv_heads
    if kv_heads % tensor and tensor % kv_heads:
        yield f"{TENSOR}: {tensor} ranks for {kv_heads} KV heads; one must divide the other"
    for size in sorted(shape.intermediate_sizes):
        if size % tensor:
            yield f"{TENSOR}: {tensor} does not divide the MLP's intermediate size of {size}"
    for size in sorted(shape.expert_sizes if not sizes.has_whole_experts else ()):
        if size % tensor:
            yield (
                f"{TENSOR}: {tensor} does not divide the experts' intermediate size of {size}; "
                f"{EXPERT} leaves experts whole"
            )


def _expert_complaints(shape: Shape, sizes: Sizes) -> Iterator[str]:
    if sizes.redundant_experts is not None and sizes.expert == 1:
        yield f"{EPLB}: no other rank has whole experts; give {EXPERT} and several ranks"
    if not sizes.has_whole_experts:
        return
    if not shape.experts:
        yield f"{EXPERT}: the model has no experts"
    elif sizes.expert > shape.experts:
        of = " x ".join(str(size) for size in (sizes.data, sizes.context, sizes.tensor) if size > 1)
        ranks = f"{sizes.expert} ranks" + (f" ({of})" if " " in of else "")
        yield (
            f"{EXPERT}: {ranks} for {shape.experts} experts of a layer; each rank needs one at "
            "least"
        )
    elif sizes.redundant_experts is not None and sizes.expert > 1:
        yield from _slot_complaints(shape.experts, sizes.redundant_experts, sizes.expert)


def _slot_complaints(experts: int, redundant: int, ranks: int) -> Iterator[str]:
    """Why the slots of `experts` and copies are no placement. Each rank has as many slots, and
    none has two copies of one expert."""
    key, most = f"{EPLB_CONFIG}: num_redundant_experts", experts * (ranks - 1)
    if redundant > most:
        yield f"{key}: {redundant}; at most {most}, {experts} experts on each of {ranks} ranks"
    elif (experts + redundant) % ranks:
        more = -(experts + redundant) % ranks
        yield (
            f"{key}: {redundant} and {experts} experts do not divide over {ranks} ranks; give "
            f"{redundant + more}"
        )


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names that families give to how many experts a layer has."""
_DEFAULT_EXPERTS = {"MixtralForCausalLM": 8, "Qwen3MoeForCausalLM": 128}
"""Where config.json has none of them; transformers' own."""


def shape_of(config: Mapping[str, object]) -> Shape | None:
    """The shape by a config.json with Hugging Face's field names; None where they do not say it.

    What is missing or odd is left to the worker to refuse.
    """
    layers, heads = _whole(config, "num_hidden_layers"), _whole(config, "num_attention_heads")
    kv_heads = _whole(config, "num_key_value_heads") or heads
    size = _whole(config, "intermediate_size")
    experts = _experts(config)
    expert_size = (_whole(config, "moe_intermediate_size") or size) if experts else 0
    if not (layers and heads and kv_heads and (size or expert_size)):
        return None
    return Shape(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        intermediate_sizes=frozenset({size} - {0} if _has_plain_layers(config, experts) else ()),
        experts=experts,
        expert_sizes=frozenset({expert_size} - {0}),
    )


def _experts(config: Mapping[str, object]) -> int:
    if any(name in config for name in _EXPERTS):
        return max(_whole(config, name) for name in _EXPERTS)
    match config.get("architectures"):
        case [str(name)]:
            return _DEFAULT_EXPERTS.get(name, 0)
        case _:
            return 0


def _has_plain_layers(config: Mapping[str, object], experts: int) -> bool:
    """Whether some layers have an MLP in place of experts."""
    return (
        not experts
        or bool(config.get("mlp_only_layers"))
        or _whole(config, "decoder_sparse_step") > 1
        or _whole(config, "first_k_dense_replace") > 0
    )


def _whole(config: Mapping[str, object], name: str) -> int:
    """A field's whole number above 0, else 0."""
    value = config.get(name)
    return max(0, value) if isinstance(value, int) and not isinstance(value, bool) else 0

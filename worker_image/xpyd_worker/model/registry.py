"""The families that are served, and the way from a checkpoint folder to its model.

The first thing that happens to a checkpoint, before torch is imported: what is wrong with one is
said at once.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from xpyd_core.errors import UserError
from xpyd_core.json_fields import Fields, Json
from xpyd_worker.model.config import ModelConfig, token_ids
from xpyd_worker.model.families import llama, mixtral, qwen2, qwen3, qwen3_moe
from xpyd_worker.model.families.family import Family

if TYPE_CHECKING:
    import torch

    from xpyd_worker.kernels.api import Kernels
    from xpyd_worker.model.decoder import Decoder
    from xpyd_worker.parallel.state import ParallelState

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    mixtral.FAMILY,
    qwen3_moe.FAMILY,
)


def load_config(folder: Path) -> ModelConfig:
    """The configuration of the checkpoint in `folder`. Raises UserError naming file and field."""
    generation = folder / "generation_config.json"
    return parse_config(
        _read_json(folder / "config.json"),
        _read_json(generation) if generation.exists() else {},
    )


def parse_config(config: Json, generation: Json) -> ModelConfig:
    """The configuration from the contents of config.json and generation_config.json.

    Raises UserError naming the field for what is missing, malformed or not supported.
    """
    fields, more = Fields(config), Fields(generation, file="generation_config.json")
    family = _family(fields)
    model = family.read_config(fields)
    if "eos_token_id" not in fields and "eos_token_id" not in more:
        return replace(model, eos_token_ids=family.default_eos_ids)
    ids = (*model.eos_token_ids, *token_ids(more, "eos_token_id"))
    return replace(model, eos_token_ids=tuple(dict.fromkeys(ids)))


def build_model(
    config: ModelConfig,
    dtype: torch.dtype,
    kernels: Kernels,
    device: torch.device,
    *,
    parallel: ParallelState | None = None,
) -> Decoder:
    """The model for `config` in `dtype`, without weights; those go to `device`. `parallel`: which
    part of it, and the other ranks (None: all of it)."""
    from xpyd_worker.model.decoder import Decoder

    if parallel is None:
        return Decoder(config, dtype, kernels, device)
    return Decoder(config, dtype, kernels, device, part=parallel.part, group=parallel.tensor)


def _family(fields: Fields) -> Family:
    for family in FAMILIES:
        if fields.get("architectures") == [family.architecture]:
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    raise fields.refusal("architectures", f"one of {known}")


def _read_json(path: Path) -> Json:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"model: {path} does not exist; name a checkpoint folder") from None
    except (OSError, ValueError) as error:
        raise UserError(f"model: cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"model: {path} must hold a JSON object")
    return cast("Json", value)

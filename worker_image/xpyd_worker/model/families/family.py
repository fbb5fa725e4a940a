"""What a family is to the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xpyd_core.json_fields import Fields
from xpyd_worker.model.config import ModelConfig


@dataclass(frozen=True)
class Family:
    """One architecture. `read_config` raises UserError naming the field that is missing, malformed
    or not supported; `default_eos_ids` are those that transformers takes where no file has the
    field."""

    architecture: str
    read_config: Callable[[Fields], ModelConfig]
    default_eos_ids: tuple[int, ...] = ()

"""Sampling defaults: what counts where a request says nothing, from generation_config.json.

The checkpoint's file may hold other members; those that are named here count, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from xpyd_core.errors import UserError
from xpyd_core.json_fields import Json, read_object

FILE = "generation_config.json"


@dataclass(frozen=True)
class SamplingDefaults:
    """`max_tokens` (the file's max_new_tokens) is also the most that a request gets, as in vLLM;
    None: no bound but the context's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None


OPENAI_DEFAULTS = SamplingDefaults()
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, 1e6),
    "max_new_tokens": (1, 2**62),
}
_ABOVE_LOW = ("top_p", "repetition_penalty")
_WHOLE = ("top_k", "max_new_tokens")


def read_generation(folder: Path) -> Json:
    """What the checkpoint's file holds; nothing without one. UserError names it."""
    path = folder / FILE
    return read_object(path, "model") if path.exists() else {}


def defaults_of(
    folder: Path, found: Json, source: str, override: Mapping[str, Any]
) -> SamplingDefaults:
    """The defaults of the checkpoint in `folder`, whose file holds `found`. `source`: auto, vllm or
    another folder; `override` wins. UserError names the file or the flag, and the member."""
    defaults = OPENAI_DEFAULTS
    if source == "auto":
        defaults = _merged(defaults, found, str(folder / FILE))
    elif source != "vllm":
        path = Path(source) / FILE
        defaults = _merged(defaults, read_object(path, "--generation-config"), str(path))
    return _merged(defaults, override, "--override-generation-config")


def _merged(before: SamplingDefaults, members: Json, where: str) -> SamplingDefaults:
    values = {field.name: getattr(before, field.name) for field in fields(before)}
    for name, (low, high) in _BOUNDS.items():
        value: object = members.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int if name in _WHOLE else int | float)
        if not is_number or isinstance(value, bool) or not low <= cast("float", value) <= high:
            raise UserError(f"{where}: {name} is {value!r}; expected {low:g} to {high:g}")
        if name in _ABOVE_LOW and value == low:
            raise UserError(f"{where}: {name} is {value!r}; expected above {low:g}")
        values["max_tokens" if name == "max_new_tokens" else name] = value
    values["top_k"] = max(0, values["top_k"])
    return SamplingDefaults(**values)

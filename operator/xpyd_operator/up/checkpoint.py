"""The fleet's model as seen from this machine: where it is, and how much memory its weights take.

Reads names, sizes and config.json; what else is in the checkpoint is the worker's business.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from xpyd_core.errors import UserError
from xpyd_operator.up.memory import flag_value

_MAX_CONFIG_BYTES = 1 << 20
_HALF = ("float16", "bfloat16")


def locate_model(uri: str, folder: Path) -> str:
    """What the worker's --model gets: a folder's absolute path, or the hf:// URI as it is.

    A relative file:// path starts at `folder`, where the document lies. UserError when it is not a
    checkpoint.
    """
    scheme, _, path = uri.partition("://")
    if scheme != "file":
        return uri
    found = (folder / path).resolve()
    if not (found / "config.json").is_file():
        where = "no such folder" if not found.is_dir() else "no config.json in it"
        raise UserError(
            f"spec.model.uri: {uri} is {found}: {where}; expected a folder in Hugging Face format "
            "(a relative path starts at the document's folder)"
        )
    return str(found)


def weights_bytes(model: str, args: Sequence[str]) -> int:
    """Bytes of the weights in an engine's memory; 0 for what is not on this machine yet.

    On a CPU a 16-bit checkpoint may be computed in float32, which doubles it, unless --dtype says
    that it is not.
    """
    if "://" in model:
        return 0
    on_disk = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    widened = _stored_dtype(model) in _HALF and flag_value(args, "--dtype") not in _HALF
    return on_disk * (2 if widened else 1)


def read_config(model: str) -> dict[str, Any]:
    """The checkpoint's config.json; empty for what is not on this machine or is no such file."""
    if "://" in model:
        return {}
    try:
        with (Path(model) / "config.json").open("rb") as file:
            read: object = json.loads(file.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", read) if isinstance(read, dict) else {}


def _stored_dtype(model: str) -> str:
    config = read_config(model)
    return str(config.get("dtype") or config.get("torch_dtype") or "")

"""The checkpoints, once written into the cache: random bf16 weights, the demo model's tokenizer."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from bench.engine.shape import MAX_MODEL_LEN, MODELS
from scripts.train_demo_model.random_checkpoint import make_checkpoint


@dataclass(frozen=True)
class Model:
    """A checkpoint. `step_bytes`: weights that a decode step reads, so all but the embedding."""

    name: str
    folder: Path
    parameters: int
    step_bytes: int


def cache() -> Path:
    """Where models, the peer's environment and its compile cache live, outside the tree."""
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = root / "xpyd/bench-engine"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def model(
    name: str, root: Path | None = None, shapes: Mapping[str, Mapping[str, Any]] = MODELS
) -> Model:
    """The checkpoint of this name, made if it is not there or other than it should be."""
    folder = (cache() if root is None else root) / "models" / name
    wanted = json.dumps({**shapes[name], "dtype": "bfloat16", "max_len": MAX_MODEL_LEN})
    made_of = folder / "made-of.json"
    if not made_of.exists() or made_of.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        make_checkpoint(folder, **json.loads(wanted))
        made_of.write_text(wanted)  # last: a folder without it was left half done
    sizes = _elements(folder / "model.safetensors")
    parameters = sum(sizes.values())
    return Model(name, folder, parameters, 2 * (parameters - sizes["model.embed_tokens.weight"]))


def _elements(file: Path) -> dict[str, int]:
    """Elements of each tensor, from the header alone."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return {name: prod(tensor["shape"]) for name, tensor in header.items()}

"""The checkpoints, once written into the cache: random bf16 weights, the demo model's tokenizer.

And prompts of text, for the demo model itself.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache as once
from math import prod
from pathlib import Path
from random import Random
from typing import Any

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from bench.engine.shape import MAX_MODEL_LEN, MODELS
from scripts.train_demo_model.corpus import read_corpus
from scripts.train_demo_model.random_checkpoint import DEMO_MODEL, make_checkpoint


@dataclass(frozen=True)
class Model:
    """A checkpoint. `step_elements`: weights that a decode step reads, so all but the embedding
    where that is not the head, too."""

    name: str
    folder: Path
    parameters: int
    step_elements: int


def cache() -> Path:
    """Where models, the peer's environment and its compile cache live, outside the tree."""
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = root / "xpyd/bench-engine"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def model(
    name: str, root: Path | None = None, shapes: Mapping[str, Mapping[str, Any]] = MODELS
) -> Model:
    """The checkpoint of this name, made if it is not there or other than it should be. Of a shape
    with `copies` no layer changes the hidden state, so that a head that is the embedding gives the
    last token again."""
    folder = (cache() if root is None else root) / "models" / name
    shape = {**shapes[name], "dtype": "bfloat16", "max_len": MAX_MODEL_LEN}
    wanted = json.dumps(shape)
    made_of, file = folder / "made-of.json", folder / "model.safetensors"
    if not made_of.exists() or made_of.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        copies = shape.pop("copies", False)
        make_checkpoint(folder, **shape)
        if copies:
            _silence_layers(file)
        made_of.write_text(wanted)  # last: a folder without it was left half done
    sizes = _elements(file)
    parameters = sum(sizes.values())
    is_tied = "lm_head.weight" not in sizes
    looked_up = 0 if is_tied else sizes["model.embed_tokens.weight"]
    return Model(name, folder, parameters, parameters - looked_up)


def _silence_layers(file: Path) -> None:
    """Let what attention and MLPs put out be 0."""
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith((".o_proj.weight", ".down_proj.weight")):
            tensor.zero_()
    save_file(tensors, file, metadata={"format": "pt"})


def text_prompts(count: int, input_tokens: int, seed: int) -> list[tuple[int, ...]]:
    """Pieces of exactly so many tokens of the documents that the demo model has read."""
    ids = _text_ids()
    chance = Random(seed)
    starts = [chance.randrange(len(ids) - input_tokens) for _ in range(count)]
    return [ids[start : start + input_tokens] for start in starts]


@once
def _text_ids() -> tuple[int, ...]:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    return tuple(tokenizer.encode("\n".join(read_corpus().documents)).ids)


def _elements(file: Path) -> dict[str, int]:
    """Elements of each tensor, from the header alone."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return {name: prod(tensor["shape"]) for name, tensor in header.items()}

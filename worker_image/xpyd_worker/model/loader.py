"""Reads safetensors straight into a model's weights, fused projections included, group by group.

Only what the model names is read, from mapped files, once: of a tensor of which other ranks have
the rest, the pieces that are for this one. The dtype is converted on the way. It must not know
layers: the model says which checkpoint tensor goes where. Pickled checkpoints (.bin) are refused.
Token ids that a checkpoint stores are read apart: they are no weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from xpyd_core.errors import UserError
from xpyd_worker.kernels.api import Kernels
from xpyd_worker.model.shards import Stored

SINGLE = "model.safetensors"
"""The file of a checkpoint that is not in several."""
_INDEX = "model.safetensors.index.json"
_SHOWN_NAMES = 5


class WeightGroup(Protocol):
    """Weights that are read and packed together: peak memory is what is packed and one group."""

    def checkpoint_tensors(self) -> dict[str, Stored]:
        """Checkpoint name -> the (parts of) weights that it fills; together they fill all. Without
        memory before `allocate`."""
        ...

    def allocate(self, device: torch.device) -> None:
        """Memory for the loader to fill."""
        ...

    def pack(self, kernels: Kernels) -> None:
        """Hand the weights to the kernels, once all are filled."""
        ...


def load_weights(
    folder: Path,
    groups: Sequence[WeightGroup],
    *,
    kernels: Kernels,
    device: torch.device,
    is_tied: bool,
    known: Set[str] | None = None,
    single: str = SINGLE,
) -> None:
    """Fill `groups` from the checkpoint in `folder`, one after the other, and pack each.

    `is_tied`: the head is the embedding, so a stored `lm_head.weight` is left out. `known`: names
    that belong to the whole model, where `groups` are a part of it (None: they are all). `single`:
    the file's name, where the checkpoint is one. Raises UserError naming tensors that are missing,
    that the model has no place for, or whose shape differs; the first two alike on all ranks.
    """
    files = tensor_files(folder, single)
    if known is None:
        known = {name for group in groups for name in group.checkpoint_tensors()}
    missing = sorted(known - files.keys())
    if missing:
        raise UserError(f"model: {folder} lacks {_names(missing)}")
    unexpected = sorted(name for name in files.keys() - known if not _is_ignored(name, is_tied))
    if unexpected:
        raise UserError(
            f"model: {folder} has {_names(unexpected)}, for which its config.json leaves no place"
        )
    for group in groups:
        group.allocate(device)
        destinations = group.checkpoint_tensors()
        for path in sorted({files[name] for name in destinations}):
            _read_file(path, {n: t for n, t in destinations.items() if files[n] == path})
        del destinations
        group.pack(kernels)


def _is_ignored(name: str, is_tied: bool) -> bool:
    """Tensors that change nothing: a tied head's copy, rotary tables of old checkpoints."""
    return name.endswith(".rotary_emb.inv_freq") or (is_tied and name == "lm_head.weight")


def _read_file(path: Path, destinations: Mapping[str, Stored]) -> None:
    try:
        with _open(path) as file:
            for name, stored in destinations.items():
                _read_pieces(file.get_slice(name), stored, f"{name} in {path}")
    except (OSError, SafetensorError) as error:
        raise UserError(f"model: cannot read {path}: {error}") from error


def _read_pieces(source: Any, stored: Stored, what: str) -> None:  # noqa: ANN401 - a Rust class
    shape = cast("list[int]", source.get_shape())
    if shape != list(stored.shape):
        raise UserError(
            f"model: {what} has shape {shape}; config.json asks for {list(stored.shape)}"
        )
    for piece in stored.pieces:
        read: Tensor = source[piece.slices]
        if not read.dtype.is_floating_point or read.dtype.itemsize < 2:
            raise UserError(
                f"model: {what} is {read.dtype}: quantized checkpoints are not supported"
            )
        piece.destination.copy_(read)


def tensor_files(folder: Path, single: str = SINGLE) -> dict[str, Path]:
    """Name of each stored tensor -> the file that holds it. UserError where there is none that can
    be read."""
    if (folder / _INDEX).exists():
        return _indexed_files(folder)
    path = folder / single
    if path.exists():
        try:
            with _open(path) as file:
                return dict.fromkeys(cast("list[str]", list(file.keys())), path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"model: cannot read {path}: {error}") from error
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise UserError(
            f"model: {folder} has only pickled weights (.bin); convert them to safetensors"
        )
    raise UserError(f"model: {folder} has no {SINGLE} and no {_INDEX}")


def stored_shape(path: Path, name: str) -> tuple[int, ...]:
    """The shape of a tensor in one of these files. UserError where it cannot be read."""
    try:
        with _open(path) as file:
            return tuple(cast("list[int]", file.get_slice(name).get_shape()))
    except (OSError, SafetensorError) as error:
        raise UserError(f"model: cannot read {path}: {error}") from error


def read_ids(path: Path, name: str, *, count: int, below: int, first: Tensor | None) -> Tensor:
    """Token ids that are stored under `name` in the file at `path`: [count] int64, each below
    `below`; `first`: what they are counted from, 0 where it is None. UserError naming the tensor
    and what is wrong with it."""
    what = f"model: {name} in {path}"
    try:
        with _open(path) as file:
            stored: Tensor = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise UserError(f"model: cannot read {path}: {error}") from error
    if stored.dtype.is_floating_point or stored.dtype is torch.bool or stored.shape != (count,):
        raise UserError(
            f"{what} is {list(stored.shape)} of {stored.dtype}; expected {count} whole numbers"
        )
    ids = stored.to(torch.int64) if first is None else stored.to(torch.int64) + first
    outside = ((ids < 0) | (ids >= below)).nonzero()
    if len(outside):
        at = int(outside[0])
        raise UserError(
            f"{what} gives token {int(ids[at])} for entry {at}; the model has {below} tokens"
        )
    return ids


def _indexed_files(folder: Path) -> dict[str, Path]:
    path = folder / _INDEX
    try:
        names = json.loads(path.read_bytes())["weight_map"]
        files = {str(name): folder / Path(str(file)).name for name, file in names.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"model: cannot read {path}: {error!r}") from error
    absent = sorted({file.name for file in files.values() if not file.exists()})
    if absent:
        raise UserError(f"model: {folder} lacks {_names(absent)}, which {_INDEX} names")
    return files


def _open(path: Path) -> Any:  # noqa: ANN401 - safe_open is untyped (a Rust class)
    opener: Any = safe_open
    return opener(path, framework="pt")


def _names(names: list[str]) -> str:
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")

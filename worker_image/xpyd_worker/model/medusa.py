"""Medusa: heads beside a model's own, each of which draws a token further ahead.

All read the hidden state that the model's head reads, so they draft a whole row of tokens at once,
without keys and values: the first head the token behind the model's next one, the second that
behind it, and so on. Each rank that drafts has them whole. It must not know requests or when to
draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from xpyd_core.errors import UserError
from xpyd_worker.kernels.api import Kernels
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.draft_heads import MedusaConfig, read_medusa
from xpyd_worker.model.layers import Linear
from xpyd_worker.model.loader import (
    SINGLE,
    load_weights,
    read_ids,
    stored_shape,
    tensor_files,
)
from xpyd_worker.model.shards import Stored, whole

_HEADS_ALONE = "medusa_lm_head.safetensors"
_TOKENS = "token_map"


class MedusaHead:
    """Residual blocks, and a linear over the draft's vocabulary. It has no memory before it is
    loaded."""

    def __init__(
        self,
        config: MedusaConfig,
        index: int,
        *,
        hidden_size: int,
        stored_tokens: int,
        dtype: torch.dtype,
    ) -> None:
        """`stored_tokens`: rows of the last linear in the checkpoint."""
        self._is_vllms, self._index = config.is_vllms, index
        hidden = whole(hidden_size)
        self._blocks = [
            Linear(hidden, (hidden,), bias=config.has_bias, dtype=dtype)
            for _ in range(config.num_layers)
        ]
        self._head = Linear(hidden, (whole(stored_tokens),), bias=False, dtype=dtype)
        self.target_ids: Tensor | None = None
        """Of the draft's tokens; None: the same."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> the most probable token of each row, [rows] int64."""
        x = hidden
        for block in self._blocks:
            x = x + F.silu(block(x))
        found = self._head(x).argmax(dim=-1)
        return found if self.target_ids is None else self.target_ids[found]

    def allocate(self, device: torch.device) -> None:
        """Memory for all weights."""
        for part in (*self._blocks, self._head):
            part.allocate(device)

    def pack(self, kernels: Kernels) -> None:
        """Hand the weights to the kernels; of a whole vocabulary only the draft's tokens."""
        ids, head = self.target_ids, self._head
        if ids is not None and head.weight.shape[0] != len(ids):
            hidden = whole(head.weight.shape[1])
            self._head = Linear(hidden, (whole(len(ids)),), bias=False, dtype=head.weight.dtype)
            self._head.weight = head.weight[ids]
        for part in (*self._blocks, self._head):
            part.pack(kernels)

    def checkpoint_tensors(self) -> dict[str, Stored]:
        """Checkpoint name -> where it goes."""
        found: dict[str, Stored] = {}
        for place, block in enumerate(self._blocks):
            name = f"blocks.{self._index}.layers.{place}"
            if not self._is_vllms:
                name = f"{self._index}.{place}.linear"
            found |= block.checkpoint_tensors("", (name,))
        return found | self._head.checkpoint_tensors("", (self._head_name,))

    @property
    def _head_name(self) -> str:
        return _head_name(self._index, len(self._blocks), is_vllms=self._is_vllms)


class Medusa:
    """A model's heads, loaded."""

    def __init__(self, heads: Sequence[MedusaHead]) -> None:
        """`heads` in the order of the tokens that they draw."""
        self.heads = heads
        self.num_heads = len(heads)

    def best(self, hidden: Tensor, count: int) -> Tensor:
        """What the first `count` heads hold most probable behind each row of `hidden` [rows,
        hidden], which the model's last norm gave: [rows, count] int64. Where the row is of position
        p, the model draws the token of p + 1, and head i, counted from 0, that of p + 2 + i."""
        return torch.stack([head(hidden) for head in self.heads[:count]], dim=1)


def load_medusa(
    folder: Path,
    target: ModelConfig,
    *,
    dtype: torch.dtype,
    kernels: Kernels,
    device: torch.device,
) -> Medusa:
    """The Medusa heads in `folder`, for the model `target`. UserError naming the field or the
    tensor that does not fit."""
    config = read_medusa(folder, target)
    single = _HEADS_ALONE if (folder / _HEADS_ALONE).exists() else SINGLE
    files = tensor_files(folder, single)
    target_ids = _target_ids(config, target, folder, files.get(_TOKENS))
    heads: list[MedusaHead] = []
    for index in range(config.num_heads):
        name = _head_name(index, config.num_layers, is_vllms=config.is_vllms) + ".weight"
        if name not in files:
            raise UserError(f"model: {folder} lacks {name}")
        # Of a truncated vocabulary's heads all rows may be stored, or only those that are used.
        shape = stored_shape(files[name], name)
        if shape[:1] not in ((config.draft_vocab_size,), (target.vocab_size,)):
            raise UserError(
                f"model: {name} in {files[name]} has shape {list(shape)}; expected "
                f"{config.draft_vocab_size} rows: name heads of this model"
            )
        head = MedusaHead(
            config,
            index,
            hidden_size=target.hidden_size,
            stored_tokens=shape[0],
            dtype=dtype,
        )
        head.target_ids = None if target_ids is None else target_ids.to(device)
        heads.append(head)
    known = {name for head in heads for name in head.checkpoint_tensors()}
    load_weights(
        folder,
        heads,
        kernels=kernels,
        device=device,
        is_tied=False,
        known=known | (files.keys() & {_TOKENS}),
        single=single,
    )
    return Medusa(heads)


def _head_name(index: int, layers: int, *, is_vllms: bool) -> str:
    """What the last linear of a head is called."""
    return f"lm_heads.{index}" if is_vllms else f"{index}.{layers}"


def _target_ids(
    config: MedusaConfig, target: ModelConfig, folder: Path, path: Path | None
) -> Tensor | None:
    """The target's id of each token of the draft's vocabulary; None where they are the same."""
    count = config.draft_vocab_size
    if count == target.vocab_size:
        return None
    if path is None:
        raise UserError(
            f"model: {folder} lacks {_TOKENS}, which says which of the target's "
            f"{target.vocab_size} tokens its {count} are"
        )
    return read_ids(path, _TOKENS, count=count, below=target.vocab_size, first=None)

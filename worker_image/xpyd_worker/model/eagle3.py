"""An EAGLE-3 head: one layer that drafts from a model's own hidden states.

Row i of a run has the token behind position p, and of position p what the target's feature layers
were given, projected to one vector; or, for tokens that are drafted one behind the other, what the
head gave for the position before. Norms of both are joined, [2 * hidden] numbers enter attention,
and what comes out gives, behind a norm, the token after next. It has keys and values of its own for
each position.

Each rank that drafts has it whole: it is small, and its sums would wait for other ranks at each
drafted token. It must not know requests, block management, or when to draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from xpyd_core.errors import UserError
from xpyd_worker.kernels.api import Kernels, KvShape, Plan
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.draft_heads import Eagle3Config, read_eagle3
from xpyd_worker.model.layers import (
    Attention,
    Linear,
    Mlp,
    Norm,
    Rotary,
    StepContext,
    unfilled,
)
from xpyd_worker.model.loader import load_weights, read_ids, tensor_files
from xpyd_worker.model.shards import Stored, all_of, whole

_EMBEDDING, _TARGETS_EMBEDDING = "embed_tokens.weight", "model.embed_tokens.weight"
# From the draft's vocabulary to the target's, and back: the second is not needed.
_TO_TARGET, _TO_DRAFT = "d2t", "t2d"
_LAYER_NAMES = ("midlayer.", "layers.0.")


class Eagle3:
    """One head. It has no memory until it is loaded (`load_eagle3`)."""

    num_layers = 1
    reads_features = True

    def __init__(
        self,
        config: Eagle3Config,
        *,
        dtype: torch.dtype,
        kernels: Kernels,
        device: torch.device,
        block_size_tokens: int,
        layer_name: str,
    ) -> None:
        """`layer_name`: what the checkpoint's names of its layer begin with."""
        layer = config.layer
        size, eps = layer.hidden_size, layer.rms_norm_eps
        self.feature_layers = config.feature_layers
        self.shape = KvShape(layer.num_kv_heads, layer.head_dim, block_size_tokens, dtype)
        self._kernels, self._layer_name = kernels, layer_name
        self._norm_before_residual = config.norm_before_residual
        features = len(config.feature_layers) * config.target_hidden_size
        self._project = Linear(whole(features), (whole(size),), bias=False, dtype=dtype)
        self._attention = Attention(layer, 0, dtype, inputs=2 * size)
        self._mlp = Mlp(
            size,
            layer.intermediate_size,
            bias=layer.mlp_bias,
            names=layer.names.mlp,
            dtype=dtype,
        )
        draft_vocabulary = whole(config.draft_vocab_size)
        self._head = Linear(whole(size), (draft_vocabulary,), bias=False, dtype=dtype)
        self._token_norm = Norm(size, eps=eps, dtype=dtype)
        self._hidden_norm = Norm(size, eps=eps, dtype=dtype)
        self._mlp_norm = Norm(size, eps=eps, dtype=dtype)
        self._last_norm = Norm(size, eps=eps, dtype=dtype)
        self._rotary = Rotary(layer, device)
        self.embedding = torch.empty(layer.vocab_size, size, dtype=dtype, device="meta")
        """Of the target's tokens."""
        self.target_ids: Tensor | None = None
        """Of the draft's tokens; None: the same."""

    def project(self, features: Tensor) -> Tensor:
        """What the feature layers were given, [rows, layers * target's hidden], in the layers'
        order -> [rows, hidden], for `run`."""
        return self._project(features)

    def run(
        self,
        token_ids: Tensor,
        hidden: Tensor | None,
        positions: Tensor,
        caches: Sequence[Tensor],
        plan: Plan,
    ) -> Tensor:
        """[rows, hidden], for `best`, and for the run of the next drafted tokens.

        Row i is of position `positions[i]`: `token_ids[i]` is the token behind that position,
        `hidden[i]` what `project` made of the position's features, or the run before of the
        position before. Its keys and values go to the position's place in the cache.
        """
        assert hidden is not None, "it reads features"
        kernels, norm = self._kernels, self._token_norm
        step = StepContext(kernels, self._rotary(positions), caches, plan, lambda _: None)
        tokens = kernels.rms_norm(F.embedding(token_ids, self.embedding), norm.weight, norm.eps)
        norm = self._hidden_norm
        normed = kernels.rms_norm(hidden, norm.weight, norm.eps)
        # A residual is added to in place.
        residual = normed.clone() if self._norm_before_residual else hidden.clone()
        x = self._attention(torch.cat((tokens, normed), dim=1), step)
        norm = self._mlp_norm
        x = self._mlp(kernels.add_rms_norm(x, residual, norm.weight, norm.eps), step)
        return residual.add_(x)

    def best(self, hidden: Tensor) -> Tensor:
        """The most probable next token of each row of what `run` gave, [rows] int64, in the
        target's ids."""
        norm = self._last_norm
        logits = self._head(self._kernels.rms_norm(hidden, norm.weight, norm.eps))
        found = logits.argmax(dim=-1)
        return found if self.target_ids is None else self.target_ids[found]

    def allocate(self, device: torch.device) -> None:
        """Memory for all weights but the embedding."""
        for part in (
            self._project,
            self._attention,
            self._mlp,
            self._head,
            self._token_norm,
            self._hidden_norm,
            self._mlp_norm,
            self._last_norm,
        ):
            part.allocate(device)

    def pack(self, kernels: Kernels) -> None:
        """Hand the weights to the kernels, once all are read."""
        for part in (self._project, self._attention, self._mlp, self._head):
            part.pack(kernels)

    def checkpoint_tensors(self) -> dict[str, Stored]:
        """Checkpoint name -> where it goes; but the embedding."""
        prefix = self._layer_name
        return {
            **self._project.checkpoint_tensors("", ("fc",)),
            f"{prefix}input_layernorm.weight": all_of(self._token_norm.weight),
            f"{prefix}hidden_norm.weight": all_of(self._hidden_norm.weight),
            f"{prefix}post_attention_layernorm.weight": all_of(self._mlp_norm.weight),
            **self._attention.checkpoint_tensors(f"{prefix}self_attn."),
            **self._mlp.checkpoint_tensors(f"{prefix}mlp."),
            "norm.weight": all_of(self._last_norm.weight),
            **self._head.checkpoint_tensors("", ("lm_head",)),
        }


class _Table:
    """An embedding, whole, as a group of weights."""

    def __init__(self, like: Tensor, name: str) -> None:
        self.weight, self._name = like, name

    def allocate(self, device: torch.device) -> None:
        """Memory for the loader to fill."""
        self.weight = unfilled(self.weight, device)

    def pack(self, kernels: Kernels) -> None:
        """Rows are looked up in it as it is."""

    def checkpoint_tensors(self) -> dict[str, Stored]:
        """Its one tensor."""
        return {self._name: all_of(self.weight)}


def load_eagle3(
    folder: Path,
    target: ModelConfig,
    target_folder: Path,
    *,
    dtype: torch.dtype,
    kernels: Kernels,
    device: torch.device,
    block_size_tokens: int,
    embedding: Tensor | None,
) -> Eagle3:
    """The EAGLE-3 head in `folder`, for the model in `target_folder`. `kernels`: made for its own
    sizes (`read_eagle3(...).layer`). `embedding`: the target's, where it is here whole, as what is
    not stored with the head; None: it is read.

    Raises UserError naming the field or the tensor that does not fit.
    """
    config = read_eagle3(folder, target)
    files = tensor_files(folder)
    named = [name for name in _LAYER_NAMES if any(one.startswith(name) for one in files)]
    head = Eagle3(
        config,
        dtype=dtype,
        kernels=kernels,
        device=device,
        block_size_tokens=block_size_tokens,
        layer_name=(named or _LAYER_NAMES)[0],
    )
    own = [_Table(head.embedding, _EMBEDDING)] if _EMBEDDING in files else []
    groups = (head, *own)
    load_weights(
        folder,
        groups,
        kernels=kernels,
        device=device,
        is_tied=False,
        known={name for group in groups for name in group.checkpoint_tensors()}
        | (files.keys() & {_TO_TARGET, _TO_DRAFT}),
    )
    head.target_ids = _target_ids(config, folder, files.get(_TO_TARGET), device)
    if own:
        head.embedding = own[0].weight
    elif config.layer.hidden_size != target.hidden_size:
        raise UserError(
            f"model: {folder} lacks {_EMBEDDING}: with a hidden_size of "
            f"{config.layer.hidden_size} it cannot use that of the target, {target.hidden_size}"
        )
    elif embedding is not None:
        head.embedding = embedding
    else:
        head.embedding = _targets_embedding(target_folder, head.embedding, kernels, device)
    return head


def _target_ids(
    config: Eagle3Config, folder: Path, path: Path | None, device: torch.device
) -> Tensor | None:
    """The target's id of each token of the draft's vocabulary; None where they are the same. What
    is stored are differences."""
    count, below = config.draft_vocab_size, config.layer.vocab_size
    if path is None:
        if count < below:
            raise UserError(
                f"model: {folder} lacks {_TO_TARGET}, which says which of the target's {below} "
                f"tokens its {count} are"
            )
        return None
    first = torch.arange(count)
    return read_ids(path, _TO_TARGET, count=count, below=below, first=first).to(device)


def _targets_embedding(
    folder: Path, like: Tensor, kernels: Kernels, device: torch.device
) -> Tensor:
    files = tensor_files(folder)
    if _TARGETS_EMBEDDING not in files:
        raise UserError(f"model: {folder} lacks {_TARGETS_EMBEDDING}")
    table = _Table(like, _TARGETS_EMBEDDING)
    known = files.keys()
    load_weights(folder, [table], kernels=kernels, device=device, is_tied=False, known=known)
    return table.weight

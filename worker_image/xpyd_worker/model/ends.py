"""What stands before the layers and behind them: embedding, last norm and head.

The first stage of a pipeline has the embedding, the last one the norm and the head, which is the
embedding once more where the two are tied. Over a tensor group both are cut by tokens: each rank
has rows of the vocabulary, padded to as many on each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from xpyd_worker.kernels.api import Kernels
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.layers import Linear, Norm, unfilled
from xpyd_worker.model.shards import Cut, Stored, all_of, by_name, whole
from xpyd_worker.parallel.api import Part, TensorGroup

# Rows of a vocabulary's share are a multiple: what matrix kernels take in one go, and vLLM pads to.
_ROWS = 64
_EMBEDDING, _HEAD = "embed_tokens", "lm_head"


class Embedding:
    """Token ids to vectors. Its rows have no memory before `allocate`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, group: TensorGroup) -> None:
        self._group, self._rows = group, vocabulary_share(config.vocab_size, group)
        size = (padded_rows(config.vocab_size, group), config.hidden_size)
        self.weight = torch.empty(size, dtype=dtype, device="meta")

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, hidden], the caller's to write to."""
        if self._group.size == 1:
            return F.embedding(token_ids, self.weight)
        own = token_ids - self._rows.held.start
        elsewhere = (own < 0) | (own >= self.weight.shape[0])
        x = F.embedding(own.masked_fill_(elsewhere, 0), self.weight)
        return self._group.all_reduce(x.masked_fill_(elsewhere.unsqueeze(1), 0))

    def allocate(self, device: torch.device) -> None:
        """Memory; what pads the vocabulary is zeros."""
        self.weight = unfilled(self.weight, device)
        self.weight[len(self._rows.held) :].zero_()

    def checkpoint_tensors(self) -> dict[str, Stored]:
        """Checkpoint name -> where it goes."""
        held = self.weight[: len(self._rows.held)]
        width = whole(self.weight.shape[1])
        return by_name(held, "model.", (_EMBEDDING,), rows=(self._rows,), columns=width)


class Head:
    """Last norm and head."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, group: TensorGroup) -> None:
        self._group, self._vocab_size = group, config.vocab_size
        self._rows = vocabulary_share(config.vocab_size, group)
        self._hidden = whole(config.hidden_size)
        rows = whole(padded_rows(config.vocab_size, group))
        self._linear = Linear(self._hidden, (rows,), bias=False, dtype=dtype)
        self._norm = Norm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self._name = "model." + _EMBEDDING if config.tie_word_embeddings else _HEAD

    @property
    def weight(self) -> Tensor:
        """Between `allocate` and `pack`."""
        return self._linear.weight

    def __call__(self, hidden: Tensor, kernels: Kernels) -> Tensor:
        """[rows, hidden] -> float32 [rows, vocab], the same on each rank."""
        logits = self._linear(kernels.rms_norm(hidden, self._norm.weight, self._norm.eps))
        if self._group.size == 1:
            return logits.to(torch.float32)
        logits = self._group.all_gather(logits)[:, : self._vocab_size]
        return logits.to(torch.float32).contiguous()

    def allocate(self, device: torch.device) -> None:
        """Memory; what pads the vocabulary is zeros."""
        self._linear.allocate(device)
        self._linear.weight[len(self._rows.held) :].zero_()
        self._norm.allocate(device)

    def pack(self, kernels: Kernels) -> None:
        """All weights are read."""
        self._linear.pack(kernels)

    def checkpoint_tensors(self) -> dict[str, Stored]:
        """Checkpoint name -> where it goes."""
        held = self._linear.weight[: len(self._rows.held)]
        return {
            "model.norm.weight": all_of(self._norm.weight),
            **by_name(held, "", (self._name,), rows=(self._rows,), columns=self._hidden),
        }


class Ends:
    """What of both a stage has; tied, and on one stage, they are in the same memory."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, part: Part, group: TensorGroup
    ) -> None:
        self._embedding = Embedding(config, dtype, group) if part.is_first else None
        self._head = Head(config, dtype, group) if part.is_last else None
        self._is_tied = config.tie_word_embeddings

    def embed(self, token_ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, hidden], the caller's to write to. On the first stage."""
        assert self._embedding is not None, "tokens enter at the first stage"
        return self._embedding(token_ids)

    def logits(self, hidden: Tensor, kernels: Kernels) -> Tensor:
        """Last norm and head over [rows, hidden] -> float32 [rows, vocab]. On the last stage."""
        assert self._head is not None, "tokens are drawn at the last stage"
        return self._head(hidden, kernels)

    def allocate(self, device: torch.device) -> None:
        """Memory for all weights."""
        if self._head is not None:
            self._head.allocate(device)
        if self._embedding is not None and self._head is not None and self._is_tied:
            self._embedding.weight = self._head.weight
        elif self._embedding is not None:
            self._embedding.allocate(device)

    def pack(self, kernels: Kernels) -> None:
        """All weights are read."""
        if self._head is not None:
            self._head.pack(kernels)

    def checkpoint_tensors(self) -> dict[str, Stored]:
        """Checkpoint name -> where it goes."""
        ends = (self._embedding, self._head)
        return {
            name: stored
            for end in ends
            if end is not None
            for name, stored in end.checkpoint_tensors().items()
        }


def padded_rows(vocab_size: int, group: TensorGroup) -> int:
    """Rows of the vocabulary on each rank: all of them where there is one."""
    if group.size == 1:
        return vocab_size
    each = -(-vocab_size // group.size)
    return -(-each // _ROWS) * _ROWS


def vocabulary_share(vocab_size: int, group: TensorGroup) -> Cut:
    """This rank's tokens; without padding, so that the last ranks may have few or none."""
    each = padded_rows(vocab_size, group)
    first = min(group.rank * each, vocab_size)
    return Cut(vocab_size, range(first, min(first + each, vocab_size)))

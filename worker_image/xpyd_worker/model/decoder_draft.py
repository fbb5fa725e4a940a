"""A whole model that drafts for another one, with the same tokenizer.

It must not know requests, block management, or when to draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from xpyd_worker.kernels.api import Plan
from xpyd_worker.model.decoder import Decoder


class DecoderDraft:
    """A whole model that drafts; implements DraftModel."""

    reads_features = False

    def __init__(self, model: Decoder, vocab_size: int, *, of: int) -> None:
        """`model` has `vocab_size` tokens, the one that is drafted for `of`: what pads either is no
        token of the other."""
        self._model, self._last, self._known = model, vocab_size - 1, min(vocab_size, of)

    def project(self, features: Tensor) -> Tensor:
        """See DraftModel."""
        return features

    def run(
        self,
        token_ids: Tensor,
        hidden: Tensor | None,
        positions: Tensor,
        caches: Sequence[Tensor],
        plan: Plan,
    ) -> Tensor:
        """See DraftModel."""
        token_ids = token_ids.clamp(max=self._last)
        return self._model.forward(token_ids, positions, caches, plan, lambda _: None)

    def best(self, hidden: Tensor) -> Tensor:
        """See DraftModel."""
        return self._model.logits(hidden)[:, : self._known].argmax(dim=-1)

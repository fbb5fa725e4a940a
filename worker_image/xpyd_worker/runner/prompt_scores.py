"""Log probabilities of prompt tokens, over prompts that are computed in chunks.

A token is scored by the row before it. A chunk's first token has that row in the chunk before, so
the last hidden state of an unfinished prompt is kept until its next chunk comes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from xpyd_core.errors import XpydError
from xpyd_worker.engine.request import TokenLogprob
from xpyd_worker.runner.batch import BatchRows
from xpyd_worker.runner.sampler import token_logprobs

# Unfinished prompts that are remembered; more than any scheduler keeps half computed at once. Those
# of aborted requests are pushed out by later ones.
_REMEMBERED = 1024
# Logits of so many bytes are made at a time: those of a whole long prompt may exceed the memory.
_LOGITS_BYTES = 64 << 20


class PromptScorer:
    """Scores prompt tokens, one step after the other. One thread."""

    def __init__(self, logits: Callable[[Tensor], Tensor], *, vocab_size: int) -> None:
        """`logits` maps hidden rows [n, hidden] to float32 [n, vocab_size]."""
        self._logits = logits
        self._rows_at_once = max(1, _LOGITS_BYTES // (4 * vocab_size))
        # Sequence id -> position and hidden state of the last prompt token computed.
        self._last: OrderedDict[int, tuple[int, Tensor]] = OrderedDict()

    def score(self, hidden: Tensor, rows: BatchRows) -> tuple[TokenLogprob, ...]:
        """Scores of the chunk's tokens that lie in the prompt, but for the prompt's first.

        `hidden` are the states [tokens, hidden] of the whole batch. Raises XpydError when the chunk
        before this one was not seen.
        """
        sequence = rows.sequence
        count = min(len(sequence.token_ids), sequence.prompt_tokens - sequence.start)
        if count <= 0:
            return ()
        own = hidden[rows.first_row : rows.first_row + count]
        states = own[:-1]
        tokens = sequence.token_ids[1:count]
        previous = self._last.pop(sequence.seq_id, None)
        if sequence.start > 0:
            if previous is None or previous[0] != sequence.start - 1:
                raise XpydError(
                    f"request {sequence.log_id or sequence.seq_id}: prompt_logprobs need the "
                    "prompt from its start, without a cached prefix"
                )
            states = torch.cat((previous[1], states))
            tokens = sequence.token_ids[:count]
        if sequence.start + count < sequence.prompt_tokens:
            # A copy: a view would keep the whole batch's states alive.
            self._last[sequence.seq_id] = (sequence.start + count - 1, own[-1:].clone())
            if len(self._last) > _REMEMBERED:
                self._last.popitem(last=False)
        return self._score(states, tokens, sequence.sampling.prompt_logprobs)

    def _score(
        self, states: Tensor, tokens: Sequence[int], wanted: int | None
    ) -> tuple[TokenLogprob, ...]:
        scores: list[TokenLogprob] = []
        for start in range(0, len(tokens), self._rows_at_once):
            part = tokens[start : start + self._rows_at_once]
            logits = self._logits(states[start : start + len(part)])
            found = token_logprobs(logits, part, [wanted or 0] * len(part), with_ranks=True)
            scores.extend(score for score in found if score is not None)
        return tuple(scores)

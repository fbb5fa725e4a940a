"""Log probabilities of prompt tokens, over prompts that are computed in chunks.

A token is scored by the row before it. A chunk's first token has that row in the chunk before, so
the last hidden state of an unfinished prompt is kept until its next chunk comes. Scores are
computed on the device and read later, like drawn tokens; what cannot be scored fails alone.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from xpyd_worker.engine.request import TokenLogprob
from xpyd_worker.runner.batch import BatchRows
from xpyd_worker.runner.sampler import Scores, score
from xpyd_worker.runner.tensors import numbers

# Unfinished prompts that are remembered; more than any scheduler keeps half computed at once. Those
# of aborted requests are pushed out by later ones.
_REMEMBERED = 1024
# Logits of so many bytes are made at a time: those of a whole long prompt may exceed the memory.
_LOGITS_BYTES = 64 << 20


@dataclass(frozen=True)
class _Chunk:
    """Scores of one sequence's tokens, some rows at a time."""

    name: str
    parts: tuple[tuple[tuple[int, ...], Scores], ...]

    def to_host(self) -> _Chunk:
        moved = tuple((tokens, scores.to_host()) for tokens, scores in self.parts)
        return replace(self, parts=moved)

    def read(self) -> tuple[TokenLogprob, ...]:
        found = [one for tokens, scores in self.parts for one in scores.read(tokens)]
        return tuple(one for one in found if one is not None)


@dataclass(frozen=True)
class ReadScores:
    """Scores on the host, by sequence id: of the chunk's tokens, or why there are none."""

    scores: dict[int, tuple[TokenLogprob, ...]]
    failed: dict[int, str]


@dataclass(frozen=True)
class PromptScores:
    """What one call of PromptScorer.score computes. On the device it may be still on its way."""

    _chunks: dict[int, _Chunk]
    _failed: dict[int, str]

    def to_host(self) -> PromptScores:
        """Enqueue copies to the host: right when what was enqueued so far is done."""
        return PromptScores({i: chunk.to_host() for i, chunk in self._chunks.items()}, self._failed)

    def result(self) -> ReadScores:
        """What is on the host, when the caller has waited for the copies: nothing here does."""
        read = ReadScores({}, dict(self._failed))
        for seq_id, chunk in self._chunks.items():
            found = chunk.read()
            if any(math.isnan(one.logprob) for one in found):
                read.failed[seq_id] = f"{chunk.name}: the model gave logits that are not finite"
            else:
                read.scores[seq_id] = found
        return read


NO_SCORES = PromptScores({}, {})
"""The scores of a step that scores nothing."""


class PromptScorer:
    """Scores prompt tokens, one step after the other. One thread."""

    def __init__(self, logits: Callable[[Tensor], Tensor], *, vocab_size: int) -> None:
        """`logits` maps hidden rows [n, hidden] to float32 [n, vocab_size]."""
        self._logits = logits
        self._rows_at_once = max(1, _LOGITS_BYTES // (4 * vocab_size))
        # Sequence id -> position and hidden state of the last prompt token computed.
        self._last: OrderedDict[int, tuple[int, Tensor]] = OrderedDict()

    def score(self, hidden: Tensor, rows: Iterable[BatchRows]) -> PromptScores:
        """Scores for the sequences among `rows` that ask for them: of the chunk's tokens that lie
        in the prompt, but for the prompt's first.

        `hidden` are the states [tokens, hidden] of the whole batch. A sequence fails when the chunk
        before this one was not seen, or when its logits are not finite.
        """
        chunks: dict[int, _Chunk] = {}
        failed: dict[int, str] = {}
        for one in rows:
            sequence = one.sequence
            if sequence.sampling.prompt_logprobs is None:
                continue
            name = f"request {sequence.log_id or sequence.seq_id}"
            asked = self._asked(hidden, one)
            if asked is None:
                failed[sequence.seq_id] = (
                    f"{name}: prompt_logprobs need the prompt from its start, without a cached "
                    "prefix"
                )
            else:
                parts = self._score(*asked, sequence.sampling.prompt_logprobs)
                chunks[sequence.seq_id] = _Chunk(name, parts)
        return PromptScores(chunks, failed)

    def _asked(self, hidden: Tensor, rows: BatchRows) -> tuple[Tensor, tuple[int, ...]] | None:
        """The chunk's tokens to score, and the states of the rows before them; None where the first
        of these was not seen."""
        sequence = rows.sequence
        count = min(len(sequence.token_ids), sequence.prompt_tokens - sequence.start)
        if count <= 0:
            return hidden[:0], ()
        own = hidden[rows.first_row : rows.first_row + count]
        states = own[:-1]
        tokens = sequence.token_ids[1:count]
        previous = self._last.pop(sequence.seq_id, None)
        if sequence.start > 0:
            if previous is None or previous[0] != sequence.start - 1:
                return None
            states = torch.cat((previous[1], states))
            tokens = sequence.token_ids[:count]
        if sequence.start + count < sequence.prompt_tokens:
            # A copy: a view would keep the whole batch's states alive.
            self._last[sequence.seq_id] = (sequence.start + count - 1, own[-1:].clone())
            if len(self._last) > _REMEMBERED:
                self._last.popitem(last=False)
        return states, tokens

    def _score(
        self, states: Tensor, tokens: Sequence[int], wanted: int
    ) -> tuple[tuple[tuple[int, ...], Scores], ...]:
        parts: list[tuple[tuple[int, ...], Scores]] = []
        for start in range(0, len(tokens), self._rows_at_once):
            part = tuple(tokens[start : start + self._rows_at_once])
            logits = self._logits(states[start : start + len(part)])
            ids = numbers(part, torch.int64, logits.device)
            found = score(logits, ids, [wanted] * len(part))
            if found is not None:
                parts.append((part, found))
        return tuple(parts)

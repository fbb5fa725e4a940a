"""From logits to tokens and their log probabilities, on the device that the logits are on.

Vectorised over the rows of a step; a row's token depends on its own logits, parameters, earlier
tokens and random number only. Nothing waits for the device: what was drawn is read later, or goes
into the next step without the host. It must not know sequences, blocks or the model.

Order of the steps, as in vLLM V1 (v1/sample/sampler.py there):
1. raw log probabilities are what `logprobs` reports;
2. allowed_token_ids, bad words, EOS and stop ids while fewer than min_tokens are out: the others'
   or their logits become -inf; then logit_bias is added;
3. penalties: repetition over prompt and output, frequency and presence over the output;
4. greedy rows take the best token (the lowest id among equals);
5. the others divide by the temperature, keep what the filters leave (min_p, top_k, top_p), and draw
   from that by inverse CDF, lower ids first (draws.py).
Where step 2 leaves a row no token at all, bad words and min_tokens give way for that draw. A row
whose logits are not finite gets no token; the others of its step are drawn as without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xpyd_worker.engine.request import SampledToken, SamplingParams
from xpyd_worker.kernels.api import NOT_FINITE
from xpyd_worker.runner import logprobs
from xpyd_worker.runner.adjustments import (
    Adjustment,
    apply_allowed,
    apply_banned,
    apply_bias,
    apply_penalties,
)
from xpyd_worker.runner.draws import Draw, draw, is_greedy
from xpyd_worker.runner.tensors import can_be_read, numbers, rows_of, to_host, to_ints
from xpyd_worker.runner.uniform import uniform


@dataclass(frozen=True)
class SampleRow:
    """One token to draw from row `logits_row`; `choice_index` and `position` key its random number.

    `position` is also how many tokens the choice has put out. `adjustment` is what its options
    change in the logits, if they change any.
    """

    logits_row: int
    sampling: SamplingParams
    choice_index: int
    position: int
    eos_token_ids: tuple[int, ...] = ()
    adjustment: Adjustment | None = None

    @property
    def has_bans(self) -> bool:
        """Whether bad words or min_tokens may take a token away."""
        return bool(self.early_stops) or (
            self.adjustment is not None and self.adjustment.banned is not None
        )

    @property
    def early_stops(self) -> set[int]:
        """EOS and stop ids that may not come yet."""
        if self.position >= self.sampling.min_tokens:
            return set()
        return {*self.eos_token_ids, *self.sampling.stop_token_ids}


@dataclass(frozen=True)
class Drawn:
    """What one call of `sample` draws, row by row. On the device it may be still on its way."""

    tokens: Tensor
    """int64 [rows]; NOT_FINITE for a row that has none: no id to give a model."""
    scores: logprobs.Scores | None

    def to_host(self) -> Drawn:
        """Enqueue copies to the host: what they hold is right when what was enqueued so far is
        done. On a CPU the same tensors."""
        return Drawn(to_host(self.tokens), self.scores and self.scores.to_host())

    def result(self) -> list[SampledToken | None]:
        """The rows' tokens, None where the logits are not finite. Of what is on the host, when the
        caller has waited for the copies: nothing here does."""
        tokens = to_ints(self.tokens)
        scores = self.scores.read(tokens) if self.scores else [None] * len(tokens)
        return [
            None if token == NOT_FINITE else SampledToken(token, score)
            for token, score in zip(tokens, scores, strict=True)
        ]


def sample(logits: Tensor, rows: Sequence[SampleRow], draw: Draw = draw) -> Drawn:
    """Enqueue a draw for each of `rows` from float32 `logits` [n, vocab], which stay untouched."""
    if not rows:
        return Drawn(torch.empty(0, dtype=torch.int64, device=logits.device), None)
    chosen = rows_of(logits, [row.logits_row for row in rows])
    tokens = _settled(_drawn(adjust(chosen, rows), rows, draw), chosen, rows, draw)
    wanted = [row.sampling.logprobs for row in rows]
    return Drawn(tokens, logprobs.score(chosen, tokens, wanted))


def _drawn(logits: Tensor, rows: Sequence[SampleRow], draw: Draw) -> Tensor:
    """Tokens [rows] from the rows' adjusted logits."""
    params = [row.sampling for row in rows]
    uniforms = [
        0.0
        if is_greedy(row.sampling)
        else uniform(row.sampling.seed, row.choice_index, row.position)
        for row in rows
    ]
    return draw(logits, params, uniforms)


def _settled(tokens: Tensor, chosen: Tensor, rows: Sequence[SampleRow], draw: Draw) -> Tensor:
    """`tokens`, those of rows whose bad words and min_tokens left none drawn without these."""
    if can_be_read(tokens) and NOT_FINITE not in to_ints(tokens):
        return tokens
    banned = [index for index, row in enumerate(rows) if row.has_bans]
    if not banned:
        return tokens
    part = [rows[index] for index in banned]
    again = _drawn(adjust(rows_of(chosen, banned), part, bans=False), part, draw)
    before = rows_of(tokens, banned)
    after = torch.where(before == NOT_FINITE, again, before)
    return tokens.index_copy(0, numbers(banned, torch.int64, tokens.device), after)


def adjust(logits: Tensor, rows: Sequence[SampleRow], *, bans: bool = True) -> Tensor:
    """`logits`, or a copy that the rows' options have changed; without bad words and min_tokens
    where `bans` is false."""
    adjustments = [
        (index, row.adjustment) for index, row in enumerate(rows) if row.adjustment is not None
    ]
    stops = _early_stops(rows, logits) if bans else None
    if not adjustments and stops is None:
        return logits
    changed = logits.clone(memory_format=torch.contiguous_format)
    apply_allowed(changed, adjustments)
    if bans:
        apply_banned(changed, adjustments)
    if stops is not None:
        changed.view(-1).index_fill_(0, stops, float("-inf"))
    apply_bias(changed, adjustments)
    apply_penalties(changed, adjustments)
    return changed


def _early_stops(rows: Sequence[SampleRow], logits: Tensor) -> Tensor | None:
    """Where in `logits`, flat, the EOS and stop ids stand that may not come yet."""
    vocab = logits.shape[1]
    places = [
        index * vocab + token
        for index, row in enumerate(rows)
        for token in row.early_stops
        if 0 <= token < vocab
    ]
    return numbers(places, torch.int64, logits.device) if places else None

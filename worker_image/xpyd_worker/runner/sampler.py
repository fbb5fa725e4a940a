"""From logits to tokens and their log probabilities.

Vectorised over the rows of a step; a row's token depends on its own logits, parameters, earlier
tokens and random number only. It must not know sequences, blocks or the model.

Order of the steps, as in vLLM V1 (v1/sample/sampler.py there):
1. raw log probabilities are what `logprobs` reports;
2. allowed_token_ids, bad words, EOS and stop ids while fewer than min_tokens are out: the others'
   or their logits become -inf; then logit_bias is added;
3. penalties: repetition over prompt and output, frequency and presence over the output;
4. greedy rows take the best token (the lowest id among equals);
5. the others divide by the temperature, keep what filters.py leaves (min_p, top_k, top_p), and draw
   from that by inverse CDF, lower ids first.
Where step 2 leaves a row no token at all, bad words and min_tokens give way for that draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xpyd_core.errors import XpydError
from xpyd_worker.engine.request import SampledToken, SamplingParams, TokenLogprob
from xpyd_worker.runner.adjustments import (
    Adjustment,
    apply_allowed,
    apply_banned,
    apply_bias,
    apply_penalties,
)
from xpyd_worker.runner.filters import drop_unlikely
from xpyd_worker.runner.tensors import rows_of, to_floats, to_ints
from xpyd_worker.runner.uniform import uniform

# Below it a row is greedy: float32 logits divided by less could overflow (vLLM's bound).
_LEAST_TEMPERATURE = 1e-5


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
    log_id: str = ""
    adjustment: Adjustment | None = None


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
    """One token for each of `rows` from float32 `logits` [n, vocab], which stay untouched.

    Raises XpydError naming the request whose logits are not finite.
    """
    if not rows:
        return []
    chosen = rows_of(logits, [row.logits_row for row in rows])
    adjusted = adjust(chosen, rows)
    best = adjusted.argmax(dim=-1)
    highest = adjusted.gather(1, best[:, None])
    # NaN and +inf win an argmax, so that the best of a row tells whether the row is sound.
    if not bool(highest.isfinite().all()):
        adjusted, best, highest = _settle(chosen, adjusted, highest, rows)
    tokens = to_ints(best)
    drawn = [
        index for index, row in enumerate(rows) if row.sampling.temperature >= _LEAST_TEMPERATURE
    ]
    if drawn:
        part, top = rows_of(adjusted, drawn), rows_of(highest, drawn)
        for index, token in zip(drawn, _draw(part, top, [rows[i] for i in drawn]), strict=True):
            tokens[index] = token
    wanted = [row.sampling.logprobs for row in rows]
    return [
        SampledToken(token, logprob)
        for token, logprob in zip(tokens, token_logprobs(chosen, tokens, wanted), strict=True)
    ]


def token_logprobs(
    logits: Tensor,
    tokens: Sequence[int],
    wanted: Sequence[int | None],
    *,
    with_ranks: bool = False,
) -> list[TokenLogprob | None]:
    """Raw log probability of tokens[i] in row i of float32 `logits`, with its wanted[i] best
    alternatives; None where wanted[i] is None."""
    some = [index for index, count in enumerate(wanted) if count is not None]
    found: list[TokenLogprob | None] = [None] * len(wanted)
    if not some:
        return found
    part = logits if len(some) == len(wanted) else logits[torch.tensor(some)]
    scores = part.log_softmax(dim=-1)
    own = torch.tensor([tokens[index] for index in some])
    own_column = scores.gather(1, own[:, None])
    own_scores = to_floats(own_column[:, 0])
    ranks = to_ints((scores >= own_column).sum(dim=-1)) if with_ranks else [0] * len(some)
    most = min(max(wanted[index] or 0 for index in some), scores.shape[1])
    top = _best(scores, most) if most else None
    for row, index in enumerate(some):
        count = wanted[index] or 0
        best: tuple[tuple[int, float], ...] = ()
        if count and top is not None:
            ids, values = to_ints(top.indices[row, :count]), to_floats(top.values[row, :count])
            best = tuple(zip(ids, values, strict=True))
        found[index] = TokenLogprob(tokens[index], own_scores[row], best, ranks[row])
    return found


@dataclass(frozen=True)
class _Sorted:
    """Columns of a matrix, best first and lower index first among equals."""

    values: Tensor
    indices: Tensor


def _best(scores: Tensor, count: int) -> _Sorted:
    """The `count` best of each row. Which of several equals at the border are in is unspecified."""
    if count >= scores.shape[1]:
        values, indices = scores.sort(dim=-1, descending=True, stable=True)
        return _Sorted(values, indices)
    # topk leaves equals in any order: sort by index, then stably by value.
    indices = scores.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = scores.gather(1, indices).sort(dim=-1, descending=True, stable=True)
    return _Sorted(values, indices.gather(1, order))


def adjust(logits: Tensor, rows: Sequence[SampleRow], *, bans: bool = True) -> Tensor:
    """`logits`, or a copy that the rows' options have changed; without bad words and min_tokens
    where `bans` is false."""
    adjustments = [
        (index, row.adjustment) for index, row in enumerate(rows) if row.adjustment is not None
    ]
    stops = _early_stops(rows, logits.shape[1]) if bans else None
    if not adjustments and stops is None:
        return logits
    changed = logits.clone()
    apply_allowed(changed, adjustments)
    if bans:
        apply_banned(changed, adjustments)
    if stops is not None:
        changed[stops] = float("-inf")
    apply_bias(changed, adjustments)
    apply_penalties(changed, adjustments)
    return changed


def _early_stops(rows: Sequence[SampleRow], vocab: int) -> tuple[Tensor, Tensor] | None:
    """Row and column of every EOS and stop id that may not come yet."""
    where: list[int] = []
    ids: list[int] = []
    for index, row in enumerate(rows):
        if row.position < row.sampling.min_tokens:
            stops = {*row.eos_token_ids, *row.sampling.stop_token_ids}
            known = [token for token in stops if 0 <= token < vocab]
            where.extend([index] * len(known))
            ids.extend(known)
    return (torch.tensor(where), torch.tensor(ids)) if ids else None


def _settle(
    logits: Tensor, adjusted: Tensor, highest: Tensor, rows: Sequence[SampleRow]
) -> tuple[Tensor, Tensor, Tensor]:
    """Adjusted logits, best tokens and their logits, where some row of `adjusted` has no best one.

    Raises XpydError where that is the model's doing.
    """
    lacking = highest[:, 0].isfinite().logical_not().nonzero()[:, 0]
    part = [rows[index] for index in to_ints(lacking)]
    adjusted = adjusted.clone()
    adjusted[lacking] = adjust(logits[lacking], part, bans=False)
    best = adjusted.argmax(dim=-1)
    highest = adjusted.gather(1, best[:, None])
    sound = highest[:, 0].isfinite()
    if not bool(sound.all()):
        bad = rows[int(sound.logical_not().nonzero()[0, 0])]
        raise XpydError(
            f"the model gave logits that are not finite for request {bad.log_id or '?'}"
        )
    return adjusted, best, highest


def distribution(logits: Tensor, highest: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """What rows that are not greedy are drawn from: float32 [rows, vocab], 0 where a filter dropped
    a token, not normalised. `logits` are adjusted, `highest` [rows, 1] are their maxima."""
    temperatures = torch.tensor([one.temperature for one in params], dtype=torch.float32)
    # Taking the maximum off first keeps a tiny temperature from overflowing.
    probabilities = (logits - highest).div_(temperatures[:, None]).softmax(dim=-1)
    drop_unlikely(probabilities, logits, params)
    return probabilities


def _draw(logits: Tensor, highest: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Tokens of rows that are not greedy; `highest` [rows, 1] are the rows' maxima."""
    probabilities = distribution(logits, highest, [row.sampling for row in rows])
    numbers = [uniform(r.sampling.seed, r.choice_index, r.position) for r in rows]
    # Sums in float64, one row after the other: the same in any batch.
    reached = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = reached[:, -1:].contiguous()
    target = torch.tensor(numbers, dtype=torch.float64)[:, None] * total
    column = torch.searchsorted(reached, target, right=True)
    # Rounding may put the target at the very end: the last token that has a probability.
    final = torch.searchsorted(reached, total, right=False)
    return to_ints(torch.minimum(column, final)[:, 0])

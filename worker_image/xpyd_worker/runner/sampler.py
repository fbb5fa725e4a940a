"""From logits to tokens and their log probabilities.

Vectorised over the rows of a step; a row's token depends on its own logits, parameters, earlier
tokens and random number only. It must not know sequences, blocks or the model.

Order of the steps, as in vLLM V1 (v1/sample/sampler.py there):
1. raw log probabilities are what `logprobs` reports;
2. allowed_token_ids, bad words, EOS and stop ids while fewer than min_tokens are out: the others'
   or their logits become -inf; then logit_bias is added;
3. penalties: repetition over prompt and output, frequency and presence over the output;
4. greedy rows take the best token (the lowest id among equals);
5. the others divide by the temperature, drop what is less likely than min_p x the best, keep the
   top_k best (with all that equal the last of them), of these the smallest head whose probability
   reaches top_p, and draw from what is left by inverse CDF, best token first and lower id first
   among equals.
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
from xpyd_worker.runner.tensors import to_floats, to_ints
from xpyd_worker.runner.uniform import uniform

# Most draws fall into the best few tokens: only so many are sorted, the whole row when they do not
# suffice. Sorting a vocabulary of 150,000 costs about 15 ms a row.
_HEAD = 256
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
    chosen = _rows_of(logits, [row.logits_row for row in rows])
    adjusted = _adjust(chosen, rows)
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
        part, top = _rows_of(adjusted, drawn), _rows_of(highest, drawn)
        for index, token in zip(drawn, _draw(part, top, [rows[i] for i in drawn]), strict=True):
            tokens[index] = token
    wanted = [row.sampling.logprobs for row in rows]
    return [
        SampledToken(token, logprob)
        for token, logprob in zip(tokens, token_logprobs(chosen, tokens, wanted), strict=True)
    ]


def _rows_of(matrix: Tensor, rows: list[int]) -> Tensor:
    """The named rows, in this order; the matrix itself where that is all of it."""
    if rows == list(range(matrix.shape[0])):
        return matrix
    return matrix[torch.tensor(rows)]


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


def _adjust(logits: Tensor, rows: Sequence[SampleRow], *, bans: bool = True) -> Tensor:
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
    adjusted[lacking] = _adjust(logits[lacking], part, bans=False)
    best = adjusted.argmax(dim=-1)
    highest = adjusted.gather(1, best[:, None])
    sound = highest[:, 0].isfinite()
    if not bool(sound.all()):
        bad = rows[int(sound.logical_not().nonzero()[0, 0])]
        raise XpydError(
            f"the model gave logits that are not finite for request {bad.log_id or '?'}"
        )
    return adjusted, best, highest


def _draw(logits: Tensor, highest: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Tokens of rows that are not greedy; `highest` [rows, 1] are the rows' maxima."""
    temperatures = torch.tensor([row.sampling.temperature for row in rows], dtype=torch.float32)
    # Taking the maximum off first keeps a tiny temperature from overflowing.
    probabilities = (logits - highest).div_(temperatures[:, None]).softmax(dim=-1)
    params = _Params.of(rows)
    tokens, is_settled = _inverse_cdf(logits, probabilities, params, head=_HEAD)
    part = is_settled.logical_not().nonzero()[:, 0]
    rest = to_ints(part)
    if rest:
        again, _ = _inverse_cdf(
            logits[part], probabilities[part], _Params.of([rows[i] for i in rest]), head=None
        )
        tokens[part] = again
    return to_ints(tokens)


@dataclass(frozen=True)
class _Params:
    """Columns [rows, 1] of what steers a draw. `top_k` 0, `top_p` 1 and `min_p` 0 are off."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    @staticmethod
    def of(rows: Sequence[SampleRow]) -> _Params:
        top_k = [row.sampling.top_k for row in rows]
        top_p = [row.sampling.top_p for row in rows]
        min_p = [row.sampling.min_p for row in rows]
        numbers = [uniform(r.sampling.seed, r.choice_index, r.position) for r in rows]
        return _Params(
            torch.tensor(top_k)[:, None],
            torch.tensor(top_p, dtype=torch.float64)[:, None],
            torch.tensor(min_p, dtype=torch.float64)[:, None],
            torch.tensor(numbers, dtype=torch.float64)[:, None],
        )


def _inverse_cdf(
    logits: Tensor, probabilities: Tensor, params: _Params, *, head: int | None
) -> tuple[Tensor, Tensor]:
    """Tokens [rows], and whether each is settled by the `head` best tokens (None: all of them)."""
    vocab = logits.shape[1]
    width = vocab if head is None else min(head, vocab)
    best = _best(logits, width)
    # Sums in float64, one row after the other: the same in any batch.
    mass = probabilities.gather(1, best.indices).to(torch.float64)
    is_whole = torch.full((logits.shape[0], 1), fill_value=width == vocab)

    has_top_k = (params.top_k > 0) & (params.top_k < vocab)
    last = torch.where(has_top_k, params.top_k, 1).clamp(max=width) - 1
    least = best.values.gather(1, last)
    has_limit = has_top_k | (params.min_p > 0)
    keeps = ~has_top_k | (best.values >= least)
    keeps &= mass >= params.min_p * mass[:, :1]
    mass = torch.where(keeps, mass, 0.0)
    # A kept last column may have more behind it that min_p and top_k (equals) keep.
    is_whole |= ~keeps[:, -1:]
    reached = mass.cumsum(dim=-1)
    total = torch.where(is_whole, reached[:, -1:], 1.0)

    has_top_p = params.top_p < 1
    wanted = params.top_p * total
    keeps = ~has_top_p | (reached - mass < wanted)
    keeps[:, 0] = True
    mass = torch.where(keeps, mass, 0.0)
    reached = mass.cumsum(dim=-1)
    # Without the rest of the row, the head of top_p is known once its last token is seen to be out.
    is_cut = is_whole | (has_top_p & ~has_limit & ~keeps[:, -1:])
    is_unfiltered = ~has_top_p & ~has_limit
    kept = torch.where(is_cut, reached[:, -1:], total)
    target = params.uniform * kept
    column = torch.searchsorted(reached, target, right=True)
    is_settled = is_cut | (is_unfiltered & (column < width))
    # Rounding may put the target at the very end: the last token that has a probability.
    final = torch.searchsorted(reached, reached[:, -1:].contiguous(), right=False)
    column = torch.minimum(column, final)
    if width < vocab:
        # Among those equal to the head's last, only the whole row tells which comes first.
        is_settled &= best.values.gather(1, column) > best.values[:, -1:]
    return best.indices.gather(1, column)[:, 0], is_settled[:, 0]

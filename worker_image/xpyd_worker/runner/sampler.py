"""From logits to tokens and their log probabilities.

Vectorised over the rows of a step; a row's token depends on its own logits, parameters and random
number only. It must not know sequences, blocks or the model.

Order of the steps, as in vLLM: raw log probabilities are taken; EOS and stop ids are masked while
fewer than min_tokens are out; greedy rows take the best token (the lowest id among equals); others
divide by the temperature, keep the top_k best (with all that equal the last of them), of these the
smallest head whose probability reaches top_p, and draw from what is left by inverse CDF, best token
first and lower id first among equals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xpyd_core.errors import XpydError
from xpyd_worker.engine.request import SampledToken, SamplingParams, TokenLogprob
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

    `position` is also how many tokens the choice has put out.
    """

    logits_row: int
    sampling: SamplingParams
    choice_index: int
    position: int
    eos_token_ids: tuple[int, ...] = ()
    log_id: str = ""


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
    """One token for each of `rows` from float32 `logits` [n, vocab], which stay untouched.

    Raises XpydError naming the request whose logits are not finite.
    """
    if not rows:
        return []
    chosen = logits[torch.tensor([row.logits_row for row in rows])]
    _refuse_not_finite(chosen, rows)
    masked = _mask_stop_ids(chosen, rows)
    tokens = to_ints(masked.argmax(dim=-1))
    drawn = [
        index for index, row in enumerate(rows) if row.sampling.temperature >= _LEAST_TEMPERATURE
    ]
    if drawn:
        every = len(drawn) == len(rows)
        part = masked if every else masked[torch.tensor(drawn)]
        for index, token in zip(drawn, _draw(part, [rows[i] for i in drawn]), strict=True):
            tokens[index] = token
    wanted = [row.sampling.logprobs for row in rows]
    return [
        SampledToken(token, logprob)
        for token, logprob in zip(tokens, token_logprobs(chosen, tokens, wanted), strict=True)
    ]


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], wanted: Sequence[int | None]
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
    own_scores = to_floats(scores.gather(1, own[:, None])[:, 0])
    most = min(max(wanted[index] or 0 for index in some), scores.shape[1])
    top = _best(scores, most) if most else None
    for row, index in enumerate(some):
        count = wanted[index] or 0
        best: tuple[tuple[int, float], ...] = ()
        if count and top is not None:
            ids, values = to_ints(top.indices[row, :count]), to_floats(top.values[row, :count])
            best = tuple(zip(ids, values, strict=True))
        found[index] = TokenLogprob(tokens[index], own_scores[row], best)
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


def _refuse_not_finite(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    # The maximum is NaN or infinite if any logit is NaN or +inf, and finite otherwise.
    good = logits.amax(dim=-1).isfinite()
    if bool(good.all()):
        return
    bad = rows[int(good.logical_not().nonzero()[0, 0])]
    raise XpydError(f"the model gave logits that are not finite for request {bad.log_id or '?'}")


def _mask_stop_ids(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """`logits`, or a copy with -inf where a token may not come yet."""
    where: list[int] = []
    ids: list[int] = []
    for index, row in enumerate(rows):
        if row.position < row.sampling.min_tokens:
            stops = {*row.eos_token_ids, *row.sampling.stop_token_ids}
            known = [token for token in stops if 0 <= token < logits.shape[1]]
            where.extend([index] * len(known))
            ids.extend(known)
    if not ids:
        return logits
    masked = logits.clone()
    masked[torch.tensor(where), torch.tensor(ids)] = float("-inf")
    return masked


def _draw(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Tokens of rows that are not greedy."""
    temperatures = torch.tensor([row.sampling.temperature for row in rows], dtype=torch.float32)
    # Taking the maximum off first keeps a tiny temperature from overflowing.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures[:, None]
    probabilities = scaled.softmax(dim=-1)
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
    """Columns [rows, 1] of what steers a draw. `top_k` 0 is off."""

    top_k: Tensor
    top_p: Tensor
    uniform: Tensor

    @staticmethod
    def of(rows: Sequence[SampleRow]) -> _Params:
        top_k = [row.sampling.top_k for row in rows]
        top_p = [row.sampling.top_p for row in rows]
        numbers = [uniform(r.sampling.seed, r.choice_index, r.position) for r in rows]
        return _Params(
            torch.tensor(top_k)[:, None],
            torch.tensor(top_p, dtype=torch.float64)[:, None],
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
    keeps = ~has_top_k | (best.values >= least)
    mass = torch.where(keeps, mass, 0.0)
    # A kept last column may have equals behind it; without top_k all of the row is kept.
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
    is_cut = is_whole | (has_top_p & ~has_top_k & ~keeps[:, -1:])
    is_unfiltered = ~has_top_p & ~has_top_k
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

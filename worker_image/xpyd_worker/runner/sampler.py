"""From logits to tokens and their log probabilities, on the device that the logits are on.

Vectorised over the rows of a step; a row's token depends on its own logits, parameters, earlier
tokens and random number only. Nothing waits for the device: a drawn token is read later, or goes
into the next step without the host. It must not know sequences, blocks or the model.

Order of the steps, as in vLLM V1 (v1/sample/sampler.py there):
1. raw log probabilities are what `logprobs` reports;
2. allowed_token_ids, bad words, EOS and stop ids while fewer than min_tokens are out: the others'
   or their logits become -inf, as do those that a grammar's mask forbids; then logit_bias is added;
3. penalties: repetition over prompt and output, frequency and presence over the output;
4. greedy rows take the best token (the lowest id among equals);
5. the others divide by the temperature, keep what the filters leave (min_p, top_k, top_p), and draw
   from that by inverse CDF, lower ids first.
Where step 2 leaves a row no token at all, bad words and min_tokens give way for that draw, and
before a mask allowed_token_ids, too: the mask never does. A row
whose logits are not finite gets no token; the others of its step are drawn as without it.

Steps 4 and 5 are a `Draw`: on a CPU torch's operators over all rows, on a GPU one Triton kernel.
Both draw the same token for the same random number, unless it falls within the rounding of `exp` of
a border.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from xpyd_worker.engine.request import SampledToken, SamplingParams, TokenLogprob
from xpyd_worker.kernels.api import NOT_FINITE, DrawParams
from xpyd_worker.runner.adjustments import (
    Adjustment,
    apply_allowed,
    apply_banned,
    apply_bias,
    apply_masks,
    apply_penalties,
)
from xpyd_worker.runner.tensors import can_be_read, numbers, rows_of, to_floats, to_host, to_ints

_MASK = (1 << 64) - 1
# The increment and the two multipliers of SplitMix64 (Steele, Lea, Flood 2014).
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
# A double holds 53 bits of fraction.
_BITS = 53


def uniform(seed: int, choice_index: int, position: int) -> float:
    """A number in [0, 1) for the token that a choice puts out at `position` (0 for its first).

    Any whole number is a seed; those that agree in their lowest 64 bits are the same seed.
    """
    state = _mix((seed + _GAMMA) & _MASK)
    state = _mix(((state ^ choice_index) + _GAMMA) & _MASK)
    state = _mix(((state ^ position) + _GAMMA) & _MASK)
    return (state >> (64 - _BITS)) * 2.0**-_BITS


def _mix(value: int) -> int:
    """SplitMix64's finaliser: a bijection of 64 bits in which each input bit moves each output."""
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True)
class Columns:
    """The best columns of each row, best first: values float32 and token ids int64, both [m,
    count]. Equals come in the order of their ids."""

    values: Tensor
    ids: Tensor


@dataclass(frozen=True)
class Scores:
    """Scores of the m rows among `wanted` that are not None, in that order.

    `wanted` [rows] is how many alternatives each asked for; `own` float32 [m] and `ranks` int64 [m]
    belong to the rows' tokens.
    """

    wanted: tuple[int | None, ...]
    own: Tensor
    ranks: Tensor
    top: Columns | None

    def to_host(self) -> Scores:
        """The columns on the host, when what was enqueued so far is done."""
        return replace(
            self,
            own=to_host(self.own),
            ranks=to_host(self.ranks),
            top=self.top and Columns(to_host(self.top.values), to_host(self.top.ids)),
        )

    def read(self, tokens: Sequence[int]) -> list[TokenLogprob | None]:
        """One entry per row, None where nothing was wanted; `tokens` [rows] are those scored. On
        the host only: elsewhere it would wait."""
        own = iter(to_floats(self.own))
        ranks = to_ints(self.ranks)
        found: list[TokenLogprob | None] = []
        row = 0
        for token, count in zip(tokens, self.wanted, strict=True):
            if count is None:
                found.append(None)
                continue
            found.append(TokenLogprob(token, next(own), self._best(row, count), ranks[row]))
            row += 1
        return found

    def _best(self, row: int, count: int) -> tuple[tuple[int, float], ...]:
        if not count or self.top is None:
            return ()
        ids, values = self.top.ids[row, :count], self.top.values[row, :count]
        return tuple(zip(to_ints(ids), to_floats(values), strict=True))


def score(logits: Tensor, tokens: Tensor, wanted: Sequence[int | None]) -> Scores | None:
    """Raw log probability of tokens[i] (int64, on the device) in row i of float32 `logits` [rows,
    vocab], and its wanted[i] best alternatives; what it says of a token below 0 means nothing. None
    where no row wants any."""
    some = [index for index, count in enumerate(wanted) if count is not None]
    if not some:
        return None
    scores = rows_of(logits, some).log_softmax(dim=-1)
    own = scores.gather(1, rows_of(tokens, some).clamp(min=0)[:, None])
    ranks = (scores >= own).sum(dim=-1)
    most = min(max(count or 0 for count in wanted), scores.shape[1])
    return Scores(tuple(wanted), own[:, 0], ranks, _best(scores, most) if most else None)


def _best(scores: Tensor, count: int) -> Columns:
    """The `count` best of each row. Which of several equals at the border are in is unspecified."""
    if count >= scores.shape[1]:
        return Columns(*scores.sort(dim=-1, descending=True, stable=True))
    # topk leaves equals in any order: sort by index, then stably by value.
    ids = scores.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = scores.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return Columns(values, ids.gather(1, order))


# Below it a row is greedy: float32 logits divided by less could overflow (vLLM's bound).
_LEAST_TEMPERATURE = 1e-5


class Draw(Protocol):
    """A way to draw."""

    def __call__(
        self, logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
    ) -> Tensor:
        """Tokens [rows] int64 from float32 `logits` [rows, vocab], at least one row, on their
        device; `uniforms` in [0, 1) say where in its distribution a row's draw falls. Greedy rows
        take the best token, the lowest id among equals. NOT_FINITE where a row has NaN or +inf, or
        nothing but -inf. A row's token depends on nothing of the others. The logits stay untouched,
        and nothing waits for the device."""
        ...


def is_greedy(params: SamplingParams) -> bool:
    """Whether the best token is taken, and no random number looked at."""
    return params.temperature < _LEAST_TEMPERATURE


def draw_for(device: torch.device) -> Draw:
    """How to draw on `device`."""
    if device.type != "cuda":
        return draw
    # Triton is not everywhere where torch is.
    from xpyd_worker.kernels.gpu.sampling import sample

    return kernel_draw(sample)


def kernel_draw(kernel: Callable[[Tensor, DrawParams], Tensor]) -> Draw:
    """The draw of a kernel that takes all rows and their parameters at once."""

    def draw(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
        # One copy to the device: a float64 holds what any of the columns can hold.
        columns = [
            [one.temperature for one in params],
            [min(one.top_k, logits.shape[1]) for one in params],
            [one.top_p for one in params],
            [one.min_p for one in params],
            uniforms,
        ]
        table = numbers(columns, torch.float64, logits.device)
        temperature, top_k, top_p, min_p, uniform = table.unbind(0)
        return kernel(
            logits,
            DrawParams(
                temperature.to(torch.float32),
                top_k.to(torch.int32),
                top_p,
                min_p.to(torch.float32),
                uniform,
            ),
        )

    return draw


def draw(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    """Draw by torch's operators; see Draw."""
    best = logits.argmax(dim=-1)
    highest = logits.gather(1, best[:, None])
    tokens = best
    drawn = [index for index, one in enumerate(params) if not is_greedy(one)]
    if drawn:
        found = _draw(
            rows_of(logits, drawn),
            rows_of(highest, drawn),
            [params[index] for index in drawn],
            [uniforms[index] for index in drawn],
        )
        if len(drawn) == len(params):
            tokens = found
        else:
            tokens = best.index_copy(0, numbers(drawn, torch.int64, logits.device), found)
    # NaN and +inf win an argmax, so that the best of a row tells whether the row is sound.
    return tokens.masked_fill(highest[:, 0].isfinite().logical_not(), NOT_FINITE)


def distribution(logits: Tensor, highest: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """What rows that are not greedy are drawn from: float32 [rows, vocab], 0 where a filter dropped
    a token, not normalised. `logits` are adjusted, `highest` [rows, 1] are their maxima."""
    temperatures = numbers([one.temperature for one in params], torch.float32, logits.device)
    # Taking the maximum off first keeps a tiny temperature from overflowing.
    probabilities = (logits - highest).div_(temperatures[:, None]).softmax(dim=-1)
    drop_unlikely(probabilities, logits, params)
    return probabilities


def _draw(
    logits: Tensor, highest: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> Tensor:
    """Tokens [rows] of rows that are not greedy; `highest` [rows, 1] are the rows' maxima."""
    probabilities = distribution(logits, highest, params)
    # Sums in float64, one row after the other: the same in any batch.
    reached = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = reached[:, -1:].contiguous()
    target = numbers(uniforms, torch.float64, logits.device)[:, None] * total
    column = torch.searchsorted(reached, target, right=True)
    # Rounding may put the target at the very end: the last token that has a probability.
    final = torch.searchsorted(reached, total, right=False)
    return torch.minimum(column, final)[:, 0]


@dataclass(frozen=True)
class SampleRow:
    """One token to draw from row `logits_row`; `choice_index` and `position` key its random number.

    `position` is also how many tokens the choice has put out. `adjustment` is what its options
    change in the logits, if they change any; `mask` is what a grammar allows (TokenMask's words).
    """

    logits_row: int
    sampling: SamplingParams
    choice_index: int
    position: int
    eos_token_ids: tuple[int, ...] = ()
    adjustment: Adjustment | None = None
    mask: bytes | None = None

    @property
    def has_bans(self) -> bool:
        """Whether something may take a token away that gives way where no other is left."""
        one = self.adjustment
        if one is None:
            return bool(self.early_stops)
        narrows = self.mask is not None and one.allowed is not None
        return bool(self.early_stops) or one.banned is not None or narrows

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
    scores: Scores | None

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
    return Drawn(tokens, score(chosen, tokens, wanted))


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
    """`logits`, or a copy that the rows' options have changed; where `bans` is false without what
    gives way."""
    adjustments = [
        (index, row.adjustment) for index, row in enumerate(rows) if row.adjustment is not None
    ]
    stops = _early_stops(rows, logits) if bans else None
    masks = [(index, row.mask) for index, row in enumerate(rows) if row.mask is not None]
    if not adjustments and stops is None and not masks:
        return logits
    changed = logits.clone(memory_format=torch.contiguous_format)
    apply_masks(changed, masks)
    masked = {index for index, _ in masks}
    apply_allowed(changed, [one for one in adjustments if bans or one[0] not in masked])
    if bans:
        apply_banned(changed, adjustments)
    if stops is not None:
        changed.view(-1).index_fill_(0, stops, float("-inf"))
    apply_bias(changed, adjustments)
    apply_penalties(changed, adjustments)
    return changed


def _early_stops(rows: Sequence[SampleRow], logits: Tensor) -> Tensor | None:
    """Where in `logits`, flat, the EOS and stop ids are that may not come yet."""
    vocab = logits.shape[1]
    places = [
        index * vocab + token
        for index, row in enumerate(rows)
        for token in row.early_stops
        if 0 <= token < vocab
    ]
    return numbers(places, torch.int64, logits.device) if places else None


# --- filters: which tokens a draw may choose from: min_p, then top_k, then top_p

# A filter looks only at the rows that use it, finds the least value that stays, and zeroes what is
# below: no ids are sorted.

# Up to so many, torch's topk beats sorting the row.
_TOPK_MOST = 256


def drop_unlikely(probabilities: Tensor, logits: Tensor, params: Sequence[SamplingParams]) -> None:
    """Zero in float32 `probabilities` [rows, vocab] what the rows' filters drop; the rest stays as
    it is. `logits` [rows, vocab] have the same order and tell apart what rounds to one probability.
    """
    _min_p(probabilities, params)
    _top_k(probabilities, logits, params)
    _top_p(probabilities, params)


def _min_p(probabilities: Tensor, params: Sequence[SamplingParams]) -> None:
    """What is less likely than min_p x the likeliest goes."""
    some = [row for row, one in enumerate(params) if one.min_p > 0]
    if not some:
        return
    part = rows_of(probabilities, some)
    share = numbers([params[row].min_p for row in some], torch.float32, part.device)
    _keep_only(probabilities, some, part, part >= share[:, None] * part.amax(dim=-1, keepdim=True))


def _top_k(probabilities: Tensor, logits: Tensor, params: Sequence[SamplingParams]) -> None:
    """The top_k best stay, with all that equal the last of them."""
    vocab = logits.shape[1]
    some = [row for row, one in enumerate(params) if 0 < one.top_k < vocab]
    if not some:
        return
    part = rows_of(logits, some)
    most = max(params[row].top_k for row in some)
    best = part.topk(most, dim=-1).values if most <= _TOPK_MOST else _descending(part)
    last = numbers([params[row].top_k - 1 for row in some], torch.int64, part.device)[:, None]
    _keep_only(probabilities, some, rows_of(probabilities, some), part >= best.gather(1, last))


def _top_p(probabilities: Tensor, params: Sequence[SamplingParams]) -> None:
    """The likeliest stay until their share of what is left reaches top_p; among equals at that
    border the lower ids, at least one token in all."""
    some = [row for row, one in enumerate(params) if one.top_p < 1]
    if not some:
        return
    part = rows_of(probabilities, some)
    best = _descending(part)
    reached = best.cumsum(dim=-1, dtype=torch.float64)
    share = numbers([params[row].top_p for row in some], torch.float64, part.device)[:, None]
    # Those before which the share was not yet reached.
    count = (reached[:, :-1] < share * reached[:, -1:]).sum(dim=-1, keepdim=True)
    least = best.gather(1, count)
    keeps = part >= least
    surplus = keeps.sum(dim=-1, keepdim=True) - (count + 1)
    if not can_be_read(surplus) or any(to_ints(surplus[:, 0])):
        equal = part == least
        keeps &= ~equal | (equal.cumsum(dim=-1) <= equal.sum(dim=-1, keepdim=True) - surplus)
    _keep_only(probabilities, some, part, keeps)


def _keep_only(probabilities: Tensor, rows: list[int], part: Tensor, keeps: Tensor) -> None:
    """Zero what is not in `keeps` in `part`, which are these rows or a copy of them."""
    part.mul_(keeps)
    if part is not probabilities:
        probabilities[numbers(rows, torch.int64, part.device)] = part


def _descending(matrix: Tensor) -> Tensor:
    """Each row's values, largest first."""
    if not can_be_read(matrix):
        return matrix.sort(dim=-1, descending=True).values
    # numpy sorts values with vector instructions, tens of times faster than torch on a CPU.
    return torch.as_tensor(np.sort(matrix.numpy(), axis=-1)).flip(-1)

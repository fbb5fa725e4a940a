"""Which tokens a draw may choose from: min_p, then top_k, then top_p.

Between the sampler's softmax and its draw. A filter looks only at the rows that use it, finds the
least value that stays, and zeroes what is below: no ids are sorted. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from xpyd_worker.engine.request import SamplingParams
from xpyd_worker.runner.tensors import can_be_read, numbers, rows_of, to_ints

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
    _keep(probabilities, some, part, part >= share[:, None] * part.amax(dim=-1, keepdim=True))


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
    _keep(probabilities, some, rows_of(probabilities, some), part >= best.gather(1, last))


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
    _keep(probabilities, some, part, keeps)


def _keep(probabilities: Tensor, rows: list[int], part: Tensor, keeps: Tensor) -> None:
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

"""The draw: from adjusted logits to one token per row, by the row's parameters and random number.

Between the sampler, which changes logits before it, and the device. On a CPU it is torch's
operators over the rows together (filters.py, then inverse CDF, lower ids first), on a GPU one
Triton kernel. Both draw the same token for the same number but where it falls within the rounding
of `exp` of a border. It must not know sequences, or which token a number belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from xpyd_worker.engine.request import SamplingParams
from xpyd_worker.kernels.api import NOT_FINITE, DrawParams
from xpyd_worker.runner.filters import drop_unlikely
from xpyd_worker.runner.tensors import numbers, rows_of

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
    """In torch's operators; see Draw."""
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

"""Raw log probabilities of tokens and of their best alternatives: computed now, read later.

Beside the sampler and the scoring of prompts. What `score` gives is on its way on the device; it is
copied to the host as a whole, and read when that copy is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from xpyd_worker.engine.request import TokenLogprob
from xpyd_worker.runner.tensors import rows_of, to_floats, to_host, to_ints


@dataclass(frozen=True)
class Columns:
    """Of each row the best, best first: values float32 and token ids int64, both [m, count]. Equals
    come in the order of their ids."""

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
        """The same on the host, when what was enqueued so far is done."""
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

"""Models that draft: behind a step, on the rank that answers it, what may follow its tokens.

    ModelRunner: the step -> what it drew, on the host -> Drafter.propose -> StepOutput.proposals

A drafter is never asked whether a token stands: what it guesses wrong costs time. So it may forget
what it likes, and its KV cache is its own (docs/adr/0137): blocks that no transfer and no prefix of
the model's cache knows. A sequence that it has not followed it takes in from the tokens, or, where
it reads the model's hidden states, from where it first sees them. It must not know schedulers,
other ranks or checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from xpyd_worker.engine.executor import ScheduledSequence
from xpyd_worker.engine.request import SampledToken
from xpyd_worker.runner.batch import BatchRows
from xpyd_worker.runner.tensors import put_ints, to_ints


@dataclass(frozen=True)
class Computed:
    """What a step computed: the rows of its sequences in `hidden` [rows, hidden], before the last
    norm; `features` [rows, n] each, of the layers that the drafter asked the model for; and what
    stands of what it drew, by sequence."""

    rows: Sequence[BatchRows]
    hidden: Tensor
    features: tuple[Tensor, ...]
    samples: Mapping[int, tuple[SampledToken, ...]]


class Drafter(Protocol):
    """Drafts behind each step; the runner calls it, in their order."""

    @property
    def weight_bytes(self) -> int:
        """Of its own weights."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Of its KV cache."""
        ...

    def note(self, step: Computed) -> bool:
        """Know of a step that has ended; whether `propose` is to be called now. Computes nothing,
        as in most steps where drafts do not pay."""
        ...

    def propose(self, step: Computed) -> dict[int, tuple[int, ...]]:
        """For sequences with `propose` above 0, by id, up to so many tokens that may follow what
        stands behind the step that was noted last. Waits for the device."""
        ...


class DraftHeads(Protocol):
    """Heads without KV: each guesses the token at one place behind the next."""

    def best(self, hidden: Tensor, count: int) -> Tensor:
        """[rows, hidden], behind the model's last norm -> int64 [rows, up to count]."""
        ...


def standing(sequence: ScheduledSequence, samples: Sequence[SampledToken]) -> list[int]:
    """The tokens of a step's sequence that stand, from `start` on: computed ones, and the one that
    was drawn last if one was; of those that fork none is the sequence's."""
    known = list(sequence.token_ids[: len(sequence.token_ids) - sequence.drafts])
    if len(sequence.samples) == 1:
        known += [sample.token_id for sample in samples]
    return known


class HeadsDrafter:
    """Drafts with heads over the hidden state behind which the last token was drawn."""

    def __init__(
        self, heads: DraftHeads, normed: Callable[[Tensor], Tensor], *, weight_bytes: int
    ) -> None:
        """`normed`: the model's last norm."""
        self._heads, self._normed = heads, normed
        self.weight_bytes, self.cache_bytes = weight_bytes, 0

    def note(self, step: Computed) -> bool:
        """See Drafter."""
        return asks(step)

    def propose(self, step: Computed) -> dict[int, tuple[int, ...]]:
        """See Drafter."""
        asked = [rows for rows in step.rows if is_asked(rows.sequence, step)]
        # The row of the last token that stands but for the drawn one: of drafts the last accepted.
        at = [
            rows.first_row + len(standing(rows.sequence, step.samples[rows.sequence.seq_id])) - 2
            for rows in asked
        ]
        most = max(rows.sequence.propose for rows in asked)
        (chosen,) = put_ints([at], step.hidden.device)
        best = self._heads.best(self._normed(step.hidden.index_select(0, chosen)), most)
        ids, width = to_ints(best.flatten().cpu()), best.shape[1]
        return {
            rows.sequence.seq_id: tuple(ids[n * width :][: min(width, rows.sequence.propose)])
            for n, rows in enumerate(asked)
        }


def asks(step: Computed) -> bool:
    """Whether tokens are to be drafted behind a step."""
    return any(is_asked(rows.sequence, step) for rows in step.rows)


def is_asked(sequence: ScheduledSequence, step: Computed) -> bool:
    """Whether tokens are to be drafted behind what the step drew for it."""
    return sequence.propose > 0 and bool(step.samples.get(sequence.seq_id))

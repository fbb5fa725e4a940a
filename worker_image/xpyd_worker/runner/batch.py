"""From a step's sequences to one flat batch, and back to whose row is whose. Numbers, no tensors.

Rows are ordered for attention (sequences with one new token first, by length), not as scheduled.
It must not know weights, devices or sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from xpyd_worker.engine.executor import DRAWN_BEFORE, ScheduledSequence
from xpyd_worker.kernels.api import KvShape, Span


@dataclass(frozen=True)
class BatchRows:
    """Rows of one sequence in the flat batch: first_row, first_row + 1, ..."""

    sequence: ScheduledSequence
    first_row: int

    @property
    def last_row(self) -> int:
        """Row of its last token."""
        return self.first_row + len(self.sequence.token_ids) - 1

    @property
    def asked(self) -> range:
        """Rows that something is drawn behind, where the sequence draws: its last known token and
        the draft tokens behind that."""
        return range(self.last_row - self.sequence.drafts, self.last_row + 1)


@dataclass(frozen=True)
class Batch:
    """One step's forward: `token_ids`, `positions` of all its rows."""

    rows: tuple[BatchRows, ...]
    spans: tuple[Span, ...]
    token_ids: list[int]
    positions: list[int]
    drawn_at: list[int]
    """Rows whose token the host does not know; `token_ids` has 0 there."""
    drawn_from: list[int]
    """For each of these rows: the index of its token among those of the step before."""
    prompt_tokens: int
    """Tokens of the batch that lie in their sequence's prompt."""

    @property
    def is_decode(self) -> bool:
        """Whether each row is a span of its own: nothing but decodes, with or without draft
        tokens."""
        return len(self.token_ids) == len(self.spans)


def faults(
    sequences: Sequence[ScheduledSequence],
    shape: KvShape,
    *,
    vocab_size: int,
    num_blocks: int,
    drawn: Mapping[int, int],
) -> dict[int, str]:
    """The sequences that must not run, by id, and why: their ids or blocks lie outside the model's
    vocabulary or the cache, so that they would read or write foreign memory. `drawn`: as for
    build_batch."""
    found = [(one, _fault(one, shape, vocab_size, num_blocks, drawn)) for one in sequences]
    return {one.seq_id: f"request {one.log_id or one.seq_id}: {why}" for one, why in found if why}


def build_batch(sequences: Sequence[ScheduledSequence], drawn: Mapping[int, int]) -> Batch:
    """The flat batch of `sequences`, at least one and none with a fault. `drawn`: sequence id ->
    place of the one token that the step before drew for it."""
    ordered = sorted(sequences, key=_order)
    rows = tuple(_rows(ordered))
    token_ids = [token for sequence in ordered for token in sequence.token_ids]
    unknown = [one for one in rows if one.sequence.token_ids[0] == DRAWN_BEFORE]
    for one in unknown:
        token_ids[one.first_row] = 0
    return Batch(
        rows=rows,
        spans=tuple(span for sequence in ordered for span in _spans(sequence)),
        token_ids=token_ids,
        positions=[s.start + index for s in ordered for index in range(len(s.token_ids))],
        drawn_at=[one.first_row for one in unknown],
        drawn_from=[drawn[one.sequence.seq_id] for one in unknown],
        prompt_tokens=sum(
            max(0, min(len(s.token_ids), s.prompt_tokens - s.start)) for s in ordered
        ),
    )


def _rows(sequences: Sequence[ScheduledSequence]) -> Iterator[BatchRows]:
    first = 0
    for sequence in sequences:
        yield BatchRows(sequence, first)
        first += len(sequence.token_ids)


def _spans(sequence: ScheduledSequence) -> list[Span]:
    """One span; of a decode with draft tokens one for each row, as each would be computed without
    the others: by the same operator, and so with the same rounding. A step's keys and values are
    stored before any row attends."""
    start, blocks = sequence.start, sequence.block_ids
    if not sequence.drafts:
        return [Span(start, len(sequence.token_ids), blocks)]
    return [Span(start + index, 1, blocks) for index in range(len(sequence.token_ids))]


def _order(sequence: ScheduledSequence) -> tuple[bool, int]:
    return len(sequence.token_ids) - sequence.drafts > 1, sequence.start


def _fault(
    sequence: ScheduledSequence,
    shape: KvShape,
    vocab_size: int,
    num_blocks: int,
    drawn: Mapping[int, int],
) -> str:
    """What is wrong with a sequence's share; empty for nothing."""
    ids, blocks = sequence.token_ids, sequence.block_ids
    if not ids or len(blocks) * shape.block_size < sequence.start + len(ids):
        return f"{len(ids)} tokens from {sequence.start} in {len(blocks)} blocks"
    if sequence.drafts and (sequence.drafts + 1 != len(ids) or len(sequence.samples) != 1):
        return (
            f"{sequence.drafts} draft tokens among {len(ids)} tokens, {len(sequence.samples)} draws"
        )
    if ids == (DRAWN_BEFORE,):
        if sequence.seq_id not in drawn:
            return "the token id that the step before drew, but it drew no one token for it"
    elif min(ids) < 0 or max(ids) >= vocab_size:
        return f"a token id outside the model's {vocab_size}"
    if min(blocks) < 0 or max(blocks) >= num_blocks:
        return f"a block outside the cache's {num_blocks}"
    return ""

"""From a step's sequences to the tensors of one flat forward, and back to whose row is whose.

Rows are ordered for attention (sequences with one new token first, by length), not as scheduled.
It must not know weights or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xpyd_worker.engine.executor import ScheduledSequence
from xpyd_worker.kernels.api import Kernels, KvShape, Plan, Span


@dataclass(frozen=True)
class BatchRows:
    """Rows of one sequence in the flat batch: first_row, first_row + 1, ..."""

    sequence: ScheduledSequence
    first_row: int

    @property
    def last_row(self) -> int:
        """Row of its last token."""
        return self.first_row + len(self.sequence.token_ids) - 1


@dataclass(frozen=True)
class Batch:
    """One step's forward: `token_ids` and `positions` [tokens] int64."""

    rows: tuple[BatchRows, ...]
    token_ids: Tensor
    positions: Tensor
    plan: Plan
    prompt_tokens: int
    """Tokens of the batch that lie in their sequence's prompt."""


def faults(
    sequences: Sequence[ScheduledSequence], shape: KvShape, *, vocab_size: int, num_blocks: int
) -> dict[int, str]:
    """By id, which sequences must not run and why: their ids or blocks lie outside the model's
    vocabulary or the cache, so that they would read or write foreign memory."""
    found = [(one, _fault(one, shape, vocab_size, num_blocks)) for one in sequences]
    return {one.seq_id: f"request {one.log_id or one.seq_id}: {why}" for one, why in found if why}


def build_batch(sequences: Sequence[ScheduledSequence], shape: KvShape, kernels: Kernels) -> Batch:
    """The flat batch of `sequences`, at least one and none with a fault."""
    ordered = sorted(sequences, key=_order)
    rows: list[BatchRows] = []
    token_ids: list[int] = []
    positions: list[int] = []
    prompt_tokens = 0
    for sequence in ordered:
        count = len(sequence.token_ids)
        rows.append(BatchRows(sequence, len(token_ids)))
        token_ids.extend(sequence.token_ids)
        positions.extend(range(sequence.start, sequence.start + count))
        prompt_tokens += max(0, min(count, sequence.prompt_tokens - sequence.start))
    spans = [Span(s.start, len(s.token_ids), s.block_ids) for s in ordered]
    return Batch(
        tuple(rows),
        torch.tensor(token_ids),
        torch.tensor(positions),
        kernels.plan(spans, shape),
        prompt_tokens,
    )


def _order(sequence: ScheduledSequence) -> tuple[bool, int]:
    return len(sequence.token_ids) > 1, sequence.start


def _fault(sequence: ScheduledSequence, shape: KvShape, vocab_size: int, num_blocks: int) -> str:
    """What is wrong with a sequence's share; empty for nothing."""
    ids, blocks = sequence.token_ids, sequence.block_ids
    if not ids or len(blocks) * shape.block_size < sequence.start + len(ids):
        return f"{len(ids)} tokens from {sequence.start} in {len(blocks)} blocks"
    if min(ids) < 0 or max(ids) >= vocab_size:
        return f"a token id outside the model's {vocab_size}"
    if min(blocks) < 0 or max(blocks) >= num_blocks:
        return f"a block outside the cache's {num_blocks}"
    return ""

"""From what the scheduler chose to what the executor gets: tables, samples, block copies. Pure.

The last thing before a step runs, so the producer is told here what will stand in its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from xpyd_worker.engine.executor import SampleSpec, ScheduledSequence, StepInput
from xpyd_worker.engine.sending import Sending
from xpyd_worker.engine.sequence import Sequence
from xpyd_worker.engine.stopping import StopRules


@dataclass(frozen=True)
class ScheduledStep:
    """One step: what the executor gets, and the sequences behind it with their token counts."""

    input: StepInput
    parts: tuple[tuple[Sequence, int], ...]


class StepMaker:
    """Numbers the steps of one engine and writes them out."""

    def __init__(self, sending: Sending, rules: StopRules) -> None:
        self._sending = sending
        self._rules = rules
        self._steps = 0

    def make(self, parts: Iterable[tuple[Sequence, int]]) -> ScheduledStep:
        """A step in which each sequence computes its next so many tokens; its table has room."""
        parts = tuple(parts)
        scheduled: list[ScheduledSequence] = []
        copies: list[tuple[int, int]] = []
        for sequence, count in parts:
            end = sequence.num_computed + count
            self._sending.stage(sequence, end)
            scheduled.append(self._scheduled(sequence, end))
            if sequence.copy is not None:
                copies.append(sequence.copy)
        self._steps += 1
        return ScheduledStep(StepInput(self._steps, tuple(scheduled), tuple(copies)), parts)

    def _scheduled(self, sequence: Sequence, end: int) -> ScheduledSequence:
        request = sequence.state.request
        samples: tuple[SampleSpec, ...] = ()
        if end == len(sequence.tokens):
            position = sequence.output_position()
            samples = tuple(
                SampleSpec(request.first_choice + choice, position)
                for choice in sequence.sampling_choices()
            )
        return ScheduledSequence(
            seq_id=sequence.seq_id,
            token_ids=tuple(sequence.tokens[sequence.num_computed : end]),
            start=sequence.num_computed,
            block_ids=tuple(sequence.blocks),
            sampling=sequence.state.sampling(),
            prompt_tokens=sequence.state.prompt_tokens,
            samples=samples,
            eos_token_ids=() if request.sampling.ignore_eos else self._rules.eos_token_ids,
            log_id=request.log_id,
            known=sequence.known_tokens() if samples else None,
        )

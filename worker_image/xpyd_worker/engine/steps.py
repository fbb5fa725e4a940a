"""From what the scheduler chose to what the executor gets: tables, samples, block copies. Pure.

The last thing before a step runs, so the producer is told here what will stand in its blocks, and
the sequences that a step is on its way with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from xpyd_worker.engine.executor import (
    DRAWN_BEFORE,
    SampleSpec,
    ScheduledSequence,
    StepInput,
)
from xpyd_worker.engine.sending import Sending
from xpyd_worker.engine.sequence import Sequence
from xpyd_worker.engine.stopping import StopRules


@dataclass(frozen=True)
class Part:
    """A sequence's share of a step: what the executor got of it."""

    sequence: Sequence
    scheduled: ScheduledSequence

    @property
    def count(self) -> int:
        """Tokens that it computes."""
        return len(self.scheduled.token_ids)

    @property
    def choices(self) -> list[int]:
        """The choices that it draws a token for."""
        first = self.sequence.state.request.first_choice
        return [spec.choice_index - first for spec in self.scheduled.samples]

    def land(self) -> None:
        """The step is over."""
        self.sequence.land(self.count, len(self.scheduled.samples))


@dataclass(frozen=True)
class ScheduledStep:
    """One step: what the executor gets, and the sequences behind it, in the same order."""

    input: StepInput
    parts: tuple[Part, ...]


class StepMaker:
    """Numbers the steps of one engine and writes them out."""

    def __init__(self, sending: Sending, rules: StopRules) -> None:
        self._sending = sending
        self._rules = rules
        self._steps = 0

    def make(self, parts: Iterable[tuple[Sequence, int]]) -> ScheduledStep:
        """A step in which each sequence computes its next so many tokens; its table has room. It
        counts as under way from here on."""
        self._steps += 1
        made: list[Part] = []
        copies: list[tuple[int, int]] = []
        for sequence, count in parts:
            end = sequence.reached + count
            self._sending.stage(sequence, end)
            if sequence.copy is not None and not sequence.in_flight:
                copies.append(sequence.copy)
            scheduled = self._scheduled(sequence, end)
            sequence.launch(self._steps, count, len(scheduled.samples))
            made.append(Part(sequence, scheduled))
        step = StepInput(
            self._steps,
            tuple(part.scheduled for part in made),
            tuple(copies),
            self._sending.step_chunks(),
        )
        return ScheduledStep(step, tuple(made))

    def _scheduled(self, sequence: Sequence, end: int) -> ScheduledSequence:
        request = sequence.state.request
        start, known = sequence.reached, len(sequence.tokens)
        drawn_before = (DRAWN_BEFORE,) if end > known else ()
        samples: tuple[SampleSpec, ...] = ()
        if end == known + sequence.drawing:
            position = sequence.output_position()
            samples = tuple(
                SampleSpec(request.first_choice + choice, position)
                for choice in sequence.sampling_choices()
            )
        return ScheduledSequence(
            seq_id=sequence.seq_id,
            token_ids=(*sequence.tokens[start:end], *drawn_before),
            start=start,
            block_ids=tuple(sequence.blocks),
            sampling=sequence.state.sampling(),
            prompt_tokens=sequence.state.prompt_tokens,
            samples=samples,
            eos_token_ids=self._rules.eos_token_ids,
            log_id=request.log_id,
            known=sequence.known_tokens() if samples else None,
        )

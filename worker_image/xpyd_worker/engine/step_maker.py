"""The executor's input of a step, from the sequences that take part. Pure.

Between the scheduler, which says who computes how many tokens, and the executor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from xpyd_worker.engine.executor import DRAWN_BEFORE, SampleSpec, ScheduledSequence, StepInput
from xpyd_worker.engine.open_requests import StopRules
from xpyd_worker.engine.sending import Sending
from xpyd_worker.engine.sequences import ScheduledStep, Sequence, SequenceShare


@dataclass(frozen=True, slots=True)
class Part:
    """What a sequence computes in a step: its next `count` tokens, and behind them a draft."""

    sequence: Sequence
    count: int
    draft: tuple[int, ...] = ()


class StepMaker:
    """Numbers the steps of one engine and makes the executor's input of them.

    It tells the producer which tokens a step computes, and the sequences that the step is under
    way.
    """

    def __init__(self, sending: Sending, rules: StopRules) -> None:
        self._sending = sending
        self._rules = rules
        self._steps = 0

    def make(self, parts: Iterable[Part]) -> ScheduledStep:
        """A step of these parts, for which the sequences' tables have room. It counts as under way
        from here on."""
        self._steps += 1
        made: list[SequenceShare] = []
        copies: list[tuple[int, int]] = []
        for part in parts:
            sequence, count, draft = part.sequence, part.count, part.draft
            end = sequence.reached + count
            self._sending.stage(sequence, end)
            if sequence.copy is not None and not sequence.in_flight:
                copies.append(sequence.copy)
            scheduled = self._scheduled(sequence, end, draft)
            sequence.launch(self._steps, count + len(draft), len(scheduled.samples))
            made.append(SequenceShare(sequence, scheduled))
        step = StepInput(
            self._steps,
            tuple(part.scheduled for part in made),
            tuple(copies),
            self._sending.step_chunks(),
        )
        return ScheduledStep(step, tuple(made))

    def _scheduled(self, sequence: Sequence, end: int, draft: tuple[int, ...]) -> ScheduledSequence:
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
            token_ids=(*sequence.tokens[start:end], *drawn_before, *draft),
            start=start,
            block_ids=tuple(sequence.blocks),
            sampling=sequence.state.sampling(),
            prompt_tokens=sequence.state.prompt_tokens,
            samples=samples,
            eos_token_ids=self._rules.eos_token_ids,
            log_id=request.log_id,
            known=sequence.known_tokens() if samples else None,
            mask=sequence.mask(draft) if samples else None,
            drafts=len(draft),
        )

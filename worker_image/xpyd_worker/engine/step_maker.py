"""The executor's input of a step, from the sequences that take part. Pure.

Between the scheduler, which says who computes how many tokens, and the executor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from xpyd_worker.engine.executor import DRAWN_BEFORE, SampleSpec, ScheduledSequence, StepInput
from xpyd_worker.engine.open_requests import StopRules
from xpyd_worker.engine.sending import Sending
from xpyd_worker.engine.sequences import BlockTables, ScheduledStep, Sequence, SequenceShare
from xpyd_worker.engine.speculation import Speculation


@dataclass(frozen=True, slots=True)
class Part:
    """What a sequence computes in a step: its next `count` tokens, and behind them a draft; and
    how many tokens a model is to draft for its next step."""

    sequence: Sequence
    count: int
    draft: tuple[int, ...] = ()
    propose: int = 0


class StepMaker:
    """Numbers the steps of one engine and makes the executor's input of them.

    It tells the producer which tokens a step computes, and the sequences that the step is under
    way; and it asks for what is drafted.
    """

    def __init__(
        self,
        sending: Sending,
        rules: StopRules,
        tables: BlockTables,
        speculation: Speculation | None,
    ) -> None:
        self._sending = sending
        self._rules = rules
        self._tables = tables
        self._speculation = speculation
        self._steps = 0

    def draft(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """What the step is to draft behind a sequence's last token, at most so many, and within
        what the sequence may still put out; its table has room for it. Nobody makes room for a
        draft."""
        if self._speculation is None or sequence.draft is None or not sequence.may_draft:
            return ()
        most = min(most, self._left(sequence) - 1)
        draft = self._speculation.propose(sequence.draft, sequence.tokens, most)
        has_room = self._tables.grow(sequence, len(sequence.tokens) + len(draft))
        return draft if has_room else ()

    def part(self, sequence: Sequence, count: int, draft: tuple[int, ...] = ()) -> Part:
        """Its share of a step, with what a model is to draft behind it."""
        speculation, known = self._speculation, len(sequence.tokens)
        if speculation is None or sequence.draft is None or sequence.drawing:
            return Part(sequence, count, draft)
        propose = 0
        draws = sequence.reached + count == known and not sequence.is_trunk
        if draws and not sequence.state.scores_prompt:
            # One token comes of this step at least, and one more of the next beside its draft.
            most = self._left(sequence) - 2
            propose = speculation.wanted(sequence.draft, known, most)
        return Part(sequence, count, draft, propose)

    def _left(self, sequence: Sequence) -> int:
        """Tokens that it may still put out."""
        most = sequence.state.request.sampling.max_tokens - sequence.output_position()
        return min(most, self._rules.max_model_len - len(sequence.tokens))

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
            scheduled = self._scheduled(sequence, end, part)
            sequence.launch(self._steps, count + len(draft), len(scheduled.samples))
            made.append(SequenceShare(sequence, scheduled))
        step = StepInput(
            self._steps,
            tuple(part.scheduled for part in made),
            tuple(copies),
            self._sending.step_chunks(),
        )
        return ScheduledStep(step, tuple(made))

    def _scheduled(self, sequence: Sequence, end: int, part: Part) -> ScheduledSequence:
        request, draft = sequence.state.request, part.draft
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
            known=sequence.known_tokens(reads=part.propose > 0) if samples else None,
            mask=sequence.mask(draft) if samples else None,
            drafts=len(draft),
            propose=part.propose,
        )

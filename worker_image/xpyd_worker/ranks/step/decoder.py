"""From a message back to the StepInput, on a rank: what the message leaves out is known here. Pure.

What stays the same over a sequence's steps is kept here, by slot; what its steps change, its tokens
and how many are computed, is in the rank's RequestStates, which every step's draws are written to.
It must not know tensors or groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from xpyd_worker.engine.executor import (
    DRAWN_BEFORE,
    KnownMask,
    KnownTokens,
    SampleSpec,
    ScheduledSequence,
    StepInput,
)
from xpyd_worker.engine.request import SamplingParams
from xpyd_worker.ranks.step.messages import (
    Ahead,
    Chunk,
    Draft,
    Full,
    Going,
    MessageError,
    StepMessage,
)


class State(NamedTuple):
    """What is known of one sequence: how many of its tokens are computed, and which was drawn
    last."""

    num_computed: int
    last_sampled: int


class States(Protocol):
    """What the decoder needs of the rank's RequestStates."""

    def begin(
        self, slot: int, *, start: int, tokens: Sequence[int], before: Sequence[int], prompt: int
    ) -> None:
        """The slot is another sequence's, or the same one's in another place: its tokens from
        `start` on, those before it where they are needed, and how many are the prompt's. A token
        DRAWN_BEFORE is the one that was drawn last."""
        ...

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        """Its next tokens."""
        ...

    def look(self, slots: Sequence[int]) -> Sequence[State]:
        """The state of these sequences as of the last update, in this order."""
        ...

    def tokens(self, slot: int, end: int) -> list[int]:
        """Its first `end` tokens."""
        ...


@dataclass(slots=True)
class _Held:
    """What stays the same of the sequence in a slot, and what its last share of a step was."""

    seq_id: int
    prompt_tokens: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    log_id: str
    blocks: tuple[int, ...]
    samples: tuple[SampleSpec, ...]
    # Behind its last known token in that share.
    end: int
    salt: bytes = b""
    # Made when a draw first reads it.
    prompt: tuple[int, ...] | None = None


class StepDecoder:
    """Reads the steps of one engine, in their order. One thread."""

    def __init__(self, slots: int, states: States) -> None:
        """`slots` and what is in them are those of the StepEncoder at the other end."""
        self._held: list[_Held | None] = [None] * slots
        self._states = states

    def read(self, message: StepMessage) -> StepInput:
        """The StepInput that the message was made from, where the states are those after all steps
        that drew for a sequence of it. Raises MessageError where it names a slot that holds
        nothing."""
        known = [row.slot for row in message.rows if not isinstance(row, Full)]
        states = dict(zip(known, self._states.look(known), strict=True)) if known else {}
        sequences: list[ScheduledSequence] = []
        propose = dict(message.propose)
        for index, row in enumerate(message.rows):
            if isinstance(row, Full):
                one = self._begin(row)
            else:
                one = self._go_on(row, states[row.slot], reads=index in propose)
            sequences.append(replace(one, propose=propose[index]) if index in propose else one)
        for index, words in message.masks:
            if index >= len(sequences):
                raise MessageError(f"a mask for row {index} of {len(sequences)}")
            sequences[index] = replace(sequences[index], mask=KnownMask(words))
        return StepInput(
            message.step,
            tuple(sequences),
            message.block_copies,
            message.kv,
            message.experts,
            message.resize,
        )

    def _begin(self, row: Full) -> ScheduledSequence:
        if row.slot >= len(self._held):
            raise MessageError(f"slot {row.slot} of {len(self._held)}")
        samples = tuple(SampleSpec(*pair) for pair in row.samples)
        held = _Held(
            row.seq_id,
            row.prompt_tokens,
            row.sampling,
            row.eos_token_ids,
            row.log_id,
            row.blocks,
            samples,
            row.start + len(row.tokens) - row.drafts,
            row.salt,
        )
        self._held[row.slot] = held
        self._states.begin(
            row.slot,
            start=row.start,
            tokens=row.tokens[: len(row.tokens) - row.drafts],
            before=row.before or (),
            prompt=row.prompt_tokens,
        )
        known = None
        if row.before is not None:
            known = self._known(row.slot, held, held.end)
        return _scheduled(held, start=row.start, ids=row.tokens, known=known, drafts=row.drafts)

    def _go_on(
        self, row: Going | Ahead | Chunk | Draft, state: State, *, reads: bool
    ) -> ScheduledSequence:
        """`reads`: what drafts behind the step reads all tokens."""
        held = self._held[row.slot]
        if held is None:
            raise MessageError(f"slot {row.slot} holds no sequence")
        if row.blocks:
            held.blocks += row.blocks
        start = state.num_computed
        drafts: tuple[int, ...] = ()
        match row:
            case Going():
                ids = (state.last_sampled,)
            case Ahead():
                ids = (DRAWN_BEFORE,)
            case Draft(tokens=drafts):
                ids = (state.last_sampled,)
            case Chunk(tokens=ids):
                self._states.extend(row.slot, ids)
        end = start + len(ids)
        if isinstance(row, Chunk):
            position = end - held.prompt_tokens
            held.samples = tuple(SampleSpec(choice, position) for choice in row.choices)
        else:
            (before,) = held.samples
            # Draft tokens that were accepted have moved the sequence on by more than one token.
            position = before.position + 1 + start - held.end
            held.samples = (SampleSpec(before.choice_index, position),)
        held.end = end
        reads = bool(held.samples) and (reads or held.sampling.reads_tokens)
        known = self._known(row.slot, held, end) if reads else None
        ids += drafts
        return _scheduled(held, start=start, ids=ids, known=known, drafts=len(drafts))

    def _known(self, slot: int, held: _Held, end: int) -> KnownTokens:
        tokens = self._states.tokens(slot, end)
        if held.prompt is None:
            held.prompt = tuple(tokens[: held.prompt_tokens])
        return KnownTokens(held.prompt, tuple(tokens[held.prompt_tokens :]), held.salt)


def _scheduled(
    held: _Held, *, start: int, ids: tuple[int, ...], known: KnownTokens | None, drafts: int
) -> ScheduledSequence:
    return ScheduledSequence(
        seq_id=held.seq_id,
        token_ids=ids,
        start=start,
        block_ids=held.blocks,
        sampling=held.sampling,
        prompt_tokens=held.prompt_tokens,
        samples=held.samples,
        eos_token_ids=held.eos_token_ids,
        log_id=held.log_id,
        known=known,
        drafts=drafts,
    )

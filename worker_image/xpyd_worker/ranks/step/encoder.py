"""From a StepInput to the message for the ranks, the shortest that says it exactly. Pure.

On the engine's side. What the ranks know of a sequence is mirrored here in as many slots as they
have, the longest unused first to go; so ends are not sent. A row is short only where everything
that it leaves out was compared and is the same: the ranks' StepDecoder makes the same StepInput. It
must not know tensors or transports.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from xpyd_worker.engine.executor import DRAWN_BEFORE, ScheduledSequence, StepInput, StepOutput
from xpyd_worker.ranks.step.messages import (
    Ahead,
    Chunk,
    Draft,
    Full,
    Going,
    MessageError,
    Row,
    StepMessage,
    encode_step,
)


@dataclass(slots=True)
class _Known:
    """What the ranks know of a sequence: its last share `of` a step, how far its tokens are
    computed, from which position on they have them, and in which step they drew its one token at
    `reached` last (0: they did not, or for several choices), which one if the engine knows. Of
    draft tokens they know when they have verified them: `reached` is before these until then."""

    slot: int
    of: ScheduledSequence
    reached: int
    held_from: int
    drawn_in: int
    drawn: int | None
    # Tokens that came of draft tokens in that step, besides the last one.
    more: int = 0
    salt: bytes = b""


class StepEncoder:
    """Encodes the steps of one engine, in their order. One thread."""

    def __init__(self, slots: int) -> None:
        """`slots`: as many as the ranks' StepDecoder has, at least a step's sequences; twice as
        many let preempted ones keep theirs."""
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._slots = slots

    def encode(self, step: StepInput) -> bytes:
        """The message of `step`, which goes to all ranks. Raises MessageError where it would be too
        long; then the ranks must not get it, and the next one tells them all anew."""
        if len(step.sequences) > self._slots:
            raise RuntimeError(f"{len(step.sequences)} sequences in {self._slots} slots")
        for sequence in step.sequences:
            if sequence.seq_id in self._known:
                self._known.move_to_end(sequence.seq_id)
        rows = tuple([self._row(sequence, step.step) for sequence in step.sequences])
        masks = tuple(
            (index, sequence.mask.words())
            for index, sequence in enumerate(step.sequences)
            if sequence.mask is not None
        )
        propose = tuple(
            (index, sequence.propose)
            for index, sequence in enumerate(step.sequences)
            if sequence.propose
        )
        try:
            return encode_step(
                StepMessage(
                    step.step,
                    rows,
                    step.block_copies,
                    step.kv,
                    masks,
                    step.experts,
                    step.resize,
                    propose,
                )
            )
        except MessageError:
            self._known.clear()
            raise

    def drawn(self, step: int, output: StepOutput) -> None:
        """What came of a step: its tokens need not be sent back to the ranks that drew them. To be
        called before a sequence's next step is encoded; left out, it costs bytes, not tokens."""
        for seq_id, samples in output.samples.items():
            known = self._known.get(seq_id)
            if known is not None and known.drawn_in == step and samples:
                known.drawn = samples[-1].token_id
                known.more = len(samples) - 1
                known.reached += known.more

    def _row(self, sequence: ScheduledSequence, step: int) -> Row:
        known = self._known.get(sequence.seq_id)
        row = known and _short(sequence, known)
        if known is None or row is None:
            known = self._take_slot(sequence)
            row = _full(sequence, known)
        known.of = sequence
        known.reached = sequence.start + len(sequence.token_ids) - sequence.drafts
        known.drawn_in = step if len(sequence.samples) == 1 else 0
        known.drawn = None
        known.more = 0
        return row

    def _take_slot(self, sequence: ScheduledSequence) -> _Known:
        """A free slot, the sequence's own, or that of the longest unused."""
        known = self._known.pop(sequence.seq_id, None)
        slot = len(self._known) if known is None else known.slot
        if slot == self._slots:
            slot = self._known.popitem(last=False)[1].slot
        held_from = 0 if sequence.known is not None else sequence.start
        if DRAWN_BEFORE in sequence.token_ids:
            held_from = sequence.start + 1
        salt = b"" if sequence.known is None else sequence.known.salt
        known = _Known(slot, sequence, 0, held_from, 0, None, salt=salt)
        self._known[sequence.seq_id] = known
        return known


def _short(sequence: ScheduledSequence, known: _Known) -> Row | None:
    """A row that leaves out what the ranks know; None where they know it otherwise."""
    of, ids, samples = known.of, sequence.token_ids, sequence.samples
    reads = bool(samples) and (sequence.sampling.reads_tokens or sequence.propose > 0)
    is_the_same = (
        sequence.start == known.reached
        and sequence.block_ids[: len(of.block_ids)] == of.block_ids
        and (sequence.sampling is of.sampling or sequence.sampling == of.sampling)
        and sequence.prompt_tokens == of.prompt_tokens
        and sequence.eos_token_ids == of.eos_token_ids
        and sequence.log_id == of.log_id
        and (sequence.known is not None) == reads
        and (sequence.known is None or (not known.held_from and sequence.known.salt == known.salt))
    )
    if not is_the_same:
        return None
    blocks = sequence.block_ids[len(of.block_ids) :]
    if not known.drawn_in:
        if sequence.drafts:
            return None
        drawn_at = sequence.start + len(ids) - sequence.prompt_tokens
        if DRAWN_BEFORE in ids or any(spec.position != drawn_at for spec in samples):
            return None
        return Chunk(known.slot, ids, blocks, tuple(spec.choice_index for spec in samples))
    before = of.samples[0]
    goes_on = (
        len(ids) - sequence.drafts == len(samples) == 1
        and samples[0].choice_index == before.choice_index
        and samples[0].position == before.position + known.more + 1
    )
    if not goes_on:
        return None
    if ids[0] == DRAWN_BEFORE:
        # The ranks do not know then what became of draft tokens.
        return None if of.drafts or sequence.drafts else Ahead(known.slot, blocks)
    if ids[0] != known.drawn:
        return None
    return Draft(known.slot, ids[1:], blocks) if sequence.drafts else Going(known.slot, blocks)


def _full(sequence: ScheduledSequence, known: _Known) -> Full:
    tokens = sequence.known
    return Full(
        slot=known.slot,
        seq_id=sequence.seq_id,
        start=sequence.start,
        tokens=sequence.token_ids,
        blocks=sequence.block_ids,
        prompt_tokens=sequence.prompt_tokens,
        samples=tuple((spec.choice_index, spec.position) for spec in sequence.samples),
        sampling=sequence.sampling,
        eos_token_ids=sequence.eos_token_ids,
        log_id=sequence.log_id,
        before=None if tokens is None else (*tokens.prompt, *tokens.output)[: sequence.start],
        drafts=sequence.drafts,
        salt=b"" if tokens is None else tokens.salt,
    )

"""Requests and their sequences as the scheduler keeps them: tokens, blocks, shares of a step. Pure.

A request is one prompt with n choices. While its choices would compute the same tokens, one
sequence, the trunk, computes them for all choices; when the prompt is computed the trunk forks into
one sequence per choice. A request with one choice never has a trunk. The scheduler is the only
owner of these values; the block manager knows blocks only, and never a sequence.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from xpyd_core.blocks import blocks_for, extend_block_hashes
from xpyd_core.kv_outcome import MOVED, header_of
from xpyd_worker.engine.block_manager import BlockManager
from xpyd_worker.engine.executor import KnownTokens, ScheduledSequence, StepInput, TokenMask
from xpyd_worker.engine.request import (
    ChoiceOutput,
    EngineRequest,
    FinishReason,
    ReceiveFrom,
    SampledToken,
    SamplingParams,
    SendTo,
    TokenLogprob,
)
from xpyd_worker.engine.speculation import SequenceDraft

if TYPE_CHECKING:
    from xpyd_worker.grammar.matcher import Matcher

# (priority, arrival, sequence id): the lowest goes first, the highest is preempted first.
Rank = tuple[int, int, int]


@dataclass(eq=False)
class RequestState:
    """One request: which choices still go on, and what its next output has to carry."""

    request: EngineRequest
    # Choices without a last token yet, in order.
    open: list[int]
    # The request's place among others: its priority where the engine has them, and its arrival.
    priority: int = 0
    arrival: int = 0
    reasons: dict[int, FinishReason] = field(default_factory=dict[int, FinishReason])
    sequences: list[Sequence] = field(default_factory=list["Sequence"])
    # Outputs of choices that ended at submit; they leave with the prompt's log probabilities.
    held: list[ChoiceOutput] = field(default_factory=list[ChoiceOutput])
    # What its choices gained in the step that just ran.
    gained: list[ChoiceOutput] = field(default_factory=list[ChoiceOutput])
    # Grows with the computed prompt; None where not asked for, and again after it was sent.
    prompt_logprobs: list[TokenLogprob | None] | None = None
    # D: the KV is still expected; then it was adopted.
    expects_kv: bool = False
    adopted: bool = False
    # D: why its prompt is computed here although P was to send its KV.
    recomputed: str = ""
    # P: tokens under OFFER (0: none), whether all of them are computed, and whether an OFFER was
    # cancelled whose writes may not have ended.
    offered_tokens: int = 0
    offer_complete: bool = False
    unsettled: bool = False
    # Counted when the first sequence starts; when that was, by the engine's clock.
    started: bool = False
    started_s: float | None = None
    cached_tokens: int = 0
    received_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def receive(self) -> ReceiveFrom | None:
        """The transfer that brings its KV."""
        transfer = self.request.transfer
        return transfer if isinstance(transfer, ReceiveFrom) else None

    @property
    def send(self) -> SendTo | None:
        """The transfer that sends its KV."""
        transfer = self.request.transfer
        return transfer if isinstance(transfer, SendTo) else None

    @property
    def kv(self) -> str:
        """D: what became of the KV that P was to send (EngineOutput.kv). A sequence that was
        preempted had begun from it."""
        if self.adopted or self.recomputed == "preempted":
            return MOVED
        return header_of(self.recomputed) if self.recomputed else ""

    @property
    def is_offered(self) -> bool:
        """P: whether the prompt is under OFFER and not all of it is computed."""
        return self.offered_tokens > 0 and not self.offer_complete

    def computed(self, tokens: int) -> None:
        """The first `tokens` tokens are computed: behind the last offered one the transfer needs
        the request no more."""
        if 0 < self.offered_tokens <= tokens:
            self.offer_complete = True

    def end_choice(self, choice: int, reason: FinishReason) -> None:
        """The choice has put out its last token."""
        self.open.remove(choice)
        self.reasons[choice] = reason

    def known_output(self, choice: int) -> tuple[int, ...]:
        """The ids of the choice in `continue_from`: another instance put them out."""
        ids = self.request.continue_from
        return ids[choice] if ids else ()

    def matcher(self, choice: int) -> Matcher | None:
        """The choice's place in the grammar that it must follow, if there is one."""
        matchers = self.request.matchers
        return matchers[choice] if matchers else None

    def follow(self, drawn: Mapping[int, SampledToken]) -> str:
        """Move the choices on in their grammar by the tokens drawn for them. Why one of them cannot
        go on, empty where all can."""
        for choice, sample in drawn.items():
            matcher = self.matcher(choice)
            if matcher is not None and not matcher.accept((sample.token_id,)):
                return f"the grammar cannot go on: {matcher.error}"
        return ""

    @property
    def scores_prompt(self) -> bool:
        """Whether rows of the prompt are still to be scored: then nothing may be skipped."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_tokens

    def sampling(self) -> SamplingParams:
        """The parameters for the next step: the prompt is scored once, not again when a
        preempted sequence recomputes it."""
        sampling = self.request.sampling
        if sampling.prompt_logprobs is not None and not self.scores_prompt:
            return replace(sampling, prompt_logprobs=None)
        return sampling


@dataclass(eq=False)
class Sequence:
    """Tokens, how many of them are computed, and the blocks that hold their KV.

    What a step under way computes and draws is counted apart (`launched`, `drawing`) until it is
    over; as long as there is such a step (`in_flight`) the blocks stay, even if the sequence ends.
    `last_step` is the number of the last one that computed tokens of it, for a fork of its trunk.
    `choice` is None in a trunk: its tokens are the prompt's alone. `blocks` is its table; one
    reference on each is the sequence's. `copy` is (source, destination) of a block that must be
    copied in the sequence's first step; the source has a reference more until that is over.
    """

    seq_id: int
    state: RequestState
    choice: int | None
    tokens: list[int]
    num_computed: int = 0
    in_flight: int = 0
    launched: int = 0
    drawing: int = 0
    last_step: int = 0
    blocks: list[int] = field(default_factory=list[int])
    hashes: list[bytes] = field(default_factory=list[bytes])
    num_registered: int = 0
    copy: tuple[int, int] | None = None
    ended: bool = False
    # None where the engine drafts nothing.
    draft: SequenceDraft | None = None

    @property
    def rank(self) -> Rank:
        """Its place among all sequences; it never changes."""
        return self.state.priority, self.state.arrival, self.seq_id

    @property
    def reached(self) -> int:
        """Tokens that are computed, or will be by the steps under way."""
        return self.num_computed + self.launched

    @property
    def remaining(self) -> int:
        """Tokens, known or being drawn, that no step computes yet."""
        return len(self.tokens) + self.drawing - self.num_computed - self.launched

    @property
    def hangs(self) -> bool:
        """Whether its next step cannot be made before the one under way is over, though a device
        draws ahead: choices fork at the token that is being drawn, or the next draw reads it, or
        the grammar does, or what is drafted behind it."""
        if not self.drawing:
            return False
        request = self.state.request
        if self.is_trunk or request.matchers or request.sampling.reads_tokens:
            return True
        return self.draft is not None and self.draft.is_on(len(self.tokens) + self.drawing)

    @property
    def may_draft(self) -> bool:
        """Whether its next step may have draft tokens: it computes the last token alone, which is
        known, and draws one behind it."""
        is_decode = self.remaining == 1 and not self.drawing
        return is_decode and not self.is_trunk and not self.state.scores_prompt

    def launch(self, step: int, count: int, draws: int) -> None:
        """Step number `step` begins; it computes the next `count` tokens and draws `draws`."""
        self.last_step = step
        self.in_flight += 1
        self.launched += count
        self.drawing += draws

    def land(self, count: int, draws: int) -> None:
        """The oldest step under way is over, or the last one, which never began."""
        self.in_flight -= 1
        self.launched -= count
        self.drawing -= draws

    @property
    def is_trunk(self) -> bool:
        """Whether the sequence computes the prompt for several choices."""
        return self.choice is None

    def sampling_choices(self) -> list[int]:
        """The choices that draw a token from the row of the last known token."""
        if self.choice is not None:
            return [self.choice]
        return [c for c in self.state.open if not self.state.known_output(c)]

    @property
    def reusable_tokens(self) -> int:
        """How many known tokens need no computing where their KV is at hand: all, but for the
        last one where its logits are needed."""
        needs_logits = bool(self.sampling_choices()) or self.state.scores_prompt
        return len(self.tokens) - (1 if needs_logits else 0)

    def output_position(self) -> int:
        """Tokens that its choice has put out, those being drawn included; 0 in a trunk."""
        drawing = 0 if self.is_trunk else self.drawing
        return len(self.tokens) + drawing - self.state.prompt_tokens

    def mask(self, draft: tuple[int, ...] = ()) -> TokenMask | None:
        """What its next draw may take, and each draw behind a token of `draft`; None: anything.
        Choices that draw from one row have all put out nothing, so the mask is the same for all."""
        matcher = self.state.matcher(self.sampling_choices()[0])
        return None if matcher is None else matcher.mask(draft)

    def known_tokens(self, *, reads: bool) -> KnownTokens | None:
        """What its next draw reads of the tokens before it; None where that is nothing. `reads`: a
        model that drafts behind it does."""
        request = self.state.request
        if not reads and not request.sampling.reads_tokens:
            return None
        output = tuple(self.tokens[len(request.prompt) :])
        return KnownTokens(request.prompt, output, request.cache_salt)


class BlockTables:
    """Every change of a sequence's `blocks`, `hashes`, `num_registered` and `copy` happens here."""

    def __init__(self, pool: BlockManager, *, read_again: int = 0) -> None:
        """`read_again`: last tokens of each sequence that are computed though their KV is at hand,
        as what drafts reads their hidden states."""
        self._pool = pool
        self._read_again = read_again
        self._block_size = pool.block_size
        self._caching = pool.caching

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that fits when it is alone."""
        return self._pool.num_blocks * self._block_size

    def start(self, sequence: Sequence) -> bool:
        """Give a sequence without blocks what its known tokens need, cached prefix first.

        False, and nothing taken, when fewer blocks are free. Otherwise `num_computed` is the end
        of the hit.
        """
        hits = self._hits(sequence)
        if self._need(sequence, hits) > self._pool.num_free:
            return False
        self._pool.retain(hits)
        fresh = blocks_for(len(sequence.tokens), self._block_size) - len(hits)
        taken = self._pool.allocate(fresh)
        if taken is None:
            raise RuntimeError("fewer blocks are free than were counted")
        sequence.blocks = hits + taken
        sequence.num_computed = len(hits) * self._block_size
        sequence.num_registered = len(hits)
        return True

    def keep(self, sequence: Sequence) -> Callable[[], None]:
        """Take a reference more on its blocks; return the call that gives them back."""
        blocks = list(sequence.blocks)
        self._pool.retain(blocks)
        return partial(self._pool.release, blocks)

    def need(self, sequence: Sequence) -> int:
        """How many free blocks `start` would take."""
        return self._need(sequence, self._hits(sequence))

    def adopt(
        self, sequence: Sequence, block_ids: tuple[int, ...], tokens: int, *, shared: int
    ) -> None:
        """Make blocks that hold the first `tokens` tokens the table; their references pass over.
        Those of the first `shared` tokens are others', too, and not written again."""
        sequence.blocks = list(block_ids)
        again = min(tokens, self._reusable(sequence))
        sequence.num_computed = max(again, min(shared, sequence.reusable_tokens))
        self.register_computed(sequence)

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Make room for the first `tokens` tokens; False, and nothing taken, if blocks lack."""
        need = blocks_for(tokens, self._block_size) - len(sequence.blocks)
        if need > 0:
            taken = self._pool.allocate(need)
            if taken is None:
                return False
            sequence.blocks.extend(taken)
        return True

    def fork(self, source: Sequence, child: Sequence) -> bool:
        """Let `child` share what `source` computed: full blocks by reference, a partial one by a
        copy still to be made. False, and nothing taken, when there is no block for the copy."""
        full, partial = divmod(source.num_computed, self._block_size)
        shared = source.blocks[:full]
        if partial:
            taken = self._pool.allocate(1)
            if taken is None:
                return False
            self._pool.retain(source.blocks[full : full + 1])
            child.copy = (source.blocks[full], taken[0])
            shared = [*shared, taken[0]]
        self._pool.retain(source.blocks[:full])
        child.blocks = shared
        child.num_computed = source.num_computed
        child.last_step = source.last_step
        child.hashes = source.hashes[:full]
        child.num_registered = min(full, source.num_registered)
        return True

    def copied(self, sequence: Sequence) -> None:
        """The step that made the sequence's copy has run: the source needs no reference more."""
        if sequence.copy is not None:
            self._pool.release(sequence.copy[:1])
            sequence.copy = None

    def free(self, sequence: Sequence) -> None:
        """Give all its blocks back; what it computed can still be hit."""
        self.copied(sequence)
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = 0
        sequence.num_registered = 0

    def drop(self, sequence: Sequence) -> None:
        """The sequence is over: take it off its request, once, and free it; with a step of it under
        way only when that has landed."""
        if not sequence.ended:
            sequence.ended = True
            sequence.state.sequences.remove(sequence)
            self.landed(sequence)

    def landed(self, sequence: Sequence) -> None:
        """A step that wrote to the sequence's blocks is over: free those of an ended sequence,
        unless the next step is under way."""
        if sequence.ended and not sequence.in_flight:
            self.free(sequence)

    def register_computed(self, sequence: Sequence) -> None:
        """Put the sequence's full, computed blocks into the prefix cache."""
        if not self._caching:
            return
        full = sequence.num_computed // self._block_size
        if full > sequence.num_registered:
            self._extend_hashes(sequence)
            for index in range(sequence.num_registered, full):
                self._pool.register(sequence.blocks[index], sequence.hashes[index])
            sequence.num_registered = full

    def may_hit(self, sequence: Sequence) -> bool:
        """Whether its prefix is looked up: not without a cache, nor where rows are to be scored."""
        return self._caching and not sequence.state.scores_prompt

    def _hits(self, sequence: Sequence) -> list[int]:
        if not self.may_hit(sequence):
            return []
        self._extend_hashes(sequence)
        full = self._reusable(sequence) // self._block_size
        return self._pool.lookup(sequence.hashes[:full])

    def _reusable(self, sequence: Sequence) -> int:
        # A draft is of no use before the third token.
        drafts = sequence.state.request.sampling.max_tokens > 2
        unread = len(sequence.tokens) - self._read_again * drafts
        return max(0, min(unread, sequence.reusable_tokens))

    def _need(self, sequence: Sequence, hits: list[int]) -> int:
        fresh = blocks_for(len(sequence.tokens), self._block_size) - len(hits)
        return fresh + sum(1 for block_id in hits if not self._pool.references(block_id))

    def _extend_hashes(self, sequence: Sequence) -> None:
        extend_block_hashes(
            sequence.hashes,
            sequence.tokens,
            block_size=self._block_size,
            salt=sequence.state.request.cache_salt,
        )


class WaitingQueue:
    """A priority queue of sequences by their rank. A sequence is in it at most once."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, sequence: Sequence) -> None:
        """Put `sequence` where its rank says."""
        heapq.heappush(self._heap, (sequence.rank, sequence))

    def pop(self) -> Sequence | None:
        """Take out the first, None when the queue is empty."""
        return heapq.heappop(self._heap)[1] if self._heap else None

    def sweep(self) -> None:
        """Let go of sequences that have ended."""
        if any(sequence.ended for _rank, sequence in self._heap):
            self._heap = [entry for entry in self._heap if not entry[1].ended]
            heapq.heapify(self._heap)


@dataclass(frozen=True)
class SequenceShare:
    """A sequence's share of a step: what the executor got of it."""

    sequence: Sequence
    scheduled: ScheduledSequence

    @property
    def count(self) -> int:
        """Tokens that it computes, draft tokens among them."""
        return len(self.scheduled.token_ids)

    @property
    def is_decode(self) -> bool:
        """Whether it computes one token, draft tokens apart, and draws one behind it."""
        return self.count - self.scheduled.drafts == len(self.scheduled.samples) == 1

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
    parts: tuple[SequenceShare, ...]

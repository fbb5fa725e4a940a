"""Requests and their sequences as the scheduler keeps them. Pure; the scheduler is the one owner.

A request is one prompt with n choices. As long as its choices would compute the same tokens, one
sequence, the trunk, stands for all of them; when the prompt is computed it forks into one sequence
per choice. A request with one choice never has a trunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from xpyd_worker.engine.executor import KnownTokens
from xpyd_worker.engine.request import (
    ChoiceOutput,
    EngineRequest,
    FinishReason,
    ReceiveFrom,
    SamplingParams,
    SendTo,
    TokenLogprob,
)

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
    # Grows with the computed prompt; None where nobody asked, and again after it was sent.
    prompt_logprobs: list[TokenLogprob | None] | None = None
    # D: the KV is still expected; then it was adopted.
    expects_kv: bool = False
    adopted: bool = False
    # D: why its prompt is computed here although KV was to come.
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
        """Where its KV comes from."""
        transfer = self.request.transfer
        return transfer if isinstance(transfer, ReceiveFrom) else None

    @property
    def send(self) -> SendTo | None:
        """Where its KV goes."""
        transfer = self.request.transfer
        return transfer if isinstance(transfer, SendTo) else None

    def end_choice(self, choice: int, reason: FinishReason) -> None:
        """The choice has put out its last token."""
        self.open.remove(choice)
        self.reasons[choice] = reason

    def known_output(self, choice: int) -> tuple[int, ...]:
        """The ids that the choice had put out when the request came."""
        ids = self.request.continue_from
        return ids[choice] if ids else ()

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
        draws ahead: choices fork at the token that is being drawn, or the next draw reads it."""
        if not self.drawing:
            return False
        return self.is_trunk or self.state.request.sampling.reads_tokens

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
        """Whether it stands for several choices."""
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

    def known_tokens(self) -> KnownTokens | None:
        """What its next draw reads of the tokens before it; None where that is nothing."""
        request = self.state.request
        if not request.sampling.reads_tokens:
            return None
        return KnownTokens(request.prompt, tuple(self.tokens[len(request.prompt) :]))

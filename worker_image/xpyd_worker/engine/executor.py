"""The seam between the engine and the model: one step in, its samples out.

On one rank the runner implements it in the engine's thread; with TP and PP the executor drives
worker processes. The engine never sees a tensor, the executor never sees a queue of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import add
from typing import NamedTuple, Protocol

from xpyd_worker.engine.eplb import ExpertTurn
from xpyd_worker.engine.request import SampledToken, SamplingParams, TokenLogprob

DRAWN_BEFORE = -1
"""The token id of a token that the step launched before this one draws for the same sequence, the
only one it draws for it: the engine does not know it yet, the device does. Only where
draws_ahead."""


@dataclass(frozen=True)
class SampleSpec:
    """Draw one token for one choice from the last row of its sequence.

    `choice_index` (OpenAI's) and `position` (tokens the choice has put out) key its random number.
    """

    choice_index: int
    position: int


@dataclass(frozen=True)
class KnownTokens:
    """All tokens of a sequence, those that a penalty or a bad word may look at.

    `prompt` is the request's own tuple, the same object in every step. Behind one `seq_id` they
    only grow. What is kept of them is for requests of the same `salt`.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    salt: bytes = b""


class LayerMoves(NamedTuple):
    """How often a layer's experts were placed anew, how many weights of experts went to another
    rank for it, since the start; and by how much, in the last window, the busiest rank was above
    the mean `before` the last placement, and would have been `after` it."""

    placements: int = 0
    moved: int = 0
    before: float = 1.0
    after: float = 1.0

    def joined(self, other: LayerMoves) -> LayerMoves:
        """Of both replicas: sums, and the worse balance."""
        return LayerMoves(
            self.placements + other.placements,
            self.moved + other.moved,
            max(self.before, other.before),
            max(self.after, other.after),
        )


class LayerExperts(NamedTuple):
    """How many tokens chose each expert of the model's layer number `layer`, since the start.
    `moves` is of all its ranks; None where they do not move, and on all ranks but one."""

    layer: int
    tokens: tuple[int, ...]
    moves: LayerMoves | None = None


def sum_by_layer(counts: Iterable[LayerExperts]) -> list[LayerExperts]:
    """One for each layer that there is, by layer, with the sums."""
    found: dict[int, LayerExperts] = {}
    for one in counts:
        before = found.get(one.layer)
        if before is None:
            found[one.layer] = one
            continue
        moves = before.moves or one.moves
        if before.moves and one.moves:
            moves = before.moves.joined(one.moves)
        tokens = tuple(map(add, before.tokens, one.tokens))
        found[one.layer] = LayerExperts(one.layer, tokens, moves)
    return [found[layer] for layer in sorted(found)]


class TokenMask(Protocol):
    """Which tokens a draw may take, where a grammar says so. It may be computed meanwhile."""

    def words(self) -> bytes:
        """One bit for each token id, 1 for those that may come, in little-endian words of 32 bits;
        ids behind the last word may not come. Waits until it is computed."""
        ...


@dataclass(frozen=True)
class KnownMask:
    """A mask that is computed: what comes to a rank."""

    bits: bytes

    def words(self) -> bytes:
        """See TokenMask."""
        return self.bits


@dataclass(frozen=True)
class ScheduledSequence:
    """A sequence's share of one step: compute `token_ids` at positions start, start + 1, ...

    The only one of them may be DRAWN_BEFORE. `block_ids` is its whole block table, long enough for
    start + len(token_ids) tokens. `samples` is empty until the sequence's last known token is
    computed; more than one when choices fork here.
    The last `drafts` of `token_ids` are draft tokens. There is one token known before them in it,
    and one sample then: it is drawn behind that token, further ones at the positions that follow
    behind each draft token. The draft token behind which a draw counts is the draw before; so the
    draws up to the first one that is another token than the draft token are what comes of it, 1 to
    drafts + 1 tokens. `prompt_tokens` is the length of its prompt, so that computed prompt tokens
    can be counted. With `prompt_logprobs`, rows of prompt positions are scored too. `known` is
    there only where `samples` are drawn under parameters that read earlier tokens: the executor may
    not have seen those whose KV was found or received; draft tokens are not in it. `mask` is there
    only where `samples` are drawn under a grammar; it is the same for all of them, and before draft
    tokens as many masks of one length, for each draw its own. With `propose` above 0, which needs
    one sample, a model drafts so many tokens behind what the step draws; `known` is there then."""

    seq_id: int
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    sampling: SamplingParams
    prompt_tokens: int
    samples: tuple[SampleSpec, ...] = ()
    # EOS (also with ignore_eos, as in vLLM) and stop ids are masked where fewer than min_tokens are
    # out.
    eos_token_ids: tuple[int, ...] = ()
    log_id: str = ""
    known: KnownTokens | None = None
    mask: TokenMask | None = None
    drafts: int = 0
    propose: int = 0


class Resize(NamedTuple):
    """Ranks are to share their experts with the ranks of `replicas`, in this order. `meeting`: its
    number among all such changes, from 1 on. `is_repair`: behind the loss of a replica, which may
    have left any of their groups unusable. `is_again`: the last step is made again, it broke."""

    meeting: int
    replicas: tuple[int, ...]
    is_repair: bool = False
    is_again: bool = False


@dataclass(frozen=True)
class StepInput:
    """One flat batch: the sequences' tokens one behind the other, no padding. Without sequences it
    is a dummy, which replicas that share experts make where others have a step (docs/adr/0122).

    `block_copies` (source, destination) are done before the forward. `kv` is the producer's
    message to ranks that send KV themselves; opaque here. `experts`: what ranks do about whole
    experts before it; the executor says it. `resize`: what they do first of all, where replicas
    come or go; for ranks of one that goes the step is over with it (docs/adr/0128).
    """

    step: int
    sequences: tuple[ScheduledSequence, ...]
    block_copies: tuple[tuple[int, int], ...] = ()
    kv: bytes = b""
    experts: ExpertTurn = ExpertTurn.NONE
    resize: Resize | None = None

    @property
    def tokens(self) -> int:
        """Tokens that enter the forward."""
        return sum(len(s.token_ids) for s in self.sequences)


@dataclass(frozen=True)
class StepOutput:
    """Samples by sequence id, in the order of its SampleSpecs, or what came of its draft; none for
    those in `failed`, which says why nothing could be drawn for them.

    `prompt_logprobs` by sequence id: for each token in `token_ids` that lies in the prompt and is
    not its first token, its log probability given the tokens before it (so chunks concatenate).
    `proposals` by sequence id: what a model drafts behind the last of its samples, up to `propose`
    tokens; a sequence may have none.
    """

    samples: dict[int, tuple[SampledToken, ...]]
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]]
    failed: dict[int, str] = field(default_factory=dict[int, str])
    proposals: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])


@dataclass
class StepCounters:
    """What entered forwards since the start. Written by the engine's thread only."""

    forwards: int = 0
    prompt_tokens_computed: int = 0
    output_tokens_computed: int = 0
    graph_replays: int = 0

    def count(self, tokens: int, prompt_tokens: int) -> None:
        """Count one forward of so many tokens, some of them of prompts."""
        self.forwards += 1
        self.prompt_tokens_computed += prompt_tokens
        self.output_tokens_computed += tokens - prompt_tokens


class Running(Protocol):
    """A step that was launched."""

    def wait(self) -> StepOutput:
        """The step's result; call it once. Raises XpydError when the step failed: the engine then
        fails its requests and goes on."""
        ...


@dataclass(frozen=True)
class Finished:
    """A step that was over when `launch` returned."""

    output: StepOutput

    def wait(self) -> StepOutput:
        """See Running."""
        return self.output


def no_layer_done(_layer: int) -> None:
    """A callback for `launch` where nothing is done when a layer's KV is there: none is sent."""


class Executor(Protocol):
    """Runs steps on the model, in the order in which they are launched. One thread calls it."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the paged KV cache (the minimum over ranks)."""
        ...

    @property
    def depth(self) -> int:
        """How many steps may be under way at once: 1, 2 where a device computes one while the
        engine prepares the next, or as many as a pipeline has stages. They are waited for in
        order."""
        ...

    @property
    def draws_ahead(self) -> bool:
        """Whether a step may take a token that the one before it still draws (DRAWN_BEFORE). If
        not, and the depth is more than 1, steps go through a pipeline of `depth` stages, and a
        sequence is in no step behind the one that draws its token before that is known."""
        ...

    @property
    def counters(self) -> StepCounters: ...

    def launch(self, step: StepInput, layer_done: Callable[[int], None]) -> Running:
        """Start one forward and the sampling after it.

        Before: every block named is owned by its sequence, until the step is over. `layer_done(i)`
        is called when the KV of layer i of all scheduled tokens is in the cache, or will be before
        anything that is enqueued on the device after the call. Raises XpydError like Running.wait.
        """
        ...

    def await_oldest(self, awake: int) -> bool:
        """Wait until the oldest step not waited for is over: True. False where descriptor `awake`
        was readable before, so that a step may be launched behind those under way. Called while
        there are some, and fewer than `depth`. True at once where a step launched sooner would not
        end sooner. Raises what the step's `wait` would raise."""
        ...

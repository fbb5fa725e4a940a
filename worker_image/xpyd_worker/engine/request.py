"""Values between the server and the engine's thread: requests, outputs, counters, configuration.

Pure and frozen. The server validates and tokenizes, the engine trusts these values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Literal, cast

import msgspec

from xpyd_core.distribution import Distribution
from xpyd_core.request_id import Address, TransferKey
from xpyd_worker.engine.speculation import SpeculativeConfig
from xpyd_worker.engine.step_times import LatencyGoal

if TYPE_CHECKING:
    # Its library is needed only where a request has a grammar.
    from xpyd_worker.grammar.matcher import Matcher

FinishReason = Literal["stop", "length", "abort", "error"]
Policy = Literal["fcfs", "priority"]
POLICIES: tuple[Policy, ...] = ("fcfs", "priority")
TransferState = Literal["none", "pending", "granted"]
# busy: the queue is full, try another instance. too_long: it can never fit here. kv_failed: its KV
# did not arrive and recomputing is off. replica_lost: another replica can serve it. internal: the
# step or the engine failed.
ErrorKind = Literal["", "busy", "too_long", "kv_failed", "grammar", "replica_lost", "internal"]


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn.

    `max_tokens` and `min_tokens` count output tokens, those of `continue_from` included.
    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off. `seed` is always set (the server
    draws one for a request without). `stop_token_ids` end a choice and stay in its output.
    `logprobs`: how many top alternatives per token, None for none at all (0: the token's own only).
    `prompt_logprobs`: the same for the prompt's tokens; such a request skips the prefix cache.
    Stop strings are not here: the server finds them in the text and aborts the choice.

    `min_p` 0, `repetition_penalty` 1 and the other penalties 0 are off; the first penalty looks at
    prompt and output, the others at the output alone. `logit_bias`: (token id, what is added), each
    id once. `allowed_token_ids`: none but these; empty for all. `bad_words`: sequences of token ids
    whose last token is not drawn where the output ends in those before it.
    """

    max_tokens: int
    seed: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def counts_tokens(self) -> bool:
        """Whether a penalty is on."""
        penalties = (self.presence_penalty, self.frequency_penalty)
        return self.repetition_penalty != 1.0 or any(penalties)

    @cached_property
    def reads_tokens(self) -> bool:
        """Whether a draw depends on which tokens came before it, not only on the logits."""
        return self.counts_tokens or bool(self.bad_words)

    @cached_property
    def changes_logits(self) -> bool:
        """Whether logits are changed before the draw (but for min_tokens)."""
        return self.reads_tokens or bool(self.logit_bias or self.allowed_token_ids)


@dataclass(frozen=True)
class SendTo:
    """Where P sends KV: that of this prompt goes to the D whose KV address is in the request id."""

    key: TransferKey
    peer: Address
    # The prompt's own tokens among those offered; continue_from's ids follow them.
    prompt_tokens: int
    # Whether all choices ending at once cancels the transfer (client_max_tokens was given).
    cancel_when_done: bool = False


@dataclass(frozen=True)
class ReceiveFrom:
    """Where D receives KV from: that of this prompt is on its way under `key`; D waits for it
    `wait_s` at most."""

    key: TransferKey
    wait_s: float
    # P's KV address.
    peer: Address | None = None


@dataclass(frozen=True)
class EngineRequest:
    """One prompt with `n` choices.

    `request_id` is unique within the instance. `log_id` is the id that log lines carry.
    `first_choice` is OpenAI's index of choice 0 (prompt index x n); it keys the random numbers.
    `continue_from` has the ids each choice already put out (n entries) or is empty for none.
    `replica`: the one of the instance's that its client names.
    `priority`: the lower runs first, where the engine's policy is by priority.
    `matchers`: where each choice must follow a grammar, its place in that, behind `continue_from`;
    the engine moves them on. Empty for none.
    """

    request_id: str
    log_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    first_choice: int = 0
    continue_from: tuple[tuple[int, ...], ...] = ()
    transfer: SendTo | ReceiveFrom | None = None
    # On D: why KV of this prompt will not arrive although a P computed it ("not_sent",
    # "restarted").
    kv_missing: str = ""
    cache_salt: bytes = b""
    priority: int = 0
    replica: int | None = None
    matchers: tuple[Matcher, ...] = ()


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of one token and of the `top` alternatives, best first: (token id, logprob).

    Taken from the model's logits before temperature and filters (as vLLM's raw_logprobs). `rank` is
    how many tokens of the vocabulary are at least as likely, itself included. Ranks send it as it
    is, hence a Struct.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True)
class SampledToken:
    """One drawn token; `logprob` only where the request asked for logprobs."""

    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class ChoiceOutput:
    """What one choice gained in one step, several tokens where a draft was accepted.
    `finish_reason` is set on its last output.

    `stop_token_id` is the EOS or stop token id that ended it.
    """

    choice: int
    tokens: tuple[SampledToken, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True)
class TransferReport:
    """The state of the prompt's transfer on P when its last output is made, the D that took it, and
    of none the reason."""

    state: TransferState
    decode_incarnation: str = ""
    reason: str = ""


@dataclass(frozen=True)
class EngineOutput:
    """What one request gained in one step; the server gets them in order.

    `finished` is true on the last. `prompt_logprobs` (one entry per prompt token, None for the
    first) is in the first output of a request that asked for it. `cached_tokens` counts prompt
    tokens from the local prefix cache, `received_tokens` those whose KV P sent. `started_s`:
    when the request first left the queue, on the engine's clock (time.monotonic); None before.
    `kv` is what became of the KV that D was to get, also where that is the `error`: see
    xpyd_core.kv_outcome.header_of; '' where none was to come.
    `error` is set, and `error_kind` with it, where choices ended by `error`.
    """

    request_id: str
    choices: tuple[ChoiceOutput, ...] = ()
    finished: bool = False
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    cached_tokens: int = 0
    received_tokens: int = 0
    transfer: TransferReport | None = None
    kv: str = ""
    started_s: float | None = None
    error: str = ""
    error_kind: ErrorKind = ""


# From a small model's decode step to a full chunk of a large one on a CPU.
STEP_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
STEP_TOKENS = tuple(float(2**power) for power in range(16))
STEP_SEQUENCES = tuple(float(2**power) for power in range(12))


@dataclass
class StepMetrics:
    """Distributions over the steps that succeeded. `seconds`: the forward and the sampling, without
    scheduling and, in mode put, without waiting for D; of a step behind another, from when that was
    over."""

    seconds: Distribution = field(default_factory=lambda: Distribution(STEP_SECONDS))
    tokens: Distribution = field(default_factory=lambda: Distribution(STEP_TOKENS))
    sequences: Distribution = field(default_factory=lambda: Distribution(STEP_SEQUENCES))


@dataclass
class EngineStats:
    """Counters and gauges of one engine, written by its thread, read by `/metrics` and heartbeats.

    Counters only grow; gauges are as of the last step. `finished` counts requests by reason,
    `running` and `waiting` are requests, `kv_leases` prompts whose KV is held for, or on its way to
    or from, another instance. `steps` goes on growing in a copy, too.
    """

    forwards: int = 0
    prompt_tokens_computed: int = 0
    output_tokens_computed: int = 0
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    kv_leases: int = 0
    finished: dict[str, int] = field(default_factory=dict[str, int])
    # Requests that computed a prompt here although P was to send its KV, by reason.
    kv_recomputed: dict[str, int] = field(default_factory=dict[str, int])
    # The tokens of those prompts that entered a forward.
    kv_recomputed_tokens: dict[str, int] = field(default_factory=dict[str, int])
    received_tokens: int = 0
    # Drafts that were verified, their tokens, and of these the accepted ones, also by their place
    # in the draft, from 0 on.
    spec_drafts: int = 0
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0
    spec_accepted_at: dict[int, int] = field(default_factory=dict[int, int])
    steps: StepMetrics = field(default_factory=StepMetrics)

    def count_draft(self, drafted: int, accepted: int) -> None:
        """Count a draft of so many tokens that was verified."""
        self.spec_drafts += 1
        self.spec_draft_tokens += drafted
        self.spec_accepted_tokens += accepted
        for place in range(accepted):
            self.spec_accepted_at[place] = self.spec_accepted_at.get(place, 0) + 1


def summed(stats: Iterable[EngineStats]) -> EngineStats:
    """The counters and gauges of all, as those of one engine."""
    total = EngineStats()
    for one in stats:
        for name in (each.name for each in fields(EngineStats)):
            value = getattr(one, name)
            if isinstance(value, StepMetrics):
                for each in fields(StepMetrics):
                    getattr(total.steps, each.name).add(getattr(value, each.name))
            elif isinstance(value, dict):
                counts = cast("dict[str, int]", value)
                found: dict[str, int] = getattr(total, name)
                found.update({key: found.get(key, 0) + count for key, count in counts.items()})
            else:
                setattr(total, name, getattr(total, name) + value)
    return total


@dataclass(frozen=True)
class SchedulerConfig:
    """Bounds and policy of one engine's scheduler, checked when made.

    `max_num_seqs` is how many sequences run at once, `max_num_batched_tokens` a step's budget,
    `max_waiting` how many may queue. With `recompute_without_kv` False a request whose KV did not
    arrive fails instead. A sequence gets at most `long_prefill_token_threshold` new tokens in a
    step (0: the budget alone bounds it). Under `fcfs` requests rank by arrival, under `priority` by
    their own number first, lower before higher. `speculative`: how tokens are drafted; None: not at
    all. With `latency_goal` `itl` a step has no more of prompts than its decodes can wait for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int = 4096
    recompute_without_kv: bool = True
    long_prefill_token_threshold: int = 0
    policy: Policy = "fcfs"
    speculative: SpeculativeConfig | None = None
    latency_goal: LatencyGoal = "ttft"

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise ValueError("expected 1 <= max_num_seqs <= max_num_batched_tokens")
        if self.long_prefill_token_threshold < 0:
            raise ValueError("expected 0 <= long_prefill_token_threshold")

    def chunk(self, remaining: int, budget: int) -> int:
        """How many of a sequence's `remaining` tokens go into a step that has room for `budget`."""
        return min(remaining, budget, self.long_prefill_token_threshold or remaining)

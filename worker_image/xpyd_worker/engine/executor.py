"""The seam between the engine and the model: one step in, its samples out.

On one rank the runner implements it in the engine's thread; with TP and PP it will stand for worker
processes. The engine never sees a tensor, the executor never sees a queue of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from xpyd_worker.engine.request import SampledToken, SamplingParams, TokenLogprob


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
    only grow.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(frozen=True)
class ScheduledSequence:
    """A sequence's share of one step: compute `token_ids` at positions start, start + 1, ...

    `block_ids` is its whole block table, long enough for start + len(token_ids) tokens. `samples`
    is empty until the sequence's last known token is computed; more than one when choices fork
    here.
    `prompt_tokens` is the length of its prompt, so that computed prompt tokens can be counted.
    With `prompt_logprobs`, rows of prompt positions are scored too. `known` is there only where
    `samples` are drawn under parameters that read earlier tokens: the executor may not have seen
    those whose KV was found or received.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    sampling: SamplingParams
    prompt_tokens: int
    samples: tuple[SampleSpec, ...] = ()
    # EOS and stop ids are masked where fewer than min_tokens are out.
    eos_token_ids: tuple[int, ...] = ()
    log_id: str = ""
    known: KnownTokens | None = None


@dataclass(frozen=True)
class StepInput:
    """One flat batch: the sequences' tokens one behind the other, no padding.

    `block_copies` (source, destination) are done before the forward.
    """

    step: int
    sequences: tuple[ScheduledSequence, ...]
    block_copies: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens that enter the forward."""
        return sum(len(s.token_ids) for s in self.sequences)


@dataclass(frozen=True)
class StepOutput:
    """Samples by sequence id, in the order of its SampleSpecs.

    `prompt_logprobs` by sequence id: for each token in `token_ids` that lies in the prompt and is
    not its first token, its log probability given what stands before it (so chunks concatenate).
    """

    samples: dict[int, tuple[SampledToken, ...]]
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]]


class Executor(Protocol):
    """Runs steps on the model. One thread calls it."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the paged KV cache (the minimum over ranks)."""
        ...

    def execute(self, step: StepInput, layer_done: Callable[[int], None]) -> StepOutput:
        """Run one forward and sample.

        Before: every block named is owned by its sequence. `layer_done(i)` is called when the KV of
        layer i of all scheduled tokens stands in the cache. Raises XpydError when the step failed;
        the engine then fails the step's requests and goes on.
        """
        ...

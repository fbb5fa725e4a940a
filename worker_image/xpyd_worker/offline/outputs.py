"""What `LLM.generate` returns, under vLLM's names; made of a finished generation. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xpyd_worker.engine.request import TokenLogprob
from xpyd_worker.runner.tokenizer import Tokenizer
from xpyd_worker.server.openai.generation import ChoiceDelta


@dataclass(frozen=True)
class Logprob:
    """Log probability of one token, from the logits before temperature and filters.

    `rank` counts from 1: how many tokens are at least as likely, itself included.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One choice. `finish_reason`: `stop` or `length`; `stop_reason`: the stop string or stop
    token id that ended it, None for EOS. The logprobs are None where none were asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: tuple[dict[int, Logprob], ...] | None
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True)
class RequestOutput:
    """One prompt and its choices. `prompt` is None where token ids were given.

    `prompt_logprobs` has an entry per prompt token, None for the first. `num_cached_tokens`: prompt
    tokens whose KV was in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int


def completion_output(
    tokenizer: Tokenizer, choice: ChoiceDelta, *, with_logprobs: bool
) -> CompletionOutput:
    """The choice from all that it gained."""
    entries = choice.logprobs if with_logprobs else None
    return CompletionOutput(
        index=choice.index,
        text=choice.text,
        token_ids=tuple(choice.token_ids),
        cumulative_logprob=None if entries is None else sum(one.logprob for one in entries),
        logprobs=None if entries is None else tuple(_alternatives(tokenizer, e) for e in entries),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )


def prompt_alternatives(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob | None]
) -> tuple[dict[int, Logprob] | None, ...]:
    """`prompt_logprobs` of a RequestOutput."""
    return tuple(None if one is None else _alternatives(tokenizer, one) for one in entries)


def _alternatives(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[int, Logprob]:
    """The token itself first, then the best ones in order."""
    found = {entry.token_id: (entry.logprob, entry.rank)}
    for rank, (token_id, logprob) in enumerate(entry.top, start=1):
        found.setdefault(token_id, (logprob, rank))
    return {
        token_id: Logprob(logprob, rank, tokenizer.token_text(token_id))
        for token_id, (logprob, rank) in found.items()
    }

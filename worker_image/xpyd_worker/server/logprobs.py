"""Log probabilities in the two shapes that OpenAI's endpoints give them. Pure.

/v1/completions: parallel lists over the tokens; /v1/chat/completions: one object per token, with
the token's bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from xpyd_worker.engine.request import TokenLogprob
from xpyd_worker.server.service import TextTokenizer

# JSON has no minus infinity; OpenAI's and vLLM's stand-in for a probability of 0.
_LEAST = -9999.0


def completion_logprobs(
    tokenizer: TextTokenizer, entries: Sequence[TokenLogprob | None], *, text_offset: int
) -> dict[str, Any]:
    """The `logprobs` object of a completion's choice. `text_offset`: where the first token begins.

    None stands for a token without probability, the prompt's first; use `first_token` for its text.
    """
    tokens: list[str] = []
    offsets: list[int] = []
    for entry in entries:
        text = "" if entry is None else tokenizer.token_text(entry.token_id)
        tokens.append(text)
        offsets.append(text_offset)
        text_offset += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": [None if one is None else max(one.logprob, _LEAST) for one in entries],
        "top_logprobs": [None if one is None else _top(tokenizer, one) for one in entries],
        "text_offset": offsets,
    }


def prompt_logprobs(
    tokenizer: TextTokenizer, prompt: Sequence[int], entries: Sequence[TokenLogprob | None]
) -> dict[str, Any]:
    """The part of an echo's `logprobs` object that stands for the prompt."""
    result = completion_logprobs(tokenizer, entries, text_offset=0)
    if prompt and entries and entries[0] is None:
        first = tokenizer.token_text(prompt[0])
        result["tokens"][0] = first
        result["text_offset"][1:] = [at + len(first) for at in result["text_offset"][1:]]
    return result


def prompt_logprob_maps(
    tokenizer: TextTokenizer, entries: Sequence[TokenLogprob | None], count: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: per prompt token (None for the first) a map from token ids, the
    token's own and the `count` best, to log probability, rank and text."""
    return [None if one is None else _map(tokenizer, one, count) for one in entries]


def _map(tokenizer: TextTokenizer, entry: TokenLogprob, count: int) -> dict[str, dict[str, Any]]:
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [(i, logprob, rank) for rank, (i, logprob) in enumerate(entry.top[:count], start=1)]
    return {
        str(token_id): {
            "logprob": max(logprob, _LEAST),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token_id),
        }
        for token_id, logprob, rank in ranked
    }


def _top(tokenizer: TextTokenizer, entry: TokenLogprob) -> dict[str, float]:
    pairs = (*entry.top, (entry.token_id, entry.logprob))
    return {tokenizer.token_text(i): max(logprob, _LEAST) for i, logprob in pairs}


def chat_logprobs(tokenizer: TextTokenizer, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` object of a chat's choice."""
    content = [
        {
            **_chat_token(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [_chat_token(tokenizer, i, logprob) for i, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: TextTokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": max(logprob, _LEAST),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def end_of(logprobs: dict[str, Any]) -> int:
    """The text offset behind a completion's `logprobs` object."""
    tokens, offsets = logprobs.get("tokens"), logprobs.get("text_offset")
    return offsets[-1] + len(tokens[-1]) if tokens and offsets else 0


def join_logprobs(parts: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """One `logprobs` object of several, in order: every list joined."""
    present = [part for part in parts if part]
    if not present:
        return None
    joined: dict[str, Any] = {}
    for part in present:
        for key, value in part.items():
            if isinstance(value, list):
                joined[key] = [*joined.get(key, []), *value]
            else:
                joined.setdefault(key, value)
    return joined

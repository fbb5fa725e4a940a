"""The `choices` of completions and chats, streamed and whole, with log probabilities. No HTTP.

A format turns the text deltas of a Generation into the members of one endpoint's answers;
answers.py writes them into chunks and bodies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from msgspec.structs import replace

from xpyd_worker.engine.request import TokenLogprob
from xpyd_worker.runner.tokenizer import Tokenizer
from xpyd_worker.server.openai.generation import CallDelta, ChoiceDelta, Generation
from xpyd_worker.server.openai.jobs import Job
from xpyd_worker.server.openai.params import Options

# JSON has no minus infinity; OpenAI's and vLLM's stand-in for a probability of 0.
_LEAST = -9999.0


def completion_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob | None], *, text_offset: int
) -> dict[str, Any]:
    """The `logprobs` object of a completion's choice. `text_offset`: where the first token begins.

    None is a token without probability, the prompt's first; use `first_token` for its text.
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
    tokenizer: Tokenizer, prompt: Sequence[int], entries: Sequence[TokenLogprob | None]
) -> dict[str, Any]:
    """The part of an echo's `logprobs` object that describes the prompt."""
    result = completion_logprobs(tokenizer, entries, text_offset=0)
    if prompt and entries and entries[0] is None:
        first = tokenizer.token_text(prompt[0])
        result["tokens"][0] = first
        result["text_offset"][1:] = [at + len(first) for at in result["text_offset"][1:]]
    return result


def prompt_logprob_maps(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob | None], count: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: per prompt token (None for the first) a map from token ids, the
    token's own and the `count` best, to log probability, rank and text."""
    return [None if one is None else _map(tokenizer, one, count) for one in entries]


def _map(tokenizer: Tokenizer, entry: TokenLogprob, count: int) -> dict[str, dict[str, Any]]:
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


def _top(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, float]:
    pairs = (*entry.top, (entry.token_id, entry.logprob))
    return {tokenizer.token_text(i): max(logprob, _LEAST) for i, logprob in pairs}


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` object of a chat's choice."""
    content = [
        {
            **_chat_token(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [_chat_token(tokenizer, i, logprob) for i, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
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


@dataclass(frozen=True)
class CallIds:
    """Ids of an answer's tool calls: functions of the answer's own id, so that whoever goes on with
    a stream has the same. `characters`: see ToolFamily."""

    answer_id: str
    characters: int = 24

    def of(self, choice: int, call: int) -> str:
        """The id of one call."""
        key = f"{self.answer_id}/{choice}/{call}".encode()
        digits = blake2b(key, digest_size=16).hexdigest()[: self.characters]
        return digits if self.characters < 10 else f"call_{digits}"


class ChatFormat:
    """answers.Format for chats."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, tokenizer: Tokenizer, options: Options, generation: Generation, ids: CallIds
    ) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._generation = generation
        self._ids = ids

    def opening(self) -> list[dict[str, Any]]:
        """The role of each choice; none where a stream goes on that has it already."""
        if self._options.kv.continue_from:
            return []
        return [
            {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            for index in range(self._options.n)
        ]

    def scores(self, deltas: Sequence[ChoiceDelta]) -> int:
        """See answers.Format."""
        options = self._options
        if options.logprobs is None and options.prompt_logprobs is None:
            return 0
        own, prompt = (1 + (count or 0) for count in (options.logprobs, options.prompt_logprobs))
        entries = self._generation.prompt_logprobs(0)
        return own * sum(len(delta.logprobs) for delta in deltas) + prompt * len(entries)

    def extras(self, *, continued: bool) -> dict[str, Any]:
        """What the client asked to see of the prompt: its ids, its log probabilities."""
        shown: dict[str, Any] = {}
        wanted = self._options.prompt_logprobs
        if wanted is not None:
            entries = self._generation.prompt_logprobs(0)
            shown["prompt_logprobs"] = prompt_logprob_maps(self._tokenizer, entries, wanted)
        if self._options.return_token_ids and not continued:
            shown["prompt_token_ids"] = self._generation.jobs[0].request.prompt
        return shown

    def chunk(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        """See answers.Format."""
        goes_on = bool(self._options.kv.continue_from)
        want_ids = goes_on or self._options.return_token_ids
        if delta.says_nothing and not (delta.finish_reason or delta.logprobs or want_ids):
            return None
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": self._delta(delta),
            "logprobs": chat_logprobs(self._tokenizer, delta.logprobs) if delta.logprobs else None,
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason:
            choice["stop_reason"] = delta.stop_reason
        if goes_on and delta.reasoning_tokens is not None:
            # For the router, which counts the answer where nobody else is left to do so.
            choice["reasoning_tokens"] = delta.reasoning_tokens
        if want_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def whole(self, delta: ChoiceDelta) -> dict[str, Any]:
        """See answers.Format. P's first entries come before our own logprobs."""
        logprobs = None
        if self._options.logprobs is not None:
            given = self._options.kv.first_logprobs
            own = chat_logprobs(self._tokenizer, delta.logprobs)
            logprobs = join_logprobs([given[delta.index] if given else None, own])
        choice: dict[str, Any] = {
            "index": delta.index,
            "message": self._message(delta),
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._options.kv.from_router and (delta.reasoning or delta.calls):
            # A message cannot say that a call goes on.
            choice["delta"] = self._delta(delta)
        if self._options.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _delta(self, delta: ChoiceDelta) -> dict[str, Any]:
        if delta.says_nothing:
            return {} if delta.finish_reason else {"content": ""}
        said = _reasoning(delta)
        if delta.text:
            said["content"] = delta.text
        if delta.calls:
            said["tool_calls"] = [
                {"index": call.index, **self._call(delta.index, call)} for call in delta.calls
            ]
        return said

    def _message(self, delta: ChoiceDelta) -> dict[str, Any]:
        has_more = delta.reasoning or delta.calls
        content = None if has_more and not delta.text else delta.text
        message = {"role": "assistant", "content": content, "refusal": None, **_reasoning(delta)}
        if delta.calls:
            message["tool_calls"] = [self._call(delta.index, call) for call in delta.calls]
        return message

    def _call(self, choice: int, call: CallDelta) -> dict[str, Any]:
        """A call from its beginning on, or only more of its arguments."""
        if not call.name:
            return {"function": {"arguments": call.arguments}}
        return {
            "id": self._ids.of(choice, call.index),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }


def _reasoning(delta: ChoiceDelta) -> dict[str, Any]:
    """By the name that most clients know, and by vLLM's newer one."""
    if not delta.reasoning:
        return {}
    return {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}


class CompletionFormat:
    """answers.Format for text completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer, options: Options, generation: Generation) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._generation = generation
        self._text_offset: dict[int, int] = {}  # of choices that have begun to stream
        self._prompt_maps: dict[int, list[Any]] = {}  # of prompts

    def opening(self) -> list[dict[str, Any]]:
        """No opening chunk: text begins at once."""
        return []

    def scores(self, deltas: Sequence[ChoiceDelta]) -> int:
        """See answers.Format. With echo the prompt's are in each choice's first chunk."""
        options = self._options
        if options.logprobs is None and options.prompt_logprobs is None:
            return 0
        own, prompts = (1 + (count or 0) for count in (options.logprobs, options.prompt_logprobs))
        new = [delta.index for delta in deltas if delta.index not in self._text_offset]
        return own * sum(len(delta.logprobs) for delta in deltas) + max(own, prompts) * sum(
            len(self._generation.prompt_logprobs(index)) for index in new
        )

    def extras(self, *, continued: bool) -> dict[str, Any]:
        """No extra members."""
        return {}

    def chunk(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        """See answers.Format. With echo the prompt is in each choice's first chunk."""
        options, continued = self._options, bool(self._options.kv.continue_from)
        first = delta.index not in self._text_offset
        head = self._echo(delta.index) if first else ""
        logprobs = self._chunk_logprobs(delta, first=first)
        silent = not (head or delta.text or delta.finish_reason or logprobs)
        if silent and not (continued or options.return_token_ids):
            return None
        choice = self._choice(delta, head + delta.text, logprobs)
        if continued or options.return_token_ids:
            choice["token_ids"] = delta.token_ids
        if options.return_token_ids and first and not self._has_begun(delta.index):
            choice["prompt_token_ids"] = self._job(delta.index).request.prompt
        return choice

    def whole(self, delta: ChoiceDelta) -> dict[str, Any]:
        """See answers.Format. P's first entries come before our own logprobs."""
        logprobs = None
        if self._options.logprobs is not None:
            given = self._options.kv.first_logprobs
            parts = [
                self._prompt_logprobs(delta.index),
                given[delta.index] if given else None,
            ]
            head = join_logprobs(parts)
            start = 0 if given else self._sent_characters(delta.index)
            own = self._own(delta.logprobs, end_of(head) if head else start)
            logprobs = join_logprobs([head, own])
        choice = self._choice(delta, self._echo(delta.index) + delta.text, logprobs)
        wanted = self._options.prompt_logprobs
        if wanted is not None:
            choice["prompt_logprobs"] = self._maps(delta.index // self._options.n, wanted)
        if self._options.return_token_ids:
            choice["token_ids"] = delta.token_ids
            choice["prompt_token_ids"] = self._job(delta.index).request.prompt
        return choice

    def _maps(self, prompt: int, wanted: int) -> list[Any]:
        """vLLM's prompt_logprobs; all choices of a prompt have the same."""
        if prompt not in self._prompt_maps:
            entries = self._generation.prompt_logprobs(prompt * self._options.n)
            self._prompt_maps[prompt] = prompt_logprob_maps(self._tokenizer, entries, wanted)
        return self._prompt_maps[prompt]

    def _choice(
        self, delta: ChoiceDelta, text: str, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {
            "index": delta.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _job(self, choice_index: int) -> Job:
        return self._generation.jobs[choice_index // self._options.n]

    def _echo(self, choice_index: int) -> str:
        return self._job(choice_index).echo_text or ""

    def _prompt_logprobs(self, choice_index: int) -> dict[str, Any] | None:
        """The log probabilities of the text that echo puts in front."""
        entries = self._generation.prompt_logprobs(choice_index)
        job, wanted = self._job(choice_index), self._options.logprobs
        if not entries or job.echo_text is None or wanted is None:
            return None
        # The field prompt_logprobs may have asked for more alternatives.
        entries = [one and replace(one, top=one.top[:wanted]) for one in entries]
        return prompt_logprobs(self._tokenizer, job.request.prompt, entries)

    def _own(self, entries: Sequence[TokenLogprob], text_offset: int) -> dict[str, Any]:
        return completion_logprobs(self._tokenizer, entries, text_offset=text_offset)

    def _chunk_logprobs(self, delta: ChoiceDelta, *, first: bool) -> dict[str, Any] | None:
        wanted = self._options.logprobs is not None
        head: dict[str, Any] | None = None
        if first:
            head = self._prompt_logprobs(delta.index) if wanted else None
            offset = end_of(head) if head else self._sent_characters(delta.index)
        else:
            offset = self._text_offset[delta.index]
        own = self._own(delta.logprobs, offset) if delta.logprobs else None
        self._text_offset[delta.index] = end_of(own) if own else offset
        return join_logprobs([head, own]) if wanted else None

    def _has_begun(self, choice_index: int) -> bool:
        """Whether the client has tokens of the choice, from elsewhere."""
        given = self._options.kv.continue_from
        return bool(given and given[choice_index])

    def _sent_characters(self, choice_index: int) -> int:
        """Characters of the tokens that the client has already."""
        job = self._job(choice_index)
        if not job.request.continue_from:
            return len(job.echo_text or "")
        j = choice_index % self._options.n
        ids = job.request.continue_from[j][: job.emit_from[j]]
        return sum(len(self._tokenizer.token_text(i)) for i in ids)

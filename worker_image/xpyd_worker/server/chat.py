"""The `choices` of /v1/chat/completions, streamed and whole. No HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xpyd_worker.server.generation import ChoiceDelta, Generation
from xpyd_worker.server.logprobs import chat_logprobs, join_logprobs, prompt_logprob_maps
from xpyd_worker.server.openai_types import Options
from xpyd_worker.server.service import TextTokenizer


class ChatFormat:
    """answers.Format for chats."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: TextTokenizer, options: Options, generation: Generation) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._generation = generation

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
        want_ids = bool(self._options.kv.continue_from) or self._options.return_token_ids
        if not (delta.text or delta.finish_reason or delta.logprobs or want_ids):
            return None
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": {"content": delta.text} if delta.text or not delta.finish_reason else {},
            "logprobs": chat_logprobs(self._tokenizer, delta.logprobs) if delta.logprobs else None,
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason:
            choice["stop_reason"] = delta.stop_reason
        if want_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def whole(self, delta: ChoiceDelta) -> dict[str, Any]:
        """See answers.Format. P's first entries stand in front of our own logprobs."""
        logprobs = None
        if self._options.logprobs is not None:
            given = self._options.kv.first_logprobs
            own = chat_logprobs(self._tokenizer, delta.logprobs)
            logprobs = join_logprobs([given[delta.index] if given else None, own])
        choice: dict[str, Any] = {
            "index": delta.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._options.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

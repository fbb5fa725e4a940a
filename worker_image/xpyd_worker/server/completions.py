"""The `choices` of /v1/completions, streamed and whole. No HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from xpyd_worker.engine.request import TokenLogprob
from xpyd_worker.server.generation import ChoiceDelta, Generation
from xpyd_worker.server.jobs import Job
from xpyd_worker.server.logprobs import (
    completion_logprobs,
    end_of,
    join_logprobs,
    prompt_logprob_maps,
    prompt_logprobs,
)
from xpyd_worker.server.openai_types import Options
from xpyd_worker.server.service import TextTokenizer


class CompletionFormat:
    """answers.Format for text completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, tokenizer: TextTokenizer, options: Options, generation: Generation) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._generation = generation
        self._text_offset: dict[int, int] = {}  # of choices that have begun to stream
        self._prompt_maps: dict[int, list[Any]] = {}  # of prompts

    def opening(self) -> list[dict[str, Any]]:
        """None: text begins at once."""
        return []

    def scores(self, deltas: Sequence[ChoiceDelta]) -> int:
        """See answers.Format. With echo the prompt's stand in each choice's first chunk."""
        options = self._options
        if options.logprobs is None and options.prompt_logprobs is None:
            return 0
        own, prompts = (1 + (count or 0) for count in (options.logprobs, options.prompt_logprobs))
        new = [delta.index for delta in deltas if delta.index not in self._text_offset]
        return own * sum(len(delta.logprobs) for delta in deltas) + max(own, prompts) * sum(
            len(self._generation.prompt_logprobs(index)) for index in new
        )

    def extras(self, *, continued: bool) -> dict[str, Any]:
        """None."""
        return {}

    def chunk(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        """See answers.Format. With echo the prompt stands in each choice's first chunk."""
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
        """See answers.Format. P's first entries stand in front of our own logprobs."""
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
        """Of the text that echo puts in front."""
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

"""Answers of both endpoints: ids, usage, server-sent events. Bytes out, no sockets.

A format (formats.py) turns deltas into the `choices` of one endpoint; this module writes chunks,
the last usage chunk, errors inside a stream and [DONE].
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import orjson

from xpyd_core.blocks import prompt_digest
from xpyd_core.errors import ApiError
from xpyd_worker.server.openai.generation import ChoiceDelta, Generation, Usage
from xpyd_worker.server.openai.params import Options
from xpyd_worker.server.service import TextThreads


@dataclass(frozen=True)
class AnswerId:
    """Head of every chunk and body. The id holds neither the request's uuid nor an address."""

    id: str
    created: int
    model: str


def answer_id(prefix: str, options: Options, model: str, *, alone: str | None) -> AnswerId:
    """The router's id and time where it gave them (a stream goes on under them), else our own.

    `alone`: the caller's own id, as vLLM does; our router puts one of its own in its place.
    """
    own = f"{prefix}-{alone or os.urandom(16).hex()}"
    created = options.kv.created
    return AnswerId(
        options.kv.response_id or own, int(time.time()) if created is None else created, model
    )


# Writing one takes about 2 us; a hop to a thread is worth more only above that many.
INLINE_SCORES = 1024


class Format(Protocol):
    """Choices of one endpoint. One object serves one HTTP request, one call at a time, on any
    thread."""

    @property
    def whole_object(self) -> str:
        """`object` of a whole answer."""
        ...

    @property
    def chunk_object(self) -> str:
        """`object` of a streamed chunk."""
        ...

    def opening(self) -> list[dict[str, Any]]:
        """Choices of the chunks before the first token; may be none."""
        ...

    def chunk(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        """The choice of one streamed chunk; None where it would say nothing."""
        ...

    def whole(self, delta: ChoiceDelta) -> dict[str, Any]:
        """The choice of a whole answer from all that it gained."""
        ...

    def scores(self, deltas: Sequence[ChoiceDelta]) -> int:
        """How many log probabilities are in what `chunk`, or `whole` with `extras`, will give for
        these: they are the work."""
        ...

    def extras(self, *, continued: bool) -> dict[str, Any]:
        """Members besides `choices` in a whole answer or the first chunk; `continued`:
        of a stream whose beginning the client has."""
        ...


def collect(into: dict[int, ChoiceDelta], deltas: Sequence[ChoiceDelta]) -> None:
    """Add deltas to what their choices gained before."""
    for delta in deltas:
        known = into.setdefault(delta.index, delta)
        if known is delta:
            continue
        known.text += delta.text
        known.reasoning += delta.reasoning
        for call in delta.calls:
            known.add_call(call)
        known.token_ids += delta.token_ids
        known.logprobs += delta.logprobs
        known.finish_reason = delta.finish_reason
        known.stop_reason = delta.stop_reason


def usage_json(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage` object."""
    found: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return found


def prefill_params(generation: Generation) -> dict[str, Any]:
    """P's `kv_transfer_params`: what D needs to know of each prompt's transfer."""
    reports = generation.reports
    incarnations = [report.decode_incarnation for report in reports if report.decode_incarnation]
    return {
        "transfer": [report.state for report in reports],
        "reason": [report.reason for report in reports],
        "decode_incarnation": incarnations[-1] if incarnations else "",
        "prompt_digest": [prompt_digest(job.request.prompt) for job in generation.jobs],
    }


_DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


async def events(
    generation: Generation,
    steps: AsyncIterator[list[ChoiceDelta]],
    first: list[ChoiceDelta],
    *,
    format_: Format,
    head: AnswerId,
    options: Options,
    threads: TextThreads,
) -> AsyncIterator[bytes]:
    """The events of a stream. `first` was taken from `steps` already; `threads` write steps that
    have much to show.

    An engine's error becomes an error event and ends the stream without [DONE].
    """
    chunks = _Chunks(generation, format_, head, options)

    async def text_of(deltas: list[ChoiceDelta]) -> bytes:
        write = partial(chunks.of, deltas)
        is_short = format_.scores(deltas) <= INLINE_SCORES
        return write() if is_short else await threads.finish(write)

    try:
        yield b"".join(map(chunks.make, format_.opening())) + await text_of(first)
        async for deltas in steps:
            text = await text_of(deltas)
            if text:
                yield text
    except ApiError as error:
        yield b"data: " + error.body() + b"\n\n"
        return
    if options.include_usage:
        yield chunks.usage()
    yield _DONE


class _Chunks:
    """Chunks of one stream; the first carries the format's extras."""

    def __init__(
        self, generation: Generation, format_: Format, head: AnswerId, options: Options
    ) -> None:
        self._generation = generation
        self._format = format_
        self._options = options
        self._head: dict[str, Any] = {
            "id": head.id,
            "object": format_.chunk_object,
            "created": head.created,
            "model": head.model,
        }
        self._extras = format_.extras(continued=any(options.kv.continue_from))

    def make(self, choice: dict[str, Any]) -> bytes:
        """One chunk."""
        extras, self._extras = self._extras, {}
        return event({**self._head, "choices": [choice], **extras, **self._tail()})

    def _tail(self) -> dict[str, Any]:
        if not self._options.include_usage:
            return {}
        # OpenAI sends "usage": null in every chunk but the last when usage was asked for.
        running = self._options.running_usage
        return {"usage": usage_json(self._generation.usage) if running else None}

    def of(self, deltas: list[ChoiceDelta]) -> bytes:
        """The chunks of one step."""
        choices = map(self._format.chunk, deltas)
        return b"".join(self.make(choice) for choice in choices if choice is not None)

    def usage(self) -> bytes:
        """The chunk before [DONE]."""
        return event({**self._head, "choices": [], "usage": usage_json(self._generation.usage)})

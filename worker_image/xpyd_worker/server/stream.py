"""Server-sent events of one answer: chunks, errors, usage, [DONE]. Bytes out, no sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import orjson

from xpyd_core.errors import ApiError
from xpyd_worker.server.answers import INLINE_SCORES, AnswerId, Format, usage_json
from xpyd_worker.server.generation import ChoiceDelta, Generation
from xpyd_worker.server.openai_types import Options
from xpyd_worker.server.text_threads import TextThreads

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

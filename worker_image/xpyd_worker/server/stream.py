"""Server-sent events of one answer: chunks, errors, usage, [DONE]. Bytes out, no sockets."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import orjson

from xpyd_core.errors import ApiError
from xpyd_worker.server.answers import AnswerId, Format, usage_json
from xpyd_worker.server.generation import ChoiceDelta, Generation

_log = logging.getLogger(__name__)
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
    include_usage: bool,
) -> AsyncIterator[bytes]:
    """The events of a stream. `first` was taken from `steps` already.

    An engine's error becomes an error event and ends the stream without [DONE].
    """
    chunks = _Chunks(format_, head, include_usage=include_usage)
    try:
        yield b"".join([*map(chunks.make, format_.opening()), *chunks.of(first)])
        async for deltas in steps:
            text = b"".join(chunks.of(deltas))
            if text:
                yield text
    except ApiError as error:
        yield b"data: " + error.body() + b"\n\n"
        return
    if include_usage:
        yield chunks.usage(generation)
    yield _DONE


class _Chunks:
    """Chunks of one stream; the first carries the format's extras."""

    def __init__(self, format_: Format, head: AnswerId, *, include_usage: bool) -> None:
        self._format = format_
        self._head: dict[str, Any] = {
            "id": head.id,
            "object": format_.chunk_object,
            "created": head.created,
            "model": head.model,
        }
        # OpenAI sends "usage": null in every chunk but the last when usage was asked for.
        self._tail: dict[str, Any] = {"usage": None} if include_usage else {}
        self._extras = format_.extras()

    def make(self, choice: dict[str, Any]) -> bytes:
        """One chunk."""
        extras, self._extras = self._extras, {}
        return event({**self._head, "choices": [choice], **extras, **self._tail})

    def of(self, deltas: list[ChoiceDelta]) -> list[bytes]:
        """The chunks of one step."""
        choices = map(self._format.chunk, deltas)
        return [self.make(choice) for choice in choices if choice is not None]

    def usage(self, generation: Generation) -> bytes:
        """The chunk before [DONE]."""
        return event({**self._head, "choices": [], "usage": usage_json(generation.usage)})

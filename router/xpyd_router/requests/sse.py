"""Server-sent events: bytes in any cut -> whole events. Pure, bounded."""

from __future__ import annotations

from typing import Any

import orjson

from xpyd_core.errors import ProtocolError

DONE = b"data: [DONE]\n\n"
MAX_EVENT_BYTES = 16 * 1024 * 1024


class EventSplitter:
    """Collects bytes until an event is whole (a blank line ends it)."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = b""

    @property
    def is_empty(self) -> bool:
        """Nothing of an event is kept: what comes now begins one."""
        return not self._rest

    def push(self, data: bytes) -> list[bytes]:
        """The events that `data` completes, each ending in one blank line (`\\n\\n`).

        Raises ProtocolError when one grows past the bound.
        """
        rest = self._rest + data if self._rest else data
        if rest.find(b"\r") >= 0:  # for bytes, `in` makes an exception first, and drops it
            # A cut may part \r from \n: keep it back until its partner is here.
            keep = b"\r" if rest.endswith(b"\r") else b""
            rest = rest[: len(rest) - len(keep)].replace(b"\r\n", b"\n") + keep
        events = rest.split(b"\n\n")
        self._rest = events.pop()
        if len(self._rest) > self._max_event_bytes:
            raise ProtocolError(f"a stream event is longer than {self._max_event_bytes} bytes")
        return [event + b"\n\n" for event in events if event.strip()]


def event_data(event: bytes) -> bytes:
    """The payload of an event: its `data:` lines joined; empty for a comment."""
    if event.startswith(b"data: ") and event.count(b"\n") == 2:
        return event[6:-2]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line[:5] == b"data:"]
    return b"\n".join(lines)


def encode_event(payload: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """One event with `payload` as JSON."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"

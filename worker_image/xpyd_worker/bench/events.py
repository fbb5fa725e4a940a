"""The bytes of one streamed HTTP answer as events. Sans I/O.

Enough of HTTP/1.1 for an answer to one request on a connection of its own: a status, headers, a
body that is chunked, of a given length or up to the connection's end.
"""

from __future__ import annotations

_MAX_HEAD_BYTES = 64 * 1024


class BadAnswer(Exception):
    """No HTTP answer, or another one than a stream of events."""


class EventParser:
    """`feed` bytes as they come, get the data of the events that are complete."""

    def __init__(self, *, events: bool = True) -> None:
        """Without `events` the body is kept as it is, like that of any status but 200."""
        self._events = events
        self.status = 0
        """0 until the head has come."""
        self.ended = False
        """The body is complete. Without a length the connection's end says so."""
        self._input = bytearray()
        self._body = bytearray()
        self._chunked = False
        self._left: int | None = None  # of the chunk, or of the body

    def feed(self, data: bytes) -> list[bytes]:
        """The `data:` of each event that is now complete. BadAnswer."""
        self._input += data
        if self.status == 0 and not self._read_head():
            return []
        while self._take():
            pass
        if self.status != 200 or not self._events:
            return []
        *lines, rest = self._body.split(b"\n")
        self._body = bytearray(rest)
        return [bytes(line[5:].strip()) for line in lines if line.startswith(b"data:")]

    @property
    def text(self) -> str:
        """The body of an answer that is no stream of events."""
        return self._body.decode(errors="replace")

    def _read_head(self) -> bool:
        end = self._input.find(b"\r\n\r\n")
        if end < 0:
            if len(self._input) > _MAX_HEAD_BYTES:
                raise BadAnswer("the answer's head does not end")
            return False
        first, *rest = bytes(self._input[:end]).split(b"\r\n")
        del self._input[: end + 4]
        words = first.split(b" ", 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise BadAnswer(f"no HTTP answer: {first[:40]!r}")
        self.status = int(words[1])
        headers = {
            name.strip().lower(): value.strip().lower()
            for name, _, value in (line.partition(b":") for line in rest)
        }
        self._chunked = headers.get(b"transfer-encoding") == b"chunked"
        if not self._chunked and headers.get(b"content-length", b"").isdigit():
            self._left = int(headers[b"content-length"])
        return True

    def _take(self) -> bool:
        """Move what has come of the body; whether there may be more to move."""
        if self.ended or not self._input:
            return False
        if self._left is None and self._chunked:
            return self._take_chunk_size()
        size = len(self._input) if self._left is None else min(self._left, len(self._input))
        self._body += self._input[:size]
        del self._input[:size]
        if self._left is not None:
            self._left -= size
            if self._left == 0:
                self.ended = not self._chunked
                self._left = None if self._chunked else 0
        return bool(self._input)

    def _take_chunk_size(self) -> bool:
        # The line's end of the chunk before stands in front of the size.
        start = 2 if self._input.startswith(b"\r\n") else 0
        end = self._input.find(b"\r\n", start)
        if end < 0:
            return False
        line = bytes(self._input[start:end]).split(b";")[0].strip()
        try:
            size = int(line, 16)
        except ValueError as error:
            raise BadAnswer(f"no chunk size: {line[:40]!r}") from error
        del self._input[: end + 2]
        self.ended = size == 0
        self._left = size or None
        return not self.ended

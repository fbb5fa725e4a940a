"""What a rank answers to steps: a ring of its own, written by it and read by the engine's process.

The output rank answers each step with what came of it; any rank, once, with why it cannot go on.
"""

from __future__ import annotations

from typing import NamedTuple

from xpyd_worker.ranks.link.ring import RingFds, RingReader, RingWriter
from xpyd_worker.ranks.loss import Failure

RESPONSE_RING_BYTES = 256 << 10
MAX_CAUSE_BYTES = 4096
"""The longest text of a cause; longer ones are cut."""
_DONE, _FAILED, _MISSES, _BROKE = b"\0", b"\1", b"\2", b"\3"
# The engine's process reads nothing else while it waits for a step.
_WRITE_S = 30.0


class Response(NamedTuple):
    """`output` of the oldest step not answered yet; or why the rank ends."""

    output: bytes = b""
    failure: Failure | None = None
    broke: int | None = None
    """The step has to be made again without a replica that is lost. The rank's last meeting."""


class Responses:
    """The engine's end of one rank's answers. The engine's thread."""

    def __init__(self, fds: RingFds) -> None:
        self._ring = RingReader(fds)

    def fileno(self) -> int:
        """Readable when there may be an answer."""
        return self._ring.fileno()

    def take(self) -> Response | None:
        """The next one, if it has come whole. RingError for what no rank writes."""
        message = self._ring.read(0)
        return None if message is None else decode_response(message)

    def close(self) -> None:
        """Unmap the memory."""
        self._ring.close()


class Answers:
    """The rank's end. The thread that runs its steps."""

    def __init__(self, fds: RingFds) -> None:
        self._ring = RingWriter(fds)

    def done(self, output: bytes) -> None:
        """What came of the oldest step that was not answered yet."""
        self._ring.write(_DONE + output, within_s=_WRITE_S)

    def broke(self, meeting: int) -> None:
        """See Response."""
        self._ring.write(_BROKE + meeting.to_bytes(8, "little"), within_s=_WRITE_S)

    def failed(self, failure: Failure) -> None:
        """Why this rank ends."""
        kind = _MISSES if failure.misses_others else _FAILED
        message = kind + failure.text.encode()[:MAX_CAUSE_BYTES]
        self._ring.write(message, within_s=_WRITE_S)


def decode_response(message: bytes) -> Response:
    """What a rank wrote."""
    if message[:1] == _DONE:
        return Response(output=message[1:])
    if message[:1] == _BROKE:
        return Response(broke=int.from_bytes(message[1:], "little"))
    text = message[1:].decode("utf-8", "replace")
    return Response(failure=Failure(text, misses_others=message[:1] == _MISSES))

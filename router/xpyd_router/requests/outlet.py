"""A streamed answer's way out: the head with the first bytes, the trace noted, then the sink.

`flow` and `relay` write through it; it knows whether anything has gone out yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xpyd_router.requests.trace import Trace
from xpyd_router.serving.sinks import Header, Sink


class Outlet:
    """See the module. `headers` are the response's; `clock` is monotonic seconds."""

    def __init__(
        self,
        sink: Sink,
        headers: Sequence[Header],
        trace: Trace,
        clock: Callable[[], float],
    ) -> None:
        self.sink = sink
        self._headers = headers
        self._trace = trace
        self._clock = clock
        self.has_begun = False
        """Something is on the client's wire: errors are events from here on."""
        self.sent_bytes = 0
        self.takes_frames = sink.write_frame is not None
        self._write_frame = sink.write_frame or sink.write

    def write(self, data: bytes) -> None:
        """Send `data`, which may be empty."""
        if not data:
            return
        if not self.has_begun:
            self.has_begun = True
            trace = self._trace
            trace.first_s = self._clock() - trace.started_s
            self.sink.start(200, self._headers)
        self.sent_bytes += len(data)
        self.sink.write(data)

    def write_frame(self, frame: bytes, size_bytes: int) -> None:
        """Send an HTTP chunk with `size_bytes` in it, where something was sent before and the sink
        has `write_frame`.
        """
        self.sent_bytes += size_bytes
        self._write_frame(frame)

    def end(self) -> None:
        """The answer is whole."""
        self.sink.end()

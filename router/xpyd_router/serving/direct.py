"""An inference request that our uvicorn protocol reads itself, and who answers it.

`http_protocol` makes one per request of the usual form; `inference` answers it, by a DirectSink.
"""

from __future__ import annotations

from typing import Protocol

from xpyd_router.requests.bodies import Endpoint
from xpyd_router.serving.sinks import DirectSink, Header


class DirectApp(Protocol):
    """What the protocol asks of an application that answers inference requests itself."""

    max_body_bytes: int

    def now_s(self) -> float:
        """Now, on the clock of `began_s`."""
        ...

    async def serve_direct(self, request: DirectRequest, sink: DirectSink) -> None:
        """Answer a request that is whole."""
        ...

    def broke_off(self, request: DirectRequest, sink: DirectSink | None) -> None:
        """A body that did not come in time is refused through `sink`; None: its client left."""
        ...


class DirectRequest:
    """A request that is served without ASGI. It stands where uvicorn has its `cycle`, with the
    names that uvicorn reads there.
    """

    __slots__ = (
        "began_s",
        "disconnected",
        "endpoint",
        "headers",
        "keep_alive",
        "parts",
        "response_complete",
        "takes_chunks",
    )

    def __init__(
        self,
        endpoint: Endpoint,
        headers: list[Header],
        began_s: float,
        *,
        keep_alive: bool,
        takes_chunks: bool,
    ) -> None:
        self.endpoint: Endpoint = endpoint
        self.headers = headers
        self.began_s = began_s
        self.keep_alive = keep_alive
        self.takes_chunks = takes_chunks
        """Else the end of the connection is the end of a stream: HTTP/1.0 has no chunks."""
        self.parts: list[bytes] = []
        self.response_complete = False
        self.disconnected = False

    @property
    def body(self) -> bytes:
        """What came of it."""
        parts = self.parts
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def message_event(self) -> DirectRequest:
        """uvicorn wakes its cycle by it: nobody waits here."""
        return self

    def set(self) -> None:
        """See message_event."""

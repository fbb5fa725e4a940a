"""Another pod of the instance, as the leader has it: its ranks are spoken to through one link."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable

from xpyd_core.errors import ProtocolError
from xpyd_worker.ranks.link.frames import Frame, Kind
from xpyd_worker.ranks.link.links import Links
from xpyd_worker.ranks.link.responses import Response, decode_response
from xpyd_worker.ranks.pods.messages import Beats, Ended, PodEnd, decode_pod, encode_pod
from xpyd_worker.ranks.start.messages import ToRank, encode
from xpyd_worker.ranks.watch.beats import Beat


class RelayedResponses:
    """See Responses; of a rank whose ring is read in its own pod."""

    def __init__(self) -> None:
        self._come: deque[bytes] = deque()
        self._counter = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Readable when there may be an answer."""
        return self._counter

    def put(self, message: bytes) -> None:
        """What the rank wrote. The links' thread."""
        self._come.append(message)
        os.eventfd_write(self._counter, 1)

    def take(self) -> Response | None:
        """The next one, if there is one."""
        if self._come:
            return decode_response(self._come.popleft())
        try:
            os.eventfd_read(self._counter)
        except BlockingIOError:
            return None
        return decode_response(self._come.popleft()) if self._come else None

    def close(self) -> None:
        """Close: nothing is received any more."""
        os.close(self._counter)


class RemotePod:
    """Pod `number`, with `ranks`. `take` gets what its ranks say, `ended` which of them are over,
    `lose` why the pod is gone; all on the links' thread."""

    def __init__(
        self,
        number: int,
        ranks: range,
        sock: socket.socket,
        links: Links,
        *,
        take: Callable[[Frame], None],
        ended: Callable[[int, int], None],
        lose: Callable[[int, str], None],
    ) -> None:
        self.number = number
        self.ranks = ranks
        self._take_frame = take
        self._ended = ended
        self._beats: tuple[Beat, ...] = tuple(Beat() for _ in ranks)
        self.responses = [RelayedResponses() for _ in ranks]
        self._link = links.add(sock, self._take, lambda reason: lose(number, reason))

    def tell(self, rank: int, message: ToRank) -> None:
        """Start-up."""
        self.post(Frame(Kind.CONTROL, rank, encode(message)))

    def post(self, frame: Frame) -> None:
        """Send the message to the rank that it names."""
        self._link.post(frame)

    def publish(self, message: bytes) -> None:
        """A step, to all its ranks."""
        self._link.post(Frame(Kind.STEP, 0, message))

    def beat(self) -> None:
        """The leader lives."""
        self._link.post(Frame(Kind.POD, 0, encode_pod(Beats())))

    def end(self, *, in_order: bool, reason: str) -> None:
        """Have it end all its processes, and itself."""
        self._link.post(Frame(Kind.POD, 0, encode_pod(PodEnd(in_order, reason))))

    def look(self) -> tuple[Beat, ...]:
        """What its ranks showed last."""
        return self._beats

    def _take(self, frame: Frame) -> None:
        if frame.kind == Kind.POD:
            self._take_own(frame)
            return
        if frame.rank not in self.ranks:
            raise ProtocolError(f"pod {self.number} speaks for rank {frame.rank}")
        if frame.kind == Kind.RESPONSE:
            self.responses[frame.rank - self.ranks.start].put(frame.body)
        else:
            self._take_frame(frame)

    def _take_own(self, frame: Frame) -> None:
        message = decode_pod(frame.body)
        if isinstance(message, Beats) and len(message.beats) == len(self.ranks):
            self._beats = message.beats
        elif isinstance(message, Ended) and message.rank in self.ranks:
            self._ended(message.rank, message.returncode)
        else:
            raise ProtocolError(f"pod {self.number} said {message!r}")

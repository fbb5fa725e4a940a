"""The ranks of one replica in another pod, as the leader has them. Their pod: pods.py."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

from xpyd_core.errors import ProtocolError
from xpyd_worker.ranks.link.frames import Frame, Kind
from xpyd_worker.ranks.link.links import TakeFrame
from xpyd_worker.ranks.link.responses import Response, decode_response
from xpyd_worker.ranks.pods.messages import (
    Beats,
    Ended,
    Load,
    PodMessage,
    Unload,
    Unloaded,
    decode_pod,
    encode_pod,
)
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


class RemoteRanks:
    """`ranks` of a replica whose first rank is number `first` of the instance, in pod `pod`. `take`
    gets what they say, `ended` which of them are over, `lose` why all are gone that were not asked
    to go; on the thread of the pods' links."""

    def __init__(
        self,
        pod: int,
        ranks: range,
        first: int,
        *,
        take: Callable[[Frame], None],
        ended: Callable[[int, int], None],
        lose: Callable[[str], None],
    ) -> None:
        self.pod = pod
        self.ranks = ranks
        self._first = first
        self._take_frame = take
        self._ended = ended
        self._lose = lose
        self._post: TakeFrame | None = None
        self._is_over = False
        self._lock = threading.RLock()
        """Nothing is handed on once `unload` has returned."""
        self._beats: tuple[Beat, ...] = tuple(Beat() for _ in ranks)
        self.responses = [RelayedResponses() for _ in ranks]

    def load(self, post: TakeFrame, message: Load) -> None:
        """Have the pod start them; `post` leads to it."""
        self._post = post
        self._say(message)

    def unload(self, *, in_order: bool, reason: str) -> None:
        """Have the pod end them. Asked again, it does nothing."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._say(Unload(in_order, reason))

    def tell(self, rank: int, message: ToRank) -> None:
        """Start-up."""
        self.post(Frame(Kind.CONTROL, rank, encode(message)))

    def post(self, frame: Frame) -> None:
        """Send the message to the rank of the replica that it names."""
        if self._post is not None:
            self._post(frame._replace(rank=self._first + frame.rank))

    def publish(self, message: bytes) -> None:
        """A step, to all of them."""
        self.post(Frame(Kind.STEP, 0, message))

    def look(self) -> tuple[Beat, ...]:
        """What they showed last."""
        return self._beats

    def _say(self, message: PodMessage) -> None:
        self.post(Frame(Kind.POD, 0, encode_pod(message)))

    # --- the pods' links' thread

    def take(self, frame: Frame) -> None:
        """What comes from the pod of them. ProtocolError for what it cannot say."""
        with self._lock:
            if self._is_over:
                return
            if frame.kind == Kind.POD:
                self._take_own(decode_pod(frame.body))
                return
            rank = frame.rank - self._first
            if rank not in self.ranks:
                raise ProtocolError(f"pod {self.pod} speaks for rank {frame.rank}")
            if frame.kind == Kind.RESPONSE:
                self.responses[rank - self.ranks.start].put(frame.body)
            else:
                self._take_frame(frame._replace(rank=rank))

    def lose(self, reason: str) -> None:
        """They are gone, and nothing more comes of them."""
        with self._lock:
            if not self._is_over:
                self._lose(reason)

    def _take_own(self, message: PodMessage) -> None:
        if isinstance(message, Beats) and len(message.beats) == len(self.ranks):
            self._beats = message.beats
        elif isinstance(message, Ended) and message.rank in self.ranks:
            self._ended(message.rank, message.returncode)
        elif isinstance(message, Unloaded):
            self._lose(message.reason)
        else:
            raise ProtocolError(f"pod {self.pod} said {message!r}")

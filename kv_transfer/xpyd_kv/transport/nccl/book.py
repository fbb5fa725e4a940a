"""All communicators of one GPU, and the one thread that makes, drives and ends them.

It exists from the first communicator on. Nothing that the I/O thread calls here waits for NCCL but
the end of a connection into whose memory messages are still coming.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from xpyd_kv.device.api import Device
from xpyd_kv.transport.nccl.api import Nccl
from xpyd_kv.transport.nccl.limits import NcclFigures, NcclLimits, communicator_bytes
from xpyd_kv.transport.nccl.pair import Frame, Pair

_log = logging.getLogger(__name__)
# Between two looks at what is under way; a group takes tens of microseconds at least.
_POLL_S = 0.0001


class Book:
    """`give_up(reason)` is called, once, when a communicator cannot be ended: whoever owns the
    process ends it, since the GPU may write into memory that was given back."""

    def __init__(
        self,
        nccl: Nccl,
        device: Device,
        limits: NcclLimits,
        *,
        give_up: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.nccl = nccl
        self.device = device
        self.limits = limits
        self.figures = NcclFigures()
        self.clock = clock
        self._give_up = give_up
        self._has_given_up = False
        self._pairs: list[Pair] = []
        self._news = threading.Condition()
        self._has_news = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def open(self, comm_id: bytes, rank: int) -> Pair | None:
        """Begin with a communicator; None when there are as many as there may be. The one that was
        idle for longest makes room."""
        with self._news:
            alive = [pair for pair in self._pairs if not (pair.reason or pair.fault)]
            if len(self._pairs) >= self.limits.max_communicators:
                idle = [pair for pair in alive if not pair.has_frames and pair.is_made]
                if len(self._pairs) == len(alive) and idle:
                    min(idle, key=lambda pair: pair.due).end("idle")
                    self._wake()
                return None
            pair = Pair(
                self.nccl,
                self.device,
                self.limits,
                comm_id=comm_id,
                rank=rank,
                now=self.clock(),
            )
            self._pairs.append(pair)
            self._count()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="xpyd-kv-nccl", daemon=True)
                self._thread.start()
            self._wake()
            return pair

    def post(self, pair: Pair, frame: Frame) -> None:
        """Send or receive a frame. NcclError when the communicator is being ended."""
        pair.post(frame, self.clock())
        with self._news:
            self._wake()

    def end(self, pair: Pair, reason: str) -> None:
        """The communicator is of no use any more."""
        pair.end(reason)
        with self._news:
            self._wake()

    def end_and_wait(self, pair: Pair) -> None:
        """The same; when this returns nothing comes into its frames' memory any more, or the
        process is given up."""
        expects = pair.has_frames
        self.end(pair, "closed")
        if expects and not pair.is_gone.wait(self.limits.abort_s + 1):
            self._say_given_up("a connection's communicator does not end")

    def close(self) -> None:
        """End all of them, and the thread."""
        with self._news:
            self._is_closed = True
            for pair in self._pairs:
                pair.end("closed")
            self._wake()
        if self._thread is not None:
            self._thread.join(self.limits.abort_s + 1)

    def _wake(self) -> None:
        self._has_news = True
        self._news.notify_all()

    def _run(self) -> None:
        while True:
            with self._news:
                self._has_news = False
                pairs = list(self._pairs)
                if self._is_closed and not pairs:
                    self._thread = None
                    return
            wants_more = False
            for pair in pairs:
                wants_more |= self._step(pair)
            self._forget(pairs)
            with self._news:
                is_over = self._is_closed and not self._pairs
                if not (self._has_news or is_over):
                    self._news.wait(_POLL_S if wants_more else self._pause_s())

    def _step(self, pair: Pair) -> bool:
        was_made = pair.is_made
        try:
            wants_more = pair.step(self.clock())
        except Exception:  # A defect: this pair ends, the thread lives.
            _log.exception("driving a communicator has failed")
            pair.fault = "internal"
            pair.end("failed")
            wants_more = True
        self.figures.made += pair.is_made and not was_made
        if pair.is_hung:
            self._say_given_up(pair.fault)
        return wants_more

    def _forget(self, pairs: list[Pair]) -> None:
        with self._news:
            for pair in pairs:
                if pair.is_gone.is_set() or pair.is_hung:
                    self._pairs.remove(pair)
                    self.figures.ended.add("hung" if pair.is_hung else pair.reason)
            self._count()

    def _pause_s(self) -> float | None:
        due = min((pair.due for pair in self._pairs), default=math.inf)
        return None if due == math.inf else max(_POLL_S, due - self.clock())

    def _count(self) -> None:
        each = communicator_bytes(self.limits.channels)
        self.figures.communicators = len(self._pairs)
        self.figures.memory_bytes = sum(each + pair.scratch_bytes for pair in self._pairs)

    def _say_given_up(self, reason: str) -> None:
        with self._news:
            if self._has_given_up:
                return
            self._has_given_up = True
        self._give_up(f"NCCL: {reason}")

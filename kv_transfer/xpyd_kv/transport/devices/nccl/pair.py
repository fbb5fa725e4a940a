"""Communicators of one GPU, and the thread that makes, drives and ends them step by step.

The I/O thread queues frames and asks how they stand; it calls nothing of NCCL. A frame is one
group. After its group comes what has to be copied out of scratch memory, then an event, on a stream
that is the pair's own: neither the default stream nor the model's. The thread exists from the first
communicator on. Nothing that the I/O thread calls here waits for NCCL but the end of a connection
into whose memory messages are still coming (ADR 0017).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xpyd_kv.memory.device import Device, DeviceError, DeviceView, Event, Stream, View
from xpyd_kv.transport.devices.nccl.library import (
    RECEIVER,
    Buffer,
    Nccl,
    NcclError,
    NcclLimits,
    NcclMetrics,
    communicator_bytes,
)

_log = logging.getLogger(__name__)


@dataclass
class Frame:
    """The messages of one frame, in order: memory of our GPU, or None for scratch memory.

    `spill`: the views that the messages without memory go to, one after another; () where nobody
    wants them, and then all of them may overwrite each other.
    """

    messages: Sequence[DeviceView | int]
    """A message's memory, or only its length."""
    spill: Sequence[View] = ()
    deadline: float = 0.0
    event: Event | None = None
    is_through: bool = False

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory that it needs."""
        lengths = [message for message in self.messages if isinstance(message, int)]
        return sum(lengths) if self.spill else max(lengths, default=0)


class Pair:
    """One rank of one communicator."""

    def __init__(
        self,
        nccl: Nccl,
        device: Device,
        limits: NcclLimits,
        *,
        comm_id: bytes,
        rank: int,
        now: float,
    ) -> None:
        self.fault = ""
        """Why nothing goes through it any more, or ''."""
        self.is_made = False
        self.is_hung = False
        self.reason = ""
        """Why it is being ended, or ''."""
        self.is_gone = threading.Event()
        """Nothing of it touches any memory any more."""
        self.scratch_bytes = 0
        self._nccl = nccl
        self._device = device
        self._limits = limits
        self._id = comm_id
        self._rank = rank
        self._make_by = now + limits.make_s
        self._last_use = now
        self._lock = threading.Lock()
        self._queue: deque[Frame] = deque()
        self._open_frames = 0
        # The driver's.
        self._stream: Stream | None = None
        self._comm: int | None = None
        self._posting: Frame | None = None
        self._under_way: deque[Frame] = deque()
        self._scratch: DeviceView | None = None
        self._abort: _Abort | None = None
        self._end_by = 0.0
        self._last_event: Event | None = None

    # --- the I/O thread

    @property
    def has_frames(self) -> bool:
        """Whether frames are not through."""
        return self._open_frames > 0

    def keep(self, now: float) -> bool:
        """Put off its end for idleness; False when it has been decided."""
        with self._lock:
            self._last_use = now
            return not (self.reason or self.fault)

    def post(self, frame: Frame, now: float) -> None:
        """NcclError when it is being ended."""
        with self._lock:
            if self.reason or self.fault:
                raise NcclError(self.fault or "the communicator has been ended")
            frame.deadline = now + self._limits.make_s * (not self.is_made) + self._limits.frame_s
            self._last_use = now
            self._open_frames += 1
            self._queue.append(frame)

    def is_through(self, frame: Frame) -> bool:
        """NcclError when it will not be."""
        if not frame.is_through and (self.fault or self.reason):
            raise NcclError(self.fault or "the communicator has been ended")
        return frame.is_through

    def end(self, reason: str) -> None:
        """No more frames; the driver does the rest."""
        with self._lock:
            self.reason = self.reason or reason

    # --- the driver's thread

    def step(self, now: float) -> bool:
        """Whether it wants the next step soon."""
        if self._abort is not None or self.is_gone.is_set():
            return self._go_on_ending(now)
        try:
            if not self.reason:
                return self._go_on(now)
        except (NcclError, DeviceError) as error:
            _log.warning("NCCL: %s", error)
            self.fault = str(error)
            self.end("failed")
        self._begin_to_end(now)
        return True

    @property
    def due(self) -> float:
        """When it will be idle for long enough to be ended."""
        return self._last_use + self._patience_s

    @property
    def _patience_s(self) -> float:
        # P first, so that it never says that bytes come through one that D has ended.
        return self._limits.idle_s * (2 if self._rank == RECEIVER else 1)

    def _go_on(self, now: float) -> bool:
        if self._comm is None:
            self._stream = self._device.stream()
            self._comm = self._nccl.init(self._id, self._rank, channels=self._limits.channels)
        if not self._nccl.is_ready(self._comm):
            self._check_time(now)
            return True
        self.is_made = True
        self._posted()
        self._take_ended()
        self._check_time(now)
        if self._posting is None and self._queue:
            self._post_next(self._comm)
        with self._lock:
            if not self._open_frames and now >= self.due:
                self.reason = self.reason or "idle"
        return self._open_frames > 0 or bool(self.reason)

    def _check_time(self, now: float) -> None:
        if not self.is_made and now >= self._make_by:
            raise NcclError("the peer has not joined the communicator in time")
        waiting = [*self._under_way, *([self._posting] if self._posting else [])]
        if waiting and now >= waiting[0].deadline:
            raise NcclError("messages were not through in time")

    def _post_next(self, comm: int) -> None:
        frame = self._queue[0]
        need = frame.scratch_bytes
        if need > self.scratch_bytes:
            if self._under_way:
                return  # It may be in use.
            self._give_scratch_back()
            self._scratch = self._device.allocate(need)
            self.scratch_bytes = need
        self._queue.popleft()
        assert self._stream is not None
        self._nccl.group(
            comm, self._buffers(frame), sends=self._rank != RECEIVER, stream=self._stream.handle
        )
        self._posting = frame

    def _buffers(self, frame: Frame) -> list[Buffer]:
        start = self._scratch.address if self._scratch is not None else 0
        offset, buffers = 0, list[Buffer]()
        for message in frame.messages:
            if isinstance(message, int):
                buffers.append(Buffer(start + offset, message))
                offset += message if frame.spill else 0
            else:
                buffers.append(Buffer(message.address, message.length))
        return buffers

    def _posted(self) -> None:
        """The group is on the stream: so is what comes after it."""
        frame, self._posting = self._posting, None
        if frame is None:
            return
        assert self._stream is not None
        if frame.spill:
            assert self._scratch is not None
            self._stream.copy(frame.spill, [self._scratch[: frame.scratch_bytes]])
        frame.event = self._stream.record()
        self._under_way.append(frame)

    def _take_ended(self) -> None:
        while self._under_way:
            event = self._under_way[0].event
            assert event is not None
            if not event.is_done():
                return
            self._under_way.popleft().is_through = True
            with self._lock:
                self._open_frames -= 1

    # --- the end

    def _begin_to_end(self, now: float) -> None:
        self._end_by = now + self._limits.abort_s
        self._abort = _Abort(self._nccl, self._comm)

    def _go_on_ending(self, now: float) -> bool:
        if self.is_gone.is_set() or self.is_hung:
            return False
        try:
            if self._abort is not None and self._abort.has_ended() and self._is_stream_empty():
                self._give_scratch_back()
                if self._stream is not None:
                    self._stream.close()
                self.is_gone.set()
                return False
        except (NcclError, DeviceError) as error:
            self._hang(str(error))
            return False
        if now >= self._end_by:
            self._hang(f"not ended {self._limits.abort_s:.0f} s after its abort")
            return False
        return True

    def _is_stream_empty(self) -> bool:
        if self._stream is None:
            return True
        if self._last_event is None:
            self._last_event = self._stream.record()
        return self._last_event.is_done()

    def _give_scratch_back(self) -> None:
        scratch, self._scratch, self.scratch_bytes = self._scratch, None, 0
        if scratch is not None:
            self._device.free(scratch)

    def _hang(self, why: str) -> None:
        self.is_hung = True
        self.fault = self.fault or why
        _log.critical("NCCL: a communicator cannot be ended (%s); the GPU may write for ever", why)


class _Abort:
    """ncclCommAbort on a thread of its own: it is known to hang."""

    def __init__(self, nccl: Nccl, comm: int | None) -> None:
        self._nccl = nccl
        self._comm = comm
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        if comm is not None:
            self._thread = threading.Thread(
                target=self._run, name="xpyd-kv-nccl-abort", daemon=True
            )
            self._thread.start()

    def has_ended(self) -> bool:
        """NcclError when it failed."""
        if self._thread is not None and self._thread.is_alive():
            return False
        if self._error is not None:
            raise NcclError(f"abort: {self._error}") from self._error
        return True

    def _run(self) -> None:
        assert self._comm is not None
        try:
            self._nccl.abort(self._comm)
        except Exception as error:  # The end of a thread: who asks raises it.
            self._error = error


# Between two looks at what is under way; a group takes tens of microseconds at least.
_POLL_S = 0.0001


class Book:
    """`give_up(reason)` is called, once, when a communicator cannot be ended: the owner of the
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
        self.metrics = NcclMetrics()
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
        self.metrics.made += pair.is_made and not was_made
        if pair.is_hung:
            self._say_given_up(pair.fault)
        return wants_more

    def _forget(self, pairs: list[Pair]) -> None:
        with self._news:
            for pair in pairs:
                if pair.is_gone.is_set() or pair.is_hung:
                    self._pairs.remove(pair)
                    self.metrics.ended.add("hung" if pair.is_hung else pair.reason)
            self._count()

    def _pause_s(self) -> float | None:
        due = min((pair.due for pair in self._pairs), default=math.inf)
        return None if due == math.inf else max(_POLL_S, due - self.clock())

    def _count(self) -> None:
        each = communicator_bytes(self.limits.channels)
        self.metrics.communicators = len(self._pairs)
        self.metrics.memory_bytes = sum(each + pair.scratch_bytes for pair in self._pairs)

    def _say_given_up(self, reason: str) -> None:
        with self._news:
            if self._has_given_up:
                return
            self._has_given_up = True
        self._give_up(f"NCCL: {reason}")

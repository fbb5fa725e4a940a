"""Communicators of one GPU, and the thread that makes, drives and ends them step by step.

The I/O thread queues frames and polls them; it makes no call of NCCL. A frame is one group. After
its group come the copies out of scratch memory, then an event, on the communicator's own stream:
neither the default stream nor the model's. The thread starts with the first communicator. No call
of the I/O thread waits for NCCL here, except the end of a connection into whose memory messages are
still coming (ADR 0017).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xpyd_kv.memory.device import Device, DeviceError, DeviceStream, DeviceView, Event, View
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
class NcclFrame:
    """The messages of one frame, in order: memory of our GPU, or None for scratch memory.

    `spill`: the views to which the messages without memory are copied, one after another; () where
    the messages are discarded and may overwrite each other.
    """

    messages: Sequence[DeviceView | int]
    """The memory of each message, or only its length."""
    spill: Sequence[View] = ()
    deadline: float = 0.0
    event: Event | None = None
    is_through: bool = False

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory that the frame needs."""
        lengths = [message for message in self.messages if isinstance(message, int)]
        return sum(lengths) if self.spill else max(lengths, default=0)


class Communicator:
    """This process' rank of one NCCL communicator."""

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
        """The reason why it moves no frame any more, or ''."""
        self.is_made = False
        self.is_hung = False
        self.reason = ""
        """The reason why it is being ended, or ''."""
        self.is_gone = threading.Event()
        """Set when NCCL touches no memory of this communicator any more."""
        self.scratch_bytes = 0
        self._nccl = nccl
        self._device = device
        self._limits = limits
        self._id = comm_id
        self._rank = rank
        self._make_by = now + limits.make_s
        self._last_use = now
        self._lock = threading.Lock()
        self._queue: deque[NcclFrame] = deque()
        self._open_frames = 0
        # The driver's.
        self._stream: DeviceStream | None = None
        self._comm: int | None = None
        self._posting: NcclFrame | None = None
        self._under_way: deque[NcclFrame] = deque()
        self._scratch: DeviceView | None = None
        self._abort: _Abort | None = None
        self._end_by = 0.0
        self._last_event: Event | None = None

    # --- the I/O thread

    @property
    def has_frames(self) -> bool:
        """Whether some frames are still under way."""
        return self._open_frames > 0

    def keep(self, now: float) -> bool:
        """Restart the idle time; False when the communicator is already being ended."""
        with self._lock:
            self._last_use = now
            return not (self.reason or self.fault)

    def post(self, frame: NcclFrame, now: float) -> None:
        """Queue a frame. NcclError when the communicator is being ended."""
        with self._lock:
            if self.reason or self.fault:
                raise NcclError(self.fault or "the communicator has been ended")
            frame.deadline = now + self._limits.make_s * (not self.is_made) + self._limits.frame_s
            self._last_use = now
            self._open_frames += 1
            self._queue.append(frame)

    def is_through(self, frame: NcclFrame) -> bool:
        """Whether the frame has moved. NcclError when it will not move."""
        if not frame.is_through and (self.fault or self.reason):
            raise NcclError(self.fault or "the communicator has been ended")
        return frame.is_through

    def end(self, reason: str) -> None:
        """Refuse frames from now on; the driver's thread aborts the communicator."""
        with self._lock:
            self.reason = self.reason or reason

    # --- the driver's thread

    def step(self, now: float) -> bool:
        """Do one step; True when the next one is due soon."""
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
        """The time at which the communicator ends for idleness."""
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

    def _buffers(self, frame: NcclFrame) -> list[Buffer]:
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
        """Enqueue the copies and the event that follow the group, which is on the stream."""
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
    """Runs ncclCommAbort on a thread of its own, because the call may hang."""

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
        """Whether the abort has returned. NcclError when it failed."""
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


class Communicators:
    """The communicators of one GPU, and the thread that drives them.

    `give_up(reason)` is called, once, when a communicator cannot be ended: the owner of the process
    ends the process, since the GPU may write into memory that was given back.
    """

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
        self._communicators: list[Communicator] = []
        self._news = threading.Condition()
        self._has_news = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def open(self, comm_id: bytes, rank: int) -> Communicator | None:
        """Begin to make a communicator; None at the limit, where the one that was idle for longest
        is ended to make room."""
        with self._news:
            alive = [one for one in self._communicators if not (one.reason or one.fault)]
            if len(self._communicators) >= self.limits.max_communicators:
                idle = [one for one in alive if not one.has_frames and one.is_made]
                if len(self._communicators) == len(alive) and idle:
                    min(idle, key=lambda one: one.due).end("idle")
                    self._wake()
                return None
            communicator = Communicator(
                self.nccl,
                self.device,
                self.limits,
                comm_id=comm_id,
                rank=rank,
                now=self.clock(),
            )
            self._communicators.append(communicator)
            self._count()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="xpyd-kv-nccl", daemon=True)
                self._thread.start()
            self._wake()
            return communicator

    def post(self, communicator: Communicator, frame: NcclFrame) -> None:
        """Send or receive a frame. NcclError when the communicator is being ended."""
        communicator.post(frame, self.clock())
        with self._news:
            self._wake()

    def end(self, communicator: Communicator, reason: str) -> None:
        """End the communicator."""
        communicator.end(reason)
        with self._news:
            self._wake()

    def end_and_wait(self, communicator: Communicator) -> None:
        """End the communicator; when this returns, NCCL writes no memory of its frames any more, or
        the process is given up."""
        expects = communicator.has_frames
        self.end(communicator, "closed")
        if expects and not communicator.is_gone.wait(self.limits.abort_s + 1):
            self._say_given_up("a connection's communicator does not end")

    def close(self) -> None:
        """End all communicators and the thread."""
        with self._news:
            self._is_closed = True
            for communicator in self._communicators:
                communicator.end("closed")
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
                communicators = list(self._communicators)
                if self._is_closed and not communicators:
                    self._thread = None
                    return
            wants_more = False
            for communicator in communicators:
                wants_more |= self._step(communicator)
            self._forget(communicators)
            with self._news:
                is_over = self._is_closed and not self._communicators
                if not (self._has_news or is_over):
                    self._news.wait(_POLL_S if wants_more else self._pause_s())

    def _step(self, communicator: Communicator) -> bool:
        was_made = communicator.is_made
        try:
            wants_more = communicator.step(self.clock())
        except Exception:  # A defect: this communicator ends, the thread lives.
            _log.exception("driving a communicator has failed")
            communicator.fault = "internal"
            communicator.end("failed")
            wants_more = True
        self.metrics.made += communicator.is_made and not was_made
        if communicator.is_hung:
            self._say_given_up(communicator.fault)
        return wants_more

    def _forget(self, communicators: list[Communicator]) -> None:
        with self._news:
            for communicator in communicators:
                if communicator.is_gone.is_set() or communicator.is_hung:
                    self._communicators.remove(communicator)
                    self.metrics.ended.add("hung" if communicator.is_hung else communicator.reason)
            self._count()

    def _pause_s(self) -> float | None:
        due = min((one.due for one in self._communicators), default=math.inf)
        return None if due == math.inf else max(_POLL_S, due - self.clock())

    def _count(self) -> None:
        each = communicator_bytes(self.limits.channels)
        self.metrics.communicators = len(self._communicators)
        self.metrics.memory_bytes = sum(each + one.scratch_bytes for one in self._communicators)

    def _say_given_up(self, reason: str) -> None:
        with self._news:
            if self._has_given_up:
                return
            self._has_given_up = True
        self._give_up(f"NCCL: {reason}")

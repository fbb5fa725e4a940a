"""DATA of a GPU's cache through sockets: pinned slabs between the device and the kernel.

P gathers a frame into a slab and sends it when that copy's event is done; D receives a frame into a
slab and scatters it from there, and tells the session when that event is done. The slabs are taken
once; where none is free, frames wait. I/O thread only; no torch.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xpyd_core.errors import UserError
from xpyd_kv.memory.device import Device, DeviceError, DeviceStream, Event, View
from xpyd_kv.transport.host.sharing import FetchTimeoutError

_log = logging.getLogger(__name__)
AHEAD = 2
"""Frames that a connection gathers before the kernel has taken them: one on its way, one next."""
MAX_HELD_CALLS = 256
"""The bytes that a peer may send behind a frame that is being scattered; then its socket is not
read."""
CLOSE_S = 5.0
"""The time for which the end of a connection waits for copies under way: they take milliseconds."""


class DeviceFailedError(OSError):
    """The GPU does not open what a peer lends, or has failed in a copy."""


@dataclass(eq=False)
class Slab:
    """A slab: one piece of pinned memory. `used_bytes` are carved, by `frames` that are not
    through."""

    memory: memoryview
    used_bytes: int = 0
    frames: int = 0


class Staging:
    """All slabs of an endpoint, and its two streams. Made and closed by the endpoint's owner."""

    def __init__(self, device: Device, *, slab_bytes: int, slabs: int) -> None:
        """UserError when there is no memory for `slabs` of `slab_bytes`."""
        if slab_bytes <= 0 or slabs < AHEAD:
            raise UserError(f"staging: {slabs} slabs of {slab_bytes} bytes; at least {AHEAD}")
        self.slab_bytes = slab_bytes
        self._device = device
        self._memory = device.allocate_pinned(slab_bytes * slabs)
        self._gather = device.stream()
        self._scatter = device.stream()
        starts = range(0, slab_bytes * slabs, slab_bytes)
        self._free = [Slab(self._memory[start : start + slab_bytes]) for start in starts]
        self._slabs = slabs

    @property
    def free_slabs(self) -> int:
        """Slabs that are free."""
        return len(self._free)

    def take(self) -> Slab | None:
        """An empty slab; None: wait."""
        return self._free.pop() if self._free else None

    def give(self, slab: Slab) -> None:
        """Take back a slab that no frame uses any more."""
        slab.used_bytes = slab.frames = 0
        self._free.append(slab)

    def gather(self, target: memoryview, sources: Sequence[View]) -> Event:
        """Begin to copy device memory into a slab."""
        return started(self._gather, [target], sources)

    def scatter(self, targets: Sequence[View], source: memoryview) -> Event:
        """Begin to copy a part of a slab to device memory."""
        return started(self._scatter, targets, [source])

    def close(self) -> None:
        """Give all back; no connection is left. Slabs of a GPU that hangs stay."""
        self._gather.close()
        self._scatter.close()
        if len(self._free) == self._slabs:
            self._device.free_pinned(self._memory)


class _Gather(NamedTuple):
    slab: Slab
    part: memoryview
    event: Event
    since_s: float


class Outward:
    """P's side of one connection: the frames at the head of its queue, in their order."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._gathers: deque[_Gather] = deque()
        self._sending: Slab | None = None
        self._starved_since: float | None = None

    @property
    def is_gathering(self) -> bool:
        """Whether a frame is on its way to a slab, or there and not asked for."""
        return bool(self._gathers)

    @property
    def since_s(self) -> float | None:
        """The time since which the next frame is awaited."""
        return self._gathers[0].since_s if self._gathers else self._starved_since

    def gather(self, frames: Sequence[Sequence[View]], now: float) -> None:
        """Begin with the next of `frames`, the views of those that come next."""
        self._starved_since = None
        for views in frames[len(self._gathers) : AHEAD]:
            slab = self._staging.take()
            if slab is None:
                self._starved_since = now
                return
            part = slab.memory[: sum(map(len, views))]
            self._gathers.append(_Gather(slab, part, self._staging.gather(part, views), now))

    def next(self) -> memoryview | None:
        """The oldest frame's bytes, once they are here."""
        if not self._gathers or not is_done(self._gathers[0].event):
            return None
        gather = self._gathers.popleft()
        self._sending = gather.slab
        return gather.part

    def sent(self) -> None:
        """Give back the slab of the frame that `next` returned: the kernel has it, or it is
        dropped."""
        slab, self._sending = self._sending, None
        if slab is not None:
            self._staging.give(slab)

    def check(self, now: float, limit_s: float) -> None:
        """FetchTimeoutError when the oldest copy takes too long."""
        if self._gathers and now >= self._gathers[0].since_s + limit_s:
            raise FetchTimeoutError("the GPU has not copied a frame in time")

    def close(self) -> None:
        """When this returns no view is read any more."""
        self.sent()
        for gather in self._gathers:
            if _has_ended(gather.event):
                self._staging.give(gather.slab)
        self._gathers.clear()


class Into(NamedTuple):
    """Where D receives a frame, and where it goes from there."""

    slab: Slab
    part: memoryview
    targets: Sequence[View]


class _Landing(NamedTuple):
    """Queue a call for the session, after `event` (None: after the calls before it)."""

    call: Callable[[], None]
    event: Event | None = None
    slab: Slab | None = None
    since_s: float = 0.0


class Inward:
    """D's side of one connection. `room_bytes`: what one read may begin, its longest frame and all
    that one read of control frames contains."""

    def __init__(self, staging: Staging, *, room_bytes: int) -> None:
        self._staging = staging
        self._room_bytes = room_bytes
        self._slab: Slab | None = None
        self._landings: deque[_Landing] = deque()

    @property
    def since_s(self) -> float | None:
        """The time since which the oldest frame is being scattered."""
        return self._landings[0].since_s if self._landings else None

    def reserve(self) -> bool:
        """Whether there is room for what a read brings; if not, do not read."""
        if len(self._landings) >= MAX_HELD_CALLS:
            return False
        slab = self._slab
        if slab is not None and len(slab.memory) - slab.used_bytes >= self._room_bytes:
            return True
        if slab is not None and not slab.frames:
            slab.used_bytes = 0
            return True
        # Its last frame gives the old one back.
        self._slab = self._staging.take()
        return self._slab is not None

    def rest(self) -> None:
        """Give back the slab while no frame is being received."""
        slab = self._slab
        if slab is not None:
            self._slab = None
            if not slab.frames:
                self._staging.give(slab)

    def carve(self, targets: Sequence[View], length: int) -> Into:
        """Room for one frame that goes on to `targets`, in what was reserved."""
        slab = self._slab
        if slab is None or length > len(slab.memory) - slab.used_bytes:
            raise ValueError(f"{length} bytes begin without room reserved for them")
        part = slab.memory[slab.used_bytes : slab.used_bytes + length]
        slab.used_bytes += length
        slab.frames += 1
        return Into(slab, part, targets)

    def land(self, into: Into, *, then: Callable[[], None], now: float) -> None:
        """Scatter a frame that is whole; `then` in the `poll` after it."""
        event = self._staging.scatter(into.targets, into.part)
        self._landings.append(_Landing(then, event, into.slab, now))

    def drop(self, slab: Slab) -> None:
        """A frame of `slab` is through."""
        slab.frames -= 1
        if not slab.frames and slab is not self._slab:
            self._staging.give(slab)

    def after(self, call: Callable[[], None], now: float) -> None:
        """`call` when the frames that came before are through: at once, if they are."""
        if self._landings:
            self._landings.append(_Landing(call, since_s=now))
        else:
            call()

    def poll(self, now: float, limit_s: float) -> None:
        """Calls whose time has come. FetchTimeoutError when the oldest copy takes too long."""
        while self._landings:
            oldest = self._landings[0]
            if oldest.event is not None and not is_done(oldest.event):
                if now >= oldest.since_s + limit_s:
                    raise FetchTimeoutError("the GPU has not taken a frame in time")
                return
            self._landings.popleft()
            if oldest.slab is not None:
                self.drop(oldest.slab)
            oldest.call()

    def close(self, receiving: Slab | None) -> None:
        """When this returns nothing is written any more; `receiving` is the slab of a frame that
        has not come whole."""
        if receiving is not None:
            self.drop(receiving)
        for landing in self._landings:
            if landing.event is None or landing.slab is None:
                continue
            if _has_ended(landing.event):
                self.drop(landing.slab)
        self._landings.clear()
        self.rest()


def started(stream: DeviceStream, targets: Sequence[View], sources: Sequence[View]) -> Event:
    """Begin to copy on this stream. DeviceFailedError."""
    try:
        stream.copy(targets, sources)
        return stream.record()
    except DeviceError as error:
        raise DeviceFailedError(str(error)) from error


def is_done(event: Event) -> bool:
    """Whether it is. DeviceFailedError."""
    try:
        return event.is_done()
    except DeviceError as error:
        raise DeviceFailedError(str(error)) from error


def _has_ended(event: Event) -> bool:
    """Wait at a connection's end; a slab that is still copied stays taken."""
    try:
        if event.wait(CLOSE_S):
            return True
        _log.error("copies of KV have not ended within %.0f s", CLOSE_S)
    except DeviceError as error:
        _log.error("the GPU has failed: %s", error)
    return False

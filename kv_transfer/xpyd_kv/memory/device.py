"""The seam between transfers and a GPU. Documented here and only here. No torch.

What an operation enqueues runs later, in the order of its stream, beside the other streams; only
Events say what has run. So: enqueue, `record`, poll the event, and then (not before) read,
overwrite or free what the operation touched. Nothing here waits without a deadline, and nothing is
enqueued on the default stream. A Device may be used by any thread, a DeviceStream by one at a time.
Every call may raise DeviceError.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from xpyd_core.errors import XpydError


class DeviceError(XpydError):
    """The device or its driver refused or failed. After a failed kernel all further calls fail:
    the owner of the process ends it."""


@dataclass(frozen=True, slots=True)
class DeviceView:
    """`length` bytes of device memory from `address` on, as `device` (its index in this process)
    sees them. Sliced like a memoryview; the CPU cannot see its bytes."""

    device: int
    address: int
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> DeviceView:
        start, stop, step = part.indices(self.length)
        if step != 1:
            raise ValueError("device memory is sliced without a step")
        return DeviceView(self.device, self.address + start, max(0, stop - start))


View = memoryview | DeviceView
"""Flat bytes: on a device, or on the host and then pinned (`Device.allocate_pinned`)."""


def is_on_host(views: Iterable[View]) -> bool:
    """Whether the CPU sees all these bytes. Hot path: no Python step for each view."""
    return DeviceView not in set(map(type, views))


def on_host(views: Sequence[View]) -> Sequence[memoryview]:
    """Return these views, all of which must be the host's memory. DeviceError when one is not."""
    if DeviceView in set(map(type, views)):
        raise DeviceError("device memory where the CPU has to see the bytes")
    return cast("Sequence[memoryview]", views)


@dataclass(frozen=True)
class IpcHandle:
    """A handle by which another process of this machine opens device memory. `handle` is the
    driver's, 64 bytes, for the whole allocation of `size_bytes`; `device_uuid` says which GPU it
    is, `process` in which process it is at home (16 random bytes)."""

    handle: bytes
    size_bytes: int
    device_uuid: str
    process: bytes


class Event(Protocol):
    """A place in a stream."""

    def is_done(self) -> bool:
        """Whether all that was enqueued before it has run. DeviceError when some of it failed."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` (finite); whether the event is done. For the end of things, not
        for the hot path."""
        ...


class DeviceStream(Protocol):
    """A queue of operations of one device."""

    @property
    def handle(self) -> int:
        """The driver's (cudaStream_t), for libraries that enqueue themselves."""
        ...

    def copy(self, targets: Sequence[View], sources: Sequence[View]) -> None:
        """Enqueue: the bytes of all `sources`, one after another, go to all `targets`, one after
        another; both have the same length in all, in pieces of any size. One launch however many
        pieces. Device to device, also a peer's; device to or from pinned memory. Both stay as they
        are until an event recorded after this is done. ValueError when the lengths differ."""
        ...

    def wait(self, event: Event) -> None:
        """Enqueue: what follows runs after `event`, of any stream of this process. The CPU goes
        on."""
        ...

    def record(self) -> Event:
        """An event for all that is enqueued now."""
        ...

    def close(self) -> None:
        """Give it back. What is enqueued still runs; an event of it may be asked."""
        ...


class Device(Protocol):
    """One GPU of this process."""

    @property
    def index(self) -> int:
        """The number of the device, as in DeviceView."""
        ...

    @property
    def uuid(self) -> str:
        """The GPU's own name, the same in all processes."""
        ...

    def allocate(self, size_bytes: int) -> DeviceView:
        """Device memory, aligned to 256 bytes, that can be exported. UserError when there is not so
        much."""
        ...

    def free(self, memory: DeviceView) -> None:
        """Give back what `allocate` gave; nothing that touches it may be under way. Waits for all
        work of the device: not for the hot path."""
        ...

    def allocate_pinned(self, size_bytes: int) -> memoryview:
        """Writable host memory of exactly this size that streams can copy to and from. UserError
        when there is not so much."""
        ...

    def free_pinned(self, memory: memoryview) -> None:
        """Give back what `allocate_pinned` gave, as `free`; no view of it may be used any more."""
        ...

    def stream(self) -> DeviceStream:
        """A new stream, which orders itself after nothing but the events it waits for."""
        ...

    def compute_stream(self) -> DeviceStream:
        """The stream that the calling thread's model runs on. To `record` and `wait`; never to copy
        on, never to close."""
        ...

    def can_reach(self, device_uuid: str) -> bool:
        """Whether memory of that GPU can be opened here: it is ours, or a peer that this process
        sees."""
        ...

    def export(self, memory: DeviceView) -> IpcHandle:
        """The handle of what `allocate` gave, whole."""
        ...

    def open_peer(self, handle: IpcHandle) -> DeviceView:
        """Map a peer's memory. A handle of this process gives its own memory."""
        ...

    def close_peer(self, memory: DeviceView) -> None:
        """Unmap what `open_peer` gave; no copy from it may be under way."""
        ...

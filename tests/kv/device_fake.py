"""A fake of the device seam: real bytes behind fake addresses, streams, events and IPC handles.

It is as unkind as a GPU may be: nothing runs before somebody asks for an event, and then only what
that event needs; what is not ordered by events is a fault even if it happens to come out right.
A fault raises DeviceFault where it is found and stays in `Machine.faults` for the fixture, since
the I/O thread contains exceptions.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.kv.device_order import Allocation, Clock, Touch, intervals, merge
from xpyd_kv.memory.device import DeviceError, DeviceView, IpcHandle, View
from xpyd_kv.spans import Span, copy_runs

_POISON = b"\xdd"
_SCRIBBLED_BYTES = 2**20


class DeviceFault(Exception):
    """The code under test did what a GPU would have punished, or let pass unnoticed."""


@dataclass
class _Operation:
    number: int
    run: Callable[[], bool | None]
    """False: not yet, for another GPU has not come to its part."""


class Machine:
    """GPUs of one host and the processes that use them. One lock, so that any thread may ask."""

    def __init__(self, *, seed: int = 0, latest: int = 3) -> None:
        self.faults: list[str] = []
        self.latest = latest
        """So often at most an event says that it is not done."""
        self.is_stalled = False
        """No event is done any more."""
        self.is_slow = False
        """An event is done for who waits for it, not for who only asks."""
        self.broken = ""
        """What every event raises, if not ''."""
        self.is_lost = False
        """What hung or failed may be left to the end of the process."""
        self.refuses_handles = False
        self.peers: set[frozenset[str]] = set()
        """Pairs of GPUs that reach each other."""
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.host: Clock = {}
        self.handles: dict[bytes, Allocation] = {}
        self.streams: dict[int, FakeStream] = {}
        self.opened: dict[int, Allocation] = {}
        self._allocations: dict[int, Allocation] = {}
        self._next_address = 0x7F00_0000_0000
        self._numbers = itertools.count(1)

    def device(self, process: str, *, gpu: str = "GPU-0", index: int = 0) -> FakeDevice:
        return FakeDevice(self, process, gpu, index)

    def fault(self, text: str) -> DeviceFault:
        self.faults.append(text)
        return DeviceFault(text)

    def check(self) -> None:
        """Nothing was done wrong, and all was given back."""
        assert self.faults == []
        if self.is_lost:
            return
        assert [hex(a) for a, one in self._allocations.items() if not one.is_freed] == []
        assert self.opened == {}
        assert [s.handle for s in self.streams.values() if not (s.is_closed or s.is_compute)] == []

    # --- memory

    def allocate(self, size: int, process: str, *, is_host: bool) -> Allocation:
        # Zeros that cost nothing until they are touched; a bytearray writes them all.
        data = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        address = _address_of(data) if is_host else self.reserve(size)
        allocation = Allocation(address, data, process, is_host)
        self._allocations[address] = allocation
        return allocation

    def reserve(self, size: int) -> int:
        """Addresses that nobody else gets, and a gap."""
        address = self._next_address
        self._next_address += (size + 0xFFFF) // 0x1000 * 0x1000 + 0x10000
        return address

    def find(self, span: Span, process: str) -> tuple[Allocation, int]:
        """The allocation of these bytes as `process` sees them, and where in it they begin."""
        for address, one in (*self.opened.items(), *self._allocations.items()):
            if not address <= span.start <= address + len(one.data) - span.length:
                continue
            if one.is_freed:
                raise self.fault(f"memory at {span.start:#x} is used after it was freed")
            if one.process != process and address == one.address:
                raise self.fault(f"{process} uses an address of {one.process}")
            return one, span.start - address
        raise self.fault(f"no memory at {span.start:#x}, {span.length} bytes (a closed handle?)")

    def give_back(self, allocation: Allocation) -> None:
        late = allocation.unfinished(self.host)
        if late:
            raise self.fault(f"memory is freed before the event of: {late}")
        allocation.is_freed = True
        # Not all of a large one: its pages may never have been touched.
        first = ctypes.c_char.from_buffer(allocation.data)
        length = min(len(allocation.data), _SCRIBBLED_BYTES)
        ctypes.memset(ctypes.addressof(first), _POISON[0], length)

    # --- streams

    def add_stream(self, stream: FakeStream) -> int:
        handle = next(self._numbers)
        self.streams[handle] = stream
        return handle

    def run_until(self, handle: int, number: int) -> bool:
        """Run this stream's operations up to that one, and what they wait for; no other. Whether
        that could be."""
        stream = self.streams[handle]
        while stream.has_run < number:
            operation = stream.queue[0]
            if operation.run() is False:
                return False
            stream.queue.popleft()
            stream.has_run = operation.number
        return True


class FakeEvent:
    """See xpyd_kv.memory.device.Event."""

    def __init__(self, machine: Machine, stream: int, number: int, clock: Clock) -> None:
        self.machine = machine
        self.stream = stream
        self.number = number
        self.clock = clock
        self._patience = machine.random.randint(0, machine.latest)

    def is_done(self) -> bool:
        machine = self.machine
        with machine.lock:
            if machine.broken:
                raise DeviceError(machine.broken)
            if machine.is_stalled or machine.is_slow:
                return False
            if machine.streams[self.stream].has_run < self.number:
                if self._patience:
                    self._patience -= 1
                    return False
                if not machine.run_until(self.stream, self.number):
                    return False
            merge(machine.host, self.clock)
            return True

    def wait(self, timeout_s: float) -> bool:
        if timeout_s is None or not math.isfinite(timeout_s):
            raise self.machine.fault("a wait without a deadline")
        with self.machine.lock:
            was_slow, self.machine.is_slow = self.machine.is_slow, False
            try:
                while not self.is_done():
                    if self.machine.is_stalled:
                        return False
                return True
            finally:
                self.machine.is_slow = was_slow


class FakeStream:
    """See xpyd_kv.memory.device.DeviceStream."""

    def __init__(self, device: FakeDevice, *, is_compute: bool = False) -> None:
        self.device = device
        self.is_compute = is_compute
        self.is_closed = False
        self.queue: deque[_Operation] = deque()
        self.has_run = 0
        self.copies = 0
        """Calls of `copy`."""
        self._clock: Clock = {}
        self._count = 0
        self.handle = device.machine.add_stream(self)

    def copy(self, targets: Sequence[View], sources: Sequence[View]) -> None:
        machine, device = self.device.machine, self.device
        with machine.lock:
            if self.is_compute:
                raise machine.fault("a transfer on the model's stream")
            self.copies += 1
            place = device.place_of
            pieces = copy_runs([place(view) for view in targets], [place(view) for view in sources])
            moves = [
                (device.bytes_of(Span(target, size)), device.bytes_of(Span(source, size)))
                for target, source, size in pieces
            ]
            expected = [bytes(view) if isinstance(view, memoryview) else b"" for view in sources]
            for target in targets:
                if isinstance(target, memoryview):
                    target[:] = _POISON * len(target)

        def run() -> None:
            for view, was in zip(sources, expected, strict=True):
                if isinstance(view, memoryview) and bytes(view) != was:
                    raise machine.fault("host memory has changed before its copy has run")
            # Again: what is freed or closed by now faults.
            for target, source, size in pieces:
                device.bytes_of(Span(target, size))
                device.bytes_of(Span(source, size))
            for target, source in moves:
                target[:] = source

        self.enqueue(
            "copy",
            [Span(source, size) for _, source, size in pieces],
            [Span(target, size) for target, _, size in pieces],
            run,
        )

    def enqueue(
        self,
        label: str,
        reads: Sequence[Span],
        writes: Sequence[Span],
        run: Callable[[], bool | None],
    ) -> None:
        """Any operation: what it reads and writes, and what it does when it is its turn."""
        machine = self.device.machine
        with machine.lock:
            if self.is_closed:
                raise machine.fault(f"{label} on a closed stream")
            merge(self._clock, machine.host)
            self._count += 1
            self._clock[self.handle] = self._count
            touched: dict[int, tuple[Allocation, list[tuple[int, int]], list[tuple[int, int]]]] = {}
            for which, spans in ((1, reads), (2, writes)):
                for span in spans:
                    one, offset = machine.find(span, self.device.process)
                    entry = touched.setdefault(id(one), (one, [], []))
                    entry[which].append((offset, span.length))
            for one, read, written in touched.values():
                touch = Touch(label, self.handle, self._count, intervals(read), intervals(written))
                other = one.touch(touch, self._clock, machine.host)
                if other:
                    raise machine.fault(f"{label} does not wait for the event of: {other}")
            self.queue.append(_Operation(self._count, run))

    def wait(self, event: FakeEvent) -> None:
        machine = self.device.machine
        with machine.lock:
            merge(self._clock, event.clock)
            self._count += 1
            self.queue.append(
                _Operation(self._count, lambda: machine.run_until(event.stream, event.number))
            )

    def record(self) -> FakeEvent:
        with self.device.machine.lock:
            clock = {**self.device.machine.host, **self._clock, self.handle: self._count}
            return FakeEvent(self.device.machine, self.handle, self._count, clock)

    def close(self) -> None:
        if self.is_compute or self.is_closed:
            raise self.device.machine.fault("a stream is closed twice, or is not ours")
        self.is_closed = True


class FakeDevice:
    """See xpyd_kv.memory.device.Device: one GPU as `process` sees it."""

    def __init__(self, machine: Machine, process: str, gpu: str, index: int) -> None:
        self.machine = machine
        self.process = process
        self.uuid = gpu
        self.index = index
        self._compute = FakeStream(self, is_compute=True)

    # --- the seam

    def allocate(self, size_bytes: int) -> DeviceView:
        with self.machine.lock:
            one = self.machine.allocate(size_bytes, self.process, is_host=False)
            return DeviceView(self.index, one.address, size_bytes)

    def free(self, memory: DeviceView) -> None:
        with self.machine.lock:
            self.machine.give_back(self._whole(Span(memory.address, memory.length)))

    def allocate_pinned(self, size_bytes: int) -> memoryview:
        with self.machine.lock:
            return self.machine.allocate(size_bytes, self.process, is_host=True).data

    def free_pinned(self, memory: memoryview) -> None:
        with self.machine.lock:
            self.machine.give_back(self._whole(self.place_of(memory)))

    def stream(self) -> FakeStream:
        return FakeStream(self)

    def compute_stream(self) -> FakeStream:
        return self._compute

    def can_reach(self, device_uuid: str) -> bool:
        return device_uuid == self.uuid or {device_uuid, self.uuid} in self.machine.peers

    def export(self, memory: DeviceView) -> IpcHandle:
        with self.machine.lock:
            one = self._whole(Span(memory.address, memory.length))
            handle = one.address.to_bytes(64)
            self.machine.handles[handle] = one
            return IpcHandle(handle, memory.length, self.uuid, self.process.encode().rjust(16))

    def open_peer(self, handle: IpcHandle) -> DeviceView:
        with self.machine.lock:
            one = self.machine.handles.get(handle.handle)
            if one is None or one.is_freed or self.machine.refuses_handles:
                raise DeviceError("cudaIpcOpenMemHandle: invalid resource handle")
            address = self.machine.reserve(len(one.data))
            self.machine.opened[address] = one
            return DeviceView(self.index, address, len(one.data))

    def close_peer(self, memory: DeviceView) -> None:
        with self.machine.lock:
            one = self.machine.opened.get(memory.address)
            if one is None:
                raise self.machine.fault("a handle is closed twice")
            late = one.unfinished(self.machine.host)
            if late:
                raise self.machine.fault(f"a handle is closed before the event of: {late}")
            del self.machine.opened[memory.address]

    # --- for the tests

    def compute(self, view: DeviceView, data: bytes) -> None:
        """The model writes `data` there, on its own stream."""
        span = self.place_of(view)
        target = self.bytes_of(span)

        def run() -> None:
            target[:] = data

        self._compute.enqueue("the model", [], [span], run)

    def fill(self, view: DeviceView, data: bytes) -> None:
        """These bytes stand there now."""
        self.bytes_of(self.place_of(view))[:] = data

    def read(self, view: DeviceView) -> bytes:
        """What stands there, which must be known to have been written."""
        with self.machine.lock:
            one, offset = self.machine.find(self.place_of(view), self.process)
            late = one.unfinished(self.machine.host, (offset, offset + len(view)))
            if late:
                raise self.machine.fault(f"bytes are read before the event of: {late}")
            return bytes(one.data[offset : offset + len(view)])

    def place_of(self, view: View) -> Span:
        if isinstance(view, DeviceView):
            return Span(view.address, view.length)
        return Span(_address_of(view), len(view)) if len(view) else Span(0, 0)

    def bytes_of(self, span: Span) -> memoryview:
        one, offset = self.machine.find(span, self.process)
        return one.data[offset : offset + span.length]

    def _whole(self, span: Span) -> Allocation:
        one, offset = self.machine.find(span, self.process)
        if offset or span.length != len(one.data):
            raise self.machine.fault("a part of an allocation is freed or exported")
        return one


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))

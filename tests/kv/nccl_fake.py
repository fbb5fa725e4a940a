"""A fake of the NCCL seam over the fake GPUs: communicators that both ranks must join, groups that
both must post, kernels that wait for each other on their streams.

As NCCL does, it hangs where groups do not match or a rank does not come; what is against its rules
is a fault of the machine.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.kv.device_fake import FakeDevice, Machine
from tests.kv.device_order import Clock, merge
from xpyd_kv.spans import Span
from xpyd_kv.transport.devices.nccl.library import ID_BYTES, Buffer, NcclError


@dataclass
class Group:
    """What one rank posted at once."""

    views: list[memoryview]
    sends: bool
    place: Clock
    """In its stream."""

    @property
    def lengths(self) -> list[int]:
        return [len(view) for view in self.views]


@dataclass
class Rank:
    """One rank's communicator."""

    device: FakeDevice
    groups: list[Group] = field(default_factory=list)
    is_aborted: bool = False
    is_busy: bool = False
    error: str = ""


class World:
    """All communicators of one machine, by their id."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.comms: dict[bytes, dict[int, Rank]] = {}
        self.made = 0
        """Ranks that were begun with."""
        self.alive = 0
        self.channels: list[int] = []
        self.abort_fails = ""
        self.abort_hangs = False
        self.let_go = threading.Event()
        self._ids = itertools.count(1)

    def new_id(self) -> bytes:
        return next(self._ids).to_bytes(ID_BYTES, "little")

    def ranks(self) -> list[Rank]:
        return [rank for comm in self.comms.values() for rank in comm.values()]


class FakeNccl:
    """See Nccl: one process's."""

    def __init__(self, world: World, device: FakeDevice, *, version: int = 23007) -> None:
        self.world = world
        self.device = device
        self.version = version
        self._handles: dict[int, tuple[bytes, int]] = {}
        self._numbers = itertools.count(1)

    def new_id(self) -> bytes:
        return self.world.new_id()

    def init(self, comm_id: bytes, rank: int, *, channels: int) -> int:
        world = self.world
        with world.machine.lock:
            comm = world.comms.setdefault(comm_id, {})
            if rank in comm:
                raise world.machine.fault("a rank joins twice")
            comm[rank] = Rank(self.device)
            world.made += 1
            world.alive += 1
            world.channels.append(channels)
            handle = next(self._numbers)
            self._handles[handle] = (comm_id, rank)
            return handle

    def is_ready(self, comm: int) -> bool:
        with self.world.machine.lock:
            rank, other = self._both(comm)
            if rank.error:
                raise NcclError(rank.error)
            rank.is_busy = other is None
            return other is not None

    def group(self, comm: int, buffers: Sequence[Buffer], *, sends: bool, stream: int) -> None:
        machine = self.world.machine
        with machine.lock:
            rank, _ = self._both(comm)
            its = machine.streams[stream]
            if rank.is_busy or not buffers or its.is_compute:
                raise machine.fault("a group too early, without messages, or on the model's stream")
            spans = [Span(*buffer) for buffer in buffers]
            number = len(rank.groups)
            reads, writes = (spans, []) if sends else ([], spans)
            comm_id, which = self._handles[comm]
            its.enqueue("NCCL", reads, writes, lambda: self._run(comm_id, which, number))
            views = [self.device.bytes_of(span) for span in spans]
            rank.groups.append(Group(views, sends, its.record().clock))

    def abort(self, comm: int) -> None:
        world = self.world
        if world.abort_fails:
            raise NcclError(world.abort_fails)
        if world.abort_hangs:
            world.let_go.wait()
        with world.machine.lock:
            rank, _ = self._both(comm)
            rank.is_aborted = True
            world.alive -= 1
            del self._handles[comm]

    def _both(self, comm: int) -> tuple[Rank, Rank | None]:
        if comm not in self._handles:
            raise self.world.machine.fault("a communicator is used after its abort")
        comm_id, which = self._handles[comm]
        ranks = self.world.comms[comm_id]
        return ranks[which], ranks.get(1 - which)

    def _run(self, comm_id: bytes, which: int, number: int) -> bool:
        ranks = self.world.comms[comm_id]
        mine, other = ranks[which], ranks.get(1 - which)
        if mine.is_aborted:
            return True
        if other is None or other.is_aborted or len(other.groups) <= number:
            return False
        ours, theirs = mine.groups[number], other.groups[number]
        if ours.sends == theirs.sends or ours.lengths != theirs.lengths:
            return False
        if not ours.sends:
            for target, source in zip(ours.views, theirs.views, strict=True):
                target[:] = source
            # What has arrived has been read, whether or not the sender has asked.
            merge(self.world.machine.host, theirs.place)
        return True

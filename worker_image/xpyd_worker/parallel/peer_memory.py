"""Memory of each rank's GPU that all ranks of a tensor group have opened.

Each makes its own and says over the store how it is opened, opens that of the others, and says how
that went: all have all of it, or none has any. It is given back in the opposite order: what was
opened of others is closed, then, when all have done so, one's own is freed.
"""

from __future__ import annotations

import logging

import msgspec
import torch
from torch import Tensor

from xpyd_core.errors import XpydError
from xpyd_kv.memory.cuda import CudaDevice, tensor_over
from xpyd_kv.memory.device import DeviceError, DeviceView, IpcHandle
from xpyd_worker.parallel.distributed import ProcessGroup, named

_log = logging.getLogger(__name__)
_SOON_S = 5.0
"""The wait for what is under way when memory is given back: steps are over then."""
_ZERO_S = 30.0
"""The wait for the first work on a device, its context included."""


class _Word(msgspec.Struct, frozen=True):
    """What a rank says of a stage: a reason to refuse, or "" and what the others need."""

    refusal: str
    body: bytes


class NotReachableError(XpydError):
    """The ranks' GPUs do not have each other's memory; the reason, for the log."""


class GpuPeers:
    """A rank's GPU, over the driver's memory of KV transfers' device seam. Nothing is asked of the
    driver before `allocate`. Any call may raise XpydError. Unverified on hardware."""

    def __init__(self, device: torch.device) -> None:
        """`device` has an index."""
        self._torch_device = device
        self._gpu: CudaDevice | None = None

    def allocate(self, size_bytes: int) -> DeviceView:
        """Memory that others can open, all zero when this returns."""
        self._gpu = CudaDevice(self._torch_device.index)
        memory = self._gpu.allocate(size_bytes)
        tensor_over(memory, (size_bytes,), torch.uint8).zero_()
        if not self.is_done(_ZERO_S):
            raise DeviceError(f"{self._torch_device} did not fill memory within {_ZERO_S:g} s")
        return memory

    def free(self, memory: DeviceView) -> None:
        """Give back what `allocate` gave."""
        self._open.free(memory)

    def export(self, memory: DeviceView) -> IpcHandle:
        """How others open it."""
        return self._open.export(memory)

    def lacks(self, uuid: str) -> str:
        """Why memory of that GPU is of no use here; "" where it is. Words arrive by atomic
        operations, which PCIe does not carry."""
        gpu = self._open
        if uuid == gpu.uuid:
            return ""
        if not gpu.can_reach(uuid):
            return f"no peer access from GPU {gpu.uuid} to GPU {uuid}"
        if not gpu.has_atomics_on(uuid):
            return f"no NVLink from GPU {gpu.uuid} to GPU {uuid}, or one without atomic operations"
        return ""

    def open_peer(self, handle: IpcHandle) -> DeviceView:
        """Map a peer's memory, to be read and written."""
        return self._open.open_peer(handle)

    def close_peer(self, memory: DeviceView) -> None:
        """Unmap it."""
        self._open.close_peer(memory)

    def put(self, x: Tensor) -> Tensor:
        """A copy of `x` on the device."""
        return x.to(self._torch_device)

    def is_done(self, within_s: float) -> bool:
        """Whether all that this thread has enqueued is done, at the latest after `within_s`."""
        return self._gpu is None or self._gpu.compute_stream().record().wait(within_s)

    @property
    def _open(self) -> CudaDevice:
        assert self._gpu is not None, "allocate comes before"
        return self._gpu


class PeerMemory:
    """What a rank has of its group's. Made by `open_peer_memory`."""

    def __init__(self, device: GpuPeers, group: ProcessGroup, name: str) -> None:
        """No memory is taken yet."""
        self.device, self.group, self.name = device, group, name
        self._own: DeviceView | None = None
        self._opened: dict[int, DeviceView] = {}

    def make(self, size_bytes: int) -> IpcHandle:
        """This rank's own, and how others open it."""
        self._own = self.device.allocate(size_bytes)
        return self.device.export(self._own)

    def open(self, rank: int, handle: IpcHandle) -> None:
        """Open the memory of another rank, by its number in the group."""
        lacks = self.device.lacks(handle.device_uuid)
        if lacks:
            raise NotReachableError(lacks)
        self._opened[rank] = self.device.open_peer(handle)

    def table(self, room: int) -> Tensor:
        """Where each rank's begins, by rank in the group, in `room` numbers on the device."""
        assert self._own is not None, "make comes before"
        views = {**self._opened, self.group.rank: self._own}
        addresses = [views[rank].address for rank in range(len(views))]
        return self.device.put(torch.tensor(addresses + [0] * (room - len(addresses))))

    def close(self) -> None:
        """Give all back. What another rank may still use stays until this process ends."""
        own, self._own = self._own, None
        opened, self._opened = self._opened, {}
        if not self.device.is_done(_SOON_S):
            _log.error("group %s: the GPU has not finished; memory stays mapped", self.name)
            return
        for memory in opened.values():
            self.device.close_peer(memory)
        # The driver does not want it freed while others have it.
        missing = self.group.meet(_SOON_S)
        if own is not None and not missing:
            self.device.free(own)
        elif missing:
            who = named(missing)
            _log.warning("group %s: %s may still have memory of this GPU", self.name, who)


def open_peer_memory(
    group: ProcessGroup, name: str, *, device: GpuPeers, size_bytes: int
) -> PeerMemory:
    """`size_bytes` of each rank of `group`, which is over Gloo; `name` is no other's of its ranks'.
    NotReachableError, on all of them, where one cannot; it has each one's reason. GroupError where
    one says nothing."""
    memory = PeerMemory(device, group, name)
    try:
        offer, refusal = b"", ""
        try:
            offer = msgspec.msgpack.encode(memory.make(size_bytes))
        except XpydError as error:
            refusal = str(error)
        offers = agree(group, f"peers/{name}/made", offer, refusal)
        try:
            for rank, body in enumerate(offers):
                if rank != group.rank:
                    memory.open(rank, msgspec.msgpack.decode(body, type=IpcHandle))
        except XpydError as error:
            refusal = str(error)
        agree(group, f"peers/{name}/opened", b"", refusal)
    except XpydError:
        memory.close()
        raise
    return memory


def agree(group: ProcessGroup, key: str, body: bytes, refusal: str) -> list[bytes]:
    """Each rank's `body`, where none has a reason to refuse. Else NotReachableError, the same on
    all; GroupError where a rank says nothing."""
    words = [
        msgspec.msgpack.decode(said, type=_Word)
        for said in group.say(key, msgspec.msgpack.encode(_Word(refusal, body)))
    ]
    refused: dict[str, list[int]] = {}
    for rank, word in zip(group.ranks, words, strict=True):
        if word.refusal:
            refused.setdefault(word.refusal, []).append(rank)
    if refused:
        raise NotReachableError("; ".join(f"{named(who)}: {why}" for why, who in refused.items()))
    return [word.body for word in words]

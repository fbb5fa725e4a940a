"""What moves KV to and from a cache on a GPU: data paths, and slabs of pinned memory for sockets.

Our engine and the connector in vLLM put their endpoints together with it. Paths whose library is
missing or fails are left out, with a line in the log, unless they were asked for by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from xpyd_core.errors import UserError
from xpyd_kv.memory.api import KvMemory
from xpyd_kv.memory.device import Device, DeviceError, DeviceView, View
from xpyd_kv.memory.paged import DevicePagedMemory
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.transport.devices.cuda_ipc import CudaIpcPath
from xpyd_kv.transport.devices.nccl.communicators import Communicators
from xpyd_kv.transport.devices.nccl.library import Nccl, NcclLimits, NcclMetrics
from xpyd_kv.transport.devices.nccl.path import NcclPath
from xpyd_kv.transport.devices.nixl.library import load as load_nixl
from xpyd_kv.transport.devices.nixl.library import version as nixl_version
from xpyd_kv.transport.devices.nixl.path import NixlPath
from xpyd_kv.transport.devices.staging import AHEAD, Staging
from xpyd_kv.transport.host.data_path import DataPath
from xpyd_kv.transport.host.shared_memory import host_token
from xpyd_kv.transport.settings import Bounds
from xpyd_kv.wire.messages import DEFAULT_MAX_DATA_BYTES, MAX_PROBE_BYTES

_log = logging.getLogger(__name__)
# Eight connections at once have as many frames as they gather ahead; a ninth waits for a slab,
# which is free again in milliseconds.
_SLABS = 8 * AHEAD
_PAGE_BYTES = 4096
# More pieces than the copy engines get, so that they go through the kernel.
_WARM_UP_PIECES = 8
_WARM_UP_PIECE_BYTES = 64
_WARM_UP_S = 60.0


class Closable(Protocol):
    """Memory that peers reach: a store, a rank's space, a GPU's cache."""

    def close(self, deadline_s: float) -> object: ...


@dataclass(frozen=True)
class Transports:
    """See the parameters of TcpEndpoint. `host` and `gpu` are for HELLO, `max_data_bytes` for
    LAYOUT."""

    frames: FrameLimits
    paths: tuple[DataPath, ...] = ()
    staging: Staging | None = None
    connections: int = 0
    probe_room: memoryview | None = None
    host: bytes = b""
    gpu: str = ""
    max_data_bytes: int = DEFAULT_MAX_DATA_BYTES
    nccl: NcclMetrics | None = None
    closers: tuple[Callable[[], None], ...] = ()

    def close(self, *memory: Closable | None, deadline_s: float) -> None:
        """When no peer is left: give back what is theirs, then the `memory` that they reached. What
        a GPU that has failed does not let go of is left to the end of the process."""
        try:
            for close in self.closers:
                close()
            for one in memory:
                if one is not None:
                    one.close(deadline_s)
        except DeviceError as error:
            _log.error("the GPU has failed: %s", error)


def transports_for_gpu(
    transports: tuple[str, ...],
    memory: DevicePagedMemory,
    *,
    is_p: bool,
    group_bytes: int,
    lends: DeviceView | None,
    load_nccl: Callable[[], Nccl],
    landings: Callable[[], Sequence[View]],
    give_up: Callable[[str], None],
) -> Transports:
    """The transports for a cache on a GPU. `lends`: the allocation that a P's peers on this machine
    may open; None: none. UserError where the only transport that was asked for cannot be had.
    `give_up`: see Communicators."""
    device = memory.device
    host = host_token()
    ipc = CudaIpcPath(device, host=host, region=lends if is_p else None)
    paths: list[DataPath] = [ipc]
    closers: list[Callable[[], None]] = [ipc.close]
    nixl = _nixl_if_there(transports, memory, is_p=is_p, landings=landings)
    if nixl is not None:
        paths.append(nixl)
        closers.append(nixl.close)
    communicators = None
    if transports == ("nccl",):
        communicators = Communicators(load_nccl(), device, NcclLimits(), give_up=give_up)
        nccl = NcclPath(communicators, unit_bytes=memory.layout.block_bytes, lends=is_p)
        paths.append(nccl)
        closers.append(nccl.close)
    frames = FrameLimits(group_bytes=group_bytes)
    # A slab holds the longest frame, so frames are no longer than they get where all goes well.
    longest = max(frames.join_bytes, memory.layout.block_bytes)
    staging = Staging(device, slab_bytes=_slab_bytes(longest), slabs=_SLABS)
    return Transports(
        replace(frames, max_frame_bytes=longest),
        tuple(paths),
        staging,
        host=host,
        gpu=device.uuid,
        max_data_bytes=longest,
        nccl=None if communicators is None else communicators.metrics,
        closers=(*closers, staging.close),
    )


def _slab_bytes(longest: int) -> int:
    """The size of a slab, with room for one read behind the frame, in whole pages, so that each
    slab begins as the copy kernel likes it."""
    need = longest + Bounds().scratch_bytes
    return -(-need // _PAGE_BYTES) * _PAGE_BYTES


def _nixl_if_there(
    transports: tuple[str, ...],
    memory: DevicePagedMemory,
    *,
    is_p: bool,
    landings: Callable[[], Sequence[View]],
) -> NixlPath | None:
    """NIXL as one of several transports, where it is installed; UserError where it was asked for by
    its name."""
    if transports == ("nixl",):
        return nixl_path(memory, memory.regions, is_p=is_p, landings=landings)
    if "nixl" not in transports or nixl_version() is None:
        return None
    try:
        return nixl_path(memory, memory.regions, is_p=is_p, landings=landings)
    except UserError as error:
        _log.warning("KV transfer goes without nixl: %s", error)
        return None


def nixl_path(
    memory: KvMemory,
    cache: Sequence[View],
    *,
    is_p: bool,
    landings: Callable[[], Sequence[View]],
) -> NixlPath:
    """NIXL over this cache and (on a D) the landings. UserError where it is not installed or does
    not start."""
    return NixlPath(
        load_nixl(),
        unit_bytes=memory.layout.block_bytes,
        spare_bytes=MAX_PROBE_BYTES,
        lends_from=cache if is_p else (),
        lands_in=lambda: [*cache, *landings()],
    )


def warm_up(device: Device) -> None:
    """Compile what copies a frame's pieces now, not when the first frame waits for it and its
    connection's PINGs with it. UserError when it does not run."""
    size = _WARM_UP_PIECES * _WARM_UP_PIECE_BYTES
    memory = device.allocate(2 * size)
    try:
        stream = device.stream()
        pieces = [
            memory[at : at + _WARM_UP_PIECE_BYTES] for at in range(0, size, _WARM_UP_PIECE_BYTES)
        ]
        stream.copy([memory[size:]], pieces[::-1])
        has_run = stream.record().wait(_WARM_UP_S)
        stream.close()
    except DeviceError as error:
        raise UserError(f"the GPU cannot copy KV: {error}") from error
    if not has_run:
        raise UserError(f"the GPU has not copied {size} bytes within {_WARM_UP_S:.0f} s")
    device.free(memory)

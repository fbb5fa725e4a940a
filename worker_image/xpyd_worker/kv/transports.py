"""What moves a worker's KV: the data paths and slabs of its endpoint, by where its cache is.

`engine` and `rank` put them together with the rest. Sockets read a cache in ordinary memory where
it is; a cache on a GPU needs slabs of pinned memory for them, which the endpoint also falls back to
where another transport does not work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from xpyd_core.errors import UserError
from xpyd_kv.memory.api import KvMemory
from xpyd_kv.memory.device import DeviceError, View
from xpyd_kv.memory.paged import DevicePagedMemory
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.transport.devices.cuda_ipc import CudaIpcPath
from xpyd_kv.transport.devices.nccl.communicators import Communicators
from xpyd_kv.transport.devices.nccl.library import NcclLimits, NcclMetrics
from xpyd_kv.transport.devices.nccl.path import NcclPath
from xpyd_kv.transport.devices.nixl.library import load as load_nixl
from xpyd_kv.transport.devices.nixl.library import version as nixl_version
from xpyd_kv.transport.devices.nixl.path import NixlPath
from xpyd_kv.transport.devices.staging import AHEAD, Staging
from xpyd_kv.transport.host.data_path import DataPath, UnusedPath
from xpyd_kv.transport.host.shared_memory import SharedMemory, SharedMemoryPath, host_token
from xpyd_kv.transport.settings import Bounds
from xpyd_kv.wire.handshake import LENT
from xpyd_kv.wire.messages import DEFAULT_MAX_DATA_BYTES, MAX_PROBE_BYTES
from xpyd_worker.config import WorkerConfig

if TYPE_CHECKING:
    from xpyd_worker.kv.cache import DeviceCache

_log = logging.getLogger(__name__)
# Eight connections at once have as many frames as they gather ahead; a ninth waits for a slab,
# which is free again in milliseconds.
_SLABS = 8 * AHEAD
_PAGE_BYTES = 4096


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


def transports_for_cache(
    config: WorkerConfig,
    memory: KvMemory,
    cache: Sequence[View],
    *,
    shared: SharedMemory | None,
    gpu: DeviceCache | None,
    landings: Callable[[], Sequence[View]],
    give_up: Callable[[str], None],
) -> Transports:
    """The transports for a cache that this process has, on its GPU or (None) in ordinary memory.
    See the two."""
    if gpu is not None and isinstance(memory, DevicePagedMemory):
        return transports_for_gpu(config, memory, gpu=gpu, landings=landings, give_up=give_up)
    return transports_for_host(config, memory, cache, shared=shared, landings=landings)


def transports_for_host(
    config: WorkerConfig,
    memory: KvMemory,
    cache: Sequence[View],
    *,
    shared: SharedMemory | None,
    landings: Callable[[], Sequence[View]],
) -> Transports:
    """The transports for a cache in ordinary memory: in `shared`, where it is given. NIXL only
    where it was asked for: all else is faster there. UserError where that cannot be had."""
    frames = FrameLimits(group_bytes=config.kv_group_bytes)
    connections = config.kv_connections if config.kv_connections > 1 else 0
    shm = SharedMemoryPath(shared)
    if config.kv_transports == ("nixl",):
        nixl = _nixl(config, memory, cache, landings)
        return Transports(
            frames,
            (shm, nixl),
            connections=connections,
            probe_room=nixl.spare,
            closers=(nixl.close,),
        )
    # The end of what is shared is for probes.
    room = None if shared is None else memoryview(shared.buffer)[-MAX_PROBE_BYTES:]
    return Transports(frames, (shm,), connections=connections, probe_room=room)


def transports_for_ranks(config: WorkerConfig, *, gpu: str) -> Transports:
    """The transports of an engine's process whose ranks have the cache and move it: its own
    connections move none. It names the transport that was asked for by name, as its ranks and its
    peers do. `gpu`: the first rank's, which is used for all towards a peer of one rank."""
    named = config.kv_transports[0] if len(config.kv_transports) == 1 else ""
    paths = (UnusedPath(named),) if named in LENT else ()
    frames = FrameLimits(group_bytes=config.kv_group_bytes)
    return Transports(frames, paths, host=host_token() if gpu else b"", gpu=gpu)


def check_host(config: WorkerConfig) -> None:
    """UserError, naming the flag, for what a cache in ordinary memory cannot do. Before the model
    is loaded."""
    if config.moves_kv and config.kv_transports in (("cuda_ipc",), ("nccl",)):
        raise UserError(
            f"--kv-transport {config.kv_transports[0]}: needs a KV cache on a GPU; take auto, shm, "
            "nixl, uds or tcp"
        )


def transports_for_gpu(
    config: WorkerConfig,
    memory: DevicePagedMemory,
    *,
    gpu: DeviceCache,
    landings: Callable[[], Sequence[View]],
    give_up: Callable[[str], None],
) -> Transports:
    """The transports for a cache on a GPU. Paths whose library is missing or fails are left out,
    with a line in the log; UserError where it is the only one that was asked for. `give_up`: see
    Communicators."""
    is_p = config.role == "Prefill"
    device = memory.device
    host = host_token()
    ipc = CudaIpcPath(device, host=host, region=memory.region if is_p else None)
    paths: list[DataPath] = [ipc]
    closers: list[Callable[[], None]] = [ipc.close]
    nixl = _nixl_if_there(config, memory, landings)
    if nixl is not None:
        paths.append(nixl)
        closers.append(nixl.close)
    communicators = None
    if config.kv_transports == ("nccl",):
        communicators = Communicators(gpu.load_nccl(), device, NcclLimits(), give_up=give_up)
        nccl = NcclPath(communicators, unit_bytes=memory.layout.block_bytes, lends=is_p)
        paths.append(nccl)
        closers.append(nccl.close)
    frames = FrameLimits(group_bytes=config.kv_group_bytes)
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
    config: WorkerConfig, memory: DevicePagedMemory, landings: Callable[[], Sequence[View]]
) -> NixlPath | None:
    """NIXL as one of the transports of `auto`, where it is installed; UserError where it was asked
    for by its name."""
    if config.kv_transports == ("nixl",):
        return _nixl(config, memory, memory.regions, landings)
    if "nixl" not in config.kv_transports or nixl_version() is None:
        return None
    try:
        return _nixl(config, memory, memory.regions, landings)
    except UserError as error:
        _log.warning("--kv-transport auto goes without nixl: %s", error)
        return None


def _nixl(
    config: WorkerConfig,
    memory: KvMemory,
    cache: Sequence[View],
    landings: Callable[[], Sequence[View]],
) -> NixlPath:
    return NixlPath(
        load_nixl(),
        unit_bytes=memory.layout.block_bytes,
        spare_bytes=MAX_PROBE_BYTES,
        lends_from=cache if config.role == "Prefill" else (),
        lands_in=lambda: [*cache, *landings()],
    )

"""What moves a worker's KV: the data paths and slabs of its endpoint, by where its cache is.

`engine` and `rank` put them together with the rest. Sockets read a cache in ordinary memory where
it is; a cache on a GPU needs slabs of pinned memory for them, which the endpoint also falls back to
where another transport does not work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from xpyd_core.errors import UserError
from xpyd_kv.memory.api import KvMemory
from xpyd_kv.memory.device import View
from xpyd_kv.memory.paged import DevicePagedMemory
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.transport.devices.paths import Transports, nixl_path, transports_for_gpu
from xpyd_kv.transport.host.data_path import UnusedPath
from xpyd_kv.transport.host.shared_memory import SharedMemory, SharedMemoryPath, host_token
from xpyd_kv.wire.handshake import LENT
from xpyd_kv.wire.messages import MAX_PROBE_BYTES
from xpyd_worker.config import WorkerConfig

if TYPE_CHECKING:
    from xpyd_worker.kv.cache import DeviceCache


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
        return transports_for_gpu(
            config.kv_transports,
            memory,
            is_p=config.role == "Prefill",
            group_bytes=config.kv_group_bytes,
            lends=memory.region,
            load_nccl=gpu.load_nccl,
            landings=landings,
            give_up=give_up,
        )
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
        nixl = nixl_path(memory, cache, is_p=config.role == "Prefill", landings=landings)
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

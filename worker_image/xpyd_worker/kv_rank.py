"""One rank's half of the KV transfer, from the worker's configuration, in the rank's process.

Its engine's half is `kv_setup`'s. A rank moves its own heads and layers, over connections of its
own; a D's listens on the port behind its number. On CPUs only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from xpyd_core.compat import compat_factors
from xpyd_core.errors import UserError
from xpyd_core.keys import fleet_keys
from xpyd_core.request_id import Address
from xpyd_core.sizes import format_bytes
from xpyd_kv.connector.layouts import wire_layout
from xpyd_kv.device.paged import PagedMemory
from xpyd_kv.plan.engine_layout import EngineLayout
from xpyd_kv.ranks.api import Channel, RankSender
from xpyd_kv.ranks.build import RankPart, build_rank
from xpyd_kv.transport.api import Handler
from xpyd_kv.transport.shared_memory import SharedMemory
from xpyd_kv.transport.tcp import TcpEndpoint
from xpyd_kv.wire.messages import MAX_PROBE_BYTES
from xpyd_worker.config import WorkerConfig
from xpyd_worker.kv_setup import identity_of, letter_of, settings_of
from xpyd_worker.kv_ways import Ways, ways_of_host
from xpyd_worker.runner.kv_cache import host_memory

if TYPE_CHECKING:
    from pathlib import Path

_CLOSE_S = 2.0


def data_address(config: WorkerConfig, rank: int, host: str) -> Address:
    """Where rank `rank` of a D listens, in a pod at `host`; any port where the engine takes any."""
    return Address(host, config.kv_port and config.kv_port + 1 + rank)


class CacheMemory:
    """Memory for a rank's cache: such as other processes may read, where that is asked for."""

    def __init__(self, config: WorkerConfig) -> None:
        self._is_shared = config.shares_kv
        self.shared: SharedMemory | None = None

    def make(self, size_bytes: int) -> torch.Tensor:
        """See MakeMemory. UserError."""
        if not self._is_shared:
            return host_memory(size_bytes)
        # Its end is for probes.
        size = size_bytes + MAX_PROBE_BYTES
        try:
            self.shared = SharedMemory(size)
        except UserError as error:
            raise UserError(f"--kv-cache-memory: {format_bytes(size)}: {error}") from error
        return torch.frombuffer(self.shared.buffer, dtype=torch.uint8)


@dataclass(frozen=True)
class RankKv:
    """What a rank has of the KV transfer; started."""

    part: RankPart
    ways: Ways
    shared: SharedMemory | None
    address: Address | None
    """Where it listens, on a D."""

    @property
    def sender(self) -> RankSender | None:
        """A P's, for its runner."""
        return self.part.sender

    def close(self) -> None:
        """When no step is under way."""
        if not self.part.endpoint.close(_CLOSE_S):
            return
        self.ways.close()
        self.part.rooms.close(_CLOSE_S)
        if self.shared is not None:
            self.shared.close()


def engine_layout(
    config: WorkerConfig, cache: PagedMemory, *, kv_heads: int, stages: Sequence[Sequence[int]]
) -> EngineLayout:
    """All ranks' cache, of which this is one's."""
    layout = cache.layout
    return EngineLayout(
        kv_heads=kv_heads,
        tp=config.tensor_parallel_size,
        stages=tuple(map(tuple, stages)),
        block_size=layout.block_size,
        row_bytes=layout.block_bytes // (layout.kv_heads * layout.block_size),
    )


def start_rank_kv(
    config: WorkerConfig,
    *,
    rank: int,
    host: str,
    incarnation: str,
    channel: Channel,
    cache: PagedMemory,
    shared: SharedMemory | None,
    engine: EngineLayout,
    folder: Path,
    model_name: str,
) -> RankKv:
    """Of a Prefill or a Decode instance; `host`: the rank's own. UserError when the port is taken,
    or memory is short."""
    role = letter_of(config)
    blocks = cache.num_blocks
    ways = ways_of_host(config, cache, cache.regions, shared=shared, landings=lambda: ())
    factors = compat_factors(folder, model=model_name, revision="", kv_dtype=cache.layout.dtype)

    def make_endpoint(handler: Handler) -> TcpEndpoint:
        return TcpEndpoint(
            handler,
            identity=identity_of(config, incarnation, ways, rank=rank),
            layout=wire_layout(
                cache.layout,
                factors=factors,
                # The engines have compared a prompt's length with what D takes.
                max_tokens=blocks * config.block_size,
                max_data_bytes=ways.max_data_bytes,
                engine=engine,
            ),
            keys=fleet_keys(config.kv_key_file, insecure=config.kv_insecure),
            takes="ranks",
            listen=data_address(config, rank, host) if role == "D" else None,
            source_host=host,
            transports=config.kv_transports,
            socket_dir=config.kv_socket_dir,
            connections=ways.connections,
            paths=ways.paths,
            probe_room=ways.probe_room,
        )

    part = build_rank(
        role,
        channel=channel,
        make_endpoint=make_endpoint,
        memory=cache,
        engine=engine,
        settings=settings_of(
            config, ways, config.buffer_bytes(blocks * engine.held_bytes_per_block)
        ),
    )
    part.endpoint.start()
    assert isinstance(part.endpoint, TcpEndpoint)
    return RankKv(part, ways, shared, part.endpoint.listen_address)

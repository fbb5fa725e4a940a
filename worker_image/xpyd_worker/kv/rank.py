"""One rank's half of the KV transfer, from the worker's configuration, in the rank's process.

The engine's half is in `engine`. A rank moves its own heads and layers, from memory of the host or
of its GPU, over connections of its own; a D's listens on the port behind its number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from xpyd_core.compat import compat_factors
from xpyd_core.keys import fleet_keys
from xpyd_core.request_id import Address
from xpyd_kv.memory.device import View
from xpyd_kv.memory.paged import DevicePagedMemory, PagedMemory
from xpyd_kv.memory.space import OwnSpace
from xpyd_kv.metrics import EndpointCounters
from xpyd_kv.plan.engine_layout import EngineLayout
from xpyd_kv.ranks.agent import StepSender
from xpyd_kv.ranks.build import RankPart, build_rank
from xpyd_kv.ranks.engine import Channel
from xpyd_kv.transport.api import Handler
from xpyd_kv.transport.endpoint import TcpEndpoint
from xpyd_kv.wire.fit import wire_layout
from xpyd_worker.config import WorkerConfig
from xpyd_worker.kv.cache import CacheMemory
from xpyd_worker.kv.engine import identity_of, letter_of, settings_of
from xpyd_worker.kv.transports import Transports, transports_for_cache

if TYPE_CHECKING:
    from pathlib import Path

_CLOSE_S = 2.0


Cache = PagedMemory | DevicePagedMemory
"""A rank's, as the transfer sees it."""


def data_address(config: WorkerConfig, rank: int, host: str) -> Address:
    """The address that rank `rank` of a D listens on, in a pod at `host`; any port where the engine
    takes any."""
    return Address(host, config.kv_port and config.kv_port + 1 + rank)


def share_of(config: WorkerConfig, stage: Sequence[int], num_layers: int) -> Fraction:
    """A rank's share of the instance's cache, on this stage; replicas of heads count."""
    return Fraction(len(stage), num_layers * config.tensor_parallel_size)


@dataclass(frozen=True)
class RankKv:
    """What a rank has of the KV transfer; started."""

    part: RankPart
    transports: Transports
    memory: CacheMemory
    address: Address | None
    """The address that the rank of a D listens on."""

    @property
    def sender(self) -> StepSender | None:
        """A P's, for its runner."""
        return self.part.sender

    def close(self) -> None:
        """When no step is under way. What the I/O thread or a GPU does not let go of is left to the
        end of the process."""
        if not self.part.endpoint.close(_CLOSE_S):
            return
        self.transports.close(self.part.space, self.memory.gpu, deadline_s=_CLOSE_S)
        if self.memory.shared is not None:
            self.memory.shared.close()


def engine_layout(
    config: WorkerConfig, cache: Cache, *, kv_heads: int, stages: Sequence[Sequence[int]]
) -> EngineLayout:
    """The layout of all ranks' cache together."""
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
    engine_id: str,
    incarnation: str,
    channel: Channel,
    cache: Cache,
    memory: CacheMemory,
    engine: EngineLayout,
    folder: Path,
    model_name: str,
    give_up: Callable[[str], None],
) -> RankKv:
    """Start the KV transfer of a rank of a Prefill or Decode instance; `host`: the rank's own;
    `engine_id` and `incarnation` are the engine's; `memory`: what `cache` is part of. `give_up`
    ends the rank, with the reason: what its GPU may still write into is not known any more.
    UserError when the port is taken, or memory is short."""
    role = letter_of(config)
    blocks = cache.num_blocks
    spaces: list[OwnSpace] = []

    def landings() -> list[View]:
        return [view for one in spaces for view in one.regions]

    transports = transports_for_cache(
        config,
        cache,
        cache.regions,
        shared=memory.shared,
        gpu=memory.gpu,
        landings=landings,
        give_up=give_up,
    )
    factors = compat_factors(
        folder,
        model=model_name,
        revision="",
        kv_dtype=cache.layout.dtype,
        encrypted=config.kv_encrypted,
    )

    counters = EndpointCounters()

    def make_endpoint(handler: Handler) -> TcpEndpoint:
        return TcpEndpoint(
            handler,
            counters=counters,
            identity=identity_of(
                config, transports, engine_id=engine_id, incarnation=incarnation, rank=rank
            ),
            layout=wire_layout(
                cache.layout,
                factors=factors,
                # The engines have compared a prompt's length with what D takes.
                max_tokens=blocks * config.block_size,
                max_data_bytes=transports.max_data_bytes,
                engine=engine,
            ),
            keys=fleet_keys(config.kv_key_file, insecure=config.kv_insecure),
            takes="ranks",
            listen=data_address(config, rank, host) if role == "D" else None,
            source_host=host,
            transports=config.kv_transports,
            socket_dir=config.kv_socket_dir,
            connections=transports.connections,
            paths=transports.paths,
            staging=transports.staging,
            probe_room=transports.probe_room,
            encrypted=config.kv_encrypted,
        )

    part = build_rank(
        role,
        channel=channel,
        make_endpoint=make_endpoint,
        memory=cache,
        engine=engine,
        counters=counters,
        settings=settings_of(
            config, transports, config.buffer_bytes(blocks * engine.held_bytes_per_block)
        ),
        give_up=give_up,
    )
    spaces.append(part.space)
    part.endpoint.start()
    assert isinstance(part.endpoint, TcpEndpoint)
    return RankKv(part, transports, memory, part.endpoint.listen_address)

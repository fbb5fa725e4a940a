"""The engine's half of the KV transfer, from the worker's configuration. Built by load.engine.

`transports` chooses what moves the bytes; `cache` has the memory that they are moved from and to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from xpyd_core.keys import Keys
from xpyd_core.kv_outcome import PeerCounts
from xpyd_core.request_id import Address
from xpyd_kv.connector.build import Connector, MakeStore, build, default_store
from xpyd_kv.memory.api import KvMemory
from xpyd_kv.memory.device import View
from xpyd_kv.memory.store import LandingStore, StoreLimits
from xpyd_kv.metrics import EndpointCounters
from xpyd_kv.ranks.engine import RankedEngine, engine_wire_layout
from xpyd_kv.session.probing import ProbeResult
from xpyd_kv.session.settings import KvLimits, KvSettings
from xpyd_kv.transport.api import Handler
from xpyd_kv.transport.endpoint import TcpEndpoint
from xpyd_kv.transport.host.shared_memory import SharedMemory
from xpyd_kv.transport.settings import Identity
from xpyd_kv.transport.stream.listeners import SocketFolder
from xpyd_kv.values import BlockPool
from xpyd_kv.wire.fit import wire_layout
from xpyd_kv.wire.messages import Layout
from xpyd_worker.config import Role, WorkerConfig
from xpyd_worker.kv.transports import Transports, transports_for_cache, transports_for_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from xpyd_worker.kv.cache import DeviceCache

ProbePeer = Callable[[Address, Callable[[ProbeResult], None]], None]

LETTER: dict[Role, Literal["P", "D", "A"]] = {
    "Prefill": "P",
    "Decode": "D",
    "Aggregated": "A",
}


@dataclass
class KvLoss:
    """Why the process has to end, said by the transfer; empty while it has not."""

    reason: str = ""

    def give_up(self, reason: str) -> None:
        """Any thread. What a GPU may still write into is not known any more."""
        self.reason = self.reason or reason


@dataclass(frozen=True)
class Kv:
    """What a worker has of the KV transfer; `connector` None on an Aggregated one."""

    connector: Connector | None = None
    counters: EndpointCounters | None = None
    transports: Transports | None = None
    shared: SharedMemory | None = None
    gpu: DeviceCache | None = None
    loss: KvLoss = field(default_factory=KvLoss)

    @property
    def probe(self) -> ProbePeer | None:
        """Tests the way to a D; None on any but a P."""
        connector = self.connector
        return None if connector is None or connector.probes is None else connector.probe

    @property
    def peers(self) -> PeerCounts:
        """What was counted with each peer, for heartbeats."""
        return self.counted

    @property
    def counted(self) -> PeerCounts:
        """Where a D's server counts what became of the KV of requests."""
        return PeerCounts() if self.connector is None else self.connector.metrics.peers

    def start(self) -> None:
        """Open the port and start the I/O thread. UserError when the address is taken."""
        if self.connector is not None:
            self.connector.endpoint.start()

    def peer_gone(self, address: Address) -> None:
        """A router says that the instance at this KV address is dead."""
        if self.connector is not None:
            self.connector.peer_gone(address)

    def drain(self) -> None:
        """Refuse new OFFERs."""
        if self.connector is not None:
            self.connector.drain()

    def close(self, deadline_s: float) -> None:
        """When the engine has ended: close all connections, end the I/O thread, lend nothing any
        more, give memory back. What that thread or a GPU does not let go of is left to the end of
        the process."""
        connector = self.connector
        if connector is None or not connector.endpoint.close(deadline_s):
            return
        if self.transports is not None:
            self.transports.close(connector.store, self.gpu, deadline_s=deadline_s)
        if self.shared is not None:
            self.shared.close()


@dataclass(frozen=True)
class HeldKv:
    """An engine's KV cache as the transfer gets to it: in memory of this process, or on `ranks`;
    `memory` is a RankedMemory then."""

    memory: KvMemory
    cache: Sequence[View] = ()
    """The cache: all of `memory`."""
    shared: SharedMemory | None = None
    """What `memory` is part of, where peers may read it; its last MAX_PROBE_BYTES are for PROBEs.
    Kv closes it."""
    gpu: DeviceCache | None = None
    """What `memory` is part of on a GPU. Kv closes it."""
    ranks: RankedEngine | None = None
    rank_gpu: str = ""
    """The first one's, if they have GPUs."""
    rank_addresses: tuple[Address, ...] = ()
    """The addresses that a D's ranks listen on."""

    def clear(self, socket_dir: Path | None) -> None:
        """When the ranks are gone: take away the Unix sockets of those that were killed."""
        if socket_dir is None or not self.rank_addresses:
            return
        folder = SocketFolder(socket_dir)
        for address in self.rank_addresses:
            folder.remove_dead(address)
        folder.close()


@dataclass(frozen=True, kw_only=True)
class KvParts:
    """What the worker gives to the transfer. `wake` wakes the engine's loop, from any thread."""

    held: HeldKv
    pool: BlockPool
    wake: Callable[[], None]
    factors: dict[str, str]
    keys: Keys
    incarnation: str
    max_model_len: int
    buffer_bytes: int
    """Budget of the device buffer."""


def make_kv(config: WorkerConfig, parts: KvParts, make_store: MakeStore | None = None) -> Kv:
    """The parts of a Prefill or a Decode instance, not started. D listens; P dials only.

    `make_store` replaces the store. UserError, naming the flag, for a host pool that cannot be had.
    """
    role, held = letter_of(config), parts.held
    endpoints: list[TcpEndpoint] = []
    stores: list[LandingStore] = []
    loss = KvLoss()

    def landings() -> list[View]:
        return [view for store in stores for view in store.regions]

    if held.ranks is not None:
        transports = transports_for_ranks(config, gpu=held.rank_gpu)
    else:
        transports = transports_for_cache(
            config,
            held.memory,
            held.cache,
            shared=held.shared,
            gpu=held.gpu,
            landings=landings,
            give_up=loss.give_up,
        )

    def make_endpoint(handler: Handler) -> TcpEndpoint:
        endpoint = TcpEndpoint(
            handler,
            identity=identity_of(
                config, transports, engine_id=config.engine_id, incarnation=parts.incarnation
            ),
            layout=_layout(parts, transports),
            keys=parts.keys,
            takes="both" if held.ranks is None else "engines",
            listen=Address(config.host, config.kv_port) if role == "D" else None,
            source_host=config.host,
            transports=config.kv_transports,
            socket_dir=config.kv_socket_dir,
            connections=transports.connections,
            paths=transports.paths,
            staging=transports.staging,
            probe_room=transports.probe_room,
            encrypted=config.kv_encrypted,
        )
        endpoints.append(endpoint)
        return endpoint

    try:
        connector = build(
            role,
            make_endpoint=make_endpoint,
            memory=held.memory,
            pool=parts.pool,
            wake=parts.wake,
            settings=settings_of(config, transports, parts.buffer_bytes),
            make_store=make_store or default_store,
            ranks=held.ranks,
        )
    except BaseException:
        # It holds sockets before it is started.
        for endpoint in endpoints:
            endpoint.close(0)
        raise
    if connector.store is not None:
        stores.append(connector.store)
    return Kv(connector, endpoints[0].counters, transports, held.shared, held.gpu, loss)


def letter_of(config: WorkerConfig) -> Literal["P", "D"]:
    """The role of an instance that moves KV."""
    return "P" if config.role == "Prefill" else "D"


def identity_of(
    config: WorkerConfig, transports: Transports, *, engine_id: str, incarnation: str, rank: int = 0
) -> Identity:
    """Who this process is to its peers. `engine_id` and `incarnation` are the engine's, also in a
    rank of another pod."""
    role = letter_of(config)
    return Identity(
        engine_id, incarnation, role, rank=rank, host=transports.host, gpu=transports.gpu
    )


def settings_of(config: WorkerConfig, transports: Transports, buffer_bytes: int) -> KvSettings:
    """What the flags say; the same in the engine's process and its ranks'."""
    return KvSettings(
        limits=KvLimits(lease_s=config.kv_lease_s, hold_s=config.kv_wait_s),
        frames=transports.frames,
        store=StoreLimits(
            direct_free=config.kv_direct_free,
            buffer_bytes=buffer_bytes,
            pool_bytes=config.kv_host_pool_bytes,
        ),
        mode=config.kv_mode,
    )


def _layout(parts: KvParts, transports: Transports) -> Layout:
    held = parts.held
    if held.ranks is not None:
        return engine_wire_layout(
            held.ranks,
            factors=parts.factors,
            max_tokens=parts.max_model_len,
            ranks=held.rank_addresses,
        )
    return wire_layout(
        held.memory.layout,
        factors=parts.factors,
        max_tokens=parts.max_model_len,
        max_data_bytes=transports.max_data_bytes,
    )

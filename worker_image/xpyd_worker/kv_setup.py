"""One role's half of the KV transfer, from the worker's configuration. Built by loading.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from xpyd_core.request_id import Address
from xpyd_kv.connector.api import BlockPool, KvMemory
from xpyd_kv.connector.build import (
    Connector,
    KvSettings,
    MakeStore,
    build,
    default_store,
    wire_layout,
)
from xpyd_kv.device.api import View
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.session.limits import KvLimits
from xpyd_kv.session.metrics import KvMetrics
from xpyd_kv.store.api import Store, StoreFigures
from xpyd_kv.store.landing_store import StoreLimits
from xpyd_kv.transport.api import Handler
from xpyd_kv.transport.counters import Counters
from xpyd_kv.transport.nixl.library import load as load_nixl
from xpyd_kv.transport.nixl.path import NixlPath
from xpyd_kv.transport.settings import Identity
from xpyd_kv.transport.shared_memory import SharedMemory, SharedMemoryPath
from xpyd_kv.transport.tcp import TcpEndpoint
from xpyd_kv.wire.messages import MAX_PROBE_BYTES
from xpyd_worker.config import Role, WorkerConfig
from xpyd_worker.engine.request import EngineStats
from xpyd_worker.server.kv_metrics import kv_samples
from xpyd_worker.server.samples import HistogramSample, Sample
from xpyd_worker.server.service import ProbePeer

LETTER: dict[Role, Literal["P", "D", "A"]] = {
    "Prefill": "P",
    "Decode": "D",
    "Aggregated": "A",
}


@dataclass(frozen=True)
class Kv:
    """What a worker has of the KV transfer; `connector` None on an Aggregated one."""

    connector: Connector | None = None
    counters: Counters | None = None
    shared: SharedMemory | None = None
    nixl: NixlPath | None = None

    @property
    def probe(self) -> ProbePeer | None:
        """Tests the way to a D; None on any but a P."""
        connector = self.connector
        return None if connector is None or connector.probes is None else connector.probe

    def start(self) -> None:
        """Open the port and start the I/O thread. UserError when the address is taken."""
        if self.connector is not None:
            self.connector.endpoint.start()

    def drain(self) -> None:
        """Refuse new OFFERs."""
        if self.connector is not None:
            self.connector.drain()

    def close(self, deadline_s: float) -> None:
        """Close all connections, end the I/O thread, lend nothing any more."""
        if self.connector is not None:
            self.connector.endpoint.close(deadline_s)
        if self.nixl is not None:
            self.nixl.close()
        if self.shared is not None:
            self.shared.close()

    def samples(self, stats: EngineStats) -> Iterable[Sample | HistogramSample]:
        """The figures for `/metrics`."""
        connector = self.connector
        store = connector.store if connector is not None else None
        return kv_samples(
            connector.metrics if connector is not None else KvMetrics(),
            self.counters or Counters(),
            store.figures() if store is not None else StoreFigures(),
            stats,
        )


@dataclass(frozen=True)
class KvParts:
    """What the worker gives to the transfer. `wake` wakes the engine's loop, from any thread."""

    memory: KvMemory
    cache: Sequence[View]
    """All of `memory`."""
    pool: BlockPool
    wake: Callable[[], None]
    factors: dict[str, str]
    keys: tuple[bytes, ...]
    incarnation: str
    max_model_len: int
    buffer_bytes: int
    """Budget of the device buffer."""
    shared: SharedMemory | None = None
    """What `memory` stands in, where peers may read it; its last MAX_PROBE_BYTES are for PROBEs.
    The worker closes it."""


def make_kv(config: WorkerConfig, parts: KvParts, make_store: MakeStore | None = None) -> Kv:
    """The parts of this worker's role, not started. D listens; P dials only.

    `make_store` replaces the store.
    """
    role = LETTER[config.role]
    if role == "A":
        return Kv()
    endpoints: list[TcpEndpoint] = []
    stores: list[Store] = []
    nixl = _nixl_path(config, parts, lambda: [view for store in stores for view in store.regions])
    shm = SharedMemoryPath(parts.shared)

    def make_endpoint(handler: Handler) -> TcpEndpoint:
        endpoint = TcpEndpoint(
            handler,
            # Unique in the fleet, and a restart has the same one. Not the KV address: P does not
            # listen on it, so that two on one host may share it.
            identity=Identity(f"{config.host}/{config.port}", parts.incarnation, role),
            layout=wire_layout(
                parts.memory.layout, factors=parts.factors, max_tokens=parts.max_model_len
            ),
            keys=parts.keys,
            listen=Address(config.host, config.kv_port) if role == "D" else None,
            source_host=config.host,
            transports=config.kv_transports,
            socket_dir=config.kv_socket_dir,
            connections=config.kv_connections if config.kv_connections > 1 else 0,
            paths=[shm] if nixl is None else [shm, nixl],
            probe_room=_probe_room(parts.shared) if nixl is None else nixl.spare,
        )
        endpoints.append(endpoint)
        return endpoint

    connector = build(
        role,
        make_endpoint=make_endpoint,
        memory=parts.memory,
        pool=parts.pool,
        wake=parts.wake,
        settings=KvSettings(
            limits=KvLimits(lease_s=config.kv_lease_s, hold_s=config.kv_wait_s),
            frames=FrameLimits(group_bytes=config.kv_group_bytes),
            store=StoreLimits(
                direct_free=config.kv_direct_free,
                buffer_bytes=parts.buffer_bytes,
                pool_bytes=config.kv_host_pool_bytes,
            ),
            mode=config.kv_mode,
        ),
        make_store=make_store or default_store,
    )
    if connector.store is not None:
        stores.append(connector.store)
    return Kv(connector, endpoints[0].counters, parts.shared, nixl)


def _probe_room(shared: SharedMemory | None) -> memoryview | None:
    return None if shared is None else memoryview(shared.buffer)[-MAX_PROBE_BYTES:]


def _nixl_path(
    config: WorkerConfig, parts: KvParts, of_store: Callable[[], Sequence[View]]
) -> NixlPath | None:
    """Only where it was asked for: between caches in ordinary memory every other way is faster.
    UserError where it cannot be had."""
    if config.kv_transports != ("nixl",):
        return None
    return NixlPath(
        load_nixl(),
        unit_bytes=parts.memory.layout.block_bytes,
        spare_bytes=MAX_PROBE_BYTES,
        lends_from=parts.cache if config.role == "Prefill" else (),
        lands_in=lambda: [*parts.cache, *of_store()],
    )

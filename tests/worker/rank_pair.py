"""P and D of any layout whose ranks' caches are on GPUs, fakes mostly, or on the CPU: the worker's
own set-up of each rank's half of the transfer and of its engine's, and real sockets. The test is
the engine.

What a rank's model writes waits on the fake's compute stream until somebody asks for an event
behind it, as in tests.worker.device_pair. Imports only what a machine with a GPU has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from tests.kv.device_fake import Machine
from tests.kv.kvfakes import FakePool
from tests.kv.nccl_fake import FakeNccl, World
from tests.kv.rank_pods import MAX_TOKENS, Pipe, Side, layout_of
from tests.worker.kv_pair import settings
from xpyd_core.compat import compat_factors
from xpyd_core.keys import fleet_keys
from xpyd_core.request_id import Address
from xpyd_kv.memory.device import DeviceView
from xpyd_kv.plan.engine_layout import EngineLayout
from xpyd_kv.ranks.engine import RankedEngine, RankedMemory
from xpyd_kv.values import KvLayout
from xpyd_worker.config import WorkerConfig
from xpyd_worker.kv.cache import CacheMemory, DeviceCache, paged
from xpyd_worker.kv.engine import HeldKv, KvParts, letter_of, make_kv
from xpyd_worker.kv.rank import RankKv, engine_layout, start_rank_kv

MODEL = Path(__file__).parents[2] / "examples" / "demo-model"
BLOCKS = 64


def config_of(role: Any, engine: EngineLayout, folder: Path, **fields: Any) -> WorkerConfig:
    """Of one instance: small frames, room beside the cache, any ports."""
    key = folder / "kv.key"
    key.write_text("the fleet's key, long enough")
    made = settings(
        role,
        tensor_parallel_size=engine.tp,
        pipeline_parallel_size=len(engine.stages),
        kv_key_file=key,
        kv_socket_dir=folder / "kv",
        **fields,
    )
    return replace(made, block_size=engine.block_size)


class Host(Protocol):
    """The GPUs of one machine."""

    def cache(self, rank: str) -> DeviceCache:
        """What a rank of this name keeps its cache in, on the GPU that it has."""
        ...

    def write(self, device: Any, view: DeviceView, data: bytes) -> None:
        """The model of that device's rank writes it, some time."""
        ...

    def read(self, device: Any, view: DeviceView) -> bytes:
        """What stands there, known to have been written."""
        ...

    def check(self) -> None:
        """Nothing was done wrong, and all was given back."""
        ...


class FakeHost:
    """Every rank has a GPU of its own, and all reach each other."""

    def __init__(self, machine: Machine, world: World) -> None:
        self.machine, self.world = machine, world
        self._gpus: set[str] = set()

    def cache(self, rank: str) -> DeviceCache:
        name, machine = f"GPU-{rank}", self.machine
        machine.peers |= {frozenset((name, other)) for other in self._gpus}
        self._gpus.add(name)
        device = machine.device(rank, gpu=name)

        def tensor_over(view: DeviceView) -> torch.Tensor:
            return torch.frombuffer(device.bytes_of(device.place_of(view)), dtype=torch.uint8)

        nccl = FakeNccl(self.world, device)
        return DeviceCache(device, tensor_over=tensor_over, load_nccl=lambda: nccl)

    def write(self, device: Any, view: DeviceView, data: bytes) -> None:
        device.compute(view, data)

    def read(self, device: Any, view: DeviceView) -> bytes:
        return device.read(view)

    def check(self) -> None:
        self.machine.check()


class DeviceSide(Side):
    """See Side. `host` None: on the CPU."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: EngineLayout,
        *,
        host: Host | None,
    ) -> None:
        self.config, self.engine, self.host = config, engine, host
        self.role = letter_of(config)
        self.pool = FakePool(BLOCKS, engine.block_size)
        self.is_ranked = engine.num_ranks > 1
        self.given_up: list[str] = []
        self.memories: list[Any] = []
        self.caches: list[CacheMemory] = []
        self.pipes: list[Pipe] = []
        self.rank_kvs: list[RankKv] = []
        for rank in range(engine.num_ranks):
            self._add_cache(rank)
        self.keys = fleet_keys(config.kv_key_file, insecure=False)
        self.factors = compat_factors(MODEL, model="m", revision="", kv_dtype="float32")
        for rank in range(engine.num_ranks if self.is_ranked else 0):
            self._start_rank(rank)
        self.parts = [one.part for one in self.rank_kvs]
        self.ends = make_kv(config, self._parts())
        assert self.ends.connector is not None
        self.kv = self.ends.connector
        self.ends.start()

    def _add_cache(self, rank: int) -> None:
        layout = layout_of(self.engine, rank)
        gpu = None if self.host is None else self.host.cache(f"{self.role}{rank}")
        cache = CacheMemory(self.config, gpu)
        flat = cache.allocate(BLOCKS * layout.bytes_per_block)
        tensors = _tensors(flat, layout)
        self.caches.append(cache)
        self.memories.append(paged(tensors, gpu, layers=layout.layers))

    def _start_rank(self, rank: int) -> None:
        cache, pipe = self.memories[rank], Pipe()
        self.pipes.append(pipe)
        engine = engine_layout(
            self.config, cache, kv_heads=self.engine.kv_heads, stages=self.engine.stages
        )
        assert engine == self.engine
        self.rank_kvs.append(
            start_rank_kv(
                self.config,
                rank=rank,
                host=self.config.host,
                engine_id=self.config.engine_id,
                incarnation=f"incarnation-{self.role}",
                channel=pipe.of_rank,
                cache=cache,
                memory=self.caches[rank],
                engine=engine,
                folder=MODEL,
                model_name="m",
                give_up=self.given_up.append,
            )
        )

    def _parts(self) -> KvParts:
        ranked = RankedEngine(
            layout=self.engine,
            channels=[pipe.of_engine for pipe in self.pipes],
            dtype="float32",
            head_dim=1,
            on_device=self.host is not None,
        )
        size = BLOCKS * self.engine.held_bytes_per_block
        memory, cache = self.memories[0], self.caches[0]
        held = HeldKv(memory, memory.regions, cache.shared, cache.gpu)
        if self.is_ranked:
            held = HeldKv(
                RankedMemory(ranked),
                ranks=ranked,
                rank_addresses=self.addresses,
                rank_gpu=self.rank_kvs[0].transports.gpu,
            )
        return KvParts(
            held=held,
            pool=self.pool,
            wake=lambda: None,
            factors=self.factors,
            keys=self.keys,
            incarnation=f"incarnation-{self.role}",
            max_model_len=MAX_TOKENS,
            buffer_bytes=self.config.buffer_bytes(size),
        )

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(one.address for one in self.rank_kvs if one.address is not None)

    def _write(self, rank: int, view: Any, data: bytes) -> None:
        if self.host is None:
            view[:] = data
        else:
            self.host.write(self.memories[rank].device, view, data)

    def _read(self, rank: int, view: Any) -> Any:
        return view if self.host is None else self.host.read(self.memories[rank].device, view)

    def close(self) -> None:
        self.ends.close(5.0)
        for one in self.rank_kvs:
            one.close()


def _tensors(flat: torch.Tensor, layout: KvLayout) -> list[torch.Tensor]:
    shape = (BLOCKS, layout.kv_heads, layout.block_size, 2 * layout.head_dim)
    size = BLOCKS * layout.block_bytes
    each = (flat[i * size :][:size] for i in range(len(layout.layers)))
    return [one.view(torch.float32).view(shape) for one in each]


class Pair:
    """What two sides have in common. `on_gpu`: whose caches are on fake GPUs, those of both on
    `one_host` where that is so."""

    def __init__(self, folder: Path, *, on_gpu: str = "PD", one_host: bool = False) -> None:
        self.folder = folder
        self.machines = {"P": Machine(seed=1), "D": Machine(seed=2)}
        if one_host:
            self.machines["D"] = self.machines["P"]
        self.world = World(self.machines["P"])
        hosts = {id(one): FakeHost(one, self.world) for one in self.machines.values()}
        self.hosts = {role: hosts[id(one)] for role, one in self.machines.items() if role in on_gpu}

    @contextmanager
    def of(self, p: EngineLayout, d: EngineLayout, **fields: Any) -> Iterator[Any]:
        """A P and a D of these layouts, closed at the end, when nothing was done wrong."""
        with sides_on(self.hosts, p, d, self.folder, **fields) as both:
            yield both
        for machine in self.machines.values():
            machine.check()


@contextmanager
def sides_on(
    hosts: Mapping[str, Host], p: EngineLayout, d: EngineLayout, folder: Path, **fields: Any
) -> Iterator[Any]:
    """A P and a D of these layouts, each on its host or on the CPU, closed at the end."""
    made: list[DeviceSide] = []
    try:
        for role, engine in (("Decode", d), ("Prefill", p)):
            config = config_of(role, engine, folder, **fields)
            made.append(DeviceSide(config, engine, host=hosts.get(role[0])))
        yield made[1], made[0]
    finally:
        for side in reversed(made):
            side.close()

"""P and D of any layout whose ranks' caches are on fake GPUs, or on the CPU: the worker's own
set-up of each rank's half of the transfer and of its engine's, and real sockets. The test is the
engine.

What a rank's model writes waits on the fake's compute stream until somebody asks for an event
behind it, as in tests.worker.device_pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.kv.device_fake import Machine
from tests.kv.kvfakes import FakePool
from tests.kv.nccl_fake import World
from tests.kv.rank_pods import MAX_TOKENS, Pipe, Side, layout_of
from tests.worker.device_pair import cache_on
from tests.worker.kv_pair import settings
from xpyd_core.compat import compat_factors
from xpyd_core.keys import fleet_keys
from xpyd_core.request_id import Address
from xpyd_kv.connector.api import KvLayout
from xpyd_kv.plan.engine_layout import EngineLayout
from xpyd_kv.ranks.engine import BookMemory, RankedEngine
from xpyd_worker.config import WorkerConfig
from xpyd_worker.kv_device import paged
from xpyd_worker.kv_rank import CacheMemory, RankKv, engine_layout, start_rank_kv
from xpyd_worker.kv_setup import KvParts, letter_of, make_kv

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


class DeviceSide(Side):
    """See Side. `machine` None: on the CPU."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: EngineLayout,
        *,
        machine: Machine | None,
        world: World | None = None,
    ) -> None:
        self.config, self.engine, self.machine, self.world = config, engine, machine, world
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
        machine, layout = self.machine, layout_of(self.engine, rank)
        gpu = None
        if machine is not None:
            # Every rank has a GPU of its own; all of one machine reach each other.
            name = f"GPU-{self.role}{rank}"
            machine.peers |= {frozenset((name, other)) for other in machine.gpus}
            machine.gpus.add(name)
            gpu = cache_on(machine.device(f"{self.role}{rank}", gpu=name), self.world)
        cache = CacheMemory(self.config, gpu)
        flat = cache.make(BLOCKS * layout.bytes_per_block)
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
            on_device=self.machine is not None,
        )
        size = BLOCKS * self.engine.held_bytes_per_block
        common = {
            "pool": self.pool,
            "wake": lambda: None,
            "factors": self.factors,
            "keys": self.keys,
            "incarnation": f"incarnation-{self.role}",
            "max_model_len": MAX_TOKENS,
            "buffer_bytes": self.config.buffer_bytes(size),
        }
        if self.is_ranked:
            return KvParts(
                memory=BookMemory(ranked),
                cache=(),
                ranks=ranked,
                rank_addresses=self.addresses,
                rank_gpu=self.rank_kvs[0].ways.gpu,
                **common,
            )
        memory, cache = self.memories[0], self.caches[0]
        return KvParts(
            memory=memory, cache=memory.regions, shared=cache.shared, gpu=cache.gpu, **common
        )

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(one.address for one in self.rank_kvs if one.address is not None)

    def _write(self, rank: int, view: Any, data: bytes) -> None:
        gpu: Any = self.memories[rank].device
        if gpu is None:
            view[:] = data
        else:
            gpu.compute(view, data)

    def _read(self, rank: int, view: Any) -> Any:
        gpu: Any = self.memories[rank].device
        return view if gpu is None else gpu.read(view)

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
        machines = {"P": Machine(seed=1), "D": Machine(seed=2)}
        if one_host:
            machines["D"] = machines["P"]
        self.machines = {role: machines[role] if role in on_gpu else None for role in "PD"}
        self.world = World(machines["P"])

    @contextmanager
    def of(self, p: EngineLayout, d: EngineLayout, **fields: Any) -> Iterator[Any]:
        """A P and a D of these layouts, closed at the end, when nothing was done wrong."""
        made: list[DeviceSide] = []
        try:
            for role, engine in (("Decode", d), ("Prefill", p)):
                config = config_of(role, engine, self.folder, **fields)
                machine = self.machines[role[0]]
                made.append(DeviceSide(config, engine, machine=machine, world=self.world))
            yield made[1], made[0]
        finally:
            for side in reversed(made):
                side.close()
        for machine in self.machines.values():
            if machine is not None:
                machine.check()

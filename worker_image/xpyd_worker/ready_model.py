"""What loading gives, on one rank or on several, before there is an engine. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from xpyd_core.request_id import Address
from xpyd_kv.memory.paged import DevicePagedMemory, PagedMemory
from xpyd_kv.ranks.engine import RankedEngine
from xpyd_kv.transport.host.shared_memory import SharedMemory
from xpyd_kv.transport.stream.listeners import SocketFolder
from xpyd_worker.engine.executor import Executor
from xpyd_worker.memory import MemoryUse

if TYPE_CHECKING:
    from xpyd_worker.kv_device import DeviceCache
    from xpyd_worker.ranks.figures import RankFigures
    from xpyd_worker.ranks.instance import Instance


class StepCounters(Protocol):
    """What entered forwards since the start."""

    @property
    def forwards(self) -> int: ...

    @property
    def prompt_tokens_computed(self) -> int: ...

    @property
    def output_tokens_computed(self) -> int: ...


class CountingExecutor(Executor, Protocol):
    """One that counts what it runs."""

    @property
    def counters(self) -> StepCounters: ...


@dataclass(frozen=True)
class OwnKv:
    """A KV cache that stands in this process' reach. `shared` where other processes may read it,
    `gpu` where KV moves from a GPU."""

    memory: PagedMemory | DevicePagedMemory
    shared: SharedMemory | None
    gpu: DeviceCache | None


@dataclass(frozen=True)
class RankedKv:
    """A KV cache that ranks have. `addresses`: where a D's listen. `gpu`: the first one's, if they
    have GPUs. `socket_dir`: of Unix sockets."""

    engine: RankedEngine
    addresses: tuple[Address, ...]
    gpu: str
    socket_dir: Path | None

    def clear(self) -> None:
        """When the ranks are gone: take away the sockets of those that were killed."""
        if self.socket_dir is None or not self.addresses:
            return
        folder = SocketFolder(self.socket_dir)
        for address in self.addresses:
            folder.remove_dead(address)
        folder.close()


@dataclass(frozen=True)
class ReadyModel:
    """A model that can run steps. `dtype`: of weights and KV; `cache_bytes`: of all ranks. `kv` is
    there where KV moves and the cache is this process'; `instance` where there are ranks."""

    executor: CountingExecutor
    dtype: str
    cache_bytes: int
    on_gpu: bool
    memory: Callable[[], Sequence[MemoryUse]]
    """The table of what it takes."""
    kv: OwnKv | None = None
    ranked_kv: RankedKv | None = None
    """Where KV moves and the cache is divided over ranks."""
    instance: Instance | None = None
    ranks: Callable[[], Sequence[RankFigures]] = tuple
    """What is known of each rank now; of none where there is one process."""

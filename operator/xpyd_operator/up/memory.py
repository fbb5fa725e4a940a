"""The memory plan: how much memory each engine may take so that the fleet fits this machine.

A size from the document or from engine.args is kept, or the fleet is refused with the numbers; only
sizes that are not given are chosen here. A later scale starts instances with the same plan: a
running instance is never resized. An instance of several ranks is one process for each rank and one
that serves HTTP. Its weights, buffer and host pool are divided among the ranks; each rank has a KV
cache of the size given. Each of its replicas has a copy of the weights. `read_machine`
is the only function that looks at the machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from xpyd_core.errors import UserError
from xpyd_core.sizes import format_bytes
from xpyd_operator.document.engine import has_whole_experts
from xpyd_operator.document.engines import Pool
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.document.parallelism import Parallelism
from xpyd_operator.manifests.resources import (
    CACHE_FLAG,
    CACHE_LEAST_BYTES,
    CACHE_MOST_BYTES,
    MIB,
    POOL_FLAG,
    POOL_MOST_BYTES,
    Sizes,
    fixed_bytes,
    given_sizes,
)
from xpyd_operator.up.control import table

_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Machine:
    """Figures of one moment."""

    available_bytes: int
    cores: int


def read_machine() -> Machine:
    """Memory that can be taken without swapping, and the cores that we may run on."""
    available = min([_mem_available(), *_cgroup_rooms()])
    return Machine(max(0, available), len(os.sched_getaffinity(0)))


def _mem_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_rooms() -> Iterator[int]:
    """Room below each memory limit above us: limit - used, page cache not counted as used."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, used, cache = _CGROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit = _CGROUPS / "memory", "memory.limit_in_bytes"
            used, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            room = _room(folder, limit, used, cache)
            if room is not None:
                yield room
            if folder == root:
                break


def _room(folder: Path, limit: str, used: str, cache: str) -> int | None:
    try:
        most = (folder / limit).read_text().strip()
        now = int((folder / used).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if most == "max" else int(most) - now + int(stat.get(cache, 0))


USABLE_PERCENT = 80
"""The share of the available memory that fleets get; the rest is for the page cache and other
processes.
"""


@dataclass(frozen=True)
class EngineMemory:
    """One engine of a pool, in bytes; the cache is that of one rank, as --kv-cache-memory is, and
    all else the engine's. `args`: the flags for the sizes that were chosen here."""

    pool: str
    engines: int
    ranks: int
    weights_bytes: int
    cache_bytes: int
    buffer_bytes: int
    host_pool_bytes: int
    args: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """All of one engine."""
        of_kv = self.ranks * self.cache_bytes + self.buffer_bytes + self.host_pool_bytes
        return fixed_bytes(self.ranks, self.weights_bytes) + of_kv


@dataclass(frozen=True)
class MemoryPlan:
    """The plan of a fleet; `threads` for each rank of each engine."""

    usable_bytes: int
    threads: int
    pools: tuple[EngineMemory, ...]

    def of(self, pool: str) -> EngineMemory:
        """The plan of one pool's engines."""
        return next(engine for engine in self.pools if engine.pool == pool)

    @property
    def total_bytes(self) -> int:
        """All engines."""
        return sum(engine.engines * engine.total_bytes for engine in self.pools)

    def table(self) -> str:
        """The plan for people."""
        has_ranks = any(e.ranks > 1 for e in self.pools)
        count = ("engines", "ranks") if has_ranks else ("engines",)
        rows: list[tuple[str, ...]] = [
            ("memory plan", *count, "process", "weights", "KV cache", "buffer", "host pool")
        ]
        for e in self.pools:
            of_kv = (e.ranks * e.cache_bytes, e.buffer_bytes, e.host_pool_bytes)
            parts = (fixed_bytes(e.ranks, 0), e.weights_bytes, *of_kv)
            counts = (str(e.engines), str(e.ranks))[: len(count)]
            rows.append((e.pool, *counts, *map(format_bytes, parts)))
        total = f"{format_bytes(self.total_bytes)} of {format_bytes(self.usable_bytes)} usable"
        each = "each rank" if has_ranks else "each"
        return f"{table(rows)}\ntotal {total}; {self.threads} CPU threads {each}"


def plan_memory(
    fleet: InferenceFleet,
    replicas: Sequence[int],
    machine: Machine,
    *,
    weights_bytes: int,
    expert_bytes: int = 0,
) -> MemoryPlan:
    """Sizes for `replicas[i]` engines of pool i; UserError with the numbers if they do not fit.
    `weights_bytes`: of one copy of the model; `expert_bytes`: how many of them experts take."""
    pools = [pool.with_replicas_that_stay for pool in fleet.spec.pools]
    ranks = [pool.parallelism.ranks for pool in pools]
    all_ranks = sum(count * each for count, each in zip(replicas, ranks, strict=True))
    usable = machine.available_bytes * USABLE_PERCENT // 100
    sizes = [given_sizes(fleet, pool) for pool in pools]
    by_args = has_whole_experts(fleet.spec.engine.args)
    weights = [
        _weights_of(pool.parallelism, weights_bytes, expert_bytes, by_args=by_args)
        for pool in pools
    ]
    least = sum(
        count * (fixed_bytes(size.ranks, held) + size.least())
        for count, size, held in zip(replicas, sizes, weights, strict=True)
    )
    spare = (usable - least) // max(1, all_ranks)
    found = tuple(
        _fit(pool, count, size, spare, held)
        for pool, count, size, held in zip(pools, replicas, sizes, weights, strict=True)
    )
    plan = MemoryPlan(usable, max(1, machine.cores // max(1, all_ranks)), found)
    if all_ranks and spare < 0:
        raise UserError(_refusal(plan, machine))
    return plan


def _weights_of(parts: Parallelism, of_a_copy: int, experts: int, *, by_args: bool) -> int:
    """What an instance holds: a copy for each replica, but of experts that replicas share one."""
    is_shared = by_args or parts.expert > 1
    return parts.data * of_a_copy - (parts.data - 1) * (experts if is_shared else 0)


def check_room(plan: MemoryPlan, pool: str, more: int, machine: Machine) -> None:
    """Refuse to start `more` engines of `pool` where what is available now cannot hold them."""
    usable = machine.available_bytes * USABLE_PERCENT // 100
    need = plan.of(pool).total_bytes * more
    if need > usable:
        raise UserError(
            f"{more} more of pool {pool} need {format_bytes(need)} of memory, "
            f"{format_bytes(usable)} ({USABLE_PERCENT} % of what is available) can be used"
        )


def _fit(pool: Pool, engines: int, size: Sizes, spare: int, weights_bytes: int) -> EngineMemory:
    """Give an engine its part of the spare memory, `spare` for each rank: a third to the host pool,
    the rest to cache."""
    args: list[str] = []
    spare = max(0, spare) * size.ranks
    host_pool = size.host_pool
    if host_pool is None:
        host_pool = _whole_mib(min(POOL_MOST_BYTES, spare // 3))
        spare -= host_pool
        args.append(f"{POOL_FLAG}={host_pool}")
    cache = size.cache
    if cache is None:
        # A buffer in percent of the cache grows with it.
        percent = size.buffer(100) if size.buffer_text.endswith("%") else 0
        room = spare * 100 // (100 + percent) // size.ranks
        cache = _whole_mib(min(CACHE_MOST_BYTES, CACHE_LEAST_BYTES + room))
        args.append(f"{CACHE_FLAG}={cache}")
    return EngineMemory(
        pool=pool.name,
        engines=engines,
        ranks=size.ranks,
        weights_bytes=weights_bytes,
        cache_bytes=cache,
        buffer_bytes=size.buffer(cache),
        host_pool_bytes=host_pool,
        args=tuple(args),
    )


def _whole_mib(count: int) -> int:
    return count // MIB * MIB


def _refusal(plan: MemoryPlan, machine: Machine) -> str:
    available = format_bytes(machine.available_bytes)
    return (
        f"the fleet does not fit this machine: it needs {format_bytes(plan.total_bytes)} of memory,"
        f" {format_bytes(plan.usable_bytes)} ({USABLE_PERCENT} % of {available} available) can be"
        f" used\n{plan.table()}\nLower replicas, {CACHE_FLAG} in spec.engine.args,"
        " spec.kvTransfer.bufferSize or spec.kvTransfer.hostPoolSize."
    )

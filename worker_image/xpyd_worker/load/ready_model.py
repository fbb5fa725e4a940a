"""A model that is loaded, on one rank or on several, and where its memory went. Imports no torch.

`engine` puts an engine over it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xpyd_core.sizes import format_bytes
from xpyd_worker.config import WorkerConfig
from xpyd_worker.engine.executor import Executor, LayerExperts
from xpyd_worker.kv.engine import HeldKv

if TYPE_CHECKING:
    from xpyd_worker.ranks.instance import Instance
    from xpyd_worker.ranks.start.messages import RankReady
    from xpyd_worker.runner.gpu_memory import GpuUse

_log = logging.getLogger(__name__)
_DRAFT = "what drafts, with its KV cache"


@dataclass(frozen=True)
class ReadyModel:
    """A model that can run steps. `dtype`: of weights and KV; `cache_bytes`: of all ranks. `kv` is
    there where KV moves, `instance` where there are ranks."""

    executor: Executor
    dtype: str
    cache_bytes: int
    on_gpu: bool
    memory: Callable[[], Sequence[MemoryUse]]
    """The table of what it takes."""
    experts_chosen: Callable[[], Sequence[LayerExperts]] = tuple
    """By layer; none of a model without experts. Any thread."""
    kv: HeldKv | None = None
    instance: Instance | None = None


# --- memory


@dataclass(frozen=True)
class MemoryUse:
    """One row: what takes `size_bytes`, and what to know about it."""

    name: str
    size_bytes: int
    note: str = ""


def memory_table(
    config: WorkerConfig,
    *,
    weight_bytes: int,
    cache_bytes: int,
    num_blocks: int,
    resident_bytes: int | None,
    gpu: GpuUse | None = None,
    draft_bytes: int = 0,
    draft_weight_bytes: int = 0,
) -> list[MemoryUse]:
    """What a loaded engine has. `resident_bytes`: what the system says of the process, if it does;
    memory that is asked for counts there from its first use on. `gpu`: of the GPU that weights and
    cache are on. `draft_bytes`: of a model that drafts; `draft_weight_bytes` are its weights."""
    when_used = "taken as it is used"
    blocks = f"{num_blocks} blocks of {config.block_size}"
    weights = weight_bytes + draft_weight_bytes
    if gpu is None:
        rows = [
            MemoryUse("weights", weight_bytes, "packed for this device"),
            MemoryUse("KV cache", cache_bytes, f"{blocks}, {when_used}"),
        ]
    else:
        rows = [
            MemoryUse("GPU: weights", weight_bytes),
            MemoryUse("GPU: largest step", max(0, gpu.found.tensors - weights)),
            MemoryUse(
                "GPU: workspaces", gpu.found.workspaces, "of libraries, and compiled kernels"
            ),
            MemoryUse("GPU: CUDA graphs", gpu.graphs),
            MemoryUse("GPU: KV cache", cache_bytes, blocks),
            MemoryUse("GPU: not ours", gpu.found.others, "other processes, the driver's context"),
            MemoryUse("GPU: all", gpu.found.total),
        ]
    if draft_bytes:
        rows.append(MemoryUse(_DRAFT if gpu is None else f"GPU: {_DRAFT}", draft_bytes))
    if config.lands_kv:
        buffer_bytes = config.buffer_bytes(cache_bytes)
        if gpu is None:
            rows.append(MemoryUse("KV buffer", buffer_bytes, f"at most, {when_used}"))
        else:
            when_used = "pinned"
            rows.append(MemoryUse("GPU: KV buffer", buffer_bytes))
        rows.append(MemoryUse("KV host pool", config.kv_host_pool_bytes, when_used))
    if resident_bytes is not None:
        on_host = weights if gpu is None else 0
        rest = max(0, resident_bytes - on_host)
        rows.append(MemoryUse("torch, libraries, Python", rest, "the process without its weights"))
        rows.append(MemoryUse("resident now", resident_bytes))
    return rows


def ranks_memory_table(config: WorkerConfig, ready: Sequence[RankReady]) -> list[MemoryUse]:
    """What each rank takes, and what all of them share."""
    rows: list[MemoryUse] = []
    for rank, one in enumerate(ready, config.first_rank):
        rows.append(MemoryUse(f"rank {rank}: weights", one.weight_bytes))
        rows.append(MemoryUse(f"rank {rank}: KV cache", one.cache_bytes, f"{one.blocks} blocks"))
        if one.draft_bytes:
            rows.append(MemoryUse(f"rank {rank}: {_DRAFT}", one.draft_bytes))
        if one.resident_bytes is not None:
            rows.append(MemoryUse(f"rank {rank}: resident now", one.resident_bytes))
    if config.lands_kv:
        shared = f"at most, shared by {len(ready)} ranks"
        buffer_bytes = config.buffer_bytes(sum(one.cache_bytes for one in ready))
        rows.append(MemoryUse("KV buffer", buffer_bytes, shared))
        rows.append(MemoryUse("KV host pool", config.kv_host_pool_bytes, shared))
    return rows


def log_memory(rows: Sequence[MemoryUse]) -> None:
    """Log one line for each row, in columns."""
    width = max(len(row.name) for row in rows)
    for row in rows:
        note = f"  {row.note}" if row.note else ""
        _log.info("memory: %-*s %10s%s", width, row.name, format_bytes(row.size_bytes), note)

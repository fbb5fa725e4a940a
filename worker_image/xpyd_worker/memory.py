"""Where an engine's memory went: the table that is logged when it has loaded."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xpyd_core.sizes import format_bytes
from xpyd_worker.config import WorkerConfig

if TYPE_CHECKING:
    from xpyd_worker.runner.gpu_memory import GpuUse

_log = logging.getLogger(__name__)


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
) -> list[MemoryUse]:
    """What a loaded engine has. `resident_bytes`: what the system says of the process, if it does;
    memory that is asked for counts there from its first use on. `gpu`: of the GPU that weights and
    cache are on."""
    when_used = "taken as it is used"
    blocks = f"{num_blocks} blocks of {config.block_size}"
    if gpu is None:
        rows = [
            MemoryUse("weights", weight_bytes, "packed for this device"),
            MemoryUse("KV cache", cache_bytes, f"{blocks}, {when_used}"),
        ]
    else:
        rows = [
            MemoryUse("GPU: weights", weight_bytes),
            MemoryUse("GPU: largest step", max(0, gpu.found.tensors - weight_bytes)),
            MemoryUse("GPU: beside tensors", gpu.found.beside, "compiled kernels, workspaces"),
            MemoryUse("GPU: CUDA graphs", gpu.graphs),
            MemoryUse("GPU: KV cache", cache_bytes, blocks),
            MemoryUse("GPU: not ours", gpu.found.others, "other processes, the driver's context"),
            MemoryUse("GPU: all", gpu.found.total),
        ]
    if config.lands_kv:
        buffer_bytes = config.buffer_bytes(cache_bytes)
        if gpu is None:
            rows.append(MemoryUse("KV buffer", buffer_bytes, f"at most, {when_used}"))
        else:
            when_used = "pinned"
            rows.append(MemoryUse("GPU: KV buffer", buffer_bytes))
        rows.append(MemoryUse("KV host pool", config.kv_host_pool_bytes, when_used))
    if resident_bytes is not None:
        on_host = weight_bytes if gpu is None else 0
        rest = max(0, resident_bytes - on_host)
        rows.append(MemoryUse("torch, libraries, Python", rest, "the process without its weights"))
        rows.append(MemoryUse("resident now", resident_bytes))
    return rows


def log_memory(rows: Sequence[MemoryUse]) -> None:
    """One line for each row, in columns."""
    width = max(len(row.name) for row in rows)
    for row in rows:
        note = f"  {row.note}" if row.note else ""
        _log.info("memory: %-*s %10s%s", width, row.name, format_bytes(row.size_bytes), note)


def give_back() -> None:
    """Let the allocator return what loading used and freed, some 70 MB for a checkpoint of 900."""
    # glibc's; other libraries have none, and need none.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """Of this process; None where the system does not say."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("VmRSS:")), None)
    return int(found.split()[1]) * 1024 if found else None

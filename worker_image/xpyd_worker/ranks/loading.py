"""An engine on several ranks: started, and what the engine's process has of them. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from xpyd_worker.config import WorkerConfig
from xpyd_worker.memory import MemoryUse
from xpyd_worker.ranks.executor import RankedExecutor
from xpyd_worker.ranks.instance import Instance
from xpyd_worker.ranks.messages import Logs, Ready
from xpyd_worker.ranks.step_encoder import StepEncoder
from xpyd_worker.ranks.step_messages import decode_output
from xpyd_worker.ready_model import ReadyModel


def load_ranks(config: WorkerConfig, logs: Logs) -> ReadyModel:
    """Start the ranks and have each load its part. UserError for what the user can mend,
    RankLostError for the rest; no rank is left then."""
    instance = Instance(config, config.sizes, logs=logs)
    try:
        ready = instance.start()
    except BaseException:
        instance.close()
        raise
    first = ready[0]
    sizes = config.sizes
    executor = RankedExecutor(
        instance,
        num_blocks=first.blocks,
        depth=sizes.pipeline if sizes.pipeline > 1 else first.depth,
        encoder=StepEncoder(slots(config)),
        decode=decode_output,
    )
    return ReadyModel(
        executor=executor,
        dtype=first.dtype,
        cache_bytes=sum(one.cache_bytes for one in ready),
        on_gpu=first.on_gpu,
        memory=lambda: _memory(ready),
        instance=instance,
    )


def slots(config: WorkerConfig) -> int:
    """Sequences that ranks know at once: those that run, and as many that were preempted."""
    return 2 * config.max_num_seqs


def _memory(ready: Sequence[Ready]) -> list[MemoryUse]:
    """What each rank takes."""
    rows: list[MemoryUse] = []
    for rank, one in enumerate(ready):
        rows.append(MemoryUse(f"rank {rank}: weights", one.weight_bytes))
        rows.append(MemoryUse(f"rank {rank}: KV cache", one.cache_bytes, f"{one.blocks} blocks"))
        if one.resident_bytes is not None:
            rows.append(MemoryUse(f"rank {rank}: resident now", one.resident_bytes))
    return rows

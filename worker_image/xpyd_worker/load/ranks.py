"""An engine on several ranks: started, and what the engine's process has of them. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from xpyd_core.request_id import Address
from xpyd_kv.ranks.engine import RankedEngine
from xpyd_worker.config import WorkerConfig
from xpyd_worker.load.ready_model import MemoryUse, RankedKv, ReadyModel
from xpyd_worker.ranks.executor import RankedExecutor
from xpyd_worker.ranks.instance import Instance, rank_metrics
from xpyd_worker.ranks.start.messages import Logs, RankReady
from xpyd_worker.ranks.step.encoder import StepEncoder
from xpyd_worker.ranks.step.messages import slot_count


def load_ranks(config: WorkerConfig, logs: Logs, incarnation: str) -> ReadyModel:
    """Start the ranks and have each load its part. UserError for what the user can mend,
    RankLostError for the rest; no rank is left then."""
    instance = Instance(config, logs=logs, incarnation=incarnation)
    try:
        ready = instance.start()
    except BaseException:
        instance.close()
        raise
    first = ready[0]
    return ReadyModel(
        executor=executor_of(config, instance, first),
        dtype=first.dtype,
        cache_bytes=sum(one.cache_bytes for one in ready),
        on_gpu=first.on_gpu,
        memory=lambda: memory_rows(config, ready),
        ranked_kv=_ranked_kv(config, instance, ready),
        instance=instance,
        ranks=lambda: rank_metrics(
            config.sizes, shown=instance.show(), ready=ready, fits=instance.fits
        ),
    )


def executor_of(config: WorkerConfig, instance: Instance, first: RankReady) -> RankedExecutor:
    """Of an instance that has started; `first`: what its rank 0 has."""
    sizes = config.sizes
    return RankedExecutor(
        instance,
        num_blocks=first.blocks,
        depth=sizes.depth(first.depth),
        draws_ahead=sizes.pipeline == 1 and first.depth > 1,
        encoder=StepEncoder(slot_count(config.max_num_seqs)),
    )


def _ranked_kv(
    config: WorkerConfig, instance: Instance, ready: Sequence[RankReady]
) -> RankedKv | None:
    """None where KV does not move."""
    kv = ready[0].kv
    if kv is None:
        return None
    addresses = [one.kv.address for one in ready if one.kv is not None]
    return RankedKv(
        engine=RankedEngine(
            layout=kv.engine,
            channels=instance.channels,
            dtype=ready[0].dtype,
            head_dim=kv.head_dim,
            on_device=ready[0].on_gpu,
        ),
        addresses=tuple(Address(*address) for address in addresses if address is not None),
        gpu=kv.gpu,
        socket_dir=config.kv_socket_dir,
    )


def memory_rows(config: WorkerConfig, ready: Sequence[RankReady]) -> list[MemoryUse]:
    """What each rank takes, and what all of them share."""
    rows: list[MemoryUse] = []
    for rank, one in enumerate(ready):
        rows.append(MemoryUse(f"rank {rank}: weights", one.weight_bytes))
        rows.append(MemoryUse(f"rank {rank}: KV cache", one.cache_bytes, f"{one.blocks} blocks"))
        if one.resident_bytes is not None:
            rows.append(MemoryUse(f"rank {rank}: resident now", one.resident_bytes))
    if config.lands_kv:
        shared = f"at most, shared by {len(ready)} ranks"
        buffer_bytes = config.buffer_bytes(sum(one.cache_bytes for one in ready))
        rows.append(MemoryUse("KV buffer", buffer_bytes, shared))
        rows.append(MemoryUse("KV host pool", config.kv_host_pool_bytes, shared))
    return rows

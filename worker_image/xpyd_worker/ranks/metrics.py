"""What an engine's process can say of each rank without asking it: for `/metrics`. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.ranks.start.messages import RankReady
from xpyd_worker.ranks.watch.judge import Shown


@dataclass(frozen=True, kw_only=True)
class RankMetrics:
    """Of rank `rank`: share `tensor` of stage `stage`. `steps`: that it has launched;
    `processor_s`: that its threads have computed; `blocks_fit`: blocks of KV that it has room for,
    of which it has as many as the rank with the least."""

    rank: int
    stage: int
    tensor: int
    is_up: bool
    steps: int
    processor_s: float
    weight_bytes: int
    cache_bytes: int
    blocks_fit: int


def rank_metrics(
    sizes: Sizes, *, shown: Sequence[Shown], ready: Sequence[RankReady], fits: Sequence[int]
) -> list[RankMetrics]:
    """Of each rank: as the watch has seen it last, and what it said as it started."""
    found: list[RankMetrics] = []
    for rank, (now, one, blocks) in enumerate(zip(shown, ready, fits, strict=True)):
        place = sizes.place(rank)
        found.append(
            RankMetrics(
                rank=rank,
                stage=place.stage,
                tensor=place.tensor,
                is_up=now.is_up,
                steps=now.beat.steps,
                processor_s=now.beat.processor_ns / 1e9,
                weight_bytes=one.weight_bytes,
                cache_bytes=one.cache_bytes,
                blocks_fit=blocks,
            )
        )
    return found

"""All-reduce of GPUs of one host by our kernel and by NCCL, in graphs as decoding steps are, in
turns in the same ranks. Nothing where there are fewer than two GPUs: NCCL wants one for each rank.

`python -m bench.parallel.gpu_all_reduce` prints it alone, with what a GPU's machine has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tests.ranks.kit.groups import Seat, run_ranks
from xpyd_core.parallel.partition import partition
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.kernels.gpu.reduce_shape import WORLD_SIZES
from xpyd_worker.parallel.stages import HiddenSize
from xpyd_worker.parallel.state import open_parallel

SIZES_KIB = (8, 16, 64, 256, 512, 1024, 8192)
_CALLS = 20
"""In a graph."""
_REPLAYS = 50
_cuda: Any = torch.cuda


class GpuRounds(NamedTuple):
    """Microseconds of one call in each round, of the slowest rank."""

    ranks: int
    size_kib: int
    ours_us: list[float]
    nccl_us: list[float]


class WrongGpuSumError(Exception):
    """What came out is not the sum, or the kernel of our own was not taken."""


def measure(rounds: int, sizes_kib: Sequence[int] = SIZES_KIB) -> list[GpuRounds]:
    """Each number of ranks that there are GPUs for. WrongGpuSumError."""
    worlds = [world for world in WORLD_SIZES if world <= _cuda.device_count()]
    found: list[GpuRounds] = []
    for world in worlds:
        for size_kib in sizes_kib:
            ranks = cast("list[Any]", run_ranks(_turns, world, size_kib, rounds))
            wrong = [said for said in ranks if isinstance(said, str)]
            if wrong:
                raise WrongGpuSumError(f"{size_kib} KiB, {world} ranks: {wrong[0]}")
            slowest = [
                [max(one) for one in zip(*(rank[which] for rank in ranks), strict=True)]
                for which in (0, 1)
            ]
            found.append(GpuRounds(world, size_kib, *slowest))
    return found


def _turns(seat: Seat, size_kib: int, rounds: int) -> tuple[list[float], list[float]] | str:
    device = torch.device("cuda", seat.rank)
    _cuda.set_device(device)
    with open_parallel(
        Sizes(tensor=seat.world),
        rank=seat.rank,
        local_rank=seat.rank,
        at=seat.at(),
        device=device,
        layers=partition(4, 1),
        hidden=HiddenSize(most_rows=16, width=8, dtype=torch.bfloat16),
    ) as state:
        group = state.tensor_group
        x = torch.empty(size_kib * 1024 // 2, dtype=torch.bfloat16, device=device)
        if group._fast is None:
            return "there is no custom all-reduce here, the log says why"
        ways = (group.all_reduce, group.device_group.all_reduce)
        graphs: list[Any] = []
        for way in ways:
            x.fill_(seat.rank + 1)
            way(x)
            if not bool((x == sum(range(1, seat.world + 1))).all()):
                return "a wrong sum"
            graphs.append(_captured(way, x.zero_()))
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for graph, kept in zip(graphs, times, strict=True):
                kept.append(_call_us(graph))
        graphs.clear()
        return times


def _captured(way: Callable[[Tensor], None], x: Tensor) -> Any:
    _cuda.synchronize()
    graph = _cuda.CUDAGraph()
    with _cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_CALLS):
            way(x)
    return graph


def _call_us(graph: Any) -> float:
    begun, ended = (_cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()  # all are here
    begun.record()
    for _ in range(_REPLAYS):
        graph.replay()
    ended.record()
    ended.synchronize()
    return begun.elapsed_time(ended) * 1e3 / (_REPLAYS * _CALLS)


if __name__ == "__main__":
    for one in measure(rounds=5):
        sys.stdout.write(f"{one}\n")

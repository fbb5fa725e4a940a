"""The all-reduce over peers' memory on GPUs: ranks are processes, on the GPUs that there are, in
turn. On one GPU they open each other's memory all the same. Runs where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks.kit.groups import Seat, run_ranks
from xpyd_core.parallel.partition import partition
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.kernels.gpu.reduce_shape import MOST_BYTES, ReduceShape
from xpyd_worker.parallel.custom_reduce import open_custom_all_reduce
from xpyd_worker.parallel.distributed import Store, gloo_device, gloo_group
from xpyd_worker.parallel.stages import HiddenSize
from xpyd_worker.parallel.state import open_parallel

pytestmark = pytest.mark.gpu
TYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES_BYTES = (4, 16, 4096, 16_384, 100_000, 262_144, 524_288, 1_000_012, MOST_BYTES)
_REPLAYS = 5


def _opened(seat: Seat) -> Any:
    """The collective, and this rank's device."""
    device = torch.device("cuda", seat.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    # Both import what only a machine with a GPU can use.
    from xpyd_worker.kernels.gpu.all_reduce import all_reduce
    from xpyd_worker.parallel.peer_memory import GpuPeers

    store = Store(seat.at(), seat.rank, range(seat.world))
    members = tuple(range(seat.world))
    gloo = gloo_device(seat.address)
    group = gloo_group(store, "tensor-0-cpu", members, device=gloo, at=seat.at())
    found = open_custom_all_reduce(
        group,
        "tensor-0",
        device=GpuPeers(device),
        launch=all_reduce,
        dtype=torch.bfloat16,
        shape=ReduceShape(),
        within_s=50.0,
    )
    assert found is not None
    return found, device


def _shares(world: int, turn: int, count: int, dtype: torch.dtype) -> list[Tensor]:
    """What each rank adds, the same numbers in each process."""
    made = [torch.Generator().manual_seed(100 * turn + rank) for rank in range(world)]
    return [torch.randn(count, generator=one).to(dtype) for one in made]


def _summed(shares: list[Tensor]) -> Tensor:
    total = shares[0].float()
    for share in shares[1:]:
        total = total + share.float()
    return total.to(shares[0].dtype)


def sums(seat: Seat) -> int:
    found, device = _opened(seat)
    done = 0
    for dtype in TYPES:
        for size_bytes in (*SIZES_BYTES, *SIZES_BYTES[::-2]):
            shares = _shares(seat.world, done, size_bytes // dtype.itemsize, dtype)
            own = shares[seat.rank].to(device)
            assert found.takes(own)
            found.all_reduce(own)
            assert torch.equal(own.cpu(), _summed(shares)), (dtype, size_bytes)
            done += 1
    found.close()
    return done


@pytest.mark.parametrize("world", [2, 4, 8])
def test_sums_have_the_same_bits_on_each_rank(world: int) -> None:
    done = len(TYPES) * (len(SIZES_BYTES) + len(SIZES_BYTES[::-2]))
    assert run_ranks(sums, world) == [done] * world


def replays(seat: Seat) -> int:
    """Graphs of calls in one shot and two, replayed with other calls between."""
    found, device = _opened(seat)
    counts = (8192, 300_000)
    kept = [torch.zeros(count, dtype=torch.bfloat16, device=device) for count in counts]
    for x in kept:
        found.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for x in kept:
            found.all_reduce(x)
    for turn in range(_REPLAYS):
        wanted: list[Tensor] = []
        for number, x in enumerate(kept):
            shares = _shares(seat.world, 2 * turn + number, x.numel(), torch.bfloat16)
            x.copy_(shares[seat.rank])
            wanted.append(_summed(shares))
        graph.replay()
        between = torch.ones(1000 * (turn + 1), device=device)
        found.all_reduce(between)
        assert bool((between == seat.world).all())
        for x, one in zip(kept, wanted, strict=True):
            assert torch.equal(x.cpu(), one), turn
    del graph
    found.close()
    return _REPLAYS


@pytest.mark.parametrize("world", [2, 4])
def test_a_replayed_graph_adds_up_what_stands_there_then(world: int) -> None:
    assert run_ranks(replays, world) == [_REPLAYS] * world


def through_the_group(seat: Seat) -> list[bool]:
    """As an engine's ranks: whatever way a tensor goes, the sum is there."""
    device = torch.device("cuda", seat.rank)
    torch.cuda.set_device(device)
    with open_parallel(
        Sizes(tensor=seat.world),
        rank=seat.rank,
        local_rank=seat.rank,
        at=seat.at(),
        device=device,
        layers=partition(4, 1),
        hidden=HiddenSize(most_rows=16, width=8, dtype=torch.bfloat16),
    ) as state:
        right: list[bool] = []
        for count in (64, 100_000, MOST_BYTES):
            x = torch.full((1, count), float(seat.rank + 1), dtype=torch.bfloat16, device=device)
            total = state.tensor.all_reduce(x)
            right.append(bool((total == sum(range(1, seat.world + 1))).all()))
        gathered = state.tensor.all_gather(torch.full((2, 3), float(seat.rank), device=device))
        right.append(gathered[0].tolist() == [rank for rank in range(seat.world) for _ in range(3)])
        return right


def test_a_groups_tensors_of_all_sizes_over_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a GPU for each rank")
    assert run_ranks(through_the_group, 2) == [[True] * 4] * 2

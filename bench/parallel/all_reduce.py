"""All-reduce of a tensor group over shared memory and over Gloo, in turns in the same ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tests.ranks.kit.groups import Seat, run_ranks
from xpyd_core.parallel.ranks import Sizes

SIZES_KIB = (16, 64, 256, 1024, 8192)
WORLDS = (2, 4)
_BATCH_BYTES = 8 << 20
_FEWEST, _MOST = 4, 200


class Rounds(NamedTuple):
    """Microseconds of one call in each round: the mean of a batch, of the slowest rank."""

    ranks: int
    size_kib: int
    ours_us: list[float]
    gloo_us: list[float]


class WrongSumError(Exception):
    """What came out is not the sum."""


def measure(worlds: Sequence[int], sizes_kib: Sequence[int], rounds: int) -> list[Rounds]:
    """Each number of ranks with each size, in bfloat16. WrongSumError."""
    found: list[Rounds] = []
    for world in worlds:
        for size_kib in sizes_kib:
            ranks = run_ranks(_turns, world, size_kib, rounds)
            if None in ranks:
                raise WrongSumError(f"{size_kib} KiB, {world} ranks")
            slowest = [
                [max(one) for one in zip(*(rank[which] for rank in ranks), strict=True)]
                for which in (0, 1)
            ]
            found.append(Rounds(world, size_kib, *slowest))
    return found


def _turns(seat: Seat, size_kib: int, rounds: int) -> tuple[list[float], list[float]] | None:
    with seat.open(Sizes(tensor=seat.world)) as state:
        group = state.tensor_group
        elements = size_kib * 1024 // torch.bfloat16.itemsize
        ways: tuple[Callable[[Tensor], None], ...] = (
            group.all_reduce,
            group.device_group.all_reduce,
        )
        for way in ways:
            x = torch.full((elements,), float(seat.rank + 1), dtype=torch.bfloat16)
            way(x)
            if not bool((x == sum(range(1, seat.world + 1))).all()):
                return None
        x = torch.zeros(elements, dtype=torch.bfloat16)
        count = max(_FEWEST, min(_MOST, _BATCH_BYTES // (size_kib * 1024)))
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for way, kept in zip(ways, times, strict=True):
                kept.append(batch_us(partial(way, x), count))
        return times


def batch_us(call: Callable[[], object], count: int) -> float:
    """Microseconds of one of `count` calls, which all ranks make."""
    call()  # all are here
    begun_s = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begun_s) / count * 1e6

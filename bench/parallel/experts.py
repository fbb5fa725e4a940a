"""Experts on several ranks: an all-to-all over shared memory and over Gloo, and one layer with its
experts in slices (TP) and whole (EP), each in turns in the same ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast
from zlib import crc32

import torch
from torch import Tensor

from bench.parallel.all_reduce import Rounds, WrongSumError, batch_us
from tests.ranks.kit.groups import Seat, run_ranks
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.kernels.api import Plan
from xpyd_worker.kernels.cpu.kernels import choose_kernels
from xpyd_worker.model.config import ExpertsConfig
from xpyd_worker.model.experts import ExpertMlps
from xpyd_worker.model.layers import StepContext
from xpyd_worker.parallel.api import ExpertGroup
from xpyd_worker.parallel.groups import OpsExpertGroup
from xpyd_worker.parallel.state import ParallelState

SIZES_KIB = (16, 256, 1024)
ROWS = (1, 8, 64, 512)
WORLDS = (2, 4)
HIDDEN, CONFIG = 512, ExpertsConfig(32, 4, 256, is_normalized=True)
"""Many small experts, as Qwen3-MoE has them."""
_WIDTH = 512
_BATCH_BYTES, _BATCH_ROWS = 4 << 20, 1024
_FEWEST, _MOST = 4, 100


class LayerRounds(NamedTuple):
    """Microseconds of one layer in each round, of the slowest rank: experts in slices; whole, with
    one sum; whole, with rows that go to them and back."""

    ranks: int
    rows: int
    slices_us: list[float]
    whole_us: list[float]
    sent_us: list[float]


def measure_exchanges(worlds: Sequence[int], sizes_kib: Sequence[int], rounds: int) -> list[Rounds]:
    """What each rank sends in all, as much to each of the others as to itself, in bfloat16.
    WrongSumError."""
    return [
        Rounds(world, size_kib, *_slowest(run_ranks(_exchanges, world, size_kib, rounds)))
        for world in worlds
        for size_kib in sizes_kib
    ]


def measure_layers(worlds: Sequence[int], rows: Sequence[int], rounds: int) -> list[LayerRounds]:
    """The same experts in the same ranks. WrongSumError."""
    return [
        LayerRounds(world, count, *_slowest(run_ranks(_layers, world, count, rounds)))
        for world in worlds
        for count in rows
    ]


def _slowest(ranks: Sequence[list[list[float]] | None]) -> list[list[float]]:
    found: list[list[list[float]]] = []
    for rank in ranks:
        if rank is None:
            raise WrongSumError("rows of experts")
        found.append(rank)
    return [[max(one) for one in zip(*ways, strict=True)] for ways in zip(*found, strict=True)]


def _exchanges(seat: Seat, size_kib: int, rounds: int) -> list[list[float]] | None:
    with seat.open(Sizes(tensor=seat.world, has_whole_experts=True)) as state:
        group = state.expert_group
        assert group is not None, "several ranks"
        each = max(1, size_kib * 1024 // (_WIDTH * 2) // seat.world)
        counts = [each] * seat.world
        x = torch.full((each * seat.world, _WIDTH), float(seat.rank), dtype=torch.bfloat16)
        expected = torch.arange(float(seat.world)).repeat_interleave(each).bfloat16()

        def by_gloo() -> Tensor:
            out = torch.empty_like(x)
            group.device_group.all_to_all(out, x, counts, counts)
            return out

        ways = (partial(group.all_to_all, x, counts, counts), by_gloo)
        if not all(torch.equal(way()[:, 0], expected) for way in ways):
            return None
        count = max(_FEWEST, min(_MOST, _BATCH_BYTES // (size_kib * 1024)))
        return _in_turns(ways, count, rounds)


def _layers(seat: Seat, rows: int, rounds: int) -> list[list[float]] | None:
    with (
        torch.inference_mode(),
        seat.open(Sizes(tensor=seat.world, has_whole_experts=True)) as state,
    ):
        blocks = _blocks(state)
        kernels = choose_kernels(vector_sizes=(HIDDEN,), head_dim=64)
        made = torch.Generator().manual_seed(1)
        x = torch.randn(rows, HIDDEN, generator=made).bfloat16()
        # No layer looks at the plan of a step on a CPU.
        plan = cast("Plan", None)

        def run(block: ExpertMlps) -> Tensor:
            angles = (x, x)
            return block(x, StepContext(kernels, angles, (), plan, lambda layer: None))

        ways = [partial(run, block) for block in blocks]
        first, *others = (way().float() for way in ways)
        if not all(bool(((one - first).abs() <= 0.05 * first.std()).all()) for one in others):
            return None
        count = max(_FEWEST, min(_MOST, _BATCH_ROWS // rows))
        return _in_turns(ways, count, rounds)


def _blocks(state: ParallelState) -> list[ExpertMlps]:
    """One layer, with the same weights three times."""
    assert state.expert_group is not None, "several ranks"
    # Two replicas that happen to have the same rows send as much as any two.
    group = state.expert_group
    sent = OpsExpertGroup(range(group.size), group.rank_in_group, replicas=2)
    sent.open(group, replicas=2)
    ways: tuple[ExpertGroup | None, ...] = (None, state.experts, sent)
    made = [
        ExpertMlps(HIDDEN, CONFIG, torch.bfloat16, group=state.tensor, whole_experts=way)
        for way in ways
    ]
    for block in made:
        block.allocate(torch.device("cpu"))
        for name, stored in block.checkpoint_tensors("").items():
            generator = torch.Generator().manual_seed(crc32(name.encode()))
            whole = torch.randn(stored.shape, generator=generator) / stored.shape[1] ** 0.5
            for piece in stored.pieces:
                piece.destination.copy_(whole[piece.slices])
        block.pack(choose_kernels(vector_sizes=(HIDDEN,), head_dim=64))
    return made


def _in_turns(ways: Sequence[Callable[[], object]], count: int, rounds: int) -> list[list[float]]:
    """Microseconds of each way in each round."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for way, kept in zip(ways, times, strict=True):
            kept.append(batch_us(way, count))
    return times

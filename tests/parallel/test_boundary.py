"""Hidden states from stage to stage (ORACLES.md 39 to 41), and what was drawn, back (42)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel.rank_kit import Seat, run_ranks
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.parallel.api import GroupError, Hidden, Sampled
from xpyd_worker.parallel.boundary import HiddenSize

STEPS = (16, 1, 7, 3)
HIDDEN = HiddenSize(most_rows=16, width=10, dtype=torch.float32)


def _hidden(step: int, rows: int, dtype: torch.dtype, stage: int) -> Hidden:
    """What `stage` sends in `step`, the same on all its tensor ranks."""
    made = torch.Generator().manual_seed(100 * stage + step)
    x, residual = torch.randn(2, rows, HIDDEN.width, generator=made).to(dtype)
    return Hidden(x, residual)


def relay(seat: Seat, sizes: Sizes, dtype: torch.dtype) -> list[int]:
    """Each stage gets what the one before sent, and sends its own. Addresses of what it got."""
    hidden = HiddenSize(most_rows=16, width=HIDDEN.width, dtype=dtype)
    addresses: set[int] = set()
    with seat.open(sizes, hidden=hidden) as state:
        part, boundary = state.part, state.boundary
        for step, rows in enumerate(STEPS):
            boundary.begin_step()
            if not part.is_first:
                got = boundary.receive(rows).get()
                wanted = _hidden(step, rows, dtype, part.stage - 1)
                assert torch.equal(got.x, wanted.x)
                assert torch.equal(got.residual, wanted.residual)
                addresses |= {got.x.data_ptr(), got.residual.data_ptr()}
            if not part.is_last:
                boundary.send(_hidden(step, rows, dtype, part.stage))
        boundary.begin_step()
    return sorted(addresses)


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        (Sizes(pipeline=2), torch.float32),
        (Sizes(pipeline=3), torch.bfloat16),
        (Sizes(pipeline=2, tensor=2), torch.float32),
        # Shares that are not all of one length: 16 * 10 elements over 3 ranks.
        (Sizes(pipeline=2, tensor=3), torch.float16),
    ],
    ids=str,
)
def test_hidden_states_arrive_whole_at_fixed_addresses(sizes: Sizes, dtype: torch.dtype):
    found = run_ranks(relay, sizes.world, sizes, dtype)
    assert [len(addresses) for addresses in found] == [
        0 if rank < sizes.tensor else 2 for rank in range(sizes.world)
    ]


def of_different_steps(seat: Seat) -> str:
    with seat.open(Sizes(pipeline=2), hidden=HIDDEN) as state:
        if state.part.is_first:
            state.boundary.send(_hidden(0, 7, torch.float32, 0))
            state.boundary.begin_step()
            return ""
        coming = state.boundary.receive(5)
        with pytest.raises(GroupError) as error:
            coming.get()
        return str(error.value)


def test_a_stage_in_another_step_is_named():
    assert run_ranks(of_different_steps, 2)[1] == (
        "rank 0 sends step 1, [7, 10] of torch.float32; "
        "rank 1 expects step 1, [5, 10] of torch.float32"
    )


def _sampled(step: int, requests: int, width: int) -> Sampled:
    tokens = torch.arange(requests * width).view(requests, width) + (step << 40)
    counts = torch.arange(requests, dtype=torch.int32)
    return Sampled(tokens, counts + 1, counts * 2)


DRAWN = ((3, 1), (1, 1), (5, 4))
"""Requests and width of steps that draw."""


def draw(seat: Seat, sizes: Sizes) -> list[Any]:
    with seat.open(sizes) as state:
        if state.part.is_last:
            for step, (requests, width) in enumerate(DRAWN):
                state.feedback.tell(_sampled(step, requests, width))
            state.world.cpu_group.all_reduce(torch.zeros(1))
            return []
        coming = [state.feedback.receive(*shape) for shape in DRAWN]
        # In any order: they belong to their steps.
        found = [one.get() for one in reversed(coming)][::-1]
        state.world.cpu_group.all_reduce(torch.zeros(1))
        assert all(one.tokens.dtype is torch.int64 for one in found)
        assert all(one.num_rejected.dtype is torch.int32 for one in found)
        return [[tensor.tolist() for tensor in one] for one in found]


@pytest.mark.parametrize("sizes", [Sizes(pipeline=3), Sizes(pipeline=2, tensor=2)], ids=str)
def test_what_was_drawn_reaches_every_other_stage_in_order(sizes: Sizes):
    found = run_ranks(draw, sizes.world, sizes)
    wanted = [
        [tensor.tolist() for tensor in _sampled(step, *shape)] for step, shape in enumerate(DRAWN)
    ]
    others = sizes.world - sizes.tensor
    assert found == [wanted] * others + [[]] * sizes.tensor

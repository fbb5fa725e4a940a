"""Hidden states from stage to stage, and what was drawn, back to every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks.kit.groups import Seat, run_ranks
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.kernels.post_update import Sampled
from xpyd_worker.parallel.api import GroupError, Hidden
from xpyd_worker.parallel.stages import HEAD_TAG, RESIDUAL_TAG, X_TAG, HiddenSize

STEPS = (16, 1, 7, 3)
HIDDEN = HiddenSize(most_rows=16, width=10, dtype=torch.float32)


def _hidden(step: int, rows: int, dtype: torch.dtype, stage: int, features: int = 0) -> Hidden:
    """What `stage` sends in `step`, the same on all its tensor ranks."""
    made = torch.Generator().manual_seed(100 * stage + step)
    x, residual, *more = torch.randn(2 + features, rows, HIDDEN.width, generator=made).to(dtype)
    return Hidden(x, residual, tuple(more))


def relay(
    seat: Seat, sizes: Sizes, dtype: torch.dtype, feature_layers: tuple[int, ...] = ()
) -> list[int]:
    """Each stage gets what the one before sent, and sends its own. Addresses of what it got."""
    hidden = HiddenSize(
        most_rows=16, width=HIDDEN.width, dtype=dtype, feature_layers=feature_layers
    )
    addresses: set[int] = set()
    with seat.open(sizes, hidden=hidden) as state:
        part, boundary = state.part, state.boundary
        before, after = (
            len({layer for layer in feature_layers if layer < end})
            for end in (part.layers.start, part.layers.stop)
        )
        for step, rows in enumerate(STEPS):
            boundary.begin_step()
            if not part.is_first:
                got = boundary.receive(rows).get()
                found = (got.x, got.residual, *got.features)
                wanted = _hidden(step, rows, dtype, part.stage - 1, before)
                for one, other in zip(
                    found, (wanted.x, wanted.residual, *wanted.features), strict=True
                ):
                    assert torch.equal(one, other)
                addresses |= {one.data_ptr() for one in found}
            if not part.is_last:
                boundary.send(_hidden(step, rows, dtype, part.stage, after))
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
def test_hidden_states_and_residual_arrive_whole_at_fixed_addresses(
    sizes: Sizes, dtype: torch.dtype
):
    """Article facts 39 and 41."""
    found = run_ranks(relay, sizes.world, sizes, dtype)
    assert [len(addresses) for addresses in found] == [
        0 if rank < sizes.tensor else 2 for rank in range(sizes.world)
    ]


def test_so_do_the_features_of_the_layers_so_far():
    """12 layers, in stages of 4: what enters a stage is no feature of those before."""
    layers = (1, 3, 8, 4, 1)
    found = run_ranks(relay, 6, Sizes(pipeline=3, tensor=2), torch.float32, layers)
    assert [len(addresses) for addresses in found] == [0, 0, 4, 4, 5, 5]


def sends(seat: Seat, sizes: Sizes) -> list[tuple[str, int, int]]:
    """On which group a rank of the first stage sends what: (group, tag, bytes)."""
    with seat.open(sizes, hidden=HIDDEN) as state:
        wanted = _hidden(0, 16, HIDDEN.dtype, 0)
        if not state.part.is_first:
            got = state.boundary.receive(16).get()
            assert torch.equal(got.x, wanted.x)
            assert torch.equal(got.residual, wanted.residual)
            return []
        found: list[tuple[str, int, int]] = []
        for kind in ("cpu_group", "device_group"):
            _note_sends(getattr(state.pipeline_group, kind), kind, found)
        state.boundary.send(wanted)
        state.boundary.begin_step()
        return found


def _note_sends(group: Any, kind: str, found: list[tuple[str, int, int]]) -> None:
    send = group.send

    def noting(x: torch.Tensor, to: int, tag: int = 0) -> Any:
        found.append((kind, tag, x.nbytes))
        return send(x, to, tag)

    group.send = noting


@pytest.mark.parametrize("tensor", [1, 2])
def test_each_tensor_rank_sends_its_share_of_the_bytes_behind_the_head(tensor: int):
    """Article facts 41, too: what is sent is announced first. (Article fact 40.)"""
    sizes = Sizes(pipeline=2, tensor=tensor)
    found = run_ranks(sends, sizes.world, sizes)
    share = 16 * HIDDEN.width * HIDDEN.dtype.itemsize // tensor
    head = ("cpu_group", HEAD_TAG, 5 * 8)
    rest = [("device_group", tag, share) for tag in (X_TAG, RESIDUAL_TAG)]
    assert found[:tensor] == [[head, *rest]] * tensor


def late(seat: Seat) -> list[str]:
    """The first stage sends when the second has begun to receive and says so."""
    with seat.open(Sizes(pipeline=2), hidden=HIDDEN, step_s=20.0) as state:
        token, other = torch.zeros(1), state.pipeline_group.cpu_group
        if state.part.is_first:
            other.receive(token, 1, 9).wait()
            state.boundary.send(_hidden(0, 3, HIDDEN.dtype, 0))
            waited: list[str] = []
            _note_waits(state.boundary, waited)
            state.boundary.begin_step()
            return waited
        coming = state.boundary.receive(3)
        other.send(token, 0, 9).wait()
        coming.get()
        return []


def _note_waits(boundary: Any, waited: list[str]) -> None:
    for one in boundary._sent:
        wait = one.wait

        def noting(wait: Any = wait) -> Any:
            waited.append("sent")
            return wait()

        one.wait = noting


def test_a_receive_waits_at_first_use_and_a_step_for_what_the_last_one_sent():
    """Article fact 41."""
    assert run_ranks(late, 2) == [["sent"] * 3, []]


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
                state.feedback.send(_sampled(step, requests, width))
            state.world.cpu_group.all_reduce(torch.zeros(1))
            return []
        coming = [state.feedback.receive(*shape) for shape in DRAWN]
        # In any order: they belong to their steps.
        found = [one.get() for one in reversed(coming)][::-1]
        state.world.cpu_group.all_reduce(torch.zeros(1))
        assert all(one.tokens.dtype is torch.int64 for one in found)
        assert [tuple(one.tokens.shape) for one in found] == list(DRAWN)
        assert all(one.num_sampled.dtype is torch.int32 for one in found)
        assert all(one.num_rejected.dtype is torch.int32 for one in found)
        return [[tensor.tolist() for tensor in one] for one in found]


@pytest.mark.parametrize("sizes", [Sizes(pipeline=3), Sizes(pipeline=2, tensor=2)], ids=str)
def test_what_was_drawn_reaches_every_other_stage_in_order(sizes: Sizes):
    """Article fact 42."""
    found = run_ranks(draw, sizes.world, sizes)
    wanted = [
        [tensor.tolist() for tensor in _sampled(step, *shape)] for step, shape in enumerate(DRAWN)
    ]
    others = sizes.world - sizes.tensor
    assert found == [wanted] * others + [[]] * sizes.tensor

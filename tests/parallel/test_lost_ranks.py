"""A rank that does not come, ends or stands still: the others say which, within their deadline."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch

from tests.ranks.kit.groups import Seat, ranks
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.kernels.post_update import Sampled
from xpyd_worker.parallel.api import GroupError, Hidden
from xpyd_worker.parallel.state import ParallelState

SOON_S = 1.0
"""A deadline that passes in these tests, and no sooner than a rank needs to be at its end."""
_TAG = 9


def _error_of(call: Callable[[], object]) -> str:
    with pytest.raises(GroupError) as error:
        call()
    return str(error.value)


def comes(seat: Seat) -> str:
    return _error_of(lambda: seat.open(Sizes(tensor=4), connect_s=SOON_S))


def test_ranks_that_do_not_come_are_named():
    with ranks(comes, 4, without=(1, 3)) as found:
        for rank in found.values():
            said = rank.answer()
            assert said.startswith("ranks 1, 3 did not come to 127.0.0.1:")
            assert said.endswith("within 1 s; 4 ranks were to")


def _all_reduce(parallel: ParallelState) -> None:
    parallel.tensor.all_reduce(torch.ones(1, 4))


def _all_gather(parallel: ParallelState) -> None:
    parallel.tensor.all_gather(torch.ones(1, 4))


def _receive(parallel: ParallelState) -> None:
    parallel.boundary.receive(2).get()


def _send(parallel: ParallelState) -> None:
    parallel.boundary.send(Hidden(torch.ones(2, 8), torch.ones(2, 8)))
    parallel.boundary.begin_step()


def _feedback(parallel: ParallelState) -> None:
    parallel.feedback.receive(1).get()


def _tell(parallel: ParallelState) -> None:
    drawn = torch.ones(1, 1, dtype=torch.int64)
    counts = torch.ones(1, dtype=torch.int32)
    for _ in range(100):
        parallel.feedback.send(Sampled(drawn, counts, counts))


def _all_to_all(parallel: ParallelState) -> None:
    ones = [1] * 3
    parallel.experts.all_to_all(torch.ones(3, 4), ones, ones)


TENSOR, PIPELINE = Sizes(tensor=3), Sizes(pipeline=3)
EXPERTS = Sizes(tensor=3, has_whole_experts=True)
# Sizes, the rank that is lost, the one that waits for it, and in what.
CALLS = [
    (TENSOR, 1, 2, _all_reduce, "rank 1 did not take part"),
    (TENSOR, 2, 0, _all_gather, "rank 2 did not take part"),
    (EXPERTS, 1, 0, _all_to_all, "all_to_all in group expert-0: rank 1 did not take part"),
    (PIPELINE, 0, 1, _receive, "rank 0 did not send what rank 1 waits for"),
    (PIPELINE, 2, 1, _send, "rank 2 did not take what rank 1 sends"),
    (PIPELINE, 2, 0, _feedback, "rank 2 did not send what rank 0 waits for"),
    (PIPELINE, 0, 2, _tell, "rank 0 did not take what rank 2 sends"),
]


def waits(
    seat: Seat,
    sizes: Sizes,
    lost: int,
    how: int,
    waiting: int,
    call: Callable[[ParallelState], None],
) -> str:
    """All come; one is lost once the others are there. `waiting` makes the call, and in a
    collective so do the others."""
    with seat.open(sizes, step_s=SOON_S) as state:
        _lose(state, lost, how)
        if seat.rank != waiting and call not in (_all_reduce, _all_gather, _all_to_all):
            signal.pause()
        return _error_of(lambda: call(state))


def _lose(state: ParallelState, lost: int, how: int) -> None:
    world, token = state.world.cpu_group, torch.zeros(1)
    if world.rank != lost:
        world.send(token, lost, _TAG).wait()
        return
    for other in range(len(world.ranks)):
        if other != lost:
            world.receive(token, other, _TAG).wait()
    os.kill(os.getpid(), how)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize(("sizes", "lost", "waiting", "call", "said"), CALLS)
def test_who_waits_for_a_lost_rank_names_it(
    sizes: Sizes,
    lost: int,
    waiting: int,
    call: Callable[[ParallelState], None],
    said: str,
    how: int,
):
    with ranks(waits, 3, sizes, lost, how, waiting, call) as found:
        assert said in found[waiting].answer()

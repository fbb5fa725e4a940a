"""The GPU's own all-reduce between processes, through Triton's interpreter: each rank's GPU memory
is a file that the others map, so loads, stores and atomic operations really meet there."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.shared_gpus import SharedGpu, interpreter
from tests.ranks.kit.groups import PATIENCE_S, Seat, ranks, run_ranks
from xpyd_worker.kernels.gpu.reduce_shape import LINE_BYTES, ReduceShape
from xpyd_worker.parallel import peer_memory
from xpyd_worker.parallel.api import GroupError
from xpyd_worker.parallel.custom_reduce import CustomAllReduce, open_custom_all_reduce
from xpyd_worker.parallel.distributed import ProcessGroup, Store, gloo_device, gloo_group

# A kilobyte of a rank at once, two programs, two shots from 4 KiB on.
SHAPE = ReduceShape(most_bytes=16 << 10, programs=2, tile_bytes=1 << 10, two_from_bytes=4 << 10)
TURNS = (
    *((torch.float32, count) for count in (1, 255, 4096, 1000, 1024, 2063, 16)),
    *((torch.float16, count) for count in (17, 2048, 3000, 8192)),
)
"""Elements: of a tile and more, of one program and two, in one shot and two, to the largest.
Neighbours differ, so programs have taken part in unlike numbers of calls."""


def _group(seat: Seat) -> ProcessGroup:
    store = Store(seat.at(), seat.rank, range(seat.world))
    members = tuple(range(seat.world))
    device = gloo_device(seat.address)
    return gloo_group(store, "tensor-0-cpu", members, device=device, at=seat.at())


def _opened(group: ProcessGroup, gpu: SharedGpu, launch: Any, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "device": gpu,
        "launch": launch,
        "dtype": torch.float16,
        "shape": SHAPE,
        "within_s": PATIENCE_S,
    }
    return open_custom_all_reduce(group, changes.pop("name", "tensor-0"), **{**given, **changes})


def _share(rank: int, turn: int, count: int, dtype: torch.dtype) -> Tensor:
    """What `rank` adds: numbers of unlike sizes, so that the order of the sum shows."""
    made = torch.Generator().manual_seed(1000 * turn + rank)
    values = torch.randn(count, generator=made) * 10.0 ** torch.randint(-2, 3, (1,), generator=made)
    return values.to(dtype)


def _summed(shares: list[Tensor]) -> Tensor:
    """In float32, by rank."""
    total = shares[0].float()
    for share in shares[1:]:
        total = total + share.float()
    return total.to(shares[0].dtype)


def sums(seat: Seat) -> int:
    group, gpu = _group(seat), SharedGpu(seat.rank)
    with interpreter() as kernels:
        found = _opened(group, gpu, kernels.all_reduce.all_reduce)
        for turn, (dtype, count) in enumerate(TURNS):
            shares = [_share(rank, turn, count, dtype) for rank in range(seat.world)]
            own = shares[seat.rank].clone()
            assert found.takes(own)
            found.all_reduce(own)
            assert torch.equal(own, _summed(shares)), (dtype, count)
        found.close()
    assert gpu.is_empty
    return len(TURNS)


@pytest.mark.parametrize(
    "world",
    [2, 4, pytest.param(6, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)],
)
@pytest.mark.long
def test_sums_are_those_of_float32_in_the_order_of_ranks_on_each(world: int) -> None:
    assert run_ranks(sums, world) == [len(TURNS)] * world


def overtaken(seat: Seat) -> list[float]:
    """Rank 1 reads what it was given only when rank 0 waits in the next call already."""
    group, gpu = _group(seat), SharedGpu(seat.rank)
    with interpreter() as kernels:
        found: CustomAllReduce = _opened(group, gpu, kernels.all_reduce.all_reduce)
        words = gpu.own_words()
        # This rank's own word: rank 0 may have written its word of the next call already.
        meet, begun = kernels.all_reduce._meet, words[seat.rank].item()

        def meet_and_wait(*args: Any) -> None:
            meet(*args)
            end = time.monotonic() + PATIENCE_S
            while words[0] < begun + 3 and time.monotonic() < end:
                os.sched_yield()

        x, y = torch.full((64,), 1.0 + seat.rank), torch.full((64,), 10.0 + seat.rank)
        if seat.rank == 1:
            kernels.all_reduce._meet = meet_and_wait
        found.all_reduce(x)
        kernels.all_reduce._meet = meet
        found.all_reduce(y)
        found.close()
    return [*x.unique().tolist(), *y.unique().tolist()]


def test_a_rank_that_is_a_call_ahead_overwrites_nothing_that_another_still_reads() -> None:
    assert run_ranks(overtaken, 2) == [[3.0, 21.0]] * 2


class Heard(logging.Handler):
    """What the log has."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []
        logging.getLogger("xpyd_worker").addHandler(self)
        logging.getLogger("xpyd_worker").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


def _adds(x: Tensor, table: Tensor, **_: Any) -> None:
    """A kernel that is wrong."""
    x.add_(1)


def _no_kernel(x: Tensor, table: Tensor, **_: Any) -> None:
    raise AssertionError("nothing is launched")


REFUSALS: dict[str, tuple[Callable[[SharedGpu, int], None], Any, dict[str, Any], str]] = {
    "a link is missing": (
        lambda gpu, rank: gpu.unreachable.update({"GPU-0"} if rank == 1 else ()),
        _no_kernel,
        {},
        "WARNING group t: no custom all-reduce, all over NCCL: rank 1: no NVLink to GPU-0",
    ),
    "no memory": (
        lambda gpu, rank: setattr(gpu, "has_room", rank != 0),
        _no_kernel,
        {},
        "WARNING group t: no custom all-reduce, all over NCCL: rank 0: out of memory",
    ),
    "a handle does not open": (
        lambda gpu, rank: setattr(gpu, "opens", False),
        _no_kernel,
        {},
        "WARNING group t: no custom all-reduce, all over NCCL: ranks 0, 1: cannot open",
    ),
    "sums are wrong": (
        lambda gpu, rank: None,
        _adds,
        {},
        "WARNING group t: no custom all-reduce, all over NCCL: ranks 0, 1: a sum of 2.0 KiB came "
        "out wrong",
    ),
    "not asked for": (
        lambda gpu, rank: None,
        _no_kernel,
        {"is_asked": False},
        "INFO group t: no custom all-reduce, all over NCCL: --disable-custom-all-reduce",
    ),
}


def refused(seat: Seat) -> dict[str, tuple[bool, str, bool]]:
    """Of each of REFUSALS: whether there is none, what was logged, whether all was given back."""
    group, heard, found = _group(seat), Heard(), {}
    for number, (name, (prepare, launch, changes, _)) in enumerate(REFUSALS.items()):
        gpu = SharedGpu(seat.rank)
        prepare(gpu, seat.rank)
        made = _opened(group, gpu, launch, name="t" if number == 0 else f"t{number}", **changes)
        lines = [f"{level} {text.replace(f't{number}:', 't:')}" for level, text in heard.lines]
        found[name] = made is None, "; ".join(lines), gpu.is_empty
        heard.lines.clear()
    return found


def test_where_one_rank_cannot_all_stay_with_nccl_and_the_first_says_why() -> None:
    first, second = run_ranks(refused, 2)
    assert first == {name: (True, said, True) for name, (*_, said) in REFUSALS.items()}
    assert second == dict.fromkeys(REFUSALS, (True, "", True))


def three(seat: Seat) -> tuple[bool, list[tuple[str, str]], list[str]]:
    gpu, heard, group = SharedGpu(seat.rank), Heard(), _group(seat)
    found = _opened(group, gpu, _no_kernel) is None, heard.lines, gpu.log
    # One that ends its group closes connections that others still make.
    group.all_reduce(torch.zeros(1))
    return found


def test_three_ranks_are_not_what_it_is_made_for() -> None:
    said = "group tensor-0: no custom all-reduce, all over NCCL: 3 ranks; it is made for 2, 4, 6"
    found = run_ranks(three, 3)
    assert found == [(True, [("WARNING", f"{said} or 8")], []), (True, [], []), (True, [], [])]


def stuck(seat: Seat) -> tuple[str, list[str]]:
    """The GPU does not come to the end of what it was given."""
    gpu, group = SharedGpu(seat.rank), _group(seat)

    def hang(x: Tensor, table: Tensor, **_: Any) -> None:
        gpu.is_stuck = True

    with pytest.raises(GroupError) as error:
        _opened(group, gpu, hang)
    # Where they agreed is in the first one's process.
    assert group.meet(60.0) == []
    return str(error.value), gpu.log


def test_gpus_that_do_not_meet_end_the_rank_and_keep_their_memory() -> None:
    for rank, (said, log) in enumerate(run_ranks(stuck, 2)):
        assert said == (
            "the GPUs of group tensor-0 do not meet within 60 s; start with "
            "--disable-custom-all-reduce"
        )
        # What a kernel may still use is neither unmapped nor freed.
        assert log == ["allocate", f"open GPU-{1 - rank}"]


def deserted(seat: Seat) -> tuple[list[str], list[tuple[str, str]]]:
    """Rank 1 is killed while all have all memory."""
    gpu, heard = SharedGpu(seat.rank), Heard()
    peer_memory._SOON_S = 1.0
    with interpreter() as kernels:
        found = _opened(_group(seat), gpu, kernels.all_reduce.all_reduce)
    if seat.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    heard.lines.clear()
    found.close()
    return gpu.log, heard.lines


def test_memory_that_a_lost_rank_may_still_have_is_not_freed() -> None:
    with ranks(deserted, 2) as found:
        log, lines = found[0].answer()
    assert log == ["allocate", "open GPU-1", "close"]
    said = "group tensor-0: rank 1 may still have memory of this GPU"
    assert lines == [("WARNING", said)]


def test_a_program_has_its_words_to_itself() -> None:
    assert LINE_BYTES >= 9 * 8
    assert SHAPE.head_bytes == SHAPE.programs * LINE_BYTES

"""Groups on GPUs, over fakes of NCCL and of a kernel: what each is asked, and who gets a tensor."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks.kit.groups import PATIENCE_S, Seat, run_ranks
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.kernels.gpu.reduce_shape import ReduceShape
from xpyd_worker.parallel.api import GroupError
from xpyd_worker.parallel.custom_reduce import CustomAllReduce
from xpyd_worker.parallel.distributed import ProcessGroup
from xpyd_worker.parallel.groups import GroupCoordinator

CPU = torch.device("cpu")


class FakeStore:
    """Of rank 0, which alone says that it is there."""

    rank = 0

    def roll_call(self, name: str, ranks: Any, *, within_s: float) -> list[int]:
        return list(ranks)[1:]


class FakeWork:
    """What a wait for it was given."""

    def __init__(self) -> None:
        self.waits: list[tuple[timedelta, ...]] = []

    def wait(self, *within: timedelta) -> None:
        self.waits.append(within)


class FakeBackend:
    """A backend. As NCCL's, a call on the current stream gives nothing to wait for."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.work = FakeWork()
        self.fails = False

    def allreduce(self, tensors: list[Tensor], options: Any) -> FakeWork | None:
        if self.fails:
            raise RuntimeError("NCCL error\nand a stack")
        self.calls.append(("allreduce", options.asyncOp))
        return self.work if options.asyncOp else None

    def _allgather_base(self, out: Tensor, share: Tensor, options: Any) -> FakeWork | None:
        self.calls.append(("allgather", options.asyncOp))
        return self.work if options.asyncOp else None

    def alltoall_base(
        self, out: Tensor, x: Tensor, receive: list[int], send: list[int], options: Any
    ) -> FakeWork | None:
        self.calls.append(("alltoall", options.asyncOp, receive, send))
        return self.work if options.asyncOp else None

    def send(self, tensors: list[Tensor], to: int, tag: int) -> FakeWork:
        self.calls.append(("send", to))
        return self.work

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> FakeWork:
        self.calls.append(("recv", source))
        return self.work

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def abort(self) -> None:
        self.calls.append("abort")


def _group(backend: Any, within_s: float | None) -> ProcessGroup:
    store: Any = FakeStore()
    return ProcessGroup(backend, store, "tensor-0-device", (0, 1), within_s)


def test_nccl_runs_on_the_current_stream_and_the_host_waits_for_nothing() -> None:
    backend = FakeBackend()
    group = _group(backend, None)
    group.all_reduce(torch.ones(2))
    group.all_gather(torch.ones(2, 2), torch.ones(2))
    group.all_to_all(torch.ones(3, 2), torch.ones(1, 2), [1, 0], [1, 2])
    group.send(torch.ones(1), 1).wait()
    group.receive(torch.ones(1), 1).wait()
    assert backend.calls == [
        ("allreduce", False),
        ("allgather", False),
        ("alltoall", False, [1, 2], [1, 0]),
        ("send", 1),
        ("recv", 1),
    ]
    # With a deadline NCCL's wait would hold the host up until the device is there.
    assert backend.work.waits == [(), ()]
    group.close()
    assert backend.calls[-1] == "shutdown"


def test_gloo_has_a_deadline_for_each_wait() -> None:
    backend = FakeBackend()
    group = _group(backend, 3.0)
    group.all_reduce(torch.ones(2))
    group.send(torch.ones(1), 1).wait()
    assert backend.calls == [("allreduce", True), ("send", 1)]
    assert backend.work.waits == [(), (timedelta(seconds=3),)]


@pytest.mark.parametrize(("within_s", "ends"), [(None, "abort"), (3.0, "shutdown")])
def test_a_group_that_failed_waits_for_no_kernel(within_s: float | None, ends: str) -> None:
    backend = FakeBackend()
    backend.fails = True
    with pytest.raises(GroupError) as error:
        _group(backend, within_s).all_reduce(torch.ones(2))
    assert backend.calls == [ends]
    said = "all_reduce in group tensor-0-device: rank 1 did not take part: NCCL error"
    assert str(error.value) == said


class FakePeerMemory:
    """Of a group of some ranks."""

    def __init__(self, ranks: int) -> None:
        self.group: Any = type("G", (), {"rank": 0, "ranks": tuple(range(ranks))})()
        self.is_open = True

    def table(self, room: int) -> Tensor:
        return torch.zeros(room, dtype=torch.int64)

    def close(self) -> None:
        self.is_open = False


def _coordinator(ranks: int) -> tuple[GroupCoordinator, FakeBackend, list[int], FakePeerMemory]:
    backend, launched, memory = FakeBackend(), list[int](), FakePeerMemory(ranks)

    def launch(x: Tensor, table: Tensor, **_: Any) -> None:
        launched.append(x.numel())

    any_memory: Any = memory
    group = _group(backend, None)
    made = GroupCoordinator(
        "tensor",
        device_group=group,
        cpu_group=group,
        device=CPU,
        local_rank=0,
        fast=CustomAllReduce(any_memory, launch=launch, shape=ReduceShape()),
    )
    return made, backend, launched, memory


MOST = ReduceShape().most_bytes


@pytest.mark.parametrize(
    ("x", "ranks", "is_custom"),
    [
        (torch.ones(3, 8), 2, True),
        (torch.ones(3, 5, dtype=torch.bfloat16), 8, True),
        (torch.ones(MOST // 2, dtype=torch.float16), 4, True),
        (torch.ones(MOST // 2 + 1, dtype=torch.float16), 4, False),
        (torch.ones(3, 8), 3, False),
        (torch.ones(8, 3).T, 2, False),
        (torch.ones(0, 8), 2, False),
        (torch.ones(3, dtype=torch.float64), 2, False),
        (torch.ones(3, dtype=torch.int32), 2, False),
    ],
    ids=["float32", "bfloat16", "8 MiB", "more", "three", "strided", "empty", "float64", "int32"],
)
def test_each_call_is_looked_at_and_what_does_not_fit_goes_over_nccl(
    x: Tensor, ranks: int, is_custom: bool
) -> None:
    """Article fact 34."""
    group, backend, launched, _ = _coordinator(ranks)
    group.all_reduce(x)
    assert launched == ([x.numel()] if is_custom else [])
    assert backend.calls == ([] if is_custom else [("allreduce", False)])
    group.close()


def test_gathers_stay_with_nccl_and_a_groups_end_gives_the_memory_back() -> None:
    group, backend, launched, memory = _coordinator(2)
    assert group.all_gather(torch.ones(3, 4)).shape == (3, 8)
    assert (launched, backend.calls) == ([], [("allgather", False)])
    assert memory.is_open
    group.close()
    assert not memory.is_open


def test_what_is_captured_uses_memory_that_was_there_before() -> None:
    """Article fact 34: a graph holds the tensor and the table of memory opened at the start."""
    held: list[tuple[int, int]] = []
    memory: Any = FakePeerMemory(2)

    def launch(x: Tensor, table: Tensor, **_: Any) -> None:
        held.append((x.data_ptr(), table.data_ptr()))

    found = CustomAllReduce(memory, launch=launch, shape=ReduceShape())
    x, y = torch.ones(4), torch.ones(4)
    for one in (x, y, x):
        found.all_reduce(one)
    assert [address for address, _ in held] == [x.data_ptr(), y.data_ptr(), x.data_ptr()]
    assert len({table for _, table in held}) == 1


def meets(seat: Seat) -> list[int]:
    with seat.open(Sizes(tensor=seat.world)) as state:
        return state.tensor_group.cpu_group.meet(PATIENCE_S)


def test_ranks_meet_once_all_are_there() -> None:
    assert run_ranks(meets, 3) == [[], [], []]

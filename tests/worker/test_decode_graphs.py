"""Decoding by graphs over a fake of the device: padding, fixed addresses, what is captured when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from xpyd_worker.kernels.api import KvShape, Plan, Span
from xpyd_worker.kernels.gpu.plan import GpuPlan, StaticPlan, make_plan
from xpyd_worker.runner.graphs import CudaGraphDevice, DecodeGraphs, padded_sizes

CPU = torch.device("cpu")
SHAPE = KvShape(1, 4, 16, torch.float32)


@dataclass
class Model:
    """A forward whose rows tell what they were given, and which addresses it read."""

    calls: list[int] = field(default_factory=list)
    addresses: list[tuple[int, ...]] = field(default_factory=list)

    def forward(self, token_ids: Tensor, positions: Tensor, plan: Plan) -> Tensor:
        assert isinstance(plan, GpuPlan)
        tensors = (token_ids, positions, plan.slots, plan.contexts, plan.block_tables)
        self.calls.append(len(token_ids))
        self.addresses.append(tuple(tensor.data_ptr() for tensor in tensors))
        first_blocks = plan.block_tables[:, 0].long()
        return torch.stack(
            (token_ids, positions, plan.slots, plan.contexts.long(), first_blocks), 1
        )


class ReplayedGraph:
    """Runs the model again for a replay, into the memory of the captured output."""

    def __init__(self, run: Callable[[], Tensor], model: Model) -> None:
        self._run, self._model = run, model
        self.output = run()
        self._read = model.addresses[-1]
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        found = self._run()
        if self._model.addresses[-1] != self._read:
            raise AssertionError("a graph reads the addresses that it was captured with")
        self.output.copy_(found)


class CapturingDevice:
    def __init__(self, model: Model) -> None:
        self._model = model
        self.graphs: dict[int, ReplayedGraph] = {}
        self.runs_before: list[int] = []

    def capture(self, run: Callable[[], Tensor]) -> ReplayedGraph:
        self.runs_before.append(len(self._model.calls))
        graph = ReplayedGraph(run, self._model)
        self.graphs[len(graph.output)] = graph
        return graph


def static_plan(size: int) -> StaticPlan:
    return StaticPlan(SHAPE, CPU, max_sequences=size, max_context=64)


@pytest.fixture
def made() -> tuple[DecodeGraphs, CapturingDevice, Model]:
    model = Model()
    device = CapturingDevice(model)
    graphs = DecodeGraphs(device, model.forward, static_plan, sizes=padded_sizes(6), on=CPU)
    return graphs, device, model


def spans(starts: Sequence[int]) -> list[Span]:
    return [Span(start, 1, (7 + i, 17 + i, 27 + i, 37 + i)) for i, start in enumerate(starts)]


def test_sizes_are_powers_of_two_and_the_largest_batch() -> None:
    assert padded_sizes(1) == (1,)
    assert padded_sizes(16) == (1, 2, 4, 8, 16)
    assert padded_sizes(24) == (1, 2, 4, 8, 16, 24)
    assert padded_sizes(0) == ()


def test_the_largest_is_captured_first_and_each_after_runs_that_set_things_up(
    made: tuple[DecodeGraphs, CapturingDevice, Model],
) -> None:
    graphs, device, model = made
    assert graphs.most == 6
    assert list(device.graphs) == [6, 4, 2, 1]
    assert model.calls == [6, 6, 6, 4, 4, 4, 2, 2, 2, 1, 1, 1]
    assert device.runs_before == [2, 5, 8, 11]


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 6), (6, 6)])
def test_a_batch_is_padded_to_the_next_size_with_rows_that_touch_no_block(
    made: tuple[DecodeGraphs, CapturingDevice, Model], count: int, size: int
) -> None:
    graphs, device, _ = made
    starts = [5 * i for i in range(count)]
    found = graphs.run([100 + i for i in range(count)], spans(starts))
    wanted = [
        [100 + i, at, (7 + i + 10 * (at // 16)) * 16 + at % 16, at + 1, 7 + i]
        for i, at in enumerate(starts)
    ]
    assert found.tolist() == wanted
    assert [n for n, graph in device.graphs.items() if graph.replays] == [size]
    rest = device.graphs[size].output[count:]
    assert rest.tolist() == [[0, 0, -1, 0, 0]] * (size - count)


def test_a_smaller_step_leaves_nothing_of_a_larger_one(
    made: tuple[DecodeGraphs, CapturingDevice, Model],
) -> None:
    graphs, device, _ = made
    graphs.run([1, 2, 3, 4], spans([1, 2, 3, 4]))
    graphs.run([9, 8, 7], spans([4, 5, 6]))
    assert device.graphs[4].output[3].tolist() == [0, 0, -1, 0, 0]


def test_buffers_that_move_are_seen() -> None:
    class Moving:
        def __init__(self) -> None:
            self._static = static_plan(2)

        @property
        def plan(self) -> GpuPlan:
            return self._static.plan

        def copy_(self, spans: Sequence[Span]) -> None:
            self._old, self._static = self._static, static_plan(2)
            self._static.copy_(spans)

    model = Model()
    graphs = DecodeGraphs(
        CapturingDevice(model), model.forward, lambda _: Moving(), sizes=[2], on=CPU
    )
    with pytest.raises(AssertionError, match="addresses"):
        graphs.run([1, 2], spans([1, 2]))


def test_a_capture_does_not_mind_what_other_threads_ask_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []

    def capture(graph: object, **options: Any) -> AbstractContextManager[None]:
        asked.append(options)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    CudaGraphDevice().capture(lambda: torch.zeros(1))
    assert asked == [{"pool": (0, 1), "capture_error_mode": "thread_local"}]


@pytest.mark.parametrize("count", [0, 7])
def test_batches_without_a_graph_are_refused(
    made: tuple[DecodeGraphs, CapturingDevice, Model], count: int
) -> None:
    with pytest.raises(ValueError, match="1 to 6 fit"):
        made[0].run([1] * count, spans([1] * count))


@pytest.mark.parametrize("span", [Span(64, 1, (1, 2, 3, 4, 5)), Span(0, 2, (1,))])
def test_a_static_plan_refuses_what_has_no_room_in_it(span: Span) -> None:
    with pytest.raises(ValueError, match="one below 64 fits"):
        static_plan(2).copy_([span])
    with pytest.raises(ValueError, match="room for 2"):
        static_plan(2).copy_(spans([1, 2, 3]))


def test_a_static_plan_has_the_tables_of_a_plan_of_the_steps_own() -> None:
    """Long contexts and short ones in turn: only the columns that are read are copied."""
    static = StaticPlan(SHAPE, CPU, max_sequences=3, max_context=1024)
    for starts in ([600, 5, 300], [5, 17], [1023], [0, 40, 290]):
        steps = [Span(at, 1, range(7 * i, 7 * i + at // 16 + 1)) for i, at in enumerate(starts)]
        static.copy_(steps)
        own, found, count = make_plan(steps, SHAPE, CPU), static.plan, len(starts)
        assert torch.equal(found.slots[:count], own.slots)
        assert torch.equal(found.contexts[:count], own.contexts)
        for row, at in enumerate(starts):
            used = at // 16 + 1
            assert torch.equal(found.block_tables[row, :used], own.block_tables[row, :used])
        assert found.slots[count:].tolist() == [-1] * (3 - count)
        assert found.contexts[count:].tolist() == [0] * (3 - count)


@pytest.mark.parametrize("counts", [(1,), (1, 1, 1), (1, 5), (3, 1, 2), (1, 1, 1, 1, 70)])
def test_every_table_of_a_plan_begins_where_kernels_are_compiled_for(
    counts: tuple[int, ...],
) -> None:
    plan = make_plan([Span(2, count, range(8)) for count in counts], SHAPE, CPU)
    tables = (plan.slots, plan.block_tables, plan.query_starts, plan.contexts, plan.tiles)
    assert [table.data_ptr() % 16 for table in tables if table.numel()] == [0] * (
        len(tables) - (not plan.tiles.numel())
    )

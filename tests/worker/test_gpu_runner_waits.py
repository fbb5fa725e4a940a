"""A launch on a device that cannot be asked: tensors without values, and a mode that refuses what
would make the host wait for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.fake_gpu import FakeGpu, FakeGraph, FakeGraphDevice, FakeMark
from tests.gpu.models import gpu_runner, model_config
from tests.worker.runner_driver import Driver, with_params
from tests.worker.test_sampler_waits import NoWaits, Waits
from xpyd_worker.engine.executor import DRAWN_BEFORE, StepInput
from xpyd_worker.kernels.api import DrawParams, KvShape, Plan, Span
from xpyd_worker.kernels.gpu.plan import StaticPlan, make_plan
from xpyd_worker.kernels.plain import PlainKernels
from xpyd_worker.runner.runner import ModelRunner
from xpyd_worker.runner.sampler import kernel_draw

META = torch.device("meta")


class NoWaitsInSteps(NoWaits):
    """Knows two more copies that are told not to wait: those in place, whose flag torch hands over
    by place, and `to`, which torch does not take apart under inference_mode. Notes copies to the
    host in `events`."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition(".")[0]
        if name == "aten::copy_" and args[2:] == (True,):
            if args[1].device != META:
                return func(*args)
            # There are no values to bring to the host.
            if args[0].device != META:
                self.events.append("to host")
            return args[0]
        if name == "aten::to" and kwargs.get("non_blocking", False):
            return func(*args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


class MetaKernels(PlainKernels):
    """Shapes of what a GPU's kernels make, over plans as they make them."""

    def plan(self, spans: Sequence[Span], shape: KvShape) -> Plan:
        return make_plan(spans, shape, META)

    def static_plan(self, shape: KvShape, *, max_sequences: int, max_context: int) -> StaticPlan:
        return StaticPlan(shape, META, max_sequences=max_sequences, max_context=max_context)

    def rotate_and_store(
        self,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor, float] | None,
        cache: Tensor,
        plan: Plan,
    ) -> Tensor:
        return qkv.new_empty(qkv.shape[0], qkv.shape[1] - 2 * cache.shape[1], qkv.shape[2])

    def attention(self, query: Tensor, cache: Tensor, plan: Plan, window: int | None) -> Tensor:
        return query.new_empty(query.shape[0], query.shape[1] * query.shape[2])


def sample(logits: Tensor, params: DrawParams) -> Tensor:
    assert params.top_p.device == logits.device
    return torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)


@dataclass
class MetaGraph(FakeGraph):
    """There are no values to write."""

    def replay(self) -> None:
        self.replays += 1


class MetaGraphs(FakeGraphDevice):
    """Captures nothing but shapes."""

    def capture(self, run: Callable[[], Tensor]) -> FakeGraph:
        return MetaGraph(run, run())


def make(largest_graph: int, kernels: MetaKernels, gpu: type[FakeGpu] = FakeGpu) -> ModelRunner:
    return gpu_runner(
        gpu(torch_device=META, graphs=MetaGraphs()),
        kernels,
        model_config("qwen3"),
        dtype=torch.float32,
        draw=kernel_draw(sample),
        largest_graph=largest_graph,
        blocks=32,
    )


def launch_three(runner: ModelRunner) -> None:
    """Prompts with copies of blocks, a chunk beside decodes, decodes alone; all kinds of draws."""
    driver = Driver(runner)
    options = [
        with_params(),
        with_params(temperature=1.0, top_p=0.9, top_k=5, logprobs=2),
        with_params(temperature=1.0, prompt_logprobs=1, repetition_penalty=1.2, max_tokens=9),
    ]
    first, second, late = (driver.add(range(1, 20), params) for params in options)
    step = StepInput(1, (driver.schedule(first, 19), driver.schedule(second, 19)), ((9, 10),))
    runner.launch(step, lambda _: None)
    for sequence in (first, second):
        sequence.computed = 19
        sequence.output.append(DRAWN_BEFORE)
    parts = (driver.schedule(first, 1), driver.schedule(second, 1), driver.schedule(late, 7))
    runner.launch(StepInput(2, parts), lambda _: None)
    for sequence in (first, second):
        sequence.computed += 1
        sequence.output.append(DRAWN_BEFORE)
    parts = (driver.schedule(first, 1), driver.schedule(second, 1))
    runner.launch(StepInput(3, parts), lambda _: None)


@pytest.mark.parametrize("largest_graph", [0, 4])
def test_nothing_in_a_launch_waits_for_the_device(largest_graph: int) -> None:
    runner = make(largest_graph, MetaKernels())
    with NoWaitsInSteps():
        launch_three(runner)
    assert runner.counters.forwards == 3
    assert runner.counters.graph_replays == (largest_graph > 0)


def test_a_step_is_over_when_its_results_are_on_the_host() -> None:
    """The mark that is waited for lies behind the copies, which are what a step ends with."""
    waits = NoWaitsInSteps()

    class Marking(FakeGpu):
        def mark(self) -> FakeMark:
            waits.events.append("mark")
            return super().mark()

    runner = make(4, MetaKernels(), Marking)
    with waits:
        launch_three(runner)
    # Tokens; those of one with log probabilities; the scores of a prompt.
    marks = [index for index, event in enumerate(waits.events) if event == "mark"]
    assert len(marks) == 3
    assert marks[0] >= 2
    assert all(later - earlier >= 2 for earlier, later in pairwise(marks))
    assert marks[-1] == len(waits.events) - 1


def test_a_forward_that_waits_is_seen() -> None:
    class Asking(MetaKernels):
        def silu_mul(self, gate_up: Tensor) -> Tensor:
            return super().silu_mul(gate_up)[torch.arange(gate_up.shape[0])]

    runner = make(0, Asking())
    with pytest.raises(Waits, match="host and device together"), NoWaitsInSteps():
        launch_three(runner)

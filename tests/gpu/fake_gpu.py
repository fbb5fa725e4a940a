"""A GPU for tests without one: it computes on the CPU at once, but says so as late as it is told,
replays what it captured by running it again, and counts memory as it is told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from xpyd_worker.kernels.api import KvShape, Plan, Span
from xpyd_worker.kernels.plain import PlainKernels

CPU = torch.device("cpu")
MIB = 1 << 20


@dataclass
class FakeGraph:
    """What was captured once."""

    run: Callable[[], Tensor]
    output: Tensor
    replays: int = 0

    def replay(self) -> None:
        """The same inputs' addresses, the same output's."""
        self.replays += 1
        self.output.copy_(self.run())


@dataclass
class FakeGraphDevice:
    """Captures by keeping the run."""

    graphs: list[FakeGraph] = field(default_factory=list[FakeGraph])

    def capture(self, run: Callable[[], Tensor]) -> FakeGraph:
        self.graphs.append(FakeGraph(run, run().clone()))
        return self.graphs[-1]


@dataclass
class FakeMark:
    """Reached at the `looks`-th look; `fails` is raised then instead."""

    looks: int = 0
    fails: RuntimeError | None = None

    def is_reached(self) -> bool:
        self.looks -= 1
        if self.looks <= 0 and self.fails is not None:
            raise self.fails
        return self.looks <= 0


@dataclass
class FakeCounters:
    """80 MiB, of which 2 are others'; what tensors take is told by the tests."""

    tensors: int = MIB
    most: int = 3 * MIB
    releases: int = 0

    def total(self) -> int:
        return 80 * MIB

    def free(self) -> int:
        return 78 * MIB - self.tensors

    def reserved(self) -> int:
        return self.tensors

    def release(self) -> None:
        self.releases += 1

    def peak(self) -> int:
        return self.most


@dataclass
class FakeGpu:
    """See xpyd_worker.runner.device.CudaDevice. Marks come from `marks` while it has some."""

    own_kernels: Any = None
    torch_device: torch.device = CPU
    depth: int = 2
    is_lost_by_an_error: bool = True
    marks: deque[FakeMark] = field(default_factory=deque[FakeMark])
    memory: FakeCounters = field(default_factory=FakeCounters)
    graphs: FakeGraphDevice = field(default_factory=FakeGraphDevice)
    marked: int = 0

    def use(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> FakeMark:
        self.marked += 1
        return self.marks.popleft() if self.marks else FakeMark()

    def kernels(self) -> Any:
        return self.own_kernels

    def counters(self) -> FakeCounters:
        return self.memory

    def graph_device(self) -> FakeGraphDevice:
        return self.graphs


class StaticPlan:
    """A plan that keeps its place; `size` rows, of which the first have sequences."""

    def __init__(self, kernels: PlainKernels, shape: KvShape, size: int) -> None:
        self._kernels, self._shape = kernels, shape
        self.size = size
        self.inner: Plan | None = None
        self.used = 0

    @property
    def plan(self) -> Plan:
        return self

    def copy_(self, spans: Sequence[Span]) -> None:
        self.used = len(spans)
        self.inner = self._kernels.plan(spans, self._shape) if spans else None


class StaticPlainKernels(PlainKernels):
    """Plain torch with plans that keep their place: quick where Triton's interpreter is not."""

    def static_plan(self, shape: KvShape, *, max_sequences: int, max_context: int) -> StaticPlan:
        return StaticPlan(PlainKernels(), shape, max_sequences)

    def rotate_and_store(
        self,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor, float] | None,
        cache: Tensor,
        plan: Plan,
    ) -> Tensor:
        if not isinstance(plan, StaticPlan):
            return super().rotate_and_store(qkv, angles, norms, cache, plan)
        heads = qkv.shape[1] - 2 * cache.shape[1]
        out = torch.zeros(plan.size, heads, qkv.shape[2], dtype=qkv.dtype)
        if plan.inner is not None:
            used = slice(0, plan.used)
            turned = (angles[0][used], angles[1][used])
            out[used] = super().rotate_and_store(qkv[used], turned, norms, cache, plan.inner)
        return out

    def attention(self, query: Tensor, cache: Tensor, plan: Plan, window: int | None) -> Tensor:
        if not isinstance(plan, StaticPlan):
            return super().attention(query, cache, plan, window)
        out = torch.zeros(plan.size, query.shape[1] * query.shape[2], dtype=query.dtype)
        if plan.inner is not None:
            found = super().attention(query[: plan.used], cache, plan.inner, window)
            out[: plan.used] = found
        return out

"""A pipeline in virtual time under an engine: each stage takes a step when it has done the last."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.worker.engine_driver import EngineDriver
from tests.worker.engine_fakes import FakeExecutor
from xpyd_worker.engine.executor import Running, StepInput, StepOutput
from xpyd_worker.engine.request import SchedulerConfig


@dataclass(frozen=True)
class _Timed:
    """A step whose last stage ends at `end`; who waits for it lets that much time pass."""

    pipeline: TimedPipeline
    running: Running
    end: float

    def wait(self) -> StepOutput:
        pipeline = self.pipeline
        pipeline.waited_with.append(len(pipeline.launched))
        pipeline.driver.now = max(pipeline.driver.now, self.end)
        pipeline.over()
        return self.running.wait()


class TimedPipeline(FakeExecutor):
    """Its stages need `cost` of a step each."""

    stages = 4
    driver: EngineDriver

    def __init__(
        self, num_blocks: int, limits: SchedulerConfig, depth: int, draws_ahead: bool
    ) -> None:
        super().__init__(num_blocks, limits, depth, draws_ahead)
        self.cost: Callable[[StepInput], float] = lambda step: 10.0
        # By stage, when it began and ended each step; steps under way when one was waited for.
        self.spans: list[list[tuple[float, float]]] = [[] for _ in range(self.stages)]
        self.waited_with: list[int] = []
        # What happens when, and of the steps under way when each is over.
        self.arrivals: deque[tuple[float, Callable[[], object]]] = deque()
        self._ends: deque[float] = deque()

    def launch(self, step: StepInput, layer_done: Callable[[int], None]) -> Running:
        running = super().launch(step, layer_done)
        at, cost = self.driver.now, self.cost(step)
        for spans in self.spans:
            begin = max(at, spans[-1][1]) if spans else at
            at = begin + cost
            spans.append((begin, at))
        self._ends.append(at)
        return _Timed(self, running, at)

    def await_oldest(self, awake: int) -> bool:
        if not self.arrivals or self.arrivals[0][0] >= self._ends[0]:
            return True
        self.driver.now, arrive = self.arrivals.popleft()
        arrive()
        readable, _, _ = select.select([awake], [], [], 0)
        return not readable

    def over(self) -> None:
        self._ends.popleft()

    def bubble(self) -> float:
        """Which share of its time the pipeline's stages were idle."""
        begin, end = self.spans[0][0][0], self.spans[-1][-1][1]
        busy = sum(end - begin for spans in self.spans for begin, end in spans)
        return 1 - busy / (self.stages * (end - begin))


def timed(
    stages: int = 4, *, queue: bool = True, **options: Any
) -> tuple[EngineDriver, TimedPipeline]:
    """An engine over a pipeline that begins at time 0; without the `queue` one step at a time."""

    class Pipeline(TimedPipeline):
        pass

    Pipeline.stages = stages
    depth = stages if queue else 1
    driver = EngineDriver(depth=depth, draws_ahead=False, make_executor=Pipeline, **options)
    assert isinstance(driver.executor, TimedPipeline)
    driver.now, driver.executor.driver = 0.0, driver
    return driver, driver.executor

"""Drives a ModelRunner with two steps under way, as the engine does over a device."""

from __future__ import annotations

from collections.abc import Sequence

from tests.worker.runner_driver import DrivenSequence, Driver, with_params
from xpyd_worker.engine.executor import DRAWN_BEFORE, Running, StepInput
from xpyd_worker.runner.runner import ModelRunner


class Ahead:
    """Two steps under way: a step is launched with what the one before draws, then that one is
    waited for."""

    def __init__(self, runner: ModelRunner) -> None:
        self.driver = Driver(runner)
        self._before: tuple[Running, list[DrivenSequence]] | None = None

    def step(self, chunks: Sequence[tuple[DrivenSequence, int]]) -> None:
        """Launch one; the one before is over then."""
        driver = self.driver
        scheduled = tuple(driver.schedule(sequence, count) for sequence, count in chunks)
        driver.steps += 1
        running = driver.runner.launch(StepInput(driver.steps, scheduled), lambda _: None)
        drawing: list[DrivenSequence] = []
        for (sequence, count), part in zip(chunks, scheduled, strict=True):
            sequence.computed += count
            if part.samples:
                sequence.output.append(DRAWN_BEFORE)
                drawing.append(sequence)
        self.end()
        self._before = (running, drawing)

    def end(self) -> None:
        """Wait for what is under way."""
        if self._before is None:
            return
        running, drawing = self._before
        self._before = None
        output = running.wait()
        for sequence in drawing:
            place = sequence.output.index(DRAWN_BEFORE)
            sequence.output[place] = output.samples[sequence.seq_id][0].token_id

    def run(
        self, prompts: Sequence[Sequence[int]], *, tokens: int, chunk: int, **changes: object
    ) -> list[list[int]]:
        """`tokens` tokens of each prompt, in steps in which each has at most `chunk` new ones."""
        sequences = [self.driver.add(prompt, with_params(**changes)) for prompt in prompts]
        while open_ := [s for s in sequences if len(s.output) < tokens]:
            self.step([(s, min(chunk, len(s.tokens) - s.computed)) for s in open_])
        self.end()
        return [sequence.output for sequence in sequences]

"""A fake executor whose steps go through the messages to the ranks and come out the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.worker.engine_fakes import FakeExecutor
from xpyd_worker.engine.executor import KnownMask, Running, StepInput, StepOutput
from xpyd_worker.engine.request import SchedulerConfig
from xpyd_worker.ranks.compute.request_states import RequestStates
from xpyd_worker.ranks.compute.work import sampled_rows
from xpyd_worker.ranks.step.decoder import StepDecoder
from xpyd_worker.ranks.step.encoder import StepEncoder
from xpyd_worker.ranks.step.messages import (
    Row,
    decode_output,
    decode_step,
    encode_output,
)

MOST_TOKENS = 512


def with_known_masks(step: StepInput) -> StepInput:
    """The step as a rank has it: with the masks computed."""
    sequences = tuple(
        one if one.mask is None else replace(one, mask=KnownMask(one.mask.words()))
        for one in step.sequences
    )
    return replace(step, sequences=sequences)


@dataclass(frozen=True)
class _Told:
    """Tells the encoder what came of a step, as the engine's side of the ranks does."""

    running: Running
    take: Callable[[StepOutput], StepOutput]

    def wait(self) -> StepOutput:
        return self.take(self.running.wait())


class CodedExecutor(FakeExecutor):
    """Encodes a step when it is launched; when it runs, after those before it, the decoder must
    give the same StepInput."""

    slots_per_sequence = 2

    def __init__(
        self, num_blocks: int, limits: SchedulerConfig, depth: int = 1, draws_ahead: bool = True
    ) -> None:
        super().__init__(num_blocks, limits, depth, draws_ahead)
        slots = self.slots_per_sequence * limits.max_num_seqs
        self.encoder = StepEncoder(slots)
        self.states = RequestStates(slots, MOST_TOKENS)
        self.decoder = StepDecoder(slots, self.states)
        self.messages: dict[int, bytes] = {}
        self.rows: list[Row] = []

    def launch(self, step: StepInput, layer_done: Callable[[int], None]) -> Running:
        if self.refuse_with is None:
            self.messages[step.step] = self.encoder.encode(step)
        running = super().launch(step, layer_done)
        return _Told(running, lambda output: self.take(step, output))

    def take(self, step: StepInput, output: StepOutput) -> StepOutput:
        came = decode_output(encode_output(output))
        assert came == output
        self.encoder.drawn(step.step, came)
        return came

    def _run_launched(self, step: StepInput, layer_done: Callable[[int], None]) -> StepOutput:
        return self._coded(step, lambda: super(CodedExecutor, self)._run_launched(step, layer_done))

    def _run(self, step: StepInput, layer_done: Callable[[int], None]) -> StepOutput:
        if self.depth > 1:
            return super()._run(step, layer_done)
        return self._coded(step, lambda: super(CodedExecutor, self)._run(step, layer_done))

    def _coded(self, step: StepInput, run: Callable[[], StepOutput]) -> StepOutput:
        message = decode_step(self.messages.pop(step.step))
        assert self.decoder.read(message) == with_known_masks(step)
        self.rows += message.rows
        output = StepOutput({}, {})
        try:
            output = run()
        finally:
            self.states.post_update(
                [row.slot for row in message.rows],
                [len(one.token_ids) for one in step.sequences],
                sampled_rows(step, output),
            )
        return output


class CrowdedExecutor(CodedExecutor):
    """Has no slot more than a step may have sequences: what is preempted loses its own."""

    slots_per_sequence = 1

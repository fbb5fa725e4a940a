"""The engine's Executor over ranks: a step out to all of them, what came of it from one. No torch.

On the engine's thread. Which ranks there are, and what becomes of them, is the instance's matter.
Steps of a pipeline are drawn as docs/adr/0029 says.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from xpyd_core.errors import XpydError
from xpyd_worker.engine.eplb import EplbConfig
from xpyd_worker.engine.executor import Resize, Running, StepCounters, StepInput, StepOutput
from xpyd_worker.ranks.instance import Instance
from xpyd_worker.ranks.loss import RankLostError
from xpyd_worker.ranks.step.encoder import StepEncoder
from xpyd_worker.ranks.step.messages import StepMessage, decode_output, encode_step

STEP_DEADLINE_S = 120.0
"""The time that ranks have for a step, as one rank has (runner): the longest step of the largest
model takes seconds."""


class RankedExecutor:
    """See Executor. Where a rank goes, `launch` and `wait` raise RankLostError: the engine ends."""

    def __init__(
        self,
        instance: Instance,
        *,
        num_blocks: int,
        depth: int,
        draws_ahead: bool,
        encoder: StepEncoder,
        decode: Callable[[bytes], StepOutput] = decode_output,
        step_deadline_s: float = STEP_DEADLINE_S,
        eplb: EplbConfig | None = None,
        await_repair: Callable[[], Resize] | None = None,
    ) -> None:
        """`eplb`: how often experts are placed anew; None: never. `await_repair`: what to tell
        ranks whose step broke because another replica is lost; it waits until that is known."""
        self._instance = instance
        self._encoder = encoder
        self._decode = decode
        self._deadline_s = step_deadline_s
        # When the oldest step became that.
        self._since_s = 0.0
        self._steps: deque[int] = deque()
        self._outputs: deque[bytes] = deque()
        self._poll = select.poll()
        self._responses = {one.fileno(): rank for rank, one in enumerate(instance.responses)}
        for descriptor in (*self._responses, instance.lost_fd):
            self._poll.register(descriptor, select.POLLIN)
        self.num_blocks = num_blocks
        self.depth = depth
        self.draws_ahead = draws_ahead
        self.counters = StepCounters()
        self._eplb = eplb
        self._await_repair = await_repair
        self._meeting = 0
        """Of the last change that the ranks were told."""
        # Steps that ranks were given.
        self._published = 0

    def launch(self, step: StepInput, layer_done: Callable[[int], None]) -> Running:
        """See Executor. `layer_done` is for one rank; here each calls its own sender."""
        if self._eplb is not None:
            step = replace(step, experts=self._eplb.turn(self._published + 1))
        if step.resize is not None:
            self._meeting = step.resize.meeting
        self._instance.publish(self._encoder.encode(step))
        self._published += 1
        if not self._steps:
            self._since_s = time.monotonic()
        self._steps.append(step.step)
        prompt_tokens = sum(
            min(len(one.token_ids), max(0, one.prompt_tokens - one.start)) for one in step.sequences
        )
        if step.sequences:  # a dummy is no forward of this replica
            self.counters.count(step.tokens, prompt_tokens)
        return _RankedStep(self)

    def await_oldest(self, awake: int) -> bool:
        """See Executor."""
        self._poll.register(awake, select.POLLIN)
        try:
            while not self._outputs:
                if awake in self._receive_some():
                    return False
        finally:
            self._poll.unregister(awake)
        return True

    def take(self) -> StepOutput:
        """What came of the oldest step not taken yet."""
        while not self._outputs:
            self._receive_some()
        output = self._decode(self._outputs.popleft())
        self._encoder.drawn(self._steps.popleft(), output)
        self._since_s = time.monotonic()
        return output

    def _receive_some(self) -> list[int]:
        """Take what has come, and wait for it where nothing has; which descriptors had something.
        The deadline is one step's, however often its waits are ended."""
        left_s = max(0.0, self._since_s + self._deadline_s - time.monotonic())
        came = [descriptor for descriptor, _ in self._poll.poll(left_s * 1000 + 1)]
        for descriptor in came:
            if descriptor in self._responses or descriptor == self._instance.lost_fd:
                self._receive(descriptor)
        # The engine may have been held up elsewhere for longer: what has come meanwhile counts.
        if not left_s and not self._outputs:
            raise self._instance.stuck(self._deadline_s)
        return came

    def _receive(self, descriptor: int) -> None:
        rank = self._responses.get(descriptor)
        if rank is None:
            raise self._instance.error()
        while (response := self._instance.responses[rank].take()) is not None:
            if response.broke is not None:
                # Several ranks may say it of one step.
                if response.broke == self._meeting:
                    self._make_again()
            elif response.failure is None:
                self._outputs.append(response.output)
            else:
                # The judge says which of those that fail was the first; `lost_fd` follows.
                self._instance.failed(rank, response.failure)

    def _make_again(self) -> None:
        assert self._await_repair is not None, "ranks end with the others"
        assert len(self._steps) == 1, "without stages no other step is under way"
        if self._instance.loss is not None:
            raise self._instance.error()
        try:
            repair = self._await_repair()._replace(is_again=True)
        except XpydError as error:
            raise (
                self._instance.error() if self._instance.loss else RankLostError(str(error))
            ) from error
        self._meeting = repair.meeting
        self._instance.publish(encode_step(StepMessage(self._steps[0], (), resize=repair)))
        self._since_s = time.monotonic()


class _RankedStep:
    """A step on its way."""

    def __init__(self, executor: RankedExecutor) -> None:
        self._executor = executor

    def wait(self) -> StepOutput:
        """See Running."""
        return self._executor.take()

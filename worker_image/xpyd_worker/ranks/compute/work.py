"""What a rank does with each step: read it, run its part of the model, and keep its states right.

    message -> StepDecoder -> runner (its Part) -> last stage: draws, tells the others, answers
                    ^                             other stages: begin to receive what is drawn
                    '------ RequestStates <------ the update that every step ends with

On other stages than the last the draws of a step are waited for when a later step first needs them,
so that what is under way between the stages stays under way. So they are on a last stage that has a
GPU: there the update follows the draw on the device, and the tokens go to the other stages when the
host knows them. It must not know processes, sockets or the queue of requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from xpyd_kv.ranks.agent import StepSender
from xpyd_worker.engine.executor import (
    Finished,
    Resize,
    Running,
    StepInput,
    StepOutput,
    no_layer_done,
)
from xpyd_worker.kernels.post_update import Sampled
from xpyd_worker.parallel.api import GroupError
from xpyd_worker.ranks.compute.request_states import DeviceStates, RequestStates, Row, UnderWay
from xpyd_worker.ranks.step.decoder import StepDecoder
from xpyd_worker.ranks.step.messages import (
    Ahead,
    Chunk,
    StepMessage,
    decode_step,
    encode_output,
)
from xpyd_worker.runner.device import reach

if TYPE_CHECKING:
    from xpyd_worker.parallel.stages import IncomingSampled
    from xpyd_worker.parallel.state import ParallelState
    from xpyd_worker.runner.runner import LaunchedStep, ModelRunner

# As of a step: what it waits for is enqueued right behind one.
_UPDATE_DEADLINE_S = 120.0


@dataclass(frozen=True)
class Share:
    """Slots of a step's sequences and how many tokens each had."""

    slots: list[int]
    query_lens: list[int]


@dataclass(frozen=True, eq=False)
class Coming:
    """Drawn on the last stage, on their way here."""

    states: RequestStates
    share: Share
    incoming: IncomingSampled

    def has_slot_of(self, slots: set[int]) -> bool:
        return not slots.isdisjoint(self.share.slots)

    def is_known(self) -> bool:
        return False

    def settle(self) -> None:
        self.states.post_update(self.share.slots, self.share.query_lens, self.incoming.get())


@dataclass(frozen=True, eq=False)
class OnDevice:
    """Drawn here, by a device that updates the states itself. `send`: what was drawn, to the other
    stages."""

    states: DeviceStates
    update: UnderWay
    running: Running
    step: int
    send: Callable[[StepOutput], None]

    def has_slot_of(self, slots: set[int]) -> bool:
        return not slots.isdisjoint(self.update.ends)

    def is_known(self) -> bool:
        return self.update.mark.is_reached()

    def settle(self) -> None:
        what = f"the update behind step {self.step}"
        reach(self.update.mark, within_s=_UPDATE_DEADLINE_S, what=what)
        self.send(self.running.wait())
        self.states.settle(self.update)


@dataclass(frozen=True)
class Settling:
    """A step whose `wait` makes the host learn of its draws, and of those before."""

    running: Running
    settle: Callable[[], None]

    def wait(self) -> StepOutput:
        self.settle()
        return self.running.wait()


Awaited = Coming | OnDevice
"""Draws that the host has yet to learn of. `has_slot_of`: whether they are for one of these slots;
`is_known`: whether `settle` would not wait; `settle`: wait, and write them to the states, the
oldest first."""


@dataclass(frozen=True)
class RankStep:
    """A step that this rank has begun. `broke`: why it cannot be made without a replica that is
    lost; the engine says how it is made again."""

    _running: Running
    _answers: bool
    broke: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the device's work is over; on a CPU it is from the start."""
        return isinstance(self._running, Finished)

    def finish(self) -> bytes | None:
        """Wait for this rank's share; once, in the order of the steps. On the output rank the
        encoded StepOutput, None elsewhere. Raises like Running.wait."""
        output = self._running.wait()
        return encode_output(output) if self._answers else None


@dataclass
class Last:
    """The step that was begun last. `is_done`: what came of it is in the states."""

    message: StepMessage
    step: StepInput
    is_done: bool = False


class RankWork:
    """Runs the steps of one rank, in their order. One thread."""

    def __init__(
        self,
        runner: ModelRunner,
        states: RequestStates,
        *,
        parallel: ParallelState,
        kv_sender: StepSender | None = None,
        resize: Callable[[Resize], bool] | None = None,
        outlives: bool = False,
    ) -> None:
        """`resize`: where replicas come and go; it says whether this rank's replica stays.
        `outlives`: it goes on where another replica is lost."""
        self._runner = runner
        self._states = states
        self._parallel = parallel
        self._part = parallel.part
        self._feedback = parallel.feedback
        self._kv_sender = kv_sender
        self._resize, self._outlives = resize, outlives
        self._last: Last | None = None
        self._broke = ""
        """Why groups are closed: a step broke."""
        self.meeting = 0
        """Of the last change of the replicas that this rank has made."""
        self._decoder = StepDecoder(states.slots, states)
        # The oldest first; no more than there are steps under way.
        self._awaited: deque[Awaited] = deque()

    def launch(self, encoded: bytes) -> RankStep:
        """Begin a step. Raises MessageError for bytes that are none, GroupError where another rank
        does not answer, or has answered a step that broke here and is not made again, and what the
        runner raises: the ranks cannot go on together then."""
        message = decode_step(encoded)
        change, last = message.resize, self._last
        if change is not None and change.is_again:
            assert last is not None, "it broke"
        else:
            if self._broke and last is not None and last.step.sequences and not last.is_done:
                raise GroupError(f"step {message.step} came behind one that broke: {self._broke}")
            self._catch_up(message)
            last = self._last = Last(message, self._decoder.read(message))
        # One that is done was answered.
        answers = self._part.answers and not last.is_done
        if change is not None:
            assert self._resize is not None, "replicas come and go"
            self.meeting = change.meeting
            if not self._resize(change):
                return RankStep(Finished(StepOutput({}, {})), answers)
            self._broke = ""
        try:
            if self._broke:
                raise GroupError(self._broke)
            return RankStep(self._make(last), answers)
        except GroupError as error:
            if not self._outlives:
                raise
            self._broke = str(error)
            # Ranks that wait for this one in another group see it by that.
            self._parallel.close()
            return RankStep(Finished(StepOutput({}, {})), answers, broke=str(error))

    def _make(self, last: Last) -> Running:
        message, step, part = last.message, last.step, self._part
        running = self._run(step)
        if last.is_done:
            # Another rank of the replica has broken behind this one's last exchange. What follows
            # was drafted before.
            return Finished(replace(running, propose=None).wait())
        if not step.sequences:
            pass  # a dummy: nothing is drawn, and no state changes
        elif not part.is_last:
            self._await_draws(message, step)
        elif (
            isinstance(self._states, DeviceStates)
            and not _width(step) > 1
            and not self._runner.drafts
        ):
            running = self._draw_on_device(self._states, message, step, running)
        else:
            running = self._draw(message, step, running)
        last.is_done = True
        return running

    def _run(self, step: StepInput) -> LaunchedStep:
        sender = self._kv_sender
        if sender is None or not step.sequences:
            return self._runner.launch(step, no_layer_done)
        sender.begin_step(step.kv)
        try:
            running = self._runner.launch(step, sender.layer_done)
        except BaseException:
            sender.step_done(failed=True)
            raise
        sender.step_done(failed=False)
        return running

    def _catch_up(self, message: StepMessage) -> None:
        """Take in draws on their way, in order, until none is left that a sequence of this step
        needs, nor one older than the steps that can be under way."""
        # A sequence with a further chunk drew no token of its own before; what is drawn ahead of a
        # step is known to the device.
        needed = {row.slot for row in message.rows if not isinstance(row, Chunk | Ahead)}
        awaited = self._awaited
        count = max((n for n, one in enumerate(awaited, 1) if one.has_slot_of(needed)), default=0)
        # A last stage's own are settled when its steps are finished.
        if not self._part.is_last:
            count = max(count, len(awaited) - self._part.stages + 1)
        for _ in range(count):
            awaited.popleft().settle()
        # Those that are known already need no wait.
        while awaited and awaited[0].is_known():
            awaited.popleft().settle()

    def _send_drawn(self, sampled: Sampled) -> None:
        """Send what was drawn to the other stages."""
        assert self._feedback is not None, "there are other stages"
        self._feedback.send(sampled)

    def _draw(self, message: StepMessage, step: StepInput, running: Running) -> Running:
        """Draw, on the last stage. Where the states are on a device that is for draft tokens, and
        where a model drafts: how many stand is known to the host first, and all before it is over
        then."""
        output = running.wait()
        while self._awaited:
            self._awaited.popleft().settle()
        share = Share(
            [row.slot for row in message.rows], [len(one.token_ids) for one in step.sequences]
        )
        sampled = sampled_rows(step, output)
        if not self._part.is_first and (asking := _asking(step)):
            self._send_drawn(_rows(sampled, asking))
        self._states.post_update(share.slots, share.query_lens, sampled)
        return Finished(output)

    def _draw_on_device(
        self, states: DeviceStates, message: StepMessage, step: StepInput, running: LaunchedStep
    ) -> Running:
        """Draw on a last stage with a GPU. Waits for nothing."""
        places = running.draw.places
        rows = [
            Row(row.slot, len(one.token_ids), places.get(one.seq_id))
            for row, one in zip(message.rows, step.sequences, strict=True)
        ]
        update = states.enqueue(rows, [one.start for one in step.sequences], running.draw)
        asking = [] if self._part.is_first else _asking(step)

        def send(output: StepOutput) -> None:
            if asking:
                self._send_drawn(_rows(sampled_rows(step, output), asking))

        one = OnDevice(states, update, running, step.step, send)
        self._awaited.append(one)

        def settle() -> None:
            while one in self._awaited:
                self._awaited.popleft().settle()

        return Settling(running, settle)

    def _await_draws(self, message: StepMessage, step: StepInput) -> None:
        """Wait, on the other stages, for the draws: sequences that nothing is drawn for are done
        with the step, the rest are when their draws have come."""
        asking = _asking(step)
        resting = [n for n, one in enumerate(step.sequences) if len(one.samples) != 1]

        def share(places: list[int]) -> Share:
            return Share(
                [message.rows[n].slot for n in places],
                [len(step.sequences[n].token_ids) for n in places],
            )

        if resting:
            rest = share(resting)
            self._states.post_update(rest.slots, rest.query_lens, None)
        if asking:
            assert self._feedback is not None, "a stage that does not draw has others"
            incoming = self._feedback.receive(len(asking), _width(step))
            self._awaited.append(Coming(self._states, share(asking), incoming))


def _asking(step: StepInput) -> list[int]:
    """Places of the sequences that a token is drawn for: the rows of Sampled, on every stage. Where
    choices fork none is their sequence's: the engine says which choice goes on with which."""
    return [n for n, one in enumerate(step.sequences) if len(one.samples) == 1]


def _width(step: StepInput) -> int:
    """The most tokens that the step can give a sequence; all stages know it."""
    return 1 + max((one.drafts for one in step.sequences), default=0)


def sampled_rows(step: StepInput, output: StepOutput) -> Sampled:
    """What was drawn for each of a step's sequences, and how many draft tokens of it were
    rejected."""
    width = _width(step)
    tokens: list[list[int]] = []
    counts: list[int] = []
    rejected: list[int] = []
    for one in step.sequences:
        drawn = output.samples.get(one.seq_id, ()) if len(one.samples) == 1 else ()
        tokens.append([*(sample.token_id for sample in drawn), *[0] * (width - len(drawn))])
        counts.append(len(drawn))
        rejected.append(one.drafts + 1 - len(drawn) if one.drafts else 0)
    return Sampled(
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor(counts, dtype=torch.int32),
        torch.tensor(rejected, dtype=torch.int32),
    )


def _rows(sampled: Sampled, places: list[int]) -> Sampled:
    """The rows of these sequences only."""
    return Sampled(*(one[torch.tensor(places)] for one in sampled))

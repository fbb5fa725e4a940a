"""The ranks of an engine in one thread: real RankWork over a fake stage each, whose KV counts.

A stage keeps KV by slot of its own cache, made from all hidden states before; what it hands on is
right only as long as that KV is. So a stage that is wrong about a position, a block or a token
changes what is drawn. A rank that waits lets the later ones work, in an order drawn at random: each
may be as late as it can.

`LateDevice` is a fake GPU that does what is enqueued as late as it may: when a test waits for it,
or when a look at a mark finds at random that it is reached.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.worker.engine_fakes import BLOCK, FakeExecutor, chain, drawn_for
from xpyd_worker.engine.executor import (
    DRAWN_BEFORE,
    Running,
    ScheduledSequence,
    StepInput,
    StepOutput,
)
from xpyd_worker.engine.request import SampledToken, SchedulerConfig
from xpyd_worker.kernels.post_update import Fields, Sampled, post_update
from xpyd_worker.parallel.api import NO_GROUP, Part, TensorGroup
from xpyd_worker.ranks.compute.request_states import DeviceStates, RequestStates
from xpyd_worker.ranks.compute.work import RankStep, RankWork
from xpyd_worker.ranks.step.encoder import StepEncoder
from xpyd_worker.ranks.step.messages import decode_output
from xpyd_worker.runner.runner import DeviceDraw

MOST_TOKENS = 512


class LateDevice:
    """See Device; computes on the CPU."""

    torch_device = torch.device("cpu")
    depth = 2
    is_lost_by_an_error = True

    def __init__(self, seed: int, most_looks: int = 4) -> None:
        self.enqueued = self.done = self.looks = 0
        self._work: deque[Callable[[], None]] = deque()
        self._rng = random.Random(seed)
        self._most_looks = most_looks

    def use(self) -> AbstractContextManager[object]:
        return nullcontext()

    def enqueue(self, work: Callable[[], None]) -> None:
        self.enqueued += 1
        self._work.append(work)

    def run_to(self, place: int) -> None:
        while self.done < place:
            self._work.popleft()()
            self.done += 1

    def mark(self) -> LateMark:
        return LateMark(self, self.enqueued)

    def look(self, place: int) -> bool:
        """A host that looks again and again waits: it is let through in the end."""
        self.looks += 1
        if self._rng.randrange(self._most_looks) == 0:
            self.run_to(place)
        return self.done >= place


@dataclass(frozen=True)
class LateMark:
    """Behind so much of what was enqueued."""

    device: LateDevice
    place: int

    def is_reached(self) -> bool:
        return self.device.look(self.place)


def make_late_states(slots: int, device: LateDevice) -> DeviceStates:
    """States that such a device updates."""

    def update(fields: Fields, slots: Tensor, query_lens: Tensor, sampled: Sampled) -> None:
        device.enqueue(lambda: post_update(fields, slots, query_lens, sampled))

    return DeviceStates(slots, MOST_TOKENS, device=device, update=update)


_ROOT = 12345


@dataclass(frozen=True)
class Flow:
    """Hidden state of one token: the token, and what a right stage's KV is up to it."""

    token: int
    kv: int


@dataclass(frozen=True)
class FakeLaunched:
    """A step that its rank has begun; on a fake GPU it is known at `mark`."""

    output: StepOutput
    draw: DeviceDraw
    mark: LateMark | None
    propose: Callable[[], None] | None = None

    def wait(self) -> StepOutput:
        if self.mark is not None:
            self.mark.device.run_to(self.mark.place)
        if self.propose is not None:
            self.propose()
        return self.output


class FakeStage:
    """A rank's part of a model: takes a step's hidden states, hands on its own."""

    drafts = False

    def __init__(self, num_blocks: int, *, before: deque[list[Flow]], after: deque[list[Flow]]):
        self.drawn: dict[int, int] = {}
        self.drafted = 0
        self.device: LateDevice | None = None
        self.memory: list[list[int | None]] = [[None] * BLOCK for _ in range(num_blocks)]
        self.is_first = self.is_last = False
        self.before, self.after = before, after
        self.steps: list[StepInput] = []

    def launch(self, step: StepInput, layer_done: Callable[[int], None]) -> FakeLaunched:
        self.steps.append(step)
        before, self.drawn = self.drawn, {}
        for source, destination in step.block_copies:
            self.memory[destination] = list(self.memory[source])
        coming = deque(() if self.is_first else self.before.popleft())
        leaving: list[Flow] = []
        samples: dict[int, tuple[SampledToken, ...]] = {}
        for one in step.sequences:
            kv = self._kv_before(one)
            kvs: list[int] = []
            for place, token in enumerate(one.token_ids):
                if token == DRAWN_BEFORE:
                    token = before[one.seq_id]
                true = coming.popleft() if coming else Flow(token, chain(kv, token))
                kv = chain(kv, true.token)
                at = one.start + place
                self.memory[one.block_ids[at // BLOCK]][at % BLOCK] = kv
                spoilt = 0 if kv == true.kv else 1 + kv % 7
                leaving.append(Flow(true.token + spoilt, true.kv))
                kv += spoilt if self.is_last else 0
                kvs.append(kv)
            if self.is_last and one.samples:
                samples[one.seq_id] = drawn_for(one, kvs)
        assert not coming
        if not self.is_last:
            self.after.append(leaving)
        layer_done(0)
        self.drawn = {i: some[0].token_id for i, some in samples.items() if len(some) == 1}
        return self._launched(StepOutput(samples, {}))

    def _launched(self, output: StepOutput) -> FakeLaunched:
        tokens = [one.token_id for some in output.samples.values() for one in some]
        counts = [len(some) for some in output.samples.values()]
        places = {
            seq_id: sum(counts[:n])
            for n, (seq_id, some) in enumerate(output.samples.items())
            if len(some) == 1
        }
        draw = DeviceDraw(torch.tensor(tokens, dtype=torch.int64), places)
        mark = None if self.device is None else self.device.mark()
        return FakeLaunched(output, draw, mark, self._draft)

    def _draft(self) -> None:
        self.drafted += 1

    def _kv_before(self, one: ScheduledSequence) -> int:
        if not one.start:
            return _ROOT
        at = one.start - 1
        return self.memory[one.block_ids[at // BLOCK]][at % BLOCK] or 0


@dataclass
class _Incoming:
    """What the last stage will have drawn, once it got there."""

    feedback: FakeFeedback
    requests: int
    width: int

    def get(self) -> Sampled:
        while not self.feedback.told:
            self.feedback.let_others_work()
        sampled = self.feedback.told.popleft()
        assert sampled.tokens.shape == (self.requests, self.width)
        assert sampled.tokens.dtype == torch.int64
        assert sampled.num_sampled.dtype == sampled.num_rejected.dtype == torch.int32
        return sampled


@dataclass
class FakeFeedback:
    """One rank's end of it."""

    let_others_work: Callable[[], None]
    others: list[FakeFeedback] = field(default_factory=list["FakeFeedback"])
    told: deque[Sampled] = field(default_factory=deque[Sampled])

    def send(self, sampled: Sampled) -> None:
        for other in self.others:
            other.told.append(sampled)

    def receive(self, requests: int, width: int = 1) -> _Incoming:
        assert requests
        return _Incoming(self, requests, width)


@dataclass(frozen=True)
class FakeParallel:
    """What a rank has of the others; its stage hands on hidden states itself."""

    part: Part
    feedback: FakeFeedback
    tensor: TensorGroup = NO_GROUP


class FakePipeline(FakeExecutor):
    """An engine's executor over `stages` ranks."""

    stages = 2
    is_last_on_device = False
    states_of: tuple[type[RequestStates], ...] = ()

    def __init__(
        self, num_blocks: int, limits: SchedulerConfig, depth: int = 1, draws_ahead: bool = True
    ) -> None:
        super().__init__(num_blocks, limits, depth, draws_ahead)
        slots = 2 * limits.max_num_seqs
        self.encoder = StepEncoder(slots)
        flows = [deque[list[Flow]]() for _ in range(self.stages + 1)]
        self.parts = [
            FakeStage(num_blocks, before=flows[n], after=flows[n + 1]) for n in range(self.stages)
        ]
        self.parts[0].is_first = self.parts[-1].is_last = True
        feedbacks = [FakeFeedback(self._work_one) for _ in range(self.stages)]
        feedbacks[-1].others = feedbacks[:-1]
        self.ranks: list[RankWork] = []
        for stage, runner in enumerate(self.parts):
            part = Part(layers=range(stage, stage + 1), stage=stage, stages=self.stages)
            make_states = self.states_of[stage] if self.states_of else RequestStates
            if stage == self.stages - 1 and self.is_last_on_device:
                runner.device = LateDevice(num_blocks)
                states: RequestStates = make_late_states(slots, runner.device)
            else:
                states = make_states(slots, MOST_TOKENS)
            parallel = FakeParallel(part, feedbacks[stage])
            self.ranks.append(RankWork(runner, states, parallel=parallel))
        self.inboxes: list[deque[bytes]] = [deque() for _ in range(self.stages)]
        self.begun: list[deque[RankStep]] = [deque() for _ in range(self.stages)]
        self.busy: set[int] = set()
        self.answers: deque[bytes] = deque()
        self.rng = random.Random(num_blocks)
        self.most_launched = 0

    def launch(self, step: StepInput, layer_done: Callable[[int], None]) -> Running:
        self._check(step)
        self.steps.append(step)
        self.launched.append(step)
        self.most_launched = max(self.most_launched, len(self.launched))
        assert self.most_launched <= self.depth
        message = self.encoder.encode(step)
        for inbox in self.inboxes:
            inbox.append(message)
        return _Awaited(self, step)

    def take(self, step: StepInput) -> StepOutput:
        assert self.launched.popleft() is step, "steps are waited for in order"
        while not self.answers:
            self._work_one()
        output = decode_output(self.answers.popleft())
        self.encoder.drawn(step.step, output)
        return output

    def _work_one(self) -> None:
        """One rank begins a step, if the one before it has, or ends its oldest."""
        idle = [n for n in range(self.stages) if n not in self.busy]
        ways = [(n, self._begin) for n in idle if self._may_begin(n)]
        ways += [(n, self._end) for n in idle if self.begun[n]]
        rank, go = self.rng.choice(ways)
        self.busy.add(rank)
        go(rank)
        self.busy.discard(rank)

    def _may_begin(self, rank: int) -> bool:
        has_room = len(self.begun[rank]) < max(self.depth, 1)
        return bool(has_room and self.inboxes[rank] and (rank == 0 or self.parts[rank].before))

    def _begin(self, rank: int) -> None:
        self.begun[rank].append(self.ranks[rank].launch(self.inboxes[rank].popleft()))

    def _end(self, rank: int) -> None:
        answer = self.begun[rank].popleft().finish()
        assert (answer is not None) == (rank == self.stages - 1)
        if answer is not None:
            self.answers.append(answer)


@dataclass(frozen=True)
class _Awaited:
    pipeline: FakePipeline
    step: StepInput

    def wait(self) -> StepOutput:
        return self.pipeline.take(self.step)

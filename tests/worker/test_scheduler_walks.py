"""Random walks of the scheduler alone, with invariants checked at each step.

Each walk goes step by step, again with one step made before the last one is over, and with those of
a pipeline. Blocks: each has as many references as tables name it, those of ended sequences that a
step under way writes to included; none is lost. Budget, threshold and sequences stay within their
limits. Decodes are never left out; in a pipeline they are in steps in turn, and one that lacks a
block waits until one comes. Who starts goes before all who still wait, who is preempted comes after
all who stay. Under fcfs the oldest request gets on at every step, but for a few in which decodes
alone are measured.
"""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from tests.worker.engine_driver import Way, make_request, walks
from tests.worker.engine_fakes import BLOCK, EOS
from xpyd_worker.engine import step_times
from xpyd_worker.engine.block_manager import BlockManager
from xpyd_worker.engine.executor import DRAWN_BEFORE, StepOutput
from xpyd_worker.engine.open_requests import StopRules
from xpyd_worker.engine.request import EngineOutput, Policy, SampledToken, SchedulerConfig
from xpyd_worker.engine.scheduler import ScheduledStep, Scheduler
from xpyd_worker.engine.sequences import Rank, RequestState, Sequence

_MODEL_LEN = 48


class Walk:
    """One scheduler, a hand that plays with it, and what a spectator knows about it."""

    def __init__(
        self,
        seed: int,
        limits: SchedulerConfig,
        *,
        blocks: int,
        choices: bool = True,
        depth: int = 1,
        draws_ahead: bool = True,
    ) -> None:
        self.depth = depth
        self.stages = 1 if draws_ahead else depth
        self.under_way: deque[ScheduledStep] = deque()
        self.rules = StopRules((EOS,), _MODEL_LEN)
        self.rng = random.Random(seed)
        self.took = random.Random(seed)
        self.limits = limits
        self.choices = choices
        self.pool = BlockManager(blocks, block_size=BLOCK)
        self.scheduler = Scheduler(self.pool, config=limits, rules=self.rules, stages=self.stages)
        # The ranks of requests that never ran, and the state of every one that did.
        self.unseen: dict[str, Rank] = {}
        self.seen: dict[str, RequestState] = {}
        self.open: set[str] = set()
        self.count = 0
        self.started = self.preempted = self.mixed = self.ahead = self.for_nothing = 0
        # Steps that each ready decode was left out of; how many steps were under way at most.
        self.left_out: Counter[int] = Counter()
        self.oldest_waited = 0
        self.most_under_way = 0

    def run(self, turns: int) -> None:
        for _ in range(turns):
            for _ in range(self.rng.choice([0, 0, 0, 1, 1, 2])):
                if len(self.open) < 14:
                    self.arrive()
            if self.open and self.rng.random() < 0.03:
                self.abort(self.rng.choice(sorted(self.open)))
            self.step()
        for _ in range(3000):
            if not self.open and not self.under_way:
                break
            self.step()
        assert not self.scheduler.has_requests
        assert self.pool.num_free == self.pool.num_blocks

    def arrive(self) -> None:
        rng = self.rng
        head = [rng.randrange(3)] * (BLOCK * rng.randrange(4))
        prompt = head + [rng.randrange(40) for _ in range(rng.randrange(1, 14))]
        name = f"r{self.count}"
        request = make_request(
            name,
            prompt,
            n=rng.choice([1, 1, 2, 3]) if self.choices else 1,
            max_tokens=rng.randrange(1, 16),
            priority=rng.randrange(-2, 3),
            ignore_eos=rng.random() < 0.5,
        )
        self.scheduler.submit(request, 0.0)
        priority = request.priority if self.limits.policy == "priority" else 0
        self.unseen[name] = (priority, self.count, 0)
        self.open.add(name)
        self.count += 1
        self.take_outputs()

    def abort(self, name: str) -> None:
        self.scheduler.abort(name)
        self.open.discard(name)
        self.unseen.pop(name, None)

    def step(self) -> None:
        ran = {s.seq_id: s for s in self.living() if s.blocks}
        decodes = {
            s.seq_id
            for s in ran.values()
            if s.remaining == 1 and not self.is_ending(s) and not (self.stages > 1 and s.drawing)
        }
        ending = {s.rank for s in ran.values() if self.is_ending(s)}
        step = self.scheduler.schedule(0.0)
        if step is not None:
            self.check_step(step, ran, decodes)
            self.check_order(step, ran, ending)
            self.under_way.append(step)
            self.most_under_way = max(self.most_under_way, len(self.under_way))
        else:
            assert self.under_way or not self.open, "nothing runs though requests wait"
        if self.under_way and (step is None or len(self.under_way) == self.depth):
            self.finish(self.under_way.popleft())
            self.take_outputs()
        self.check_blocks()

    def is_ending(self, sequence: Sequence) -> bool:
        """Whether a token is being drawn for it behind which none can come."""
        return sequence.drawing > 0 and self.rules.is_last(
            sequence.output_position() - 1,
            prompt_tokens=sequence.state.prompt_tokens,
            sampling=sequence.state.request.sampling,
        )

    def check_step(self, step: ScheduledStep, ran: dict[int, Sequence], decodes: set[int]) -> None:
        for part in step.parts:
            assert part.scheduled.block_ids == tuple(part.sequence.blocks)
            name = part.sequence.state.request.request_id
            self.seen[name] = part.sequence.state
            self.unseen.pop(name, None)
            self.ahead += DRAWN_BEFORE in part.scheduled.token_ids
        self.check_limits(step)
        in_step = {part.sequence.seq_id for part in step.parts}
        left_out = {i for i in decodes - in_step if ran[i].blocks}
        self.left_out = Counter({i: self.left_out[i] + 1 for i in left_out})
        most = max(self.left_out.values(), default=0)
        assert most <= 2 * (self.stages - 1), "a running decode got no token"
        self.mixed += len(in_step & decodes) not in (0, len(in_step))

    def finish(self, step: ScheduledStep) -> None:
        """A step is over; a few fail, whole or for one sequence."""
        self.for_nothing += any(part.sequence.ended for part in step.parts)
        if self.rng.random() < 0.01:
            self.scheduler.fail(step, "failed")
            return
        output = self.draw(step)
        if output.samples and self.rng.random() < 0.01:
            unlucky = self.rng.choice(sorted(output.samples))
            del output.samples[unlucky]
            output.failed[unlucky] = "no token"
        self.scheduler.update(step, output, self.took.uniform(0.5, 2.0) * (1 + step.input.tokens))

    def living(self) -> list[Sequence]:
        return [s for name in self.open & self.seen.keys() for s in self.seen[name].sequences]

    def check_limits(self, step: ScheduledStep) -> None:
        counts = [part.count for part in step.parts]
        limits = self.limits
        assert min(counts) > 0
        assert sum(counts) <= limits.max_num_batched_tokens
        assert len(counts) <= limits.max_num_seqs
        assert max(counts) <= (limits.long_prefill_token_threshold or max(counts))
        assert sum(bool(s.blocks) for s in self.living()) <= limits.max_num_seqs

    def check_order(self, step: ScheduledStep, ran: dict[int, Sequence], ending: set[Rank]) -> None:
        runs = [s for s in self.living() if s.blocks]
        waits = [s.rank for s in self.living() if not s.blocks] + list(self.unseen.values())
        started = [s.rank for s in runs if s.seq_id not in ran]
        preempted = [s.rank for s in ran.values() if not s.blocks]
        stayed = [s.rank for s in runs if s.seq_id in ran]
        self.started += len(started)
        self.preempted += len(preempted)
        assert not started or not waits or max(started) < min(waits), "one went before a better"
        assert not preempted or not stayed or max(stayed) < min(preempted), "not the last in rank"
        if self.limits.policy == "fcfs" and not self.choices:
            oldest = min(rank for rank in [s.rank for s in runs] + waits if rank not in ending)
            gets_on = {sequence.rank for sequence in self.writing(step)}
            if self.stages > 1:
                gets_on |= {s.rank for one in self.under_way for s in self.writing(one)}
                gets_on |= {ran[i].rank for i in self.left_out}
            self.oldest_waited = 0 if oldest in gets_on else self.oldest_waited + 1
            few = 4 if self.limits.latency_goal == "itl" else 0
            assert self.oldest_waited <= few, "the oldest waits"

    def check_blocks(self) -> None:
        writing = {s.seq_id: s for step in self.under_way for s in self.writing(step)}
        holding = list((writing | {s.seq_id: s for s in self.living()}).values())
        tables = Counter(block for s in holding for block in s.blocks)
        held = tables + Counter(s.copy[0] for s in holding if s.copy is not None)
        blocks = range(self.pool.num_blocks)
        assert [self.pool.references(block) for block in blocks] == [held[b] for b in blocks]
        assert self.pool.num_free == self.pool.num_blocks - len(held)
        for sequence in holding:
            own = sequence.blocks[sequence.num_computed // BLOCK :]
            assert all(tables[block] == 1 for block in own), "a block to write is in two tables"

    @staticmethod
    def writing(step: ScheduledStep) -> list[Sequence]:
        return [part.sequence for part in step.parts]

    def draw(self, step: ScheduledStep) -> StepOutput:
        rng = self.rng
        samples = {
            s.seq_id: tuple(SampledToken(rng.randrange(20)) for _ in s.samples)
            for s in step.input.sequences
            if s.samples
        }
        return StepOutput(samples, {})

    def check_all_was_seen(self) -> None:
        assert min(self.started, self.preempted, self.mixed) > 5
        assert self.most_under_way == self.depth
        if self.stages > 1:
            assert not self.ahead
        elif self.depth > 1:
            assert min(self.ahead, self.for_nothing) > 10

    def take_outputs(self) -> None:
        outputs: list[EngineOutput] = self.scheduler.take_outputs()
        for output in outputs:
            assert output.request_id in self.open
            if output.finished:
                self.open.remove(output.request_id)
                self.unseen.pop(output.request_id, None)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("threshold", [0, 3])
@pytest.mark.parametrize(("seed", "way"), walks(3, 5))
def test_every_step_keeps_the_limits_the_blocks_and_the_order(
    seed: int, threshold: int, policy: Policy, way: Way
):
    limits = SchedulerConfig(6, 11, 1000, True, threshold, policy)
    walk = Walk(seed, limits, blocks=16, choices=False, **way)
    walk.run(400)
    walk.check_all_was_seen()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(("seed", "way"), walks(2, 5))
def test_so_does_every_step_whose_prompts_are_bounded_by_time(
    seed: int, policy: Policy, way: Way, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(step_times, "LEAST_TOKENS", 1)
    limits = SchedulerConfig(6, 11, 1000, policy=policy, latency_goal="itl")
    walk = Walk(seed, limits, blocks=16, choices=False, **way)
    walk.run(400)
    walk.check_all_was_seen()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(("seed", "way"), walks(3, 5))
def test_so_does_every_step_with_several_choices(seed: int, policy: Policy, way: Way):
    walk = Walk(seed, SchedulerConfig(6, 11, 1000, True, 4, policy), blocks=16, **way)
    walk.run(400)
    walk.check_all_was_seen()

"""Which sequences run in the next step, with how many tokens and blocks. Pure: time is an argument.

    submit -> waiting (for its turn, or for KV from P) -> running -> finished
                 ^---------- preempted (recompute) ------'

Running sequences come first, then the queue, each by rank: arrival, or priority and then arrival.
Every running decode has its token of the step's budget; prompts share the rest, or less of it, so
that no decode waits for long (step_times.py). A prompt that gets a part of its tokens stays running
with tokens to compute, so chunked prefill and mixed batches need no code of their own, and a decode
waits for one chunk at most. When blocks run out, the last
sequence in rank is preempted and goes back to its place in the queue.

Further steps may be made before the last one is over. Where a device draws ahead, one: its
sequences compute tokens that are still being drawn, and the work for a sequence that then turns out
to have ended is lost. In a pipeline as many as it has stages: a prompt's chunks follow each other,
and a decode is in one step at a time. Blocks stay until no step under way writes to them. It must
not know tensors, sockets or threads.
"""

from __future__ import annotations

import itertools
import logging
from bisect import insort

from xpyd_kv.connector.consumer import KvConsumer
from xpyd_kv.connector.producer import KvProducer
from xpyd_worker.engine.block_manager import BlockManager
from xpyd_worker.engine.executor import StepOutput
from xpyd_worker.engine.open_requests import (
    Forked,
    OpenRequests,
    SequenceAdmission,
    StopRules,
    TokenCommit,
    Verdict,
)
from xpyd_worker.engine.request import (
    EngineOutput,
    EngineRequest,
    EngineStats,
    FinishReason,
    SampledToken,
    SchedulerConfig,
)
from xpyd_worker.engine.sending import Sending
from xpyd_worker.engine.sequences import (
    BlockTables,
    ScheduledStep,
    Sequence,
    SequenceShare,
    WaitingQueue,
)
from xpyd_worker.engine.speculation import Speculation
from xpyd_worker.engine.step_maker import Part, StepMaker
from xpyd_worker.engine.step_times import STRETCH, StepTimes

logger = logging.getLogger(__name__)


class Scheduler:
    """The queue, the running list, and every request in them. One thread uses it.

    Outputs collect inside and leave by `take_outputs`.
    """

    def __init__(
        self,
        pool: BlockManager,
        *,
        config: SchedulerConfig,
        rules: StopRules,
        producer: KvProducer | None = None,
        consumer: KvConsumer | None = None,
        stages: int = 1,
        draws_ahead: bool = False,
    ) -> None:
        """`stages`: of the pipeline that steps go through, so many may be under way; 1: none, a
        step behind one that is not over has the tokens that this draws. `draws_ahead`: there may be
        such steps."""
        self.stats = EngineStats(blocks_total=pool.num_blocks, blocks_free=pool.num_free)
        self._pool = pool
        self._config = config
        self._rules = rules
        self._consumer = consumer
        self._stages = stages
        self._sending = Sending(producer)
        again = config.speculative.reads_again if config.speculative is not None else 0
        self._tables = BlockTables(pool, read_again=again)
        self._requests = OpenRequests(
            self.stats, tables=self._tables, sending=self._sending, consumer=consumer
        )
        self._admission = SequenceAdmission(
            tables=self._tables,
            requests=self._requests,
            sending=self._sending,
            consumer=consumer,
            config=config,
            rules=rules,
        )
        self._speculation: Speculation | None = None
        if config.speculative is not None:
            self._speculation = Speculation(config.speculative, waits=draws_ahead)
        self._times = StepTimes(STRETCH if config.latency_goal == "itl" else None)
        # Tokens of prompts that the step which is made may still have.
        self._prompts = 0
        self._commit = TokenCommit(self._tables, rules, self._speculation)
        self._maker = StepMaker(self._sending, rules, self._tables, self._speculation)
        self._arrivals = itertools.count()
        self._waiting = WaitingQueue()
        # By rank. A sequence in it has blocks, one in the queue has none.
        self._running: list[Sequence] = []
        # Steps made and not over, the oldest first.
        self._under_way: list[ScheduledStep] = []

    # --- requests: submit, abort, outputs

    @property
    def has_requests(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests.states)

    def take_outputs(self) -> list[EngineOutput]:
        """What requests gained since the last call, in order."""
        return self._requests.take_outputs()

    def submit(self, request: EngineRequest, now: float) -> None:
        """Queue a request, or end it at once: it can never fit, the queue is full, or all its
        choices end in their `continue_from` ids."""
        state = self._commit.begin(request)
        state.arrival = next(self._arrivals)
        if self._config.policy == "priority":
            state.priority = request.priority
        receive = state.receive
        if self._consumer is not None and receive is not None:
            self._consumer.expect(receive.key, wait_s=receive.wait_s, now=now, source=receive.peer)
            state.expects_kv = True
        self._requests.states[request.request_id] = state
        refusal = self._admission.refusal(state, waiting=len(self._waiting))
        if refusal is not None:
            self._requests.fail(state, *refusal)
            return
        if state.expects_kv and state.scores_prompt:
            self._requests.forget_kv(state)
            self._requests.recomputes(state, "prompt_logprobs")
        missing = request.kv_missing
        if missing and not self._admission.goes_on_without_kv(state, missing):
            return
        for sequence in state.sequences:
            self._waiting.push(sequence)
        if not state.sequences or (state.held and not state.scores_prompt):
            self._requests.emit(state)

    def abort(self, request_id: str, choices: tuple[int, ...] | None = None) -> None:
        """End a request, or some of its choices; blocks go back at once."""
        state = self._requests.states.get(request_id)
        if state is None:
            self._sending.abort_ended(request_id, choices)
            return
        if choices is None:
            self._sending.aborted(state, "aborted")
            self._requests.close(state, "abort")
            self._sweep()
            return
        for choice in choices:
            if choice in state.open:
                state.end_choice(choice, "stop")
                for sequence in list(state.sequences):
                    if sequence.choice == choice:
                        self._tables.drop(sequence)
        if not state.open:
            self._requests.emit(state)
        self._sweep()

    def end_all(self, reason: FinishReason, message: str) -> None:
        """Give every request its last output: the engine stops."""
        for state in list(self._requests.states.values()):
            self._requests.fail(state, "internal", message, reason)
        for step in list(self._under_way):
            self._land(step)
        self._sweep()

    # --- one step

    def schedule(self, now: float) -> ScheduledStep | None:
        """The next step, or None when nothing can run now.

        Where a device draws ahead: behind a step that is not over, only a step in which every
        running sequence can take part. Otherwise the caller waits for the step and asks again.
        """
        is_ahead = self._stages == 1 and bool(self._under_way)
        if is_ahead and any(sequence.hangs for sequence in self._running):
            return None
        parts: list[Part] = []
        budget = self._schedule_running(parts)
        if budget is None:
            return None
        self._admit(parts, budget, now)
        if not parts:
            return None
        step = self._maker.make(parts)
        self._under_way.append(step)
        return step

    def reset_prefix_cache(self) -> bool:
        """Forget every prefix that no request and no transfer holds; whether none is left."""
        return self._pool.reset_prefix_cache()

    def update(self, step: ScheduledStep, result: StepOutput, seconds: float = 0.0) -> None:
        """Take in what the oldest step under way computed in so much time."""
        self._under_way.remove(step)
        self.stats.forwards += 1
        self._measure(step, result, seconds)
        for part in step.parts:
            self._take(part, result, len(step.parts))
        for state in dict.fromkeys(part.sequence.state for part in step.parts):
            if not self._requests.is_open(state):
                continue
            if state.gained or not (state.open or state.sequences):
                self._requests.emit(state)
        self._running = [s for s in self._running if not s.ended]

    def fail(self, step: ScheduledStep, message: str) -> None:
        """A step failed: so do its requests."""
        for part in step.parts:
            if self._requests.is_open(part.sequence.state):
                self._requests.fail(part.sequence.state, "internal", message)
        self._land(step)
        self._sweep()

    def observe(self) -> EngineStats:
        """The counters, with gauges as of now. The scheduler goes on writing into it."""
        running = {id(sequence.state) for sequence in self._running}
        self.stats.running = len(running)
        self.stats.waiting = len(self._requests.states) - len(running)
        self.stats.blocks_free = self._pool.num_free
        return self.stats

    # --- scheduling

    def _measure(self, step: ScheduledStep, result: StepOutput, seconds: float) -> None:
        asked = {part.sequence.seq_id for part in step.parts if part.scheduled.propose}
        if not asked <= result.proposals.keys():
            return  # a model that drafts took prompts in behind it
        decodes = sum(part.is_decode for part in step.parts)
        drafts = sum(part.scheduled.drafts for part in step.parts)
        prompts = sum(part.count for part in step.parts if not part.is_decode)
        self._times.measured(seconds, decodes=decodes, prompt_tokens=prompts)
        if self._speculation is not None and decodes == len(step.parts):
            self._speculation.measured(
                seconds, decodes=decodes, draft_tokens=drafts, drafts_on=bool(asked)
            )

    def _land(self, step: ScheduledStep) -> None:
        """A step has ended without a result."""
        self._under_way.remove(step)
        for part in step.parts:
            part.land()
            self._tables.landed(part.sequence)

    def _take(self, part: SequenceShare, result: StepOutput, sequences: int) -> None:
        """Give a sequence what the step, of so many `sequences`, computed and drew for it."""
        sequence, count = part.sequence, part.count
        part.land()
        self._requests.count_computed(sequence, count)
        if sequence.ended:
            self._tables.landed(sequence)
            return
        failure = result.failed.get(sequence.seq_id)
        if failure is not None:
            self._requests.fail(sequence.state, "internal", f"the step failed: {failure}")
            return
        # What was computed of a draft counts where it is accepted.
        sequence.num_computed += count - part.scheduled.drafts
        self._tables.copied(sequence)
        self._tables.register_computed(sequence)
        sequence.state.computed(sequence.num_computed)
        self._requests.compare_kv(sequence)
        self._requests.take_prompt_logprobs(sequence, count, result)
        if part.scheduled.drafts:
            self._take_verified(part, result, sequences)
        elif sequence.num_computed == len(sequence.tokens):
            drawn = _samples(part, result)
            if broken := sequence.state.follow(drawn):
                self._requests.fail(sequence.state, "grammar", broken)
                return
            room = self._config.max_num_seqs - len(self._running)
            self._place(self._commit.commit(sequence, drawn, room))
        if self._speculation is not None and sequence.draft is not None:
            ids = result.proposals.get(sequence.seq_id, ())
            self._speculation.drafted(sequence.draft, len(sequence.tokens), ids)

    def _take_verified(self, part: SequenceShare, result: StepOutput, sequences: int) -> None:
        """Give a sequence the tokens that came of its draft."""
        sequence, drafted = part.sequence, part.scheduled.drafts
        samples = result.samples.get(sequence.seq_id, ())
        if not 1 <= len(samples) <= drafted + 1:
            raise RuntimeError(f"{len(samples)} samples arrived for a draft of {drafted}")
        if broken := self._commit.commit_run(sequence, samples):
            self._requests.fail(sequence.state, "grammar", broken)
            return
        accepted = len(samples) - 1
        self.stats.count_draft(drafted, accepted)
        if self._speculation is not None and sequence.draft is not None:
            self._speculation.verified(
                sequence.draft,
                accepted=accepted,
                drafted=drafted,
                tokens=len(sequence.tokens),
                decodes=sequences,
            )

    def _shares(self) -> dict[int, int]:
        """The number of tokens of each running sequence, by id, that the next step may compute."""
        due = {sequence.seq_id: self._due(sequence) for sequence in self._running}
        if self._stages > 1:
            # The sequences that waited longest go first.
            ready = sorted(
                (s for s in self._running if due[s.seq_id] == 1), key=lambda s: s.last_step
            )
            most = decodes_per_step(
                sum(s.remaining == 1 or s.drawing > 0 for s in self._running),
                ready=len(ready),
                stages=self._stages,
                free=self._stages - len(self._under_way),
            )
            due.update((s.seq_id, 0) for s in ready[most:])
        return due

    def _due(self, sequence: Sequence) -> int:
        if sequence.drawing:
            if self._stages > 1:
                return 0
            state = sequence.state
            if self._rules.is_last(
                sequence.output_position() - 1,
                prompt_tokens=state.prompt_tokens,
                sampling=state.request.sampling,
            ):
                return 0
        return sequence.remaining

    def _schedule_running(self, parts: list[Part]) -> int | None:
        """What is left of the budget. Where blocks lack behind a step of a device that draws ahead
        None: a sequence that ends in that step makes room. In a pipeline 0, if the last in rank is
        in a step: those before go on, until that one can be preempted."""
        due = self._shares()
        budget, index = self._config.max_num_batched_tokens, 0
        # Tokens kept for decodes further behind. The budget is at least max_num_seqs, so each has
        # its own, and the first prompt at least one.
        decodes = kept = sum(count == 1 for count in due.values())
        seats = self._config.max_num_seqs - decodes
        prompts = sum(count > 1 for count in due.values()) + len(self._waiting)
        bound = self._times.prompt_tokens(decodes, min(prompts, seats))
        self._prompts = budget if bound is None else min(budget, bound)
        room = 0
        if self._speculation is not None:
            room = self._speculation.room(decodes, budget - kept)
        while index < len(self._running) and budget:
            sequence = self._running[index]
            left = due[sequence.seq_id]
            kept -= left == 1
            count = self._chunk(left, budget - kept)
            index += 1
            if not count:
                continue
            while not self._tables.grow(sequence, sequence.reached + count):
                if self._stages == 1 and self._under_way:
                    return None
                if self._running[-1].in_flight:
                    return 0
                # The last in rank. None of those behind `sequence` is in this step yet.
                victim = self._running.pop()
                kept -= victim is not sequence and due[victim.seq_id] == 1
                self._preempt(victim)
                if victim is sequence:
                    return budget
            draft: tuple[int, ...] = ()
            if room:
                draft = self._maker.draft(sequence, min(room, budget - kept - count))
            parts.append(self._maker.part(sequence, count, draft))
            self._prompts -= count * (left > 1)
            budget -= count + len(draft)
            room -= len(draft)
        return budget

    def _chunk(self, remaining: int, budget: int) -> int:
        """How many of a sequence's `remaining` tokens go into the step; a decode has one."""
        room = budget if remaining <= 1 else min(budget, self._prompts)
        return self._config.chunk(remaining, room)

    def _may_start(self, budget: int) -> bool:
        """Whether the step has tokens for what waits: prompts, where no KV comes from elsewhere."""
        return (budget if self._consumer else min(budget, self._prompts)) > 0

    def _admit(self, parts: list[Part], budget: int, now: float) -> None:
        """Start sequences from the queue while budget, room and blocks last.

        A sequence that waits for KV blocks no other, except those whose KV would be pulled into
        the blocks that it lacks. A sequence that waits for blocks blocks all others, except those
        whose KV has landed: they hold blocks already, and free them only by running. Free blocks
        are kept from transfers while a sequence waits for them, unless no sequence runs: then
        transfers hold the missing blocks, and must go on.
        """
        if self._waiting and not self._may_start(budget):
            return
        missing, is_crowded = 0, False
        passed: list[Sequence] = []
        self._pool.set_aside(0, from_hits=False)
        while self._may_start(budget) and len(self._running) < self._config.max_num_seqs:
            sequence = self._waiting.pop()
            if sequence is None:
                break
            seats = 0 if is_crowded else self._config.max_num_seqs - len(self._running)
            verdict = self._admission.admit(sequence, blocked=missing > 0, seats=seats, now=now)
            is_crowded = is_crowded or verdict is Verdict.CROWDED
            if verdict is Verdict.GO:
                sequence.state.started_s = sequence.state.started_s or now
                budget -= self._start(sequence, parts, budget)
            elif verdict is not Verdict.OVER:
                passed.append(sequence)
            if verdict is Verdict.BLOCKED:
                missing = self._tables.need(sequence)
                # What has landed may still pin the prefix it was sent without.
                self._pool.set_aside(missing if self._running else 0, from_hits=False)
                if self._consumer is None:
                    break
        self._pool.set_aside(missing, from_hits=True)
        for sequence in passed:
            self._waiting.push(sequence)

    def _start(self, sequence: Sequence, parts: list[Part], budget: int) -> int:
        """Run a sequence that holds its blocks; how many tokens of the budget it takes."""
        forked = Forked()
        self._run(sequence)
        if not sequence.remaining:
            room = self._config.max_num_seqs - len(self._running)
            forked = self._commit.fork(sequence, {}, room)
            self._place(forked)
        used = 0
        for member in (sequence, *forked.running):
            remaining = member.remaining
            count = self._chunk(remaining, budget - used)
            # Without a block it waits in the running list; the next step preempts for it.
            if count and self._tables.grow(member, member.reached + count):
                parts.append(self._maker.part(member, count))
                self._prompts -= count * (remaining > 1)
                used += count
        return used

    def _preempt(self, sequence: Sequence) -> None:
        """Take its blocks; it recomputes its tokens, with what of them is still cached."""
        state = sequence.state
        logger.info("preempted for lack of blocks", extra={"request": state.request.log_id})
        self.stats.preemptions += 1
        self._sending.preempted(state)
        self._tables.free(sequence)
        self._waiting.push(sequence)
        if state.adopted:
            state.adopted = False
            self._requests.recomputes(state, "preempted")

    # --- bookkeeping

    def _place(self, forked: Forked) -> None:
        for child in forked.running:
            self._run(child)
        for child in forked.parked:
            self._waiting.push(child)

    def _run(self, sequence: Sequence) -> None:
        insort(self._running, sequence, key=lambda s: s.rank)

    def _sweep(self) -> None:
        self._running = [s for s in self._running if not s.ended]
        self._waiting.sweep()


def _samples(part: SequenceShare, result: StepOutput) -> dict[int, SampledToken]:
    """The tokens drawn for each choice that is still open."""
    drawn = result.samples.get(part.sequence.seq_id, ())
    if len(drawn) != len(part.choices):
        raise RuntimeError(f"{len(drawn)} samples arrived for {len(part.choices)} choices")
    still_open = part.sequence.state.open
    pairs = zip(part.choices, drawn, strict=True)
    return {choice: sample for choice, sample in pairs if choice in still_open}


def decodes_per_step(decodes: int, *, ready: int, stages: int, free: int) -> int:
    """How many decodes go into the next step of a pipeline of `stages`. `decodes` run, `ready` of
    them are in no step, and `free` steps may still be launched before one is waited for.

    The first bound keeps steps even where many become ready at once; each that is ready then waits
    for `stages` steps at most. The second leaves some for the other free steps.
    """
    return min(-(-decodes // stages), -(-ready // free))

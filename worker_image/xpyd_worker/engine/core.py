"""The engine's thread: take input, poll the connectors, schedule, execute, update, deliver.

    server --submit/abort--> Inbox --> [ Scheduler -> Executor -> Scheduler ] --deliver--> server
    KV I/O thread --wake-----^            | KvProducer/KvConsumer |

One thread owns the scheduler, the block manager, the executor and the connectors' engine side. It
sleeps when nothing can run: until input, a wake-up, or the connectors' next deadline. Where the
executor takes several steps at once, they are made and launched while the oldest is computed.
It must not know HTTP, tensors or sockets.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Protocol

from xpyd_core.errors import XpydError
from xpyd_core.request_id import TransferKey
from xpyd_kv.connector.consumer import KvConsumer
from xpyd_kv.connector.producer import KvProducer
from xpyd_kv.values import OfferedPrompt
from xpyd_worker.engine.block_manager import BlockManager
from xpyd_worker.engine.executor import Executor, Resize, Running, StepInput, no_layer_done
from xpyd_worker.engine.inbox import Inbox, Item
from xpyd_worker.engine.open_requests import StopRules
from xpyd_worker.engine.request import (
    ChoiceOutput,
    EngineOutput,
    EngineRequest,
    EngineStats,
    SchedulerConfig,
)
from xpyd_worker.engine.scheduler import Scheduler
from xpyd_worker.engine.sequences import ScheduledStep
from xpyd_worker.grammar.matcher import MaskFiller

logger = logging.getLogger(__name__)

Deliver = Callable[[Sequence[EngineOutput]], None]

# Unfinished transfers and waiting requests are polled this often even without a wake-up:
# P's deadlines (GRANT, leases) are checked in KvProducer.poll, which names no next one.
_TICK_S = 0.25
# A deadline that has passed and is named again must not become a busy loop.
_LEAST_SLEEP_S = 0.001
# The runner makes a dummy forward of it; no result refers to its number.
_DUMMY = StepInput(0, ())
_STOPPED = "the engine was stopped"


class LockStep(Protocol):
    """What keeps the forwards of replicas that share experts in step: the k-th of each meets the
    k-th of all others (docs/adr/0122). Called on the engine's thread."""

    def bind(self, put: Callable[[Item], object]) -> None:
        """`put` has a call made on the engine's thread: what others say comes that way."""
        ...

    def submitted(self, wave: int) -> None:
        """A request comes, before it is in a step. `wave`: the one its sender knew of."""
        ...

    @property
    def in_wave(self) -> bool:
        """Whether the others make forwards, so that this replica has to make as many."""
        ...

    @property
    def resize(self) -> Resize | None:
        """What the next forward tells the ranks: replicas come or go with it."""
        ...

    def await_repair(self) -> Resize:
        """The forward broke because another replica is lost: what ranks make it again with. Waits
        until that is known."""
        ...

    def end_iteration(self, *, waiting: int, running: int, is_dummy: bool) -> None:
        """A forward of the wave was launched, a step's or a dummy; the replica has so many
        requests. May wait for the others; raises where they do not come."""
        ...

    @property
    def may_leave(self) -> bool:
        """Whether no other replica will ever need a forward of this one, which was stopped."""
        ...

    def failed(self, why: str) -> None:
        """The engine ends by itself."""
        ...


@dataclass(frozen=True)
class _UnderWay:
    """A step that was launched at `begun_s`; None: a dummy."""

    step: ScheduledStep | None
    running: Running
    begun_s: float


class EngineCore:
    """One engine: its queue, its loop, its KV cache.

    The methods above "the engine's thread" may be called from any thread and return at once, except
    `start` and `stop`. Outputs go to `deliver`, once per step, on the engine's thread; the server
    moves them to its event loop.

    Built last: executor, then `BlockManager(executor.num_blocks)` and `Inbox()`, then the
    connectors with that pool and `inbox.wake`, then this class with all of them. When the engine
    has ended, `submit` calls `deliver` once, on the thread of its caller.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        pool: BlockManager,
        inbox: Inbox,
        config: SchedulerConfig,
        rules: StopRules,
        deliver: Deliver,
        producer: KvProducer | None = None,
        consumer: KvConsumer | None = None,
        lock_step: LockStep | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._pool = pool
        self._inbox = inbox
        self._deliver = deliver
        self._producer = producer
        self._consumer = consumer
        self._lock_step = lock_step
        if lock_step is not None:
            lock_step.bind(inbox.put)
        self._clock = clock
        # A producer that is called for each layer cannot tell the layers of two steps apart.
        is_single = producer is not None and not producer.ranks_send
        self._depth = 1 if is_single else executor.depth
        self._scheduler = Scheduler(
            pool,
            config=config,
            rules=rules,
            producer=producer,
            consumer=consumer,
            stages=1 if executor.draws_ahead else self._depth,
            draws_ahead=executor.draws_ahead and self._depth > 1,
        )
        # The oldest first, at most `_depth`.
        self._under_way: deque[_UnderWay] = deque()
        self._last_over_s = 0.0
        self._layer_done = producer.layer_done if producer else no_layer_done
        self._stats = copy(self._scheduler.observe())
        self._recompute_log = RecomputeLog()
        self._masks = MaskFiller()
        self._is_quiet = True
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- any thread

    @property
    def failure(self) -> BaseException | None:
        """Why the engine's thread ended by itself; None while it runs. The process then exits."""
        return self._failure

    @property
    def is_running(self) -> bool:
        """Whether the engine's thread has begun and not ended."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def stop(self, deadline_s: float) -> None:
        """Abort what runs and end the thread; waits at most `deadline_s` for the step under way,
        and in lock step for all other replicas to be stopped."""
        self._stopping = True
        self._inbox.wake()
        if self._thread.ident is not None:
            self._thread.join(deadline_s)
            if self._thread.is_alive():
                logger.error("the engine's step did not end within %g s", deadline_s)

    def submit(self, request: EngineRequest, *, wave: int = 0) -> None:
        """Queue a request. Its last output has `finished` set, whatever happens. `wave`: see
        LockStep."""
        if not self._inbox.put(lambda: self._submit(request, wave)):
            last = EngineOutput(
                request.request_id,
                tuple(ChoiceOutput(choice, (), "error") for choice in range(request.n)),
                finished=True,
                error="the engine has stopped",
                error_kind="internal",
            )
            self._deliver([last])

    def abort(self, request_id: str, choices: tuple[int, ...] | None = None) -> None:
        """End a request, or some of its choices (a stop string was found; they count as `stop`).

        No output follows for these choices, except those of steps that already ran. When no choice
        is left, a last output without choices has `finished` set; it does not come when the whole
        request is aborted. Unknown requests are ignored. On P, choices that ended by `length` may
        still be named: when all are, and `cancel_when_done` was set, their transfer is cancelled.
        """
        self._inbox.put(lambda: self._scheduler.abort(request_id, choices))

    def end_requests(self) -> None:
        """End all requests as when the engine is stopped, but it goes on."""
        self._inbox.put(self._end_requests)

    def kv_offered(self, key: TransferKey) -> OfferedPrompt | None:
        """The prompt that P offered under `key`; None before its OFFER arrives."""
        return self._consumer.offered(key) if self._consumer else None

    def kv_release(self, uuid: str) -> None:
        """Free KV received for `uuid` and refuse more of it (docs: release)."""
        consumer = self._consumer
        if consumer is not None:
            self._inbox.put(lambda: consumer.release(uuid, self._clock()))

    def reset_prefix_cache(self, done: Callable[[bool], None]) -> None:
        """Forget cached prefixes that no request and no transfer holds, before the next step.

        `done` gets whether no prefix is left, on the engine's thread; False at once, on the
        caller's thread, when the engine has ended.
        """
        if not self._inbox.put(lambda: done(self._scheduler.reset_prefix_cache())):
            done(False)

    def stats(self) -> EngineStats:
        """The counters and gauges as of the last step; the caller may keep it."""
        return copy(self._stats)

    def is_idle(self) -> bool:
        """No request is queued or running, no KV is held for or on its way to an instance."""
        # In this order: the thread says that it is not quiet before it empties the inbox.
        return self._inbox.is_empty and self._is_quiet

    # --- the engine's thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                # A turn forgets the wake-ups before it: `stop` may have given one.
                if not self.turn() and not self._stopping:
                    self._inbox.wait(self._sleep_s())
            if self._lock_step is not None:
                self._leave(self._lock_step)
            self._end(_STOPPED)
        except Exception as error:  # the thread's edge: the process sees `failure` and exits
            logger.exception("the engine failed")
            self._failure = error
            self._end("the engine failed")
            if self._lock_step is not None:
                self._lock_step.failed(repr(error))

    def _leave(self, lock_step: LockStep) -> None:
        """End all requests, and make forwards as long as others need them: they end, too."""
        while not lock_step.may_leave:
            self._end_requests()
            self._hand_out()
            # Other replicas see by it that there is nothing here.
            if not self.turn() and not lock_step.may_leave:
                self._inbox.wait(_TICK_S)

    def _end_requests(self) -> None:
        while self._under_way:
            self._finish(self._under_way.popleft())
        self._scheduler.end_all("abort", _STOPPED)

    def _submit(self, request: EngineRequest, wave: int) -> None:
        if self._lock_step is not None:
            self._lock_step.submitted(wave)
        self._scheduler.submit(request, self._clock())

    def turn(self) -> bool:
        """Run one round of the loop; False when nothing can be done before input, wake-up or
        deadline.

        Public for tests, which run it without the thread.
        """
        was_quiet, self._is_quiet = self._is_quiet, False
        free = self._pool.num_free
        items = self._inbox.take()
        for item in items:
            item()
        # In a wave a replica without requests has one turn behind the other: it may leave in each.
        self._is_quiet = was_quiet and not items
        now = self._clock()
        if self._producer:
            self._producer.poll(now)
        if self._consumer:
            self._consumer.poll(now)
        step = self._scheduler.schedule(now)
        # Refusals and immediate ends do not wait for the step.
        delivered = self._hand_out()
        launched = step is not None and self._launch(step)
        is_dummy = not launched and self._owes_forward
        if is_dummy:
            self._launch_dummy()
        launched = launched or is_dummy
        is_full = len(self._under_way) == self._depth
        if self._under_way and (not launched or is_full):
            if not is_full and not self._executor.await_oldest(self._inbox.fileno()):
                return True
            self._finish(self._under_way.popleft())
            self._hand_out()
            delivered = True
        self._observe()
        if launched and self._lock_step is not None:
            stats = self._stats
            self._lock_step.end_iteration(
                waiting=stats.waiting, running=stats.running, is_dummy=is_dummy
            )
        # Freed blocks may let a deferred OFFER or the queue's first in: look again before sleeping.
        return launched or step is not None or delivered or self._pool.num_free != free

    @property
    def _owes_forward(self) -> bool:
        """Whether to make a dummy forward where there is no step. Behind a step of its own a
        replica waits for that: its requests go on then. Else it keeps the pipeline full, for the
        others may have many steps under way."""
        if self._lock_step is None or not self._lock_step.in_wave:
            return False
        is_full = len(self._under_way) == self._depth
        return not is_full and all(one.step is None for one in self._under_way)

    def _launch_dummy(self) -> None:
        running = self._executor.launch(self._telling(_DUMMY), no_layer_done)
        self._under_way.append(_UnderWay(None, running, self._clock()))

    def _launch(self, step: ScheduledStep) -> bool:
        """Whether the step is under way; else it has failed, and no rank has seen it."""
        begun_s = self._clock()
        self._masks.begin(one.mask for one in step.input.sequences)
        try:
            running = self._executor.launch(self._telling(step.input), self._layer_done)
        except XpydError as error:
            # Steps end in their order.
            while self._under_way:
                self._finish(self._under_way.popleft())
            self._failed(step, error)
        except Exception:
            self._step_done(failed=True)
            raise
        else:
            self._under_way.append(_UnderWay(step, running, begun_s))
            return True
        return False

    def _telling(self, step: StepInput) -> StepInput:
        resize = None if self._lock_step is None else self._lock_step.resize
        return step if resize is None else replace(step, resize=resize)

    def _finish(self, one: _UnderWay) -> None:
        """Wait for the oldest step and give its result to the scheduler."""
        step = one.step
        if step is None:
            one.running.wait()
            self._last_over_s = self._clock()
            return
        try:
            result = one.running.wait()
        except XpydError as error:
            self._failed(step, error)
        except Exception:
            self._step_done(failed=True)
            raise
        else:
            now = self._clock()
            steps = self._scheduler.stats.steps
            # The step's own time: it begins when the step before is over. In a pipeline that is
            # what the step adds, once its stages overlap.
            seconds = now - max(one.begun_s, self._last_over_s)
            steps.seconds.observe(seconds)
            steps.tokens.observe(step.input.tokens)
            steps.sequences.observe(len(step.input.sequences))
            self._last_over_s = now
            for message in result.failed.values():
                logger.error("step %d: %s", step.input.step, message)
            self._step_done(failed=False)
            self._hold()
            self._scheduler.update(step, result, seconds)

    def _failed(self, step: ScheduledStep, error: XpydError) -> None:
        logger.error("step %d failed: %s", step.input.step, error)
        self._step_done(failed=True)
        self._scheduler.fail(step, f"the step failed: {error}")

    def _step_done(self, *, failed: bool) -> None:
        if self._producer:
            self._producer.step_done(failed=failed)

    def _hold(self) -> None:
        """Wait, in mode put, until D has the step's KV. New input waits like during a step."""
        while self._producer:
            # First, so that what happens from here on ends the wait.
            self._inbox.rearm()
            now = self._clock()
            until = self._producer.held_until(now)
            if until is None or self._stopping:
                return
            self._inbox.wait(until - now)

    def _hand_out(self) -> bool:
        outputs = self._scheduler.take_outputs()
        if outputs:
            self._deliver(outputs)
        return bool(outputs)

    def _observe(self) -> None:
        stats = copy(self._scheduler.observe())
        stats.finished = dict(stats.finished)
        stats.kv_recomputed = dict(stats.kv_recomputed)
        stats.kv_recomputed_tokens = dict(stats.kv_recomputed_tokens)
        stats.spec_accepted_at = dict(stats.spec_accepted_at)
        stats.kv_leases = self._kv_leases()
        self._stats = stats
        self._recompute_log.look(stats.kv_recomputed, stats.kv_recomputed_tokens, self._clock())
        # A dummy is the others': a replica that makes them has nothing to do.
        has_steps = any(one.step is not None for one in self._under_way)
        is_busy = self._scheduler.has_requests or has_steps
        self._is_quiet = not (is_busy or stats.kv_leases)

    def _kv_leases(self) -> int:
        sending = 0 if self._producer is None else self._producer.leases
        return sending + (0 if self._consumer is None else self._consumer.leases)

    def _sleep_s(self) -> float | None:
        tick = None if self._is_quiet else _TICK_S
        deadline = self._consumer.next_deadline() if self._consumer else None
        if deadline is None:
            return tick
        left = max(_LEAST_SLEEP_S, deadline - self._clock())
        return left if tick is None else min(left, tick)

    def _end(self, message: str) -> None:
        reason = "error" if self._failure else "abort"
        for item in self._inbox.close():
            item()
        self._scheduler.end_all(reason, message)
        self._masks.close()
        self._hand_out()
        self._observe()


# At least so many seconds between two warnings of one engine.
EVERY_S = 30.0
# No fault of the transfer: the scores of a prompt need its forward; blocks ran out later.
_USUAL = frozenset({"prompt_logprobs", "preempted"})


class RecomputeLog:
    """Warns, at most once in EVERY_S, that D computes prompts whose KV P was to send.

    Answers stay right meanwhile, so without the warning P's work would be lost unseen. Each request
    has a log line of its own at INFO. The class reads no clock.
    """

    def __init__(self) -> None:
        self._said: dict[str, int] = {}
        self._quiet_until = float("-inf")

    def look(self, requests: Mapping[str, int], tokens: Mapping[str, int], now: float) -> None:
        """The counters of recomputed requests and their tokens, by reason, as of now."""
        if now < self._quiet_until or requests == self._said:
            return
        new = {
            reason: count - self._said.get(reason, 0)
            for reason, count in requests.items()
            if reason not in _USUAL and count > self._said.get(reason, 0)
        }
        self._said = dict(requests)
        if not new:
            return
        self._quiet_until = now + EVERY_S
        logger.warning(
            "%d prompts are computed here whose KV was to come (%s); %d tokens since the start",
            sum(new.values()),
            ", ".join(f"{reason} {count}" for reason, count in sorted(new.items())),
            sum(count for reason, count in tokens.items() if reason not in _USUAL),
        )

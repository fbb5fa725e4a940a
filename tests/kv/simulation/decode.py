"""D's engine as far as the transfer sees it: a queue of requests that wait for KV, and a pool.

As in the worker: one thread, which polls when it is woken, at the consumer's deadline, and when
blocks come back. What it adopts it reads at once and again when the request ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tests.kv.kvfakes import FakeKvMemory
from tests.kv.simulation.prefill import PromptPlan
from xpyd_core.blocks import blocks_for
from xpyd_core.request_id import TransferKey
from xpyd_kv.values import Landed, NoKv

if TYPE_CHECKING:
    from tests.kv.simulation.process import Process

# Few, so that in mode get requests wait for each other.
_SEATS = 2


@dataclass(eq=False)
class Request:
    """One that waits. `excused_at`: when there was last no room for it, or no seat."""

    plan: PromptPlan
    since: float
    excused_at: float


class DecodeEngine:
    """One D's."""

    def __init__(self, process: Process, memory: FakeKvMemory) -> None:
        self.process = process
        self.world = process.world
        assert process.connector.consumer is not None
        self.consumer = process.connector.consumer
        self.waiting: dict[TransferKey, Request] = {}
        self.inbox: list[Callable[[], None]] = []
        self.stalled_until = 0.0
        self._memory = memory
        # What stood in a cached block when it was cached.
        self._cached: dict[int, bytes] = {}
        self._turn_is_due = False

    # --- from outside

    def submit(self, plan: PromptPlan) -> None:
        self.tell(partial(self._take_in, plan))

    def tell(self, action: Callable[[], None]) -> None:
        self.inbox.append(action)
        self.wake()

    def wake(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            now = self.world.schedule.now
            self.process.at(now + self.world.jitter(), self._turn)

    def stall(self, seconds: float) -> None:
        """The next turn comes late: a long step."""
        self.stalled_until = self.world.schedule.now + seconds
        self.process.pause(self.world.schedule.now, self.stalled_until)

    def forget(self, key: TransferKey) -> None:
        """The request is aborted."""
        if self.waiting.pop(key, None) is not None:
            self.world.note(self.process, "forgets", key)
            self.process.activity[key] = self.world.schedule.now
            self.consumer.forget(key)

    def release(self, key: TransferKey) -> None:
        """The router gave the request up; it may come all the same."""
        self.world.note(self.process, "releases", key)
        self.consumer.release(key.uuid, self.world.schedule.now)

    def fill_up(self, leave: int, seconds: float) -> None:
        """Other requests take all but `leave` free blocks for a while."""
        taken = self.process.pool.take(max(0, self.process.pool.num_free - leave))
        if taken:
            self._forget_cached(taken)
            self.process.after(seconds, partial(self._give_back, taken))

    # --- one turn

    def _take_in(self, plan: PromptPlan) -> None:
        now = self.world.schedule.now
        self.waiting[plan.key] = Request(plan, now, now)
        self.world.note(self.process, "expects", plan.key)
        self.consumer.expect(plan.key, wait_s=plan.wait_s, now=now)

    def _turn(self) -> None:
        now = self.world.schedule.now
        if now < self.stalled_until:
            self.process.at(self.stalled_until, self._turn)
            return
        self._turn_is_due = False
        inbox, self.inbox = self.inbox, []
        for action in inbox:
            action()
        free = self.process.pool.num_free
        self.consumer.poll(now)
        for request in list(self.waiting.values()):
            self._admit(request)
        if self.process.pool.num_free != free:
            self.wake()
        deadline = self.consumer.next_deadline()
        if deadline is not None:
            self.process.at(max(deadline, now + 1e-3), self.wake)

    def _admit(self, request: Request) -> None:
        plan, now = request.plan, self.world.schedule.now
        answer = self.consumer.admit(plan.key, plan.ids, seats=_SEATS, now=now)
        if isinstance(answer, Landed):
            del self.waiting[plan.key]
            self.world.note(self.process, "adopts", plan.key, answer.skipped_tokens)
            self._run(plan, answer)
        elif isinstance(answer, NoKv):
            del self.waiting[plan.key]
            self.process.activity[plan.key] = now
            self.world.note(self.process, "recomputes", plan.key, answer.reason)
            self.world.outcomes[answer.reason] += 1

    def _run(self, plan: PromptPlan, answer: Landed) -> None:
        """From KV that must be P's, byte by byte, until the request ends."""
        world, pool = self.world, self.process.pool
        tag = world.watch.on_adopted(self.process, plan)
        assert answer.tokens == len(plan.ids), "tokens of the landed KV"
        size = pool.block_size
        skipped = answer.skipped_tokens // size
        for block in answer.block_ids[:skipped]:
            assert self._bytes_of(block) == self._cached[block], "a cached block was changed"
        own = answer.block_ids[skipped:]
        self._forget_cached(own)
        tokens = len(plan.ids)
        is_right = self._memory.holds(own, tag, first=skipped, tokens=tokens)
        assert is_right, f"adopted KV of {plan.key} is wrong"
        if world.plan.caches:
            pool.remember(plan.ids, answer.block_ids[: tokens // size])
            self._cached.update((b, self._bytes_of(b)) for b in answer.block_ids)
        world.outcomes["landed"] += 1

        def end() -> None:
            is_right = self._memory.holds(own, tag, first=skipped, tokens=tokens)
            assert is_right, f"KV of {plan.key} was changed"
            self._give_back(list(answer.block_ids))

        self.process.after(plan.runs_s, end)

    def _bytes_of(self, block: int) -> bytes:
        layers = range(len(self._memory.layout.layers))
        return b"".join(self._memory.block_view(layer, block) for layer in layers)

    def _forget_cached(self, blocks: tuple[int, ...] | list[int]) -> None:
        for block in blocks:
            self._cached.pop(block, None)

    def excuse(self) -> None:
        """Who has no room now waits for that, and not for its KV. Who may not be pulled waits for
        those before it, and each of them no longer than its own KV may take."""
        for key, request in self.waiting.items():
            need = blocks_for(len(request.plan.ids), self.process.pool.block_size)
            ahead = len((self.consumer._pulled & self.waiting.keys()) - {key})
            if self.process.pool.num_free < need or ahead >= _SEATS:
                request.excused_at = self.world.schedule.now

    def _give_back(self, blocks: list[int]) -> None:
        self.excuse()
        self.process.pool.release(blocks)
        self.wake()

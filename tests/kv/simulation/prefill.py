"""P's engine as far as the transfer sees it: chunked steps, layer by layer, preemption, aborts.

As in the worker: one thread, whose turn takes in requests and aborts, polls, starts what may
start, and runs a step. During a step only the I/O thread runs; so it does while a step that has
ended is held (mode put).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from tests.kv.kvfakes import LAYOUT
from tests.kv.simulation.memory import SourceMemory
from xpyd_core.blocks import blocks_for
from xpyd_core.request_id import Address, TransferKey

if TYPE_CHECKING:
    from tests.kv.simulation.process import Process

_BATCH = 3


@dataclass(eq=False)
class PromptPlan:
    """One prompt of the plan: when it comes where, and how it is computed."""

    key: TransferKey
    ids: tuple[int, ...]
    p_name: str
    d_name: str
    d_address: Address
    at_s: float
    d_after_s: float | None
    wait_s: float
    chunk_tokens: int
    cached_tokens: int
    runs_s: float
    aborted_after_s: float | None


@dataclass(eq=False)
class Prefill:
    """One prompt on this P. `tag` names the bytes of this attempt: each attempt has its own."""

    plan: PromptPlan
    tag: int = 0
    blocks: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def key(self) -> TransferKey:
        return self.plan.key

    @property
    def is_computed(self) -> bool:
        return self.computed >= len(self.plan.ids)


class PrefillEngine:
    """One P's."""

    def __init__(self, process: Process, memory: SourceMemory) -> None:
        self.process = process
        self.world = process.world
        assert process.connector.producer is not None
        self.producer = process.connector.producer
        self.waiting: list[Prefill] = []
        self.running: list[Prefill] = []
        self.known: dict[TransferKey, Prefill] = {}
        self.unsettled: dict[TransferKey, Prefill] = {}
        self.inbox: list[Callable[[], None]] = []
        self.stalled_until = 0.0
        self._memory = memory
        self.held_since = 0.0
        self._in_step = False
        self._turn_is_due = False
        # The step that has ended and waits for D: its prompts, those of them of which it completed
        # a block, and whether it failed.
        self.held: tuple[list[Prefill], list[Prefill], bool] | None = None

    # --- from outside

    def submit(self, plan: PromptPlan) -> None:
        prompt = self.known[plan.key] = Prefill(plan)
        self.tell(lambda: self.waiting.append(prompt))

    def tell(self, action: Callable[[], None]) -> None:
        """For the next turn."""
        self.inbox.append(action)
        self.wake()

    def wake(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            self.process.after(self.world.jitter(), self._turn)

    def stall(self, seconds: float) -> None:
        """The next turn comes late: a long step."""
        self.stalled_until = self.world.schedule.now + seconds
        self.process.pause(self.world.schedule.now, self.stalled_until)

    def abort(self, prompt: Prefill) -> None:
        """The request is over, or it was its first token already and nothing goes on at D."""
        self.world.note(self.process, "aborts", prompt.key)
        self.producer.cancel(prompt.key, "aborted")
        self._touch(prompt)
        if prompt in self.running:
            self.running.remove(prompt)
            self.process.pool.release(prompt.blocks)
        if prompt in self.waiting:
            self.waiting.remove(prompt)

    def preempt(self, prompt: Prefill) -> None:
        """Its blocks are taken away; it starts again when its transfer is settled."""
        if prompt not in self.running:
            return
        self.world.note(self.process, "preempts", prompt.key)
        self.producer.cancel(prompt.key, "preempted")
        self._touch(prompt)
        self.running.remove(prompt)
        self.process.pool.release(prompt.blocks)
        self.waiting.append(prompt)

    # --- one turn

    def _turn(self) -> None:
        if self.world.schedule.now < self.stalled_until:
            self.process.at(self.stalled_until, self._turn)
            return
        self._turn_is_due = False
        if self.held is not None:
            self._release_step()
        if self._in_step:
            return
        inbox, self.inbox = self.inbox, []
        for action in inbox:
            action()
        self.producer.poll(self.world.schedule.now)
        self._settle()
        for prompt in list(self.waiting):
            self._start(prompt)
        if self.running:
            self._begin_step(self.running[:_BATCH])

    def _settle(self) -> None:
        for key, prompt in list(self.unsettled.items()):
            if self.producer.is_settled(key):
                del self.unsettled[key]
                state = self.producer.status(key).state
                self.world.note(self.process, "settles", key, state)
                self.world.watch.on_settled(self.process, prompt, state)

    def _start(self, prompt: Prefill) -> None:
        plan, pool = prompt.plan, self.process.pool
        if not self.producer.is_settled(prompt.key):
            return
        blocks = pool.take(blocks_for(len(plan.ids), LAYOUT.block_size))
        if blocks is None:
            return
        self.waiting.remove(prompt)
        self.running.append(prompt)
        prompt.tag, prompt.blocks = self.world.new_tag(), blocks
        prompt.computed = plan.cached_tokens
        self._memory.bytes.fill(blocks[: plan.cached_tokens // LAYOUT.block_size], prompt.tag)
        self.world.note(self.process, "offers", prompt.key, f"tag {prompt.tag}")
        self.producer.offer(
            prompt.key,
            plan.d_address,
            plan.ids,
            prompt_tokens=len(plan.ids),
            salt=b"",
            now=self.world.schedule.now,
        )
        self.unsettled[prompt.key] = prompt
        self._touch(prompt)
        if plan.cached_tokens:
            self.producer.cached(prompt.key, blocks, plan.cached_tokens)

    # --- one step

    def _begin_step(self, batch: list[Prefill]) -> None:
        self._in_step = True
        failed = self.world.rare(self.world.plan.step_fails)
        work: list[tuple[Prefill, int, int]] = []
        for prompt in batch:
            first = prompt.computed // LAYOUT.block_size
            prompt.computed = min(prompt.computed + prompt.plan.chunk_tokens, len(prompt.plan.ids))
            tokens = prompt.computed
            end = len(prompt.blocks) if prompt.is_computed else tokens // LAYOUT.block_size
            self.producer.stage(prompt.key, prompt.blocks, tokens)
            work.append((prompt, first, end))
        layer_s = self.world.plan.layer_s
        layers = len(LAYOUT.layers)
        # A step that fails leaves its last layer as it was.
        for layer in range(layers - failed):
            self.process.after(layer_s * (layer + 1), partial(self._layer, work, layer))
        gained = [prompt for prompt, first, end in work if first < end]
        self.process.after(layer_s * (layers + 1), partial(self._end_step, batch, gained, failed))

    def _layer(self, work: list[tuple[Prefill, int, int]], layer: int) -> None:
        for prompt, first, end in work:
            self._memory.bytes.fill_layer(layer, prompt.blocks[first:end], prompt.tag, first)
            self._touch(prompt)
        self.producer.layer_done(layer)

    def _end_step(self, batch: list[Prefill], gained: list[Prefill], failed: bool) -> None:
        self.producer.step_done(failed=failed)
        self.held = batch, gained, failed
        self.held_since = self.world.schedule.now
        self._release_step()

    def _release_step(self) -> None:
        """The step is over, unless it has to wait for D."""
        assert self.held is not None
        now = self.world.schedule.now
        until = self.producer.held_until(now)
        if until is not None:
            self.process.at(until, self.wake)
            return
        (batch, gained, failed), self.held = self.held, None
        self.world.watch.on_step_over(self.process, gained, self.held_since)
        for prompt in batch:
            self._touch(prompt)
            if failed or prompt.is_computed:
                self.running.remove(prompt)
                self.process.pool.release(prompt.blocks)
        self._in_step = False
        self.wake()

    def _touch(self, prompt: Prefill) -> None:
        self.process.activity[prompt.key] = self.world.schedule.now

"""P's half of the connector: which blocks of which prompt may be sent, and when they are free
again.

It runs on the engine's thread and talks to SendSession on the I/O thread: calls go there through
`Endpoint.call`, results come back through a deque and a wake-up. It holds a reference on every
block that the session may read, and drops it when the session has said SendEnded, or that it reads
a spill instead.

Whole blocks only: a block that a chunk leaves half full goes with the next chunk, the prompt's last
block with its last chunk. The modes differ in little. PUT_ASYNC hands over layers during a step.
PUT hands over when the step has ended, and holds the engine then. GET hands over like PUT_ASYNC,
though nothing leaves before D pulls; until then memory beside the cache may take the KV.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from xpyd_core.blocks import blocks_for, token_bytes
from xpyd_core.errors import XpydError
from xpyd_core.request_id import Address, TransferKey, is_dialable
from xpyd_kv.connector.prompts import AnnouncedChunks, Hold, Pressure, Prompt, Settled
from xpyd_kv.memory.device import Event
from xpyd_kv.memory.store import LandingStore
from xpyd_kv.metrics import RateLimits
from xpyd_kv.ranks.build import Parts
from xpyd_kv.ranks.chunks import StepChunks
from xpyd_kv.session import pairs
from xpyd_kv.session.deadlines import Remembered
from xpyd_kv.session.events import (
    SendDeferred,
    SendEnded,
    SendEvent,
    SendFlushed,
    SendGranted,
    SendSpilled,
)
from xpyd_kv.session.outgoing import OfferRequest, ReadyArea
from xpyd_kv.session.sending import SendSession
from xpyd_kv.values import BlockPool, SendStatus
from xpyd_kv.wire.messages import Mode

_log = logging.getLogger(__name__)

_USUAL = frozenset({"stopped", "aborted"})


Chunks = StepChunks[Prompt] | AnnouncedChunks
"""The chunks of the steps under way; the second where ranks send them."""
MakeChunks = Callable[[Callable[[Prompt, Sequence[ReadyArea]], None]], Chunks]


class KvProducer:
    """P's half. It takes its own references on the blocks it sends and drops them when no read can
    follow, so the engine frees its own as if there were no transfer."""

    def __init__(
        self,
        parts: Parts,
        *,
        ranks: Sequence[pairs.Post],
        wake: Callable[[], None],
        pool: BlockPool,
        store: LandingStore | None,
        make_chunks: MakeChunks,
        ranks_send: bool,
    ) -> None:
        """`ranks`: see SendSession. `store`: where to move KV that waits to be pulled; None:
        nowhere. `make_chunks`: given what hands areas over; if `ranks_send`, they know steps that
        follow each other apart."""
        self.ranks_send = ranks_send
        """Whether ranks send, each when its layers are done. If not, `layer_done` is called here,
        and a step is staged only when the one before is done. If they do, several may be under
        way: they are done in the order in which they were staged, and `stage`, `status`, `cancel`
        and `poll` come between. A chunk of what is cancelled may still be in a step under way."""
        context = parts.context
        self.session = SendSession(context, self._on_event, metrics=parts.metrics, ranks=ranks)
        self._wake = wake
        self._call = context.endpoint.call
        # What the I/O thread reported, in order.
        self._events: deque[SendEvent] = deque()
        self._memory = context.memory
        self._gate = parts.gate
        self._layout = context.memory.layout
        self._pool = pool
        self._mode: Mode = context.settings.mode
        self._limits = context.settings.limits
        self._metrics = parts.metrics
        self._clock = context.clock
        self._prompts: dict[TransferKey, Prompt] = {}
        self._settled: Remembered[TransferKey, Settled] = Remembered(self._limits.tombstone_s)
        self._warnings = RateLimits()
        self._chunks = make_chunks(self._ready)
        self._hold: Hold | None = None
        self._pressure = Pressure(
            call_after=self._call_after,
            session=self.session,
            pool=pool,
            limits=self._limits,
            store=store,
            metrics=parts.metrics,
        )

    # --- the life of a prompt

    def offer(
        self,
        key: TransferKey,
        peer: Address,
        token_ids: Sequence[int],
        *,
        prompt_tokens: int,
        salt: bytes,
        now: float,
    ) -> None:
        """Announce the transfer when the first chunk is scheduled. A peer that must not be
        dialled or cannot be reached makes the transfer fail; the request is not touched."""
        if key in self._prompts:
            raise XpydError(f"{key} is offered again before it is settled")
        before = self._settled.get(key, now)
        epoch = before.epoch + 1 if before is not None else 0
        if not is_dialable(peer):
            self._settle(key, epoch, "address")
            return
        blocks = blocks_for(len(token_ids), self._layout.block_size)
        self._prompts[key] = Prompt(key, epoch, len(token_ids), blocks)
        self._settled.drop(key)
        request = OfferRequest(
            key=key,
            epoch=epoch,
            address=peer,
            tokens=len(token_ids),
            prompt_tokens=prompt_tokens,
            salt=salt,
            body=token_bytes(token_ids),
            mode=self._mode,
        )
        self._call(partial(self.session.offer, request))

    def cached(self, key: TransferKey, block_ids: Sequence[int], tokens: int) -> None:
        """The first `tokens` (whole blocks) were in the local prefix cache: sendable at once."""
        prompt = self._sendable(key)
        if prompt is None:
            return
        first, end = len(prompt.held), tokens // self._layout.block_size
        if first >= end:
            return
        self._chunks.cached(prompt, first, self._take(prompt, block_ids, end))

    def stage(self, key: TransferKey, block_ids: Sequence[int], tokens: int) -> None:
        """Stage a chunk, before its forward: after it the first `tokens` tokens are in `block_ids`,
        the sequence's whole table."""
        prompt = self._sendable(key)
        if prompt is None or prompt.computed:
            return
        first = len(prompt.held)
        is_last = tokens >= prompt.tokens
        end = prompt.num_blocks if is_last else tokens // self._layout.block_size
        if first >= end:
            return
        self._chunks.add(prompt, first, self._take(prompt, block_ids, end))

    def step_chunks(self) -> bytes:
        """Once for each step, when it is staged: what ranks that send must know of what was
        staged and cached for it (StepInput.kv). b'' where that is nothing."""
        return self._chunks.message()

    def layer_done(self, layer: int) -> None:
        """During the forward: layer `layer` of all staged chunks is in the cache. Hot path."""
        self._chunks.layer_done(layer)

    def step_done(self, *, failed: bool = False) -> None:
        """End the oldest step, after its forward: its staged chunks are complete (or the step
        failed: cancel them). A transfer whose offered tokens are all computed is committed."""
        chunks = self._chunks.end(failed=failed)
        for chunk in chunks:
            prompt = chunk.owner
            if failed:
                self.cancel(prompt.key, "step_failed")
            elif chunk.end_block == prompt.num_blocks:
                prompt.computed = True
                complete = partial(self.session.complete, prompt.key, prompt.epoch)
                self._when_written(prompt, complete)
        if self._mode == "put" and chunks and not failed:
            now = self._clock()
            prompts = tuple(dict.fromkeys(chunk.owner for chunk in chunks))
            self._hold = Hold(prompts, now, now + self._limits.hold_s)

    def held_until(self, now: float) -> float | None:
        """Until when the step that is just done must wait for D, at most; None: it need not, or
        not any more. Ask after `step_done`, at each wake-up and at that time, until the answer is
        None; use no other method but these before. Always None but in mode put."""
        hold = self._hold
        if hold is None:
            return None
        self._take_events()
        if now < hold.until_s and any(prompt.holds_up for prompt in hold.prompts):
            return hold.until_s
        self._hold = None
        self._metrics.held_s += now - hold.since_s
        return None

    def cancel(self, key: TransferKey, reason: str) -> None:
        """Stop this transfer: request aborted, preempted, or ended at its first token."""
        prompt = self._prompts.get(key)
        if prompt is not None:
            if not prompt.cancelled:
                prompt.cancelled = True
                self._call(partial(self.session.cancel, key, prompt.epoch, reason))
            return
        settled = self._settled.get(key, self._clock())
        if settled is not None and settled.state == "granted":
            self._call(partial(self.session.cancel, key, settled.epoch, reason))
            self._settle(key, settled.epoch, reason)

    def cancel_all(self, reason: str) -> None:
        """Stop all transfers."""
        for key in list(self._prompts):
            self.cancel(key, reason)

    # --- its state

    def status(self, key: TransferKey) -> SendStatus:
        self._take_events()
        prompt = self._prompts.get(key)
        if prompt is not None:
            if prompt.cancelled:
                return SendStatus("none", reason="cancelled")
            state = "granted" if prompt.granted else "pending"
            return SendStatus(state, prompt.incarnation)
        settled = self._settled.get(key, self._clock())
        return SendStatus("none") if settled is None else _status(settled)

    def is_settled(self, key: TransferKey) -> bool:
        """Whether nothing of `key` is in flight, so that a preempted request may offer it again."""
        self._take_events()
        return key not in self._prompts

    def poll(self, now: float) -> None:
        """Once per engine step and at a wake-up: take in what the I/O thread reported, release
        blocks, move or cancel the oldest transfers while they hold more than half of them."""
        self._take_events()
        if now >= self._settled.due_s:
            self._settled.purge(now)
        self._pressure.relieve(self._prompts.values(), self.cancel)

    def peer_gone(self, address: Address) -> None:
        """The D at this KV address is dead: nothing waits for a connection with it, but what may
        be for the next one there. What has a connection ends with that. Any thread."""
        self._call(partial(self.session.peer_gone, address))

    @property
    def leases(self) -> int:
        """Prompts whose KV is held for another instance, or on its way."""
        return len(self._prompts)

    def has_work(self) -> bool:
        """Whether transfers are unfinished (a draining instance waits for them)."""
        return bool(self._prompts)

    # --- inside

    def _sendable(self, key: TransferKey) -> Prompt | None:
        prompt = self._prompts.get(key)
        return None if prompt is None or prompt.cancelled else prompt

    def _take(self, prompt: Prompt, block_ids: Sequence[int], end: int) -> tuple[int, ...]:
        """Take a reference on the prompt's blocks up to `end`; those new to us."""
        ids = tuple(block_ids[len(prompt.held) : end])
        self._pool.retain(ids)
        prompt.held.extend(ids)
        return ids

    def _ready(self, prompt: Prompt, areas: Sequence[ReadyArea]) -> None:
        prompt.handed += len(areas)
        self._when_written(prompt, partial(self.session.ready, prompt.key, prompt.epoch, areas))

    def _when_written(self, prompt: Prompt, call: Callable[[], None]) -> None:
        """Make a call to the session when the model has written the blocks that it is writing."""
        self._call_after(self._memory.written(), prompt, call)

    def _call_after(self, event: Event | None, prompt: Prompt, call: Callable[[], None]) -> None:
        if event is not None:
            fail = partial(self.session.cancel, prompt.key, prompt.epoch, "device_failed")
            call = partial(self._gate.add, event, call, fail)
        self._call(call)

    def _on_event(self, event: SendEvent) -> None:
        """Queue an event of the session for the engine's thread. Runs on the I/O thread."""
        self._events.append(event)
        self._wake()

    def _take_events(self) -> None:
        while self._events:
            event = self._events.popleft()
            prompt = self._prompts.get(event.key)
            if prompt is None:
                continue
            match event:
                case SendGranted():
                    prompt.granted = True
                    prompt.incarnation = event.incarnation
                case SendDeferred():
                    prompt.deferred = True
                    prompt.incarnation = event.incarnation
                case SendFlushed():
                    prompt.flushed = event.areas
                case SendSpilled():
                    self._pressure.on_spilled(prompt, taken=event.taken)
                case SendEnded():
                    self._end(prompt, event.reason)

    def _end(self, prompt: Prompt, reason: str) -> None:
        del self._prompts[prompt.key]
        prompt.is_over = True
        self._pool.release(prompt.held)
        if prompt.spill is not None:
            prompt.spill.free()
        self._settle(prompt.key, prompt.epoch, reason, prompt.incarnation)

    def _settle(self, key: TransferKey, epoch: int, reason: str, incarnation: str = "") -> None:
        if reason:
            self._log_failure(key, reason)
        settled = Settled(epoch, "none" if reason else "granted", incarnation, reason)
        self._settled.set(key, settled, self._clock())

    def _log_failure(self, key: TransferKey, reason: str) -> None:
        # What the request's own end brings is usual; everything else makes D compute again. While
        # a D is away each request fails alike: one warning in a while for each reason.
        is_usual = reason in _USUAL
        left_out = None if is_usual else self._warnings.take(reason, self._clock())
        level = logging.INFO if left_out is None else logging.WARNING
        more = f" ({left_out} more like it before)" if left_out else ""
        text = "KV of %s is not sent: %s%s"
        _log.log(level, text, key, reason, more, extra={"request": key.uuid})


def _status(settled: Settled) -> SendStatus:
    incarnation = settled.incarnation if settled.state == "granted" else ""
    return SendStatus(settled.state, incarnation, settled.reason)

"""P's half of the connector: which blocks of which prompt may be sent, and when they are free
again.

It runs on the engine's thread and talks to SendSession on the I/O thread: calls go there through
`Endpoint.call`, results come back through a deque and a wake-up. It holds a reference on every
block that the session may read, and drops it when the session has said SendEnded.

Whole blocks only: a block that a chunk leaves half full goes with the next chunk, the prompt's last
block with its last chunk.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from xpyd_core.blocks import blocks_for, token_bytes
from xpyd_core.errors import XpydError
from xpyd_core.request_id import Address, TransferKey, is_dialable
from xpyd_kv.connector.api import BlockPool, KvMemory, SendStatus
from xpyd_kv.connector.compute_gate import ComputeGate
from xpyd_kv.plan.frames import Area, FrameLimits, frames, layer_groups
from xpyd_kv.rate_limit import RateLimits
from xpyd_kv.session.deadlines import Remembered
from xpyd_kv.session.events import SendEnded, SendEvent, SendGranted
from xpyd_kv.session.limits import KvLimits
from xpyd_kv.session.metrics import KvMetrics
from xpyd_kv.session.outgoing import OfferRequest, ReadyArea
from xpyd_kv.session.sending import SendSession
from xpyd_kv.transport.api import Endpoint

_log = logging.getLogger(__name__)

_USUAL = frozenset({"stopped", "aborted"})


@dataclass
class _Prompt:
    """One offered prompt that is not settled."""

    key: TransferKey
    epoch: int
    tokens: int
    num_blocks: int
    # The blocks we hold a reference on: the first len(held) of the prompt.
    held: list[int] = field(default_factory=list[int])
    computed: bool = False
    cancelled: bool = False
    incarnation: str = ""


@dataclass
class _Chunk:
    """Blocks [first_block, end_block) of one prompt that the running step completes."""

    prompt: _Prompt
    first_block: int
    end_block: int
    block_ids: tuple[int, ...]
    # First layer that was not handed over.
    next_layer: int = 0


@dataclass(frozen=True)
class _Settled:
    epoch: int
    state: str
    incarnation: str


class KvProducer:
    """See xpyd_kv.connector.api.Producer."""

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        session: SendSession,
        events: deque[SendEvent],
        memory: KvMemory,
        gate: ComputeGate,
        pool: BlockPool,
        limits: KvLimits,
        frame_limits: FrameLimits,
        metrics: KvMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._call = endpoint.call
        self._session = session
        self._events = events
        self._memory = memory
        self._gate = gate
        self._layout = memory.layout
        self._pool = pool
        self._limits = limits
        self._frame_limits = frame_limits
        self._metrics = metrics
        self._clock = clock
        self._prompts: dict[TransferKey, _Prompt] = {}
        self._settled: Remembered[TransferKey, _Settled] = Remembered(limits.tombstone_s)
        self._warnings = RateLimits()
        # Of the running step: its chunks, and those whose group of layers ends with a layer.
        self._chunks: list[_Chunk] = []
        self._group_ends: dict[int, list[_Chunk]] = {}

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
        if key in self._prompts:
            raise XpydError(f"{key} is offered again before it is settled")
        before = self._settled.get(key, now)
        epoch = before.epoch + 1 if before is not None else 0
        if not is_dialable(peer):
            self._settle(key, epoch, "address")
            return
        blocks = blocks_for(len(token_ids), self._layout.block_size)
        self._prompts[key] = _Prompt(key, epoch, len(token_ids), blocks)
        self._settled.drop(key)
        request = OfferRequest(
            key=key,
            epoch=epoch,
            address=peer,
            tokens=len(token_ids),
            prompt_tokens=prompt_tokens,
            salt=salt,
            body=token_bytes(token_ids),
        )
        self._call(partial(self._session.offer, request))

    def cached(self, key: TransferKey, block_ids: Sequence[int], tokens: int) -> None:
        prompt = self._sendable(key)
        if prompt is None:
            return
        first, end = len(prompt.held), tokens // self._layout.block_size
        if first >= end:
            return
        ids = self._hold(prompt, block_ids, end)
        areas = frames(
            len(self._layout.layers),
            first,
            end,
            block_bytes=self._layout.block_bytes,
            limits=self._frame_limits,
        )
        ready = [ReadyArea(area, _ids_of(area, first, ids)) for area in areas]
        self._when_written(prompt, partial(self._session.ready, key, prompt.epoch, ready))

    def stage(self, key: TransferKey, block_ids: Sequence[int], tokens: int) -> None:
        prompt = self._sendable(key)
        if prompt is None or prompt.computed:
            return
        first = len(prompt.held)
        is_last = tokens >= prompt.tokens
        end = prompt.num_blocks if is_last else tokens // self._layout.block_size
        if first >= end:
            return
        chunk = _Chunk(prompt, first, end, self._hold(prompt, block_ids, end))
        self._chunks.append(chunk)
        groups = layer_groups(
            len(self._layout.layers),
            self._layout.block_bytes * (end - first),
            self._frame_limits.group_bytes,
        )
        for _, end_layer in groups:
            self._group_ends.setdefault(end_layer - 1, []).append(chunk)

    def layer_done(self, layer: int) -> None:
        # Hot path: called for each layer of each step, usually with nothing to hand over.
        for chunk in self._group_ends.get(layer, ()):
            self._hand_over(chunk, layer + 1)

    def step_done(self, *, failed: bool = False) -> None:
        chunks, self._chunks = self._chunks, []
        self._group_ends = {}
        for chunk in chunks:
            prompt = chunk.prompt
            if failed:
                self.cancel(prompt.key, "step_failed")
                continue
            self._hand_over(chunk, len(self._layout.layers))
            if chunk.end_block == prompt.num_blocks:
                prompt.computed = True
                complete = partial(self._session.complete, prompt.key, prompt.epoch)
                self._when_written(prompt, complete)

    def cancel(self, key: TransferKey, reason: str) -> None:
        prompt = self._prompts.get(key)
        if prompt is not None:
            if not prompt.cancelled:
                prompt.cancelled = True
                self._call(partial(self._session.cancel, key, prompt.epoch, reason))
            return
        settled = self._settled.get(key, self._clock())
        if settled is not None and settled.state == "granted":
            self._call(partial(self._session.cancel, key, settled.epoch, reason))
            self._settle(key, settled.epoch, reason)

    # --- how it stands

    def status(self, key: TransferKey) -> SendStatus:
        self._take_events()
        prompt = self._prompts.get(key)
        if prompt is not None:
            if prompt.cancelled:
                return SendStatus("none")
            state = "granted" if prompt.incarnation else "pending"
            return SendStatus(state, prompt.incarnation)
        settled = self._settled.get(key, self._clock())
        return SendStatus("none") if settled is None else _status(settled)

    def is_settled(self, key: TransferKey) -> bool:
        self._take_events()
        return key not in self._prompts

    def poll(self, now: float) -> None:
        self._take_events()
        self._settled.purge(now)
        self._relieve_pressure()

    def has_work(self) -> bool:
        return bool(self._prompts)

    # --- inside

    def _sendable(self, key: TransferKey) -> _Prompt | None:
        prompt = self._prompts.get(key)
        return None if prompt is None or prompt.cancelled else prompt

    def _hold(self, prompt: _Prompt, block_ids: Sequence[int], end: int) -> tuple[int, ...]:
        """Take a reference on the prompt's blocks up to `end`; those new to us."""
        ids = tuple(block_ids[len(prompt.held) : end])
        self._pool.retain(ids)
        prompt.held.extend(ids)
        return ids

    def _hand_over(self, chunk: _Chunk, end_layer: int) -> None:
        if chunk.next_layer >= end_layer:
            return
        area = Area(chunk.next_layer, end_layer, chunk.first_block, chunk.end_block)
        chunk.next_layer = end_layer
        prompt, ready = chunk.prompt, [ReadyArea(area, chunk.block_ids)]
        self._when_written(prompt, partial(self._session.ready, prompt.key, prompt.epoch, ready))

    def _when_written(self, prompt: _Prompt, call: Callable[[], None]) -> None:
        """To the session, when the blocks that the model was told to write are written."""
        event = self._memory.written()
        if event is not None:
            fail = partial(self._session.cancel, prompt.key, prompt.epoch, "device_failed")
            call = partial(self._gate.add, event, call, fail)
        self._call(call)

    def _take_events(self) -> None:
        while self._events:
            event = self._events.popleft()
            prompt = self._prompts.get(event.key)
            if prompt is None:
                continue
            match event:
                case SendGranted():
                    prompt.incarnation = event.incarnation
                case SendEnded():
                    self._end(prompt, event.reason)

    def _end(self, prompt: _Prompt, reason: str) -> None:
        del self._prompts[prompt.key]
        self._pool.release(prompt.held)
        self._settle(prompt.key, prompt.epoch, reason, prompt.incarnation)

    def _settle(self, key: TransferKey, epoch: int, reason: str, incarnation: str = "") -> None:
        if reason:
            self._log_failure(key, reason)
        settled = _Settled(epoch, "none" if reason else "granted", incarnation)
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

    def _relieve_pressure(self) -> None:
        """Cancel the oldest computed prompts while D's slowness costs P too much of its cache."""
        waiting = [p for p in self._prompts.values() if p.computed and not p.cancelled]
        holders = Counter(block for prompt in waiting for block in prompt.held)
        limit = int(self._pool.num_blocks * self._limits.max_held_share)
        for prompt in waiting:
            if len(holders) <= limit:
                return
            holders -= Counter(prompt.held)
            self._metrics.pressure_cancels += 1
            self.cancel(prompt.key, "pressure")


def _ids_of(area: Area, first_block: int, ids: tuple[int, ...]) -> tuple[int, ...]:
    return ids[area.first_block - first_block : area.end_block - first_block]


def _status(settled: _Settled) -> SendStatus:
    return SendStatus(settled.state, settled.incarnation if settled.state == "granted" else "")

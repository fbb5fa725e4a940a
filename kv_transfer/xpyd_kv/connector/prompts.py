"""The prompts that P offers, what their steps' chunks say to ranks, and the bound on held blocks.

Engine thread only. Blocks of computed prompts whose transfers are not over may be at most a share
of all. Over that, in GET, the oldest prompt that D has not pulled moves to memory beside the cache
and is sent from there; where that is full, and in the other modes, the oldest is given up and D
computes it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from xpyd_core.request_id import TransferKey
from xpyd_kv.memory.device import Event
from xpyd_kv.memory.store import LandingStore, StagedLanding
from xpyd_kv.metrics import KvMetrics
from xpyd_kv.plan.frames import Area
from xpyd_kv.ranks.chunks import Chunk
from xpyd_kv.session.outgoing import ReadyArea
from xpyd_kv.session.pairs import StepChunk, encode_chunks
from xpyd_kv.session.sending import SendSession
from xpyd_kv.session.settings import KvLimits
from xpyd_kv.values import BlockPool


@dataclass(eq=False)
class Prompt:
    """An offered prompt whose transfer is not over."""

    key: TransferKey
    epoch: int
    tokens: int
    num_blocks: int
    # The blocks we hold a reference on: the first len(held) of the prompt, or none once all of it
    # is in the spill.
    held: list[int] = field(default_factory=list[int])
    spill: StagedLanding | None = None
    # It must not be moved: the session is sending it, or giving it up.
    stays: bool = False
    computed: bool = False
    cancelled: bool = False
    # D sent GRANT or PULL; or LEASE before; and the incarnation of the D that did.
    granted: bool = False
    deferred: bool = False
    incarnation: str = ""
    # Areas that the session got, and how many of them it has sent (PUT).
    handed: int = 0
    flushed: int = 0
    is_over: bool = False

    @property
    def holds_up(self) -> bool:
        """PUT: whether the step that has just ended must wait for this prompt's KV to be with D.

        A prompt that is computed waits for DONE, one that is not until its areas are sent. Where D
        defers there is nothing to wait for: it grants when the request comes, which P's own
        answer has to bring about.
        """
        if self.is_over or self.cancelled:
            return False
        if self.granted:
            return self.computed or self.flushed < self.handed
        return self.computed and not self.deferred


@dataclass(frozen=True)
class Hold:
    """A step that has ended and waits for D (PUT), at most until `until_s`."""

    prompts: tuple[Prompt, ...]
    since_s: float
    until_s: float


class Settled(msgspec.Struct, frozen=True):
    """The record of a prompt whose transfer is over."""

    epoch: int
    state: str
    incarnation: str
    reason: str = ""
    """Why its KV was not sent."""


class Pressure:
    """Keeps the number of held blocks under its bound. `store` None: no memory outside the cache
    takes spills. `call_after` makes a call to the session for a prompt when the event is done."""

    def __init__(
        self,
        *,
        call_after: Callable[[Event | None, Prompt, Callable[[], None]], None],
        session: SendSession,
        pool: BlockPool,
        limits: KvLimits,
        store: LandingStore | None,
        metrics: KvMetrics,
    ) -> None:
        self._call_after = call_after
        self._session = session
        self._pool = pool
        self._limits = limits
        self._store = store
        self._metrics = metrics

    def relieve(
        self, prompts: Iterable[Prompt], cancel: Callable[[TransferKey, str], None]
    ) -> None:
        """Bring the held blocks under the bound. `prompts`: all that are not settled, the oldest
        first."""
        if self._store is not None:
            self._store.poll()
        waiting = [p for p in prompts if p.computed and not p.cancelled and not p.spill]
        holders = Counter(block for prompt in waiting for block in prompt.held)
        limit = int(self._pool.num_blocks * self._limits.max_held_share)
        while waiting and len(holders) > limit:
            leaving = self._spill(waiting)
            if leaving is None:
                leaving = waiting[0]
                self._metrics.pressure_cancels += 1
                cancel(leaving.key, "pressure")
            waiting.remove(leaving)
            # Its blocks come back when the session has answered.
            holders -= Counter(leaving.held)

    def on_spilled(self, prompt: Prompt, *, taken: bool) -> None:
        """Handle the session's answer to a spill."""
        if taken:
            held, prompt.held = prompt.held, []
            self._pool.release(held)
            if prompt.spill is not None:
                self._metrics.spilled[prompt.spill.kind] += 1
                self._metrics.spilled_bytes += prompt.spill.size_bytes
        elif prompt.spill is not None:
            prompt.spill.free()
            prompt.spill = None
            prompt.stays = True

    def _spill(self, waiting: Sequence[Prompt]) -> Prompt | None:
        """Copy the oldest prompt that D has not pulled; None when there is none, or no room."""
        prompt = next((p for p in waiting if not (p.granted or p.stays)), None)
        if prompt is None or self._store is None:
            return None
        spill = self._store.take_staged(prompt.key, prompt.num_blocks)
        if spill is None:
            return None
        prompt.spill = spill
        event = spill.fill(prompt.held)
        spilled = partial(self._session.spill, prompt.key, prompt.epoch, spill)
        self._call_after(event, prompt, spilled)
        return prompt


class AnnouncedChunks:
    """Collects the chunks of steps that ranks send. `ready` gets areas that name all layers and no
    blocks, for counting."""

    def __init__(
        self, *, layers: int, ready: Callable[[Prompt, Sequence[ReadyArea]], None]
    ) -> None:
        self._layers = layers
        self._ready = ready
        self._announced: list[StepChunk] = []
        self._chunks: list[Chunk[Prompt]] = []
        # Of the steps that were launched and are not over.
        self._steps: deque[list[Chunk[Prompt]]] = deque()

    def cached(self, owner: Prompt, first: int, block_ids: tuple[int, ...]) -> None:
        """Blocks from `first` on that were computed before."""
        self._announce(owner, first, block_ids, is_cached=True)

    def add(self, owner: Prompt, first: int, block_ids: tuple[int, ...]) -> None:
        """Blocks from `first` on that the step completes."""
        self._announce(owner, first, block_ids, is_cached=False)

    def layer_done(self, layer: int) -> None:
        """Do nothing: the ranks send the layer."""

    def message(self) -> bytes:
        """The ranks' chunks of the step that is launched next, which begins here."""
        announced, self._announced = self._announced, []
        chunks, self._chunks = self._chunks, []
        self._steps.append(chunks)
        return encode_chunks(announced)

    def end(self, *, failed: bool) -> Sequence[Chunk[Prompt]]:
        """End the oldest step and return its chunks."""
        chunks = self._steps.popleft()
        for chunk in () if failed else chunks:
            area = Area(0, self._layers, chunk.first_block, chunk.end_block)
            self._ready(chunk.owner, [ReadyArea(area, ())])
        return chunks

    def _announce(
        self, owner: Prompt, first: int, block_ids: tuple[int, ...], *, is_cached: bool
    ) -> None:
        chunk = Chunk(owner, first, first + len(block_ids), block_ids)
        self._chunks.append(chunk)
        self._announced.append(
            StepChunk(
                key=owner.key,
                epoch=owner.epoch,
                first_block=first,
                block_ids=block_ids,
                is_cached=is_cached,
                is_last=chunk.end_block == owner.num_blocks,
            )
        )

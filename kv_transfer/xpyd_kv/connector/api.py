"""The seam between an engine and the transfer library. Documented here and only here.

The engine gives a BlockPool (its block manager) and a KvMemory (its paged cache as bytes). It
gets a Producer on P or a Consumer on D. All methods below run on the engine's thread unless they
say otherwise; none of them blocks. Times are seconds of one monotonic clock. Both
halves are constructed with `wake`, a callable that the I/O thread calls to wake an idle engine
loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.values import Admission, OfferedPrompt, SendStatus


class Producer(Protocol):
    """P's half. It takes its own references on the blocks it sends and drops them when no read can
    follow, so the engine frees its own as if there were no transfer."""

    @property
    def ranks_send(self) -> bool:
        """Whether ranks send, each when its layers stand. If not, `layer_done` is called here, and
        a step is staged only when the one before is done. If they do, several may be under way:
        they are done in the order in which they were staged, and `stage`, `status`, `cancel` and
        `poll` come between. A chunk of what is cancelled may still be in a step under way."""
        ...

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
        ...

    def stage(self, key: TransferKey, block_ids: Sequence[int], tokens: int) -> None:
        """Before the forward of a chunk: after it the first `tokens` tokens stand in `block_ids`,
        the sequence's whole table."""
        ...

    def cached(self, key: TransferKey, block_ids: Sequence[int], tokens: int) -> None:
        """The first `tokens` (whole blocks) were in the local prefix cache: sendable at once."""
        ...

    def step_chunks(self) -> bytes:
        """Once for each step, when it is staged: what ranks that send have to be told of what was
        staged and cached for it (StepInput.kv). b'' where that is nothing."""
        ...

    def layer_done(self, layer: int) -> None:
        """During the forward: layer `layer` of all staged chunks stands in the cache. Hot path."""
        ...

    def step_done(self, *, failed: bool = False) -> None:
        """After the forward of the oldest step: its staged chunks are complete (or the step failed:
        cancel them). A transfer whose offered tokens are all computed is committed."""
        ...

    def held_until(self, now: float) -> float | None:
        """Until when the step that is just done must wait for D, at most; None: it need not, or
        not any more. Ask after `step_done`, at each wake-up and at that time, until the answer is
        None; use no other method but these before. Always None but in mode put."""
        ...

    def status(self, key: TransferKey) -> SendStatus: ...

    def cancel(self, key: TransferKey, reason: str) -> None:
        """Stop this transfer: request aborted, preempted, or ended at its first token."""
        ...

    def is_settled(self, key: TransferKey) -> bool:
        """Whether nothing of `key` is in flight, so that a preempted request may offer it again."""
        ...

    def poll(self, now: float) -> None:
        """Once per engine step and at a wake-up: take in what the I/O thread reported, release
        blocks, move or cancel the oldest transfers while they hold more than half of them."""
        ...

    def has_work(self) -> bool:
        """Whether transfers are unfinished (a draining instance waits for them)."""
        ...


class Consumer(Protocol):
    """D's half. A reservation belongs to the transfer's key until a request adopts it, once."""

    def poll(self, now: float) -> None:
        """Once per engine step and at wake-up: answer OFFERs (reserve: own blocks, device buffer,
        host pool, or defer; where P's mode is get, always defer), take in landed and failed
        transfers, expire orphans' leases."""
        ...

    def offered(self, key: TransferKey) -> OfferedPrompt | None:
        """What was offered under `key`. Callable from any thread."""
        ...

    def expect(self, key: TransferKey, *, wait_s: float, now: float) -> None:
        """A request for `key` is in the queue: its KV does not expire while it waits."""
        ...

    def admit(
        self, key: TransferKey, token_ids: Sequence[int], *, seats: int, now: float
    ) -> Admission:
        """May the expecting request start? `token_ids` are all its known tokens; KV offered for
        other ids is refused. Copies from buffer or pool into blocks taken from the pool now; a
        deferred OFFER is granted now, but KV is pulled only while what was pulled and not given yet
        is of fewer requests than `seats`, those that may start. Landed is given once per key."""
        ...

    def forget(self, key: TransferKey) -> None:
        """No request expects this KV any more (aborted, refused or failed): free what has landed,
        and what has not as soon as no write can land."""
        ...

    def release(self, uuid: str, now: float) -> None:
        """`POST /kv/release`: free all prompts' KV of `uuid`, refuse OFFERs of it for 60 s.
        Called on the engine's thread; idempotent."""
        ...

    def next_deadline(self) -> float | None:
        """When `poll`/`admit` must run again even if nothing arrives."""
        ...

    def has_work(self) -> bool:
        """Whether granted KV is still here or on its way (a draining instance waits for it)."""
        ...

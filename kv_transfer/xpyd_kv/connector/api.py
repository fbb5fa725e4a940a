"""The seams between an engine and the transfer library. Documented here and only here.

The engine gives a BlockPool (its block manager) and a KvMemory (its paged cache as bytes). It
gets a Producer on P or a Consumer on D. All methods below run on the engine's thread unless they
say otherwise; none of them blocks. Times are seconds of one monotonic clock. Both
halves are constructed with `wake`, a callable that the I/O thread calls to wake an idle engine
loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.device.api import Device, Event, View


@dataclass(frozen=True)
class KvLayout:
    """Shape of the paged cache of one rank.

    One block of one layer is `kv_heads` x `block_size` x 2 x `head_dim` elements, K then V per
    token, contiguous: `block_bytes` bytes. `layers` are absolute layer indices, in order.
    """

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    block_bytes: int

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return self.block_bytes * len(self.layers)


class KvMemory(Protocol):
    """The paged cache as bytes. May be used by the engine's and the I/O thread at once: the owner
    of a block decides who touches it."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def device(self) -> Device | None:
        """The GPU whose memory it is; None: the host's."""
        ...

    def block_view(self, layer: int, block_id: int) -> View:
        """Writable bytes of one block of one layer (index into `layout.layers`), `block_bytes`
        long."""
        ...

    def views(self, layers: Sequence[int], block_ids: Sequence[int]) -> Sequence[View]:
        """The bytes of these blocks of these layers in order: layer after layer, for each block
        after block. Neighbours may be one view. Hot path."""
        ...

    def written(self) -> Event | None:
        """Engine thread: when all that the model has enqueued by now stands in the cache. None: it
        does."""
        ...


class BlockPool(Protocol):
    """Blocks with reference counts, and the prefix cache over them. Engine thread only."""

    @property
    def block_size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_free(self) -> int:
        """Blocks with reference count 0 (cached or not)."""
        ...

    def match_prefix(self, token_ids: Sequence[int], *, salt: bytes, max_tokens: int) -> list[int]:
        """The longest cached run of full blocks from the start, at most max_tokens long, one
        reference taken on each."""
        ...

    def take(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None when fewer are free."""
        ...

    def retain(self, block_ids: Sequence[int]) -> None:
        """One more reference on each."""
        ...

    def release(self, block_ids: Sequence[int]) -> None:
        """One reference less on each; at 0 a block is free, its cached content can still be hit."""
        ...


# --- P


@dataclass(frozen=True)
class SendStatus:
    """How a prompt's transfer stands: none (failed or cancelled), pending (no GRANT or PULL yet) or
    granted (and later done), and the incarnation of the D that answered ('' before)."""

    state: str
    decode_incarnation: str = ""


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


# --- D


@dataclass(frozen=True)
class OfferedPrompt:
    """What P announced: all offered ids (prompt, then continue_from), and how many are the
    prompt's."""

    token_ids: tuple[int, ...]
    prompt_tokens: int


@dataclass(frozen=True)
class Wait:
    """The KV is not there yet. Ask again after the next event or at the deadline. `for_blocks`: it
    would be pulled now and finds no room; who pulls before it takes room from it."""

    for_blocks: bool = False


@dataclass(frozen=True)
class Landed:
    """The KV of the first `tokens` tokens stands in `block_ids`; the references are the caller's
    now.

    `skipped_tokens` of them were in the local prefix cache.
    """

    block_ids: tuple[int, ...]
    tokens: int
    skipped_tokens: int


@dataclass(frozen=True)
class NoKv:
    """The KV will not come: compute the prompt here. `reason` is a short word for metrics and
    logs."""

    reason: str


Admission = Wait | Landed | NoKv


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
        """The expecting request was aborted: free its KV as soon as no write can land."""
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

"""Both ends of a transfer, faked at the engine's seams with the checkable KV of engine_fakes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.worker.engine_fakes import BLOCK, FakeExecutor, kv_of
from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.values import Admission, Landed, NoKv, OfferedPrompt, SendStatus, Wait
from xpyd_worker.engine.block_manager import BlockManager


@dataclass
class Offer:
    """One transfer as the fake producer sees it."""

    token_ids: tuple[int, ...]
    staged: int = 0
    done: int = 0
    blocks: list[int] = field(default_factory=list[int])
    state: str = "granted"
    polls_left: int = 0


class FakeProducer:
    """Holds blocks as the real one does, and checks that what it sends is right when it may."""

    def __init__(
        self,
        pool: BlockManager,
        executor: FakeExecutor,
        linger: int = 2,
        ranks_send: bool = False,
    ) -> None:
        self.ranks_send = ranks_send
        self.offers: dict[TransferKey, Offer] = {}
        self.calls: list[tuple[object, ...]] = []
        self.layers: list[int] = []
        self.hold: Callable[[float], float | None] = lambda now: None
        self._pool, self._executor, self._linger = pool, executor, linger
        # Tokens that stand behind a step, by prompt: of the one being staged, of those under way.
        self._staged: dict[TransferKey, int] = {}
        self._steps: deque[dict[TransferKey, int]] = deque()

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
        assert self.is_settled(key), "offered again before it settled"
        self.calls.append(("offer", key, len(token_ids), prompt_tokens))
        self.offers[key] = Offer(tuple(token_ids))

    def cached(self, key: TransferKey, block_ids: Sequence[int], tokens: int) -> None:
        self.calls.append(("cached", key, tokens))
        assert tokens % BLOCK == 0
        self._hold(key, block_ids, tokens)
        self._check(self.offers[key], tokens)

    def stage(self, key: TransferKey, block_ids: Sequence[int], tokens: int) -> None:
        self.calls.append(("stage", key, tokens))
        self._hold(key, block_ids, tokens)
        self._staged[key] = tokens

    def step_chunks(self) -> bytes:
        self._steps.append(self._staged)
        self._staged = {}
        assert self.ranks_send or len(self._steps) == 1, "a step is staged before the last is done"
        return f"{len(self._steps[-1])} chunks".encode() if self.ranks_send else b""

    def layer_done(self, layer: int) -> None:
        self.layers.append(layer)

    def step_done(self, *, failed: bool = False) -> None:
        for key, tokens in self._steps.popleft().items():
            offer = self.offers[key]
            if failed:
                self.cancel(key, "failed")
            if offer.state == "none":
                continue
            self._check(offer, tokens)
            if offer.done == len(offer.token_ids):
                offer.polls_left = self._linger

    def held_until(self, now: float) -> float | None:
        assert self.ranks_send or not self._steps, "asked in the middle of a step"
        return self.hold(now)

    def status(self, key: TransferKey) -> SendStatus:
        assert self.ranks_send or not self._is_under_way(key), "asked in the middle of a step"
        return SendStatus(self.offers[key].state, "d-1")

    def cancel(self, key: TransferKey, reason: str) -> None:
        self.calls.append(("cancel", key, reason))
        self.offers[key].state = "none"
        self.offers[key].polls_left = self._linger

    def is_settled(self, key: TransferKey) -> bool:
        offer = self.offers.get(key)
        if offer is None:
            return True
        return offer.state == "none" and not offer.blocks and not self._is_under_way(key)

    def poll(self, now: float) -> None:
        for key, offer in self.offers.items():
            over = offer.state == "none" or offer.done == len(offer.token_ids)
            if over and offer.blocks and not self._is_under_way(key):
                offer.polls_left -= 1
                if offer.polls_left <= 0:
                    self._pool.release(offer.blocks)
                    offer.blocks = []

    @property
    def leases(self) -> int:
        return sum(bool(offer.blocks) for offer in self.offers.values())

    def has_work(self) -> bool:
        return self.leases > 0

    def _is_under_way(self, key: TransferKey) -> bool:
        return any(key in staged for staged in self._steps)

    def _hold(self, key: TransferKey, block_ids: Sequence[int], tokens: int) -> None:
        offer = self.offers[key]
        assert offer.state != "none"
        assert offer.staged < tokens <= len(offer.token_ids)
        assert list(block_ids[: len(offer.blocks)]) == offer.blocks
        more = list(block_ids[len(offer.blocks) : -(-tokens // BLOCK)])
        self._pool.retain(more)
        offer.blocks.extend(more)
        offer.staged = tokens

    def _check(self, offer: Offer, tokens: int) -> None:
        want = kv_of(offer.token_ids[:tokens])
        assert [self._executor.slot(offer.blocks, p) for p in range(tokens)] == want
        offer.done = tokens


@dataclass
class Arrival:
    """One transfer as the fake consumer sees it: where it lands, and whether it has."""

    token_ids: tuple[int, ...]
    where: str
    blocks: list[int] = field(default_factory=list[int])
    skipped: int = 0
    landed: bool = False
    failed: str = ""


class FakeConsumer:
    """Landing of KV: in blocks taken at OFFER (direct) or at admission (buffer, deferred)."""

    def __init__(self, pool: BlockManager, executor: FakeExecutor) -> None:
        self.arrivals: dict[TransferKey, Arrival] = {}
        self.expected: dict[TransferKey, float] = {}
        self.calls: list[tuple[object, ...]] = []
        # How many seats each question named; keys that would be pulled and find no blocks.
        self.seats: list[tuple[TransferKey, int]] = []
        self.crowded: set[TransferKey] = set()
        # Of how many tokens KV is to be compared; what was computed of it, and how it is let go.
        self.compares: dict[TransferKey, int] = {}
        self.computed_blocks: dict[TransferKey, tuple[list[int], Callable[[], None]]] = {}
        self._pool, self._executor = pool, executor
        self._dead: list[Arrival] = []

    # --- what P would do

    def arrive(self, key: TransferKey, token_ids: Sequence[int], where: str) -> None:
        """An OFFER comes; the prefix that is cached here is pinned."""
        arrival = Arrival(tuple(token_ids), where)
        self.arrivals[key] = arrival
        if where != "deferred":
            self._reserve(arrival)

    def land(self, key: TransferKey) -> None:
        """All DATA of the key has come."""
        arrival = self.arrivals.get(key)
        if arrival is None or arrival.failed or arrival.landed or arrival.where == "deferred":
            return
        arrival.landed = True
        if arrival.where == "direct":
            self._write(arrival)

    def fail(self, key: TransferKey, reason: str) -> None:
        """P died or cancelled."""
        arrival = self.arrivals.get(key)
        if arrival is not None and not arrival.landed:
            arrival.failed = reason
            self._drop(arrival)

    def drop_orphans(self) -> None:
        """The leases of KV that nobody expects end."""
        for key in [k for k in self.arrivals if k not in self.expected]:
            self._drop(self.arrivals.pop(key))

    # --- the seam

    def poll(self, now: float) -> None:
        for arrival in self._dead:
            self._drop(arrival)
        self._dead.clear()

    def offered(self, key: TransferKey) -> OfferedPrompt | None:
        arrival = self.arrivals.get(key)
        return OfferedPrompt(arrival.token_ids, len(arrival.token_ids)) if arrival else None

    def expect(
        self, key: TransferKey, *, wait_s: float, now: float, source: Address | None = None
    ) -> None:
        assert key not in self.expected
        self.calls.append(("expect", key))
        self.expected[key] = now + wait_s

    def admit(
        self, key: TransferKey, token_ids: Sequence[int], *, seats: int, now: float
    ) -> Admission:
        assert key in self.expected, "asked again after its answer"
        self.seats.append((key, seats))
        if key in self.crowded:
            return Wait(for_blocks=True)
        arrival = self.arrivals.get(key)
        if arrival is not None and arrival.failed:
            return self._no_kv(key, arrival.failed)
        if arrival is not None and tuple(token_ids[: len(arrival.token_ids)]) != arrival.token_ids:
            return self._no_kv(key, "other_prompt")
        if arrival is not None and arrival.where == "deferred" and self._reserve(arrival):
            arrival.where = "direct"
        if arrival is None or not arrival.landed:
            return self._no_kv(key, "late") if now >= self.expected[key] else Wait()
        if arrival.where == "buffer" and not self._take_rest(arrival):
            return Wait()
        if arrival.where == "buffer":
            self._write(arrival)
        del self.expected[key], self.arrivals[key]
        return Landed(tuple(arrival.blocks), len(arrival.token_ids), arrival.skipped)

    def forget(self, key: TransferKey) -> None:
        self.calls.append(("forget", key))
        del self.expected[key]
        self._end(self.arrivals.pop(key, None))

    def is_compared(self, key: TransferKey, tokens: int) -> bool:
        return key not in self.computed_blocks and tokens >= self.compares.get(key, tokens + 1)

    def computed(
        self, key: TransferKey, block_ids: Sequence[int], release: Callable[[], None]
    ) -> None:
        self.computed_blocks[key] = list(block_ids), release

    def release(self, uuid: str, now: float) -> None:
        for key, arrival in self.arrivals.items():
            if key.uuid == uuid:
                arrival.failed = "released"
                self._drop(arrival)

    def next_deadline(self) -> float | None:
        return min(self.expected.values(), default=None)

    @property
    def leases(self) -> int:
        return len(self.arrivals)

    def _reserve(self, arrival: Arrival) -> bool:
        limit = len(arrival.token_ids) - 1
        arrival.blocks = self._pool.match_prefix(arrival.token_ids, salt=b"", max_tokens=limit)
        arrival.skipped = len(arrival.blocks) * BLOCK
        if arrival.where == "buffer" or self._take_rest(arrival):
            return True
        self._drop(arrival)
        arrival.where = "deferred"
        return False

    def _take_rest(self, arrival: Arrival) -> bool:
        need = -(-len(arrival.token_ids) // BLOCK) - len(arrival.blocks)
        taken = self._pool.take(need)
        if taken is not None:
            arrival.blocks.extend(taken)
        return taken is not None

    def _write(self, arrival: Arrival) -> None:
        for position, value in enumerate(kv_of(arrival.token_ids)):
            if position >= arrival.skipped:
                self._executor.write(arrival.blocks, position, value)

    def _drop(self, arrival: Arrival) -> None:
        self._pool.release(arrival.blocks)
        arrival.blocks = []

    def _no_kv(self, key: TransferKey, reason: str) -> NoKv:
        del self.expected[key]
        self._end(self.arrivals.pop(key, None))
        return NoKv(reason)

    def _end(self, arrival: Arrival | None) -> None:
        if arrival is not None and arrival.landed:
            self._drop(arrival)
        elif arrival is not None:
            # A write may land until the next poll.
            self._dead.append(arrival)

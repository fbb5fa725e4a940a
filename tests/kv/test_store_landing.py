"""The store: where bytes land, and that all of it comes back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv.kvfakes import LAYOUT, FakeKvMemory, FakePool, expected_bytes
from xpyd_core.request_id import TransferKey
from xpyd_kv.connector.build import default_store
from xpyd_kv.memory.api import Landing
from xpyd_kv.memory.store import LandingStore, LeaseError, StoreLimits

KEY = TransferKey("ab" * 16, 0)
UNIT = LAYOUT.bytes_per_block


def make(
    blocks: int = 20, *, direct_free: float = 0.1, buffer: int = 0, pool: int = 0
) -> tuple[LandingStore, FakeKvMemory, FakePool]:
    memory, block_pool = FakeKvMemory(blocks), FakePool(blocks)
    limits = StoreLimits(direct_free, buffer * UNIT, pool * UNIT)
    return default_store(limits, memory, block_pool), memory, block_pool


def write(landing: Landing, seed: int) -> None:
    """As the session does: layer by layer, in two ranges of blocks."""
    cut = landing.num_blocks // 2
    for layer in range(len(LAYOUT.layers)):
        for first, end in ((0, cut), (cut, landing.num_blocks)):
            if first == end:
                continue
            body = b"".join(expected_bytes(seed, layer, index) for index in range(first, end))
            for view in landing.views(layer, layer + 1, first, end):
                view[:], body = body[: len(view)], body[len(view) :]
            assert not body


def test_own_blocks_then_buffer_then_pool_then_nothing() -> None:
    store, _, _ = make(10, buffer=5, pool=3)
    kinds = []
    while (landing := store.take(KEY, 2)) is not None:
        kinds.append(landing.kind)
    # 8 of 10 blocks: taking 2 more would leave none free, and more than 1 must stay.
    assert kinds == ["direct"] * 4 + ["buffer"] * 2 + ["pool"]
    assert store.take_direct(KEY, 2) is not None
    assert store.take_direct(KEY, 1) is None


@pytest.mark.parametrize("direct_free", [0.0, 0.1, 0.25, 1.0])
def test_what_is_said_to_be_free_can_be_taken_directly_and_no_block_more(
    direct_free: float,
) -> None:
    store, _, _ = make(10, direct_free=direct_free, buffer=20)
    while free := store.metrics().direct_free_bytes // UNIT:
        too_much, enough = store.take(KEY, free + 1), store.take(KEY, min(free, 3))
        assert too_much is not None
        assert enough is not None
        assert (too_much.kind, enough.kind) == ("buffer", "direct")
        too_much.free()
    landing = store.take(KEY, 1)
    assert landing is not None
    assert landing.kind == "buffer"


def test_fragmentation_is_a_figure() -> None:
    store, _, _ = make(direct_free=1.0, pool=8)
    taken = [store.take(KEY, 1) for _ in range(8)]
    assert store.metrics().pool_fragmentation == 0.0
    for landing in taken[::2]:
        assert landing is not None
        landing.free()
    assert store.metrics().pool_fragmentation == 0.75


def test_direct_free_of_one_means_never_and_of_zero_means_all_but_the_last() -> None:
    store, _, _ = make(10, direct_free=1.0, pool=2)
    landing = store.take(KEY, 1)
    assert landing is not None
    assert landing.kind == "pool"
    store, _, pool = make(10, direct_free=0.0)
    assert store.take(KEY, 9) is not None
    assert store.take(KEY, 1) is None
    assert pool.num_free == 1


@pytest.mark.parametrize("kind", ["direct", "buffer", "pool"])
def test_adopted_blocks_hold_what_was_written_and_are_the_callers(kind: str) -> None:
    store, memory, pool = make(
        20,
        direct_free=0.1 if kind == "direct" else 1.0,
        buffer=7 if kind == "buffer" else 0,
        pool=7,
    )
    landing = store.take(KEY, 7)
    assert landing is not None
    assert landing.kind == kind
    write(landing, 5)
    blocks = landing.adopt()
    assert blocks is not None
    assert memory.holds(blocks, 5)
    assert [pool.references[b] for b in blocks] == [1] * 7
    metrics = store.metrics()
    assert (metrics.leases, metrics.buffer_used_bytes, metrics.pool_used_bytes) == (0, 0, 0)
    pool.release(blocks)
    assert pool.num_free == 20


@pytest.mark.parametrize("kind", ["direct", "buffer", "pool"])
def test_blocks_that_the_caller_has_elsewhere_are_not_adopted(kind: str) -> None:
    store, memory, pool = make(
        20,
        direct_free=0.1 if kind == "direct" else 1.0,
        buffer=7 if kind == "buffer" else 0,
        pool=7,
    )
    landing = store.take(KEY, 7)
    assert landing is not None
    write(landing, 5)
    blocks = landing.adopt(3)
    assert blocks is not None
    assert len(blocks) == 4
    assert memory.holds(blocks, 5, first=3)
    metrics = store.metrics()
    assert (metrics.leases, metrics.buffer_used_bytes, metrics.pool_used_bytes) == (0, 0, 0)
    assert pool.num_free == 16
    pool.release(blocks)


def test_a_fragmented_host_pool_serves_a_landing_in_pieces() -> None:
    store, memory, _ = make(20, direct_free=1.0, pool=16)
    landings = [store.take(KEY, 1) for _ in range(16)]
    for landing in landings[::2]:
        assert landing is not None
        landing.free()
    assert store.metrics().pool_fragmentation > 0
    landing = store.take(KEY, 8)
    assert landing is not None
    write(landing, 9)
    blocks = landing.adopt(3)
    assert blocks is not None
    assert memory.holds(blocks, 9, first=3)


def test_a_landing_that_finds_no_blocks_stays_as_it_is() -> None:
    store, memory, pool = make(4, direct_free=1.0, pool=4)
    landing = store.take(KEY, 3)
    assert landing is not None
    write(landing, 1)
    running = pool.take(2)
    assert running is not None
    assert landing.adopt() is None
    assert store.metrics().leases == 1
    pool.release(running)
    blocks = landing.adopt()
    assert blocks is not None
    assert memory.holds(blocks, 1)


@pytest.mark.parametrize("kind", ["direct", "pool"])
@pytest.mark.parametrize("first", ["free", "adopt"])
@pytest.mark.parametrize("second", ["free", "adopt", "views"])
def test_a_landing_is_given_back_once(kind: str, first: str, second: str) -> None:
    store, _, _ = make(20, direct_free=0.1 if kind == "direct" else 1.0, pool=4)
    landing = store.take(KEY, 2)
    assert landing is not None
    getattr(landing, first)()
    with pytest.raises(LeaseError):
        getattr(landing, second)(*((0, 1, 0, 1) if second == "views" else ()))


def test_a_pool_that_is_no_multiple_of_a_block_uses_the_whole_blocks() -> None:
    memory, pool = FakeKvMemory(4), FakePool(4)
    store = default_store(StoreLimits(1.0, 0, 3 * UNIT + 5), memory, pool)
    assert store.metrics().pool_bytes == 3 * UNIT


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_accounting_returns_to_zero_after_any_mix_of_ends(seed: int) -> None:
    rng = random.Random(seed)
    store, memory, pool = make(30, direct_free=0.3, buffer=9, pool=13)
    held: list[tuple[Landing, int]] = []
    adopted: list[tuple[list[int], int]] = []
    for step in range(80):
        move = rng.random()
        if move < 0.45:
            landing = store.take(KEY, rng.randint(1, 6))
            if landing is not None:
                write(landing, step)
                held.append((landing, step))
        elif move < 0.65 and held:
            held.pop(rng.randrange(len(held)))[0].free()
        elif move < 0.85 and held:
            index = rng.randrange(len(held))
            landing, number = held[index]
            blocks = landing.adopt()
            if blocks is not None:
                del held[index]
                adopted.append((blocks, number))
        elif adopted:
            blocks, number = adopted.pop(rng.randrange(len(adopted)))
            assert memory.holds(blocks, number)
            pool.release(blocks)
        metrics = store.metrics()
        assert metrics.leases == len(held)
        of_kind = {
            kind: sum(x.size_bytes for x, _ in held if x.kind == kind)
            for kind in ("buffer", "pool")
        }
        assert metrics.buffer_used_bytes == of_kind["buffer"] <= metrics.buffer_bytes
        assert metrics.pool_used_bytes == of_kind["pool"] <= metrics.pool_high_water_bytes
    for landing, _ in held:
        landing.free()
    for blocks, number in adopted:
        assert memory.holds(blocks, number)
        pool.release(blocks)
    metrics = store.metrics()
    assert (metrics.leases, metrics.buffer_used_bytes, metrics.pool_used_bytes) == (0, 0, 0)
    assert pool.num_free == 30

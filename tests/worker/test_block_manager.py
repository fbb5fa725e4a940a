"""The block manager: counts, LRU order, prefix cache; the articles' numbers, and a random walk."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from xpyd_core.blocks import block_hashes, blocks_for
from xpyd_kv.values import BlockPool
from xpyd_worker.engine.block_manager import BlockManager


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def fill(pool: BlockManager, ids: list[int], salt: bytes = b"") -> list[int]:
    """Blocks that hold `ids`, full ones registered, as after a prefill."""
    blocks = pool.allocate(blocks_for(len(ids)))
    assert blocks is not None
    for block, block_hash in zip(blocks, block_hashes(ids, salt=salt), strict=False):
        pool.register(block, block_hash)
    return blocks


def test_it_is_the_transfer_librarys_block_pool():
    pool: BlockPool = BlockManager(4)
    assert (pool.block_size, pool.num_blocks, pool.num_free) == (16, 4, 4)


def test_take_gives_all_or_nothing():
    pool = BlockManager(3)
    assert pool.take(4) is None
    assert pool.num_free == 3
    assert len(set(pool.take(3) or [])) == 3
    assert pool.take(1) is None
    assert pool.take(0) == []


@pytest.mark.parametrize(("limit", "hits"), [(32, 2), (31, 1), (16, 1), (15, 0), (0, 0)])
def test_a_hit_is_at_most_max_tokens_long(limit: int, hits: int):
    pool = BlockManager(8)
    fill(pool, tokens(32))
    assert len(pool.match_prefix(tokens(32), salt=b"", max_tokens=limit)) == hits


def test_what_is_computed_again_is_as_new_as_what_is_behind_it():
    """Where the older block is free: it would be taken first, and what is behind it lost."""
    pool = BlockManager(6)
    old = fill(pool, tokens(32))
    pool.release(old)
    again = fill(pool, tokens(32))
    pool.release(again)
    # The old ones hold nothing now, and go first.
    assert set(pool.take(2) or []) == set(old)
    assert pool.match_prefix(tokens(32), salt=b"", max_tokens=32) == again


def test_the_least_recently_used_prefix_goes_first():
    pool = BlockManager(4)
    old, new = fill(pool, tokens(32)), fill(pool, tokens(32, first=500))
    pool.release(old)
    pool.release(new)
    hit = pool.match_prefix(tokens(32), salt=b"", max_tokens=32)
    pool.release(hit)
    assert pool.take(2) == [new[1], new[0]]


def test_of_two_blocks_with_one_content_the_first_stays_cached():
    pool = BlockManager(4)
    first, second = fill(pool, tokens(16)), fill(pool, tokens(16))
    assert pool.lookup(block_hashes(tokens(16))) == first
    pool.release(second)
    pool.release(first)
    assert pool.lookup(block_hashes(tokens(16))) == first


def test_without_prefix_caching_nothing_hits():
    pool = BlockManager(4, enable_prefix_caching=False)
    pool.release(fill(pool, tokens(32)))
    assert pool.match_prefix(tokens(32), salt=b"", max_tokens=32) == []


def test_blocks_set_aside_are_for_the_scheduler_alone():
    pool = BlockManager(4)
    pool.set_aside(3, from_hits=False)
    assert pool.take(2) is None
    assert pool.take(1) is not None
    assert pool.allocate(3) is not None


@pytest.mark.parametrize(("from_hits", "hits"), [(False, 3), (True, 1)])
def test_blocks_set_aside_end_a_hit_where_it_would_take_them(from_hits: bool, hits: int):
    pool = BlockManager(4)
    pool.release(fill(pool, tokens(48)))
    pool.set_aside(3, from_hits=from_hits)
    assert len(pool.match_prefix(tokens(48), salt=b"", max_tokens=48)) == hits


def test_a_hit_on_held_blocks_takes_nothing_that_was_set_aside():
    pool = BlockManager(4)
    fill(pool, tokens(48))
    pool.set_aside(1, from_hits=True)
    assert len(pool.match_prefix(tokens(48), salt=b"", max_tokens=48)) == 3


def test_releasing_what_nobody_holds_is_refused():
    pool = BlockManager(2)
    held = pool.take(1) or []
    pool.release(held)
    with pytest.raises(RuntimeError, match="more often"):
        pool.release(held)


def test_a_block_named_twice_in_one_release_is_refused():
    pool = BlockManager(2)
    (block,) = pool.take(1) or []
    with pytest.raises(RuntimeError, match="twice"):
        pool.release([block, block])


def test_retaining_an_empty_free_block_is_refused():
    with pytest.raises(RuntimeError, match="holds nothing"):
        BlockManager(2).retain([0])


class PoolWalk(RuleBasedStateMachine):
    """Holders take, share, register and drop blocks; a model keeps the counts and contents."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockManager(8, block_size=2)
        self.holders: list[list[int]] = []
        self.content: dict[int, bytes] = {}

    @rule(count=st.integers(0, 9))
    def take(self, count: int) -> None:
        free = self.pool.num_free
        taken = self.pool.take(count)
        assert (taken is None) == (count > free)
        for block in taken or []:
            assert not any(block in holder for holder in self.holders)
            self.content.pop(block, None)
        if taken:
            self.holders.append(taken)

    @rule(ids=st.lists(st.integers(0, 1), max_size=7), limit=st.integers(0, 8))
    def match(self, ids: list[int], limit: int) -> None:
        hashes = block_hashes(ids[:limit], block_size=2)
        found = self.pool.match_prefix(ids, salt=b"", max_tokens=limit)
        assert [self.content[block] for block in found] == hashes[: len(found)]
        assert len(found) == len(hashes) or hashes[len(found)] not in self.content.values()
        if found:
            self.holders.append(found)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), ids=st.lists(st.integers(0, 1), max_size=7))
    def register(self, data: st.DataObject, ids: list[int]) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        for block, block_hash in zip(holder, block_hashes(ids, block_size=2), strict=False):
            if block not in self.content:
                self.pool.register(block, block_hash)
                before = [at for at, held in self.content.items() if held == block_hash]
                if any(at in one for at in before for one in self.holders):
                    continue
                for at in before:
                    del self.content[at]
                self.content[block] = block_hash

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.pool.retain(holder)
        self.holders.append(list(holder))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.release(self.holders.pop(index))

    @invariant()
    def counts_are_exact(self) -> None:
        counts = Counter(block for holder in self.holders for block in holder)
        assert [self.pool.references(b) for b in range(8)] == [counts[b] for b in range(8)]
        assert self.pool.num_free == 8 - len(counts)


TestPoolWalk = PoolWalk.TestCase
TestPoolWalk.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_what_holds_nothing_is_used_again_before_memory_that_was_never_used() -> None:
    pool = BlockManager(8, enable_prefix_caching=False)
    first = pool.allocate(3)
    assert first is not None
    pool.release(first)
    assert pool.allocate(3) == first
    caching = BlockManager(8)
    cached, plain = caching.allocate(1), caching.allocate(1)
    assert cached is not None
    assert plain is not None
    caching.register(cached[0], b"hash")
    caching.release([*cached, *plain])
    taken = caching.allocate(8)
    assert taken is not None
    assert (taken[0], taken[-1]) == (plain[0], cached[0])

"""Paged KV blocks: their references, the free queue, and the prefix cache. Pure.

The scheduler takes and frees blocks through this, and so does the transfer library (it is its
BlockPool). A block with no reference is free: it waits in a queue in LRU order, and as long as it
was not taken for new use its content can be hit by the hash of the prefix that ends in it. This
module knows ids and counts; it must not know sequences, bytes or devices.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from xpyd_core.blocks import DEFAULT_BLOCK_SIZE, next_block_hash, root_hash


class BlockManager:
    """`num_blocks` blocks with reference counts, a free queue and the prefix cache over them.

    One thread uses it. Releasing or retaining a block without references is a defect of the caller
    and raises RuntimeError.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        block_size: int = DEFAULT_BLOCK_SIZE,
        enable_prefix_caching: bool = True,
    ) -> None:
        self._block_size = block_size
        self._caching = enable_prefix_caching
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        # Those that hold nothing, then the oldest first. An OrderedDict because a hit takes a block
        # out of the middle in O(1).
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        # Free blocks that `take` and `match_prefix` leave alone.
        self._keep_from_take = 0
        self._keep_from_hits = 0

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Blocks with reference count 0, cached or not."""
        return len(self._free)

    @property
    def caching(self) -> bool:
        """Whether there is a prefix cache."""
        return self._caching

    def references(self, block_id: int) -> int:
        """How many hold the block."""
        return self._references[block_id]

    # --- what the transfer library uses

    def match_prefix(self, token_ids: Sequence[int], *, salt: bytes, max_tokens: int) -> list[int]:
        """The longest cached run of full blocks from the start, at most `max_tokens` long, one
        reference taken on each. It ends before it would take blocks that were set aside."""
        spare = len(self._free) - self._keep_from_hits
        found: list[int] = []
        parent = root_hash(salt)
        size = self._block_size
        end = min(len(token_ids), max_tokens) if self._caching else 0
        for start in range(0, end - size + 1, size):
            parent = next_block_hash(parent, token_ids[start : start + size])
            block_id = self._block_of.get(parent)
            if block_id is None:
                break
            if not self._references[block_id]:
                if spare <= 0:
                    break
                spare -= 1
            found.append(block_id)
        self.retain(found)
        return found

    def take(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None when fewer are free besides those that
        were set aside."""
        if count > len(self._free) - self._keep_from_take:
            return None
        return self.allocate(count)

    def retain(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each block; a free block must be cached (a hit) and leaves the
        queue."""
        for block_id in block_ids:
            if not self._references[block_id] and self._hash_of[block_id] is None:
                raise RuntimeError(f"block {block_id} is free and holds nothing")
        for block_id in block_ids:
            self._references[block_id] += 1
            if self._references[block_id] == 1:
                del self._free[block_id]

    def release(self, block_ids: Sequence[int]) -> None:
        """Take a reference from each block; at 0 a block goes to the end of the free queue.

        Blocks enter the queue last one first, so that of one prefix the tail is taken first. One
        that holds nothing to be hit goes to the front: memory that was never used stays so.
        """
        for block_id in block_ids:
            if not self._references[block_id]:
                raise RuntimeError(f"block {block_id} is released more often than it was taken")
        for block_id in reversed(block_ids):
            if not self._references[block_id]:
                raise RuntimeError(f"block {block_id} is released twice in one call")
            self._references[block_id] -= 1
            if not self._references[block_id]:
                self._free[block_id] = None
                if self._hash_of[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    # --- what only the scheduler uses

    def set_aside(self, count: int, *, from_hits: bool) -> None:
        """Free blocks that `take` must leave, because a request waits for them; with `from_hits`
        `match_prefix` leaves them too.

        Without it transfers that reserve blocks ahead of their requests could starve the queue.
        """
        self._keep_from_take = count
        self._keep_from_hits = count if from_hits else 0

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, oldest free first, or None when fewer are free.

        This is the moment at which what a block had cached is forgotten.
        """
        if count > len(self._free):
            return None
        taken: list[int] = []
        for _ in range(count):
            block_id, _none = self._free.popitem(last=False)
            self._forget(block_id)
            self._references[block_id] = 1
            taken.append(block_id)
        return taken

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached run of `hashes`. Takes no reference, changes nothing."""
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Put the content of a held, full block into the cache. A second block with the same
        content stays unregistered, but where the first is free: that would be forgotten before
        what is cached behind it."""
        if not self._caching:
            return
        before = self._block_of.get(block_hash)
        if before is not None:
            if self._references[before]:
                return
            self._forget(before)
            self._free.move_to_end(before, last=False)
        self._block_of[block_hash] = block_id
        self._hash_of[block_id] = block_hash

    def reset_prefix_cache(self) -> bool:
        """Forget what free blocks hold; whether nothing is cached any more. A block that is
        held stays in the cache as long as it would have."""
        for block_id in self._free:
            self._forget(block_id)
        return not self._block_of

    def _forget(self, block_id: int) -> None:
        old = self._hash_of[block_id]
        if old is not None:
            del self._block_of[old]
            self._hash_of[block_id] = None

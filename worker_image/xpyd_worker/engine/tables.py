"""Block tables of sequences: taking, growing, forking, freeing, and feeding the prefix cache. Pure.

Between the scheduler, which decides who may run, and the block manager, which knows blocks only.
"""

from __future__ import annotations

from xpyd_core.blocks import blocks_for, extend_block_hashes
from xpyd_worker.engine.block_manager import BlockManager
from xpyd_worker.engine.sequence import Sequence


class BlockTables:
    """Every change of a sequence's `blocks`, `hashes`, `num_registered` and `copy` happens here."""

    def __init__(self, pool: BlockManager) -> None:
        self._pool = pool

    def fits(self, tokens: int) -> bool:
        """Whether one sequence of so many tokens fits when it is alone."""
        return blocks_for(tokens, self._pool.block_size) <= self._pool.num_blocks

    def start(self, sequence: Sequence) -> bool:
        """Give a sequence without blocks what its known tokens need, cached prefix first.

        False, and nothing taken, when fewer blocks are free. Then `num_computed` stands at the end
        of the hit.
        """
        hits = self._hits(sequence)
        if self._need(sequence, hits) > self._pool.num_free:
            return False
        self._pool.retain(hits)
        fresh = blocks_for(len(sequence.tokens), self._pool.block_size) - len(hits)
        taken = self._pool.allocate(fresh)
        if taken is None:
            raise RuntimeError("fewer blocks are free than were counted")
        sequence.blocks = hits + taken
        sequence.num_computed = len(hits) * self._pool.block_size
        sequence.num_registered = len(hits)
        return True

    def need(self, sequence: Sequence) -> int:
        """How many free blocks `start` would take."""
        return self._need(sequence, self._hits(sequence))

    def adopt(self, sequence: Sequence, block_ids: tuple[int, ...], tokens: int) -> None:
        """Make blocks that hold the first `tokens` tokens the table; their references pass over."""
        sequence.blocks = list(block_ids)
        sequence.num_computed = min(tokens, sequence.reusable_tokens)
        self.register_computed(sequence)

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Make room for the first `tokens` tokens; False, and nothing taken, if blocks lack."""
        need = blocks_for(tokens, self._pool.block_size) - len(sequence.blocks)
        if need > 0:
            taken = self._pool.allocate(need)
            if taken is None:
                return False
            sequence.blocks.extend(taken)
        return True

    def fork(self, source: Sequence, child: Sequence) -> bool:
        """Let `child` share what `source` computed: full blocks by reference, a partial one by a
        copy still to be made. False, and nothing taken, when there is no block for the copy."""
        full, partial = divmod(source.num_computed, self._pool.block_size)
        shared = source.blocks[:full]
        if partial:
            taken = self._pool.allocate(1)
            if taken is None:
                return False
            self._pool.retain(source.blocks[full : full + 1])
            child.copy = (source.blocks[full], taken[0])
            shared = [*shared, taken[0]]
        self._pool.retain(source.blocks[:full])
        child.blocks = shared
        child.num_computed = source.num_computed
        child.last_step = source.last_step
        child.hashes = source.hashes[:full]
        child.num_registered = min(full, source.num_registered)
        return True

    def copied(self, sequence: Sequence) -> None:
        """The step that made the sequence's copy has run: the source needs no reference more."""
        if sequence.copy is not None:
            self._pool.release(sequence.copy[:1])
            sequence.copy = None

    def free(self, sequence: Sequence) -> None:
        """Give all its blocks back; what it computed can still be hit."""
        self.copied(sequence)
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = 0
        sequence.num_registered = 0

    def drop(self, sequence: Sequence) -> None:
        """The sequence is over: take it off its request, once, and free it; with a step of it under
        way only when that has landed."""
        if not sequence.ended:
            sequence.ended = True
            sequence.state.sequences.remove(sequence)
            self.landed(sequence)

    def landed(self, sequence: Sequence) -> None:
        """A step is over that wrote to the sequence's blocks: nobody needs those of an ended one
        any more, unless the next step is under way."""
        if sequence.ended and not sequence.in_flight:
            self.free(sequence)

    def register_computed(self, sequence: Sequence) -> None:
        """Put the sequence's full, computed blocks into the prefix cache."""
        if not self._pool.caching:
            return
        full = sequence.num_computed // self._pool.block_size
        if full > sequence.num_registered:
            self._extend_hashes(sequence)
            for index in range(sequence.num_registered, full):
                self._pool.register(sequence.blocks[index], sequence.hashes[index])
            sequence.num_registered = full

    def may_hit(self, sequence: Sequence) -> bool:
        """Whether its prefix is looked up: not without a cache, nor where rows are to be scored."""
        return self._pool.caching and not sequence.state.scores_prompt

    def _hits(self, sequence: Sequence) -> list[int]:
        if not self.may_hit(sequence):
            return []
        self._extend_hashes(sequence)
        full = sequence.reusable_tokens // self._pool.block_size
        return self._pool.lookup(sequence.hashes[:full])

    def _need(self, sequence: Sequence, hits: list[int]) -> int:
        fresh = blocks_for(len(sequence.tokens), self._pool.block_size) - len(hits)
        return fresh + sum(1 for block_id in hits if not self._pool.references(block_id))

    def _extend_hashes(self, sequence: Sequence) -> None:
        extend_block_hashes(
            sequence.hashes,
            sequence.tokens,
            block_size=self._pool.block_size,
            salt=sequence.state.request.cache_salt,
        )

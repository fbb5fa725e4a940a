"""Fakes for the transfer's seams: paged memory, block pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from mmap import mmap

from xpyd_core.blocks import block_hashes
from xpyd_kv.values import KvLayout

BLOCK_SIZE = 4
LAYOUT = KvLayout(
    layers=(0, 1, 2),
    kv_heads=2,
    head_dim=1,
    block_size=BLOCK_SIZE,
    dtype="float32",
    block_bytes=BLOCK_SIZE * 2 * 2 * 4,
)


def with_block_size(block_size: int, layout: KvLayout = LAYOUT) -> KvLayout:
    """The same model's cache in blocks of another size."""
    block_bytes = layout.block_bytes // layout.block_size * block_size
    return replace(layout, block_size=block_size, block_bytes=block_bytes)


class FakeKvMemory:
    """KvMemory over one piece of memory, layer after layer: a bytearray, or what `memory` is."""

    def __init__(
        self, num_blocks: int, layout: KvLayout = LAYOUT, memory: mmap | None = None
    ) -> None:
        self.layout = layout
        self.device = None
        size = num_blocks * layout.block_bytes
        whole = memoryview(bytearray(size * len(layout.layers)) if memory is None else memory)
        self._layers = [whole[at * size : (at + 1) * size] for at in range(len(layout.layers))]

    def block_view(self, layer: int, block_id: int) -> memoryview:
        size = self.layout.block_bytes
        return self._layers[layer][block_id * size : (block_id + 1) * size]

    def written(self) -> None:
        """Always."""

    def views(self, layers: Sequence[int], block_ids: Sequence[int]) -> list[memoryview]:
        return [self.block_view(layer, block) for layer in layers for block in block_ids]

    def fill(self, block_ids: Sequence[int], seed: int) -> None:
        for layer in range(len(self.layout.layers)):
            self.fill_layer(layer, block_ids, seed)

    def fill_layer(self, layer: int, block_ids: Sequence[int], seed: int, first: int = 0) -> None:
        for index, block in enumerate(block_ids, start=first):
            self.block_view(layer, block)[:] = expected_bytes(seed, layer, index, self.layout)

    def holds(
        self, block_ids: Sequence[int], seed: int, first: int = 0, tokens: int | None = None
    ) -> bool:
        """Whether the blocks from the prompt's `first` on hold its KV; `tokens`: the prompt's, what
        stands behind its end does not matter."""
        return all(
            is_expected(self.block_view(layer, block), seed, layer, index, self.layout, tokens)
            for layer in range(len(self.layout.layers))
            for index, block in enumerate(block_ids, start=first)
        )


def expected_bytes(seed: int, layer: int, index: int, layout: KvLayout = LAYOUT) -> bytes:
    """Block `index` of the prompt named `seed`: each row says whose it is, head by head, so that
    blocks of any size hold the same of a token."""
    row_bytes = layout.block_bytes // (layout.kv_heads * layout.block_size)
    start = index * layout.block_size
    return b"".join(
        _row(seed, layer, head, token, row_bytes)
        for head in range(layout.kv_heads)
        for token in range(start, start + layout.block_size)
    )


def _row(seed: int, layer: int, head: int, token: int, row_bytes: int) -> bytes:
    word = (seed * 1_000_003 + layer * 10_007 + head * 77_777_777 + token * 101 + 1).to_bytes(8)
    return (word * (row_bytes // 8 + 1))[:row_bytes]


def is_expected(
    found: memoryview | bytes,
    seed: int,
    layer: int,
    index: int,
    layout: KvLayout = LAYOUT,
    tokens: int | None = None,
) -> bool:
    """Whether a block is right, as far as a prompt of `tokens` reaches into it."""
    wanted = expected_bytes(seed, layer, index, layout)
    size = layout.block_size
    if tokens is None or (index + 1) * size <= tokens:
        return found == wanted
    head_bytes = layout.block_bytes // layout.kv_heads
    used_bytes = max(0, tokens - index * size) * (head_bytes // size)
    return all(
        found[start : start + used_bytes] == wanted[start : start + used_bytes]
        for start in range(0, layout.block_bytes, head_bytes)
    )


class FakePool:
    """BlockPool with reference counts and a prefix cache filled by `remember`."""

    def __init__(self, num_blocks: int, block_size: int = BLOCK_SIZE) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.references = [0] * num_blocks
        self._cache: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return self.references.count(0)

    def match_prefix(self, token_ids: Sequence[int], *, salt: bytes, max_tokens: int) -> list[int]:
        found: list[int] = []
        limit = max_tokens // self.block_size
        for hash_ in block_hashes(token_ids, block_size=self.block_size, salt=salt)[:limit]:
            if hash_ not in self._cache:
                break
            found.append(self._cache[hash_])
        self.retain(found)
        return found

    def remember(
        self, token_ids: Sequence[int], block_ids: Sequence[int], salt: bytes = b""
    ) -> None:
        hashes = block_hashes(token_ids, block_size=self.block_size, salt=salt)
        self._cache.update(zip(hashes, block_ids, strict=False))

    def take(self, count: int) -> list[int] | None:
        # Uncached blocks first, as an LRU queue would mostly do.
        cached = set(self._cache.values())
        free = sorted(
            (block for block in range(self.num_blocks) if not self.references[block]),
            key=lambda block: (block in cached, block),
        )
        if count > len(free):
            return None
        taken = free[:count]
        self._cache = {h: b for h, b in self._cache.items() if b not in taken}
        self.retain(taken)
        return taken

    def retain(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            self.references[block] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            assert self.references[block] > 0, f"block {block} is released too often"
            self.references[block] -= 1

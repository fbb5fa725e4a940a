"""Fakes for the transfer's seams: paged memory, block pool."""

from __future__ import annotations

from collections.abc import Sequence
from mmap import mmap

from xpyd_core.blocks import block_hashes
from xpyd_kv.connector.api import KvLayout

BLOCK_SIZE = 4
LAYOUT = KvLayout(
    layers=(0, 1, 2),
    kv_heads=1,
    head_dim=2,
    block_size=BLOCK_SIZE,
    dtype="float32",
    block_bytes=BLOCK_SIZE * 2 * 2 * 4,
)


class FakeMemory:
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

    def fill(self, block_ids: Sequence[int], seed: int) -> None:
        for layer in range(len(self.layout.layers)):
            self.fill_layer(layer, block_ids, seed)

    def fill_layer(self, layer: int, block_ids: Sequence[int], seed: int, first: int = 0) -> None:
        for index, block in enumerate(block_ids, start=first):
            self.block_view(layer, block)[:] = expected_bytes(seed, layer, index, self.layout)

    def holds(self, block_ids: Sequence[int], seed: int, first: int = 0) -> bool:
        return all(
            bytes(self.block_view(layer, block))
            == expected_bytes(seed, layer, first + index, self.layout)
            for layer in range(len(self.layout.layers))
            for index, block in enumerate(block_ids)
        )


def expected_bytes(seed: int, layer: int, index: int, layout: KvLayout = LAYOUT) -> bytes:
    word = (seed * 1_000_003 + layer * 10_007 + index * 101 + 1).to_bytes(8, "little")
    return (word * (layout.block_bytes // 8 + 1))[: layout.block_bytes]


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

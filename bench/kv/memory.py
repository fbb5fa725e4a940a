"""The paged caches of both sides: bytes, who gets which blocks, and whether two caches agree.

numpy only: the processes of other people's environments run this too.
"""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Sequence

import numpy as np

from bench.kv.shape import BLOCK_BYTES, BLOCK_BYTES_ALL, LAYERS


class Arena:
    """A cache of `blocks` blocks of all layers, layer after layer: `array` is uint8 [layers,
    blocks, block bytes]."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.array = np.frombuffer(buffer, np.uint8).reshape(LAYERS, -1, BLOCK_BYTES)
        self.blocks = self.array.shape[1]

    @property
    def address(self) -> int:
        return self.array.ctypes.data

    def fill(self, seed: int) -> None:
        """Bytes that are nowhere else."""
        words = self.array.reshape(-1).view(np.uint64)
        generator = np.random.default_rng(seed)
        for part in np.array_split(words, LAYERS):
            part[:] = generator.integers(0, 2**63, len(part), dtype=np.uint64)

    def clear(self) -> None:
        self.array[:] = 0

    def runs(self, ids: Sequence[int], layout: str) -> list[tuple[int, int]]:
        """(offset, length) of these blocks of all layers in order: one for a layer of `whole`."""
        step = len(ids) if layout == "whole" else 1
        parts = [(first, first + step) for first in range(0, len(ids), step)]
        row_bytes = self.blocks * BLOCK_BYTES
        return [
            (layer * row_bytes + ids[first] * BLOCK_BYTES, (end - first) * BLOCK_BYTES)
            for layer in range(LAYERS)
            for first, end in parts
        ]

    def views(self, ids: Sequence[int], layout: str) -> list[memoryview]:
        """The same as writable views."""
        whole = memoryview(self.buffer)
        return [whole[offset : offset + length] for offset, length in self.runs(ids, layout)]

    def holds(self, ids: Sequence[int], other: Arena, other_ids: Sequence[int]) -> bool:
        """Whether these blocks have the bytes of those."""
        return all(
            np.array_equal(self.array[layer, list(ids)], other.array[layer, list(other_ids)])
            for layer in range(LAYERS)
        )


def own_memory(blocks: int) -> Arena:
    """As a process usually has it."""
    return Arena(mmap.mmap(-1, blocks * BLOCK_BYTES_ALL, flags=mmap.MAP_PRIVATE))


def visible_memory(blocks: int) -> tuple[Arena, int]:
    """Memory that another process can look into, by the descriptor that comes with it."""
    fd = os.memfd_create("bench")
    os.ftruncate(fd, blocks * BLOCK_BYTES_ALL)
    return Arena(mmap.mmap(fd, 0)), fd


def look_into(pid: int, fd: int) -> Arena:
    """What another process has there, read-only."""
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
    try:
        return Arena(mmap.mmap(own, 0, prot=mmap.PROT_READ))
    finally:
        os.close(own)


class Ring:
    """Gives blocks in one order for ever, so that each prompt finds memory that no cache has had
    for a while: whole ones side by side, paged ones anywhere."""

    def __init__(self, blocks: int, *, seed: int) -> None:
        shuffled = list(range(blocks))
        random.Random(seed).shuffle(shuffled)
        self._orders = {"whole": list(range(blocks)), "paged": shuffled}
        self._next = {"whole": 0, "paged": 0}

    def take(self, count: int, layout: str) -> list[int]:
        order, start = self._orders[layout], self._next[layout]
        if start + count > len(order):
            start = 0
        self._next[layout] = start + count
        return order[start : start + count]

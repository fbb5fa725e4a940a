"""What is moved: prompts of a 32-layer model with 8 KV heads of 128 elements, in bf16."""

from __future__ import annotations

from typing import NamedTuple

LAYERS = 32
KV_HEADS = 8
HEAD_DIM = 128
BLOCK_TOKENS = 16
_ELEMENT_BYTES = 2
BLOCK_BYTES = KV_HEADS * BLOCK_TOKENS * 2 * HEAD_DIM * _ELEMENT_BYTES
"""One block of one layer: 64 KiB."""
BLOCK_BYTES_ALL = BLOCK_BYTES * LAYERS
PROMPTS = (128, 1024, 8192)
SPARE_BLOCKS = 8
"""So many more than the longest prompt has each side."""


class Case(NamedTuple):
    """One prompt, and how its blocks lie: `whole` (side by side in each layer) or `paged`
    (anywhere)."""

    tokens: int
    layout: str

    @property
    def blocks(self) -> int:
        return self.tokens // BLOCK_TOKENS

    @property
    def size_bytes(self) -> int:
        return self.blocks * BLOCK_BYTES_ALL


def cases(prompts: tuple[int, ...]) -> list[Case]:
    """Each prompt in both layouts."""
    return [Case(tokens, layout) for tokens in prompts for layout in ("whole", "paged")]

"""When the GPU's own all-reduce takes a tensor, and how it cuts it. Pure: all ranks come to the
same answers, since these depend on nothing but the call.

A tensor is cut into parts of whole tiles, one for each program of the kernel. Small ones go in one
shot: each rank reads the whole of all others. Larger ones in two: each rank adds up a share of each
part, and reads the other shares where they were added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

WORLD_SIZES = (2, 4, 6, 8)
"""Ranks that the kernel is made for."""
MOST_RANKS = max(WORLD_SIZES)
MOST_BYTES = 8 << 20
"""The largest tensor that is reduced so; beyond it NCCL's algorithms are faster."""
LINE_BYTES = 128
"""A program's words in a rank's memory: where each rank's word arrives, and its own count."""
_SHARE_STEP = 16
"""Shares begin at multiples of so many elements, or loads would be of single ones."""


class Division(NamedTuple):
    """How one tensor is divided, in elements."""

    programs: int
    part: int
    """The length of each program's part; the last one may be shorter."""
    share: int
    """The length of each rank's share of a part, where `in_two`; the last shares may be shorter, or
    empty."""
    in_two: bool


@dataclass(frozen=True)
class ReduceShape:
    """The kernel's measures. The same on all ranks of a group."""

    most_bytes: int = MOST_BYTES
    programs: int = 32
    """The most programs; each has a part of a multiprocessor to itself on any GPU with NVLink."""
    tile_bytes: int = 8 << 10
    """What a program reads of a rank at once: 16 for each of 512 threads."""
    two_from_bytes: int | None = None
    """The size from which more than two ranks go in two shots; None: by their number."""

    def __post_init__(self) -> None:
        assert self.most_bytes % (self.programs * self.tile_bytes) == 0, "parts are whole tiles"

    @property
    def head_bytes(self) -> int:
        """The size of the words, before the two places of a tensor."""
        return self.programs * LINE_BYTES

    @property
    def part_bytes(self) -> int:
        """The size of one program's part of a place."""
        return self.most_bytes // self.programs

    @property
    def memory_bytes(self) -> int:
        """The memory that each rank gives: the words, and a tensor in two places."""
        return self.head_bytes + 2 * self.most_bytes

    def takes(self, *, ranks: int, size_bytes: int, is_contiguous: bool) -> bool:
        """Whether a tensor may be given to the kernel, where all ranks reach each other."""
        return ranks in WORLD_SIZES and 0 < size_bytes <= self.most_bytes and is_contiguous

    def cut(self, elements: int, element_bytes: int, ranks: int) -> Division:
        """How a tensor that it takes is divided."""
        tile = self.tile_bytes // element_bytes
        part = -(-elements // (self.programs * tile)) * tile
        share = -(-part // (ranks * _SHARE_STEP)) * _SHARE_STEP
        is_large = elements * element_bytes >= self._two_from(ranks)
        return Division(-(-elements // part), part, share, ranks > 2 and is_large)

    def trial_bytes(self, ranks: int) -> tuple[int, ...]:
        """Sizes that between them go all ways that tensors go."""
        one_shot = 2 * self.tile_bytes
        return (one_shot,) if ranks <= 2 else (one_shot, self._two_from(ranks))

    def _two_from(self, ranks: int) -> int:
        """Two ranks read as much either way. Of more, one shot reads ranks - 1 times the tensor,
        two shots twice at most, and meet once more."""
        if self.two_from_bytes is not None:
            return self.two_from_bytes
        return (512 if ranks <= 4 else 256) << 10

# pyright: basic, reportArgumentType=false
"""Many pieces of memory copied in one launch, by a Triton kernel.

Bytes are moved as integers, never as floats, so nothing is rounded or normalised. The table holds
target, source and length of each piece; the kernel finds them there, so pieces may lie anywhere
that the device can address: its own memory, a peer's, pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from xpyd_kv.spans import CopyRun

WORDS_PER_PROGRAM = 2048
# A grid's second axis takes 65,535; in single bytes that is 128 MiB.
MAX_WORDS = WORDS_PER_PROGRAM * 65_535
_WORD_BYTES = (8, 4, 1)


@triton.jit
def _copy_pieces(table, word: tl.constexpr, words_per_program: tl.constexpr) -> None:  # noqa: ANN001
    # A row of the table for each piece: target, source, number of words.
    row = table + tl.program_id(0).to(tl.int64) * 3
    count = tl.load(row + 2)
    first = tl.program_id(1).to(tl.int64) * words_per_program
    at = first + tl.arange(0, words_per_program)
    inside = at < count
    target = tl.load(row).to(tl.pointer_type(word))
    source = tl.load(row + 1).to(tl.pointer_type(word))
    tl.store(target + at, tl.load(source + at, mask=inside, other=0), mask=inside)


def word_bytes(pieces: Iterable[CopyRun]) -> int:
    """Return the longest word (8, 4 or 1 bytes) that all addresses and lengths are multiples of."""
    together = 0
    for piece in pieces:
        together |= piece.target | piece.source | piece.length
    return next(size for size in _WORD_BYTES if together % size == 0)


def rows_of(pieces: Iterable[CopyRun], word: int) -> list[tuple[int, int, int]]:
    """Return the table of a copy in words of this length."""
    return [(piece.target, piece.source, piece.length // word) for piece in pieces]


def launch(table: torch.Tensor, *, num_pieces: int, most_words: int, word: int) -> None:
    """Copy the pieces of an int64 `table` ([num_pieces, 3], where the device can read it) on the
    current stream; the longest has `most_words` (at most MAX_WORDS) words of `word` bytes."""
    if most_words > MAX_WORDS:
        raise ValueError(f"a piece of {most_words} words; at most {MAX_WORDS}")
    kind = {8: tl.int64, 4: tl.int32, 1: tl.int8}[word]
    grid = (num_pieces, triton.cdiv(most_words, WORDS_PER_PROGRAM))
    _copy_pieces[grid](table, kind, WORDS_PER_PROGRAM)

"""Random bytes for ids and seeds, drawn from the system some hundred requests at a time."""

from __future__ import annotations

from collections.abc import Callable

_DRAW_BYTES = 8192


class Draws:
    """`source` gives n random bytes (os.urandom): a call of it costs more than what it gives."""

    def __init__(self, source: Callable[[int], bytes]) -> None:
        self._source = source
        self._drawn = b""
        self._at = 0

    def __call__(self, size: int) -> bytes:
        """`size` bytes, at most 8192, that were given to nobody else."""
        end = self._at + size
        if end > len(self._drawn):
            self._drawn = self._source(_DRAW_BYTES)
            self._at, end = 0, size
        drawn = self._drawn[self._at : end]
        self._at = end
        return drawn

"""CRC64NVME and CRC32C, which S3 stores have of objects and Python's library has not. Pure.

AWS gives CRC64NVME to each object that is uploaded without a checksum; of one that is encrypted by
a key of KMS it may be the only one. A loop over bytes would be slower than the network, so numpy
folds: a CRC is linear, so a row of words can be carried over to the next row, all words at once,
and what is left at the end is one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WORDS = 4096
"""Of a row. Larger: numpy's calls cost less; but the last row goes byte by byte."""
_ROW_BYTES = 8 * _WORDS


class Crc:
    """A reflected CRC of 32 or 64 bits that begins and ends inverted; like an object of hashlib."""

    def __init__(self, polynomial: int, bits: int) -> None:
        self._steps = _steps(polynomial)
        self._carries = _carries(polynomial)
        self._ones = (1 << bits) - 1
        self._bytes = bits // 8
        self._row: NDArray[np.uint64] | None = None
        """Stands for all bytes before `_rest`."""
        self._rest = b""

    def update(self, data: bytes, /) -> None:
        """The next bytes."""
        data = self._rest + data
        count = len(data) // _ROW_BYTES
        rows = np.frombuffer(data, "<u8", count * _WORDS).reshape(count, _WORDS)
        self._rest = data[count * _ROW_BYTES :]
        for row in rows:
            if self._row is None:
                self._row = row.copy()
                self._row[0] ^= np.uint64(self._ones)
            else:
                shorts = self._row.view("<u2").reshape(_WORDS, 4)
                a, b, c, d = (self._carries[i][shorts[:, i]] for i in range(4))
                self._row = row ^ a ^ b ^ c ^ d

    def digest(self) -> bytes:
        """The CRC of all bytes so far, the highest byte first as S3 has it."""
        value, before = (self._ones, b"") if self._row is None else (0, self._row.tobytes())
        for byte in before + self._rest:
            value = _step(self._steps, value ^ byte)
        return (value ^ self._ones).to_bytes(self._bytes, "big")


def crc64nvme() -> Crc:
    """NVM Express's and AWS's."""
    return Crc(0x9A6C9329AC4BC9B5, 64)


def crc32c() -> Crc:
    """Castagnoli's."""
    return Crc(0x82F63B78, 32)


def _step(steps: Sequence[int], value: int) -> int:
    """What `value` becomes by a byte of zero behind it."""
    return (value >> 8) ^ steps[value & 0xFF]


@cache
def _steps(polynomial: int) -> tuple[int, ...]:
    """For each byte, what it adds to the bytes behind it."""
    found: list[int] = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (polynomial if value & 1 else 0)
        found.append(value)
    return tuple(found)


@cache
def _carries(polynomial: int) -> tuple[NDArray[np.uint64], ...]:
    """For each 16 bits of a word, what they add to the same word of the next row."""
    steps = _steps(polynomial)
    of_bits = [_step(steps, 1 << bit) for bit in range(64)]  # over one byte
    length = 1
    while length < _ROW_BYTES:
        of_bits = [_sum(of_bits, value) for value in of_bits]
        length *= 2
    tables: list[NDArray[np.uint64]] = []
    for begin in range(0, 64, 16):
        table = np.zeros(1, np.uint64)
        for value in of_bits[begin : begin + 16]:
            table = np.concatenate([table, table ^ np.uint64(value)])
        tables.append(table)
    return tuple(tables)


def _sum(of_bits: Sequence[int], value: int) -> int:
    found = 0
    for bit, one in enumerate(of_bits):
        if value >> bit & 1:
            found ^= one
    return found

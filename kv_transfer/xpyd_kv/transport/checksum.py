"""The checksum of a DATA body: xxh3-64, which finds corruption, not tampering."""

from __future__ import annotations

from collections.abc import Iterable

from xxhash import xxh3_64


def checksum(views: Iterable[memoryview]) -> bytes:
    """xxh3-64 over the views' bytes in order: 8 bytes, big-endian (xxHash's canonical form)."""
    digest = xxh3_64()
    for view in views:
        digest.update(view)
    return digest.digest()

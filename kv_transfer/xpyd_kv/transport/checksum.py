"""The checksum of a DATA body: xxh3-64, which finds corruption, not tampering."""

from __future__ import annotations

from collections.abc import Iterable

from xxhash import xxh3_64


class Checksum:
    """xxh3-64 over bytes as they come: 8 bytes, big-endian (xxHash's canonical form)."""

    def __init__(self) -> None:
        self._digest = xxh3_64()
        self.update = self._digest.update
        """Take in one view."""

    def take(self, views: Iterable[memoryview], count: int) -> None:
        """The first `count` bytes of the views. Soon after they were written: what is still in
        the processor's cache costs a third."""
        for view in views:
            if count < len(view):
                self.update(view[:count])
                return
            self.update(view)
            count -= len(view)

    def digest(self) -> bytes:
        return self._digest.digest()


def checksum(views: Iterable[memoryview]) -> bytes:
    """That of the views' bytes in order."""
    digest = Checksum()
    for view in views:
        digest.update(view)
    return digest.digest()

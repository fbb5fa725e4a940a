"""For a machine with a GPU, where nothing is installed: what the tests there need of a package
that is not."""

from __future__ import annotations

import hashlib
import sys
from types import SimpleNamespace


class Sum:
    """Eight bytes, as xxhash's; both ends of a test's connection make the same."""

    def __init__(self, data: bytes = b"") -> None:
        self._hash = hashlib.blake2b(data, digest_size=8)
        self.update = self._hash.update

    def digest(self) -> bytes:
        return self._hash.digest()


try:
    import xxhash  # noqa: F401
except ModuleNotFoundError:
    sys.modules["xxhash"] = SimpleNamespace(xxh3_64=Sum)  # pyright: ignore[reportArgumentType]

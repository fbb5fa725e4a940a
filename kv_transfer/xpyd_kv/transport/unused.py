"""A transport that an engine names and never uses: its ranks do, over connections of their own.

Two engines must name one transport in common, and who was told to take one alone names no other. On
a control connection nothing moves beside the socket (`wire.connection`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xpyd_core.errors import ProtocolError, XpydError
from xpyd_kv.device.api import View
from xpyd_kv.transport.data_path import Fetch, Lender
from xpyd_kv.wire.messages import Hello


class UnusedPath:
    """See DataPath. `name`: of the transport."""

    lends = True

    def __init__(self, name: str) -> None:
        self.name = name

    def can_use(self, theirs: Hello) -> bool:
        """The ranks say it, each to each."""
        return True

    def lender(self) -> Lender:
        """Only connections that DATA moves on have one."""
        raise XpydError(f"an engine whose ranks move KV lends nothing over {self.name}")

    def borrower(self) -> UnusedBorrower:
        return UnusedBorrower()


class UnusedBorrower:
    """See Borrower. It is there from the peer's AUTH on, before LAYOUT says that it is not used."""

    takes_descriptors = False
    reopens = False

    def open(self, size_bytes: int, body: bytes, descriptors: Sequence[int]) -> None:
        raise ProtocolError("REGION to an engine whose ranks take DATA")

    def prepare(self, body: bytes, length: int) -> Callable[[Sequence[View] | None], Fetch]:
        raise ProtocolError("SHARED to an engine whose ranks take DATA")

    def close(self) -> None:
        """Nothing was opened."""

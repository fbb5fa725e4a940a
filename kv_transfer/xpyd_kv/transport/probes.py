"""PROBE's bytes: what P sends, and what D says of what it has read.

Random and made once for each process, in memory that P lends where it lends some: so D's digest
proves that the pair's own way for DATA brings this process's bytes. Owned by the endpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from hashlib import sha256

from xpyd_kv.transport.checksum import checksum
from xpyd_kv.wire.messages import MAX_PROBE_BYTES, Probe, Probed


class ProbeSource:
    """P's bytes. `room`: memory that it lends and that nothing else uses; at most MAX_PROBE_BYTES
    of it are taken."""

    def __init__(self, room: memoryview | None = None) -> None:
        view = (room or memoryview(bytearray(MAX_PROBE_BYTES)))[:MAX_PROBE_BYTES]
        view[:] = os.urandom(len(view))
        self.views = [view]
        self.digest = sha256(view).digest()
        self._checksum = checksum(self.views)

    def header(self, token: int) -> Callable[[], Probe]:
        """Makes the header when the frame's turn has come."""
        size = len(self.views[0])
        return partial(Probe, token=token, size_bytes=size, checksum=self._checksum)


def answer_of(probe: Probe, views: Iterable[memoryview], transport: str) -> Probed:
    """What D says of the bytes that it has read, moved by `transport`."""
    digest = sha256()
    for view in views:
        digest.update(view)
    return Probed(token=probe.token, digest=digest.digest(), transport=transport)

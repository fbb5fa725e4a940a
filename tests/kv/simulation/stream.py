"""One side of a simulated connection: what it has queued, and the frame that is under way."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from tests.kv.simulation.link import Control, Link, Pipe
from tests.kv.simulation.memory import SourceView, TargetView
from xpyd_core.request_id import Address
from xpyd_kv.plan.pairs import Pair
from xpyd_kv.transport.api import Done
from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.fit import pair_on, wire_layout

if TYPE_CHECKING:
    from tests.kv.simulation.endpoint import SimEndpoint

Queued = tuple[Callable[[], wire.Data | None], Sequence[SourceView], Done]


class Checksum:
    """Stands in for xxh3: eight bytes."""

    def __init__(self) -> None:
        self._crc = 0

    def update(self, data: bytes) -> None:
        self._crc = zlib.crc32(data, self._crc)

    def digest(self) -> bytes:
        return self._crc.to_bytes(8, "big")


class SimStream:
    """One side of a link: a Peer."""

    transport = "tcp"

    def __init__(
        self,
        endpoint: SimEndpoint,
        link: Link,
        *,
        address: Address | None,
        pipes: tuple[Pipe, Pipe],
    ) -> None:
        self.endpoint = endpoint
        self.link = link
        self.address = address
        self.pipe_in, self.pipe_out = pipes
        self.pipe_in.reader = self.pipe_out.writer = self
        self.hello: wire.Hello | None = None
        theirs = endpoint.process.world.plan.layout_of("P" if address is None else "D")
        self.layout = wire_layout(theirs, factors={}, max_tokens=4096)
        self.is_data = False
        self.transport = "tcp"
        self.is_up = False
        self.closing: str | None = None
        self.control: deque[Control] = deque()
        self.data: deque[Queued] = deque()
        # The frame under way to the peer, the sum of what is sent of it, its parts that are left,
        # and when the next may go.
        self.sending: Queued | None = None
        self.sum = Checksum()
        self.parts: deque[Sequence[SourceView]] = deque()
        self.next_part_at = 0.0
        self.part_s = 0.0
        # The frame under way from the peer.
        self.header: wire.Data | None = None
        self.views: Sequence[TargetView | memoryview] | None = None
        self.written = 0
        self.heard_at = endpoint.process.world.schedule.now

    @cached_property
    def pair(self) -> Pair | None:
        """As the handshake makes it."""
        assert self.hello is not None
        ours = self.endpoint.process.world.plan.layout_of("D" if self.address is None else "P")
        ours = wire_layout(ours, factors={}, max_tokens=4096)
        layouts = (self.layout, ours) if self.address is None else (ours, self.layout)
        return pair_on(*layouts, dialler=self.hello, acceptor=self.hello)

    @property
    def has_output(self) -> bool:
        return bool(self.sending or self.control or self.data)

    def count_writer(self, change: int) -> None:
        # A frame begins in its landing, whatever of it goes nowhere.
        if self.views:
            assert isinstance(self.views[0], TargetView)
            self.views[0].landing.writers += change


def write_into(views: Sequence[TargetView | memoryview], offset: int, data: bytes) -> None:
    """Put `data` at `offset` of the views; their landing must still be out. What is no landing's
    takes the bytes that belong nowhere."""
    for view in views:
        if not data:
            return
        if offset < len(view):
            target = view
            if isinstance(view, TargetView):
                assert not view.landing.is_over, f"a write into {view.landing.owner}'s old landing"
                target = view.view
            room = len(view) - offset
            target[offset : offset + len(data[:room])] = data[:room]
            data, offset = data[room:], 0
        else:
            offset -= len(view)

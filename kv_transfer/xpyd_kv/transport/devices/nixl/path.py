"""The data path `nixl`: P lends its registered cache, D reads it. Fills the seam of `data_path`.

Put together by the worker. No notification is used: D says COPIED on the connection, and until
then P's lease keeps what D reads.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

from xpyd_core.errors import UserError
from xpyd_kv.memory.device import View, is_on_host
from xpyd_kv.transport.devices.nixl import regions as region_body
from xpyd_kv.transport.devices.nixl.borrowing import Landings, NixlBorrower, landings
from xpyd_kv.transport.devices.nixl.library import Agent, Nixl, NixlError
from xpyd_kv.transport.devices.nixl.regions import Described, Row, region_of
from xpyd_kv.transport.host.data_path import DataPath, Lender, Lent, pack
from xpyd_kv.wire.frames import MAX_REGION_BODY_BYTES


class NixlPath(DataPath):
    """`unit_bytes`: one block of one layer.

    A P gives `lends_from`, its whole cache, which is registered here and until `close`, and beside
    it `spare_bytes` of ordinary memory for PROBEs: UserError when that fails. A D gives `lands_in`,
    its cache and landings, asked for at each connection; bytes that land elsewhere cost a
    registration for each frame.
    """

    name = "nixl"

    def __init__(
        self,
        library: Nixl,
        *,
        unit_bytes: int,
        lends_from: Sequence[View] = (),
        spare_bytes: int = 0,
        lands_in: Callable[[], Sequence[View]] = tuple,
    ) -> None:
        self._library = library
        self._unit_bytes = unit_bytes
        self._lands_in = lands_in
        # As long as they are registered they must not go away.
        self._kept = tuple(lends_from)
        self.spare: memoryview | None = None
        """Memory of a P that D's can read and that is not used."""
        if lends_from and is_on_host(lends_from) and spare_bytes:
            units = -(-spare_bytes // unit_bytes)
            whole = memoryview(mmap.mmap(-1, units * unit_bytes))
            self.spare = whole[:spare_bytes]
            self._kept = (*self._kept, whole)
        self._row = Row([region_of(view) for view in self._kept])
        self._agent: Agent | None = None
        self._body = b""
        if self._kept:
            self._register()

    @property
    def lends(self) -> bool:
        return self._agent is not None

    def lender(self) -> NixlLender:
        return NixlLender(self._row, self._body)

    def borrower(self) -> NixlBorrower:
        return NixlBorrower(self._library, self._landings)

    def close(self) -> None:
        """Deregister the lent memory, when no peer is left."""
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()
        self._kept = ()

    def _landings(self) -> Landings:
        return landings(map(region_of, self._lands_in()), self._unit_bytes)

    def _register(self) -> None:
        try:
            # The one side that others wait for: it answers them while our threads compute.
            agent = self._library.agent(has_progress_thread=True)
            agent.register(self._row.regions)
            body = region_body.pack(Described(self._row, self._unit_bytes, agent.metadata()))
        except NixlError as error:
            raise UserError(f"KV transport nixl: {error}") from error
        if len(body) > MAX_REGION_BODY_BYTES:
            agent.close()
            raise UserError(f"KV transport nixl: {len(body)} bytes describe the cache; too many")
        self._agent, self._body = agent, body


class NixlLender(Lender):
    def __init__(self, row: Row, body: bytes) -> None:
        self._row = row
        self._body = body

    def lent(self) -> Lent:
        return Lent(self._row.size_bytes, self._body)

    def places(self, views: Sequence[View], *, at_most: int) -> bytes | None:
        try:
            spans = [region_of(view) for view in views]
        except TypeError:
            return None  # Read-only, so not ours.
        runs = self._row.runs_of(spans, at_most=at_most)
        return None if runs is None else pack(runs)

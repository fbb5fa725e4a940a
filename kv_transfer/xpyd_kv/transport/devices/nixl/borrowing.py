"""D's side of `nixl`: one agent for each P, which reads what P lends into D's own memory.

An agent of its own, because ending it is all that stops a read: NIXL (1.5) gives a transfer's
handle back, and forgets its peer, while the bytes go on arriving. It is made on a thread of its
own, since registering much memory takes long; until then fetches wait.

See docs/adr/0016.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from xpyd_kv.memory.device import View
from xpyd_kv.spans import Span
from xpyd_kv.transport.devices.nixl import regions as region_body
from xpyd_kv.transport.devices.nixl.library import (
    Agent,
    Nixl,
    NixlError,
    Prepared,
    Remote,
    Transfer,
)
from xpyd_kv.transport.devices.nixl.regions import (
    Described,
    NixlRegion,
    Row,
    cuts,
    joined,
    region_of,
    unit_numbers,
)
from xpyd_kv.transport.host.data_path import Borrower, Fetch, Through, check_runs, unpack

_log = logging.getLogger(__name__)


class Landings(NamedTuple):
    """Our memory into which bytes may be read, by device; registered as long as an agent lives."""

    rows: dict[int, Row]
    unit_bytes: int


def landings(regions: Iterable[NixlRegion], unit_bytes: int) -> Landings:
    """Regions of any devices."""
    found: dict[int, list[NixlRegion]] = {}
    for region in regions:
        found.setdefault(region.device, []).append(region)
    return Landings({device: Row(its) for device, its in found.items()}, unit_bytes)


class NixlBorrower(Borrower):
    def __init__(self, library: Nixl, landings: Callable[[], Landings]) -> None:
        self._library = library
        self._landings = landings
        self._theirs: Described | None = None
        self._opening: _Opening | None = None

    def open(self, size_bytes: int, body: bytes, descriptors: Sequence[int]) -> None:
        self._theirs = region_body.unpack(body, size_bytes)
        self._opening = _Opening(self._library, self._theirs, self._landings())

    def prepare(self, body: bytes, length: int) -> Callable[[Sequence[View] | None], Fetch]:
        opening, theirs = self._opening, self._theirs
        assert opening is not None
        assert theirs is not None
        columns = unpack(body)
        check_runs(columns, theirs.row.size_bytes, length)
        runs = columns.each()

        def start(views: Sequence[View] | None) -> Fetch:
            return Through() if views is None else _Read(opening, runs, views)

        return start

    def close(self) -> None:
        if self._opening is not None:
            self._opening.close()


class _Opened:
    """An agent that has met its P."""

    def __init__(self, agent: Agent, remote: Remote, theirs: Described, ours: Landings) -> None:
        self.agent = agent
        self.theirs = theirs.row
        self.ours = ours.rows
        self._remote = remote
        self._unit = unit = theirs.unit_bytes
        self._our_units: dict[int, Prepared] = {}
        if ours.unit_bytes != unit or not theirs.row.is_of_units(unit):
            return
        for device, row in ours.rows.items():
            if row.is_of_units(unit):
                self._our_units[device] = agent.prepare(row, unit)
        self._their_units = agent.prepare(theirs.row, unit, remote)

    def read_units(
        self, device: int, places: Sequence[Span], runs: Sequence[Span]
    ) -> Transfer | None:
        """Begin to read whole units into the row of `device`; None where these are not."""
        units = self._our_units.get(device)
        ours, theirs = (unit_numbers(side, self._unit) for side in (places, runs))
        if units is None or ours is None or theirs is None:
            return None
        return self.agent.read_units(units, ours, self._their_units, theirs)

    def read(self, targets: Sequence[NixlRegion], runs: Sequence[Span]) -> Transfer:
        """Begin to read any bytes into memory of one device that is registered."""
        pairs = list(cuts(targets, self.theirs.spans_of(runs)))
        to, sources = zip(*pairs, strict=True)
        return self.agent.read(to, sources, self._remote)


class _Opening:
    """The agent of one connection, on its way or there."""

    def __init__(self, library: Nixl, theirs: Described, ours: Landings) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._opened: _Opened | None = None
        self._fault = ""
        thread = threading.Thread(
            target=self._open, args=(library, theirs, ours), name="xpyd-kv-nixl", daemon=True
        )
        thread.start()

    def opened(self) -> _Opened | None:
        """The agent, or None while it is made. NixlError when it could not be."""
        if self._fault:
            raise NixlError(self._fault)
        return self._opened

    def close(self) -> None:
        """End the agent; one that is still being made is ended by who makes it."""
        with self._lock:
            self._is_closed = True
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.agent.close()

    def _open(self, library: Nixl, theirs: Described, ours: Landings) -> None:
        agent = None
        try:
            agent = library.agent(has_progress_thread=False)
            for row in ours.rows.values():
                agent.register(row.regions)
            opened = _Opened(agent, agent.meet(theirs.metadata), theirs, ours)
        except Exception as error:  # The end of a thread: who polls raises it.
            _log.warning("no NIXL agent for a peer: %s", error)
            if agent is not None:
                agent.close()
            self._fault = f"no NIXL agent: {error}"
            return
        with self._lock:
            if not self._is_closed:
                self._opened = opened
                return
        agent.close()


class _Read(Fetch):
    def __init__(self, opening: _Opening, runs: Sequence[Span], views: Sequence[View]) -> None:
        self._opening = opening
        self._runs = runs
        # The views are kept: what is read into them must not go away before.
        self._views = views
        self._transfer: Transfer | None = None
        self._guests: list[NixlRegion] = []

    def poll(self) -> bool:
        opened = self._opening.opened()
        if opened is None:
            return False
        transfer = self._transfer
        if transfer is None:
            transfer = self._transfer = self._begin(opened)
        if not opened.agent.is_done(transfer):
            return False
        opened.agent.deregister(self._guests)
        self._guests = []
        return True

    def _begin(self, opened: _Opened) -> Transfer:
        targets = [region_of(view) for view in self._views if len(view)]
        device = targets[0].device
        if any(target.device != device for target in targets):
            raise NixlError("a landing of more than one device")
        row = opened.ours.get(device)
        places = None if row is None else row.runs_of(targets, at_most=len(targets))
        if row is None or places is None:
            # Not ours to keep registered: for the time of this frame only.
            self._guests = joined(targets)
            opened.agent.register(self._guests)
            return opened.read(self._guests, self._runs)
        transfer = opened.read_units(device, places, self._runs)
        return transfer or opened.read(row.spans_of(places), self._runs)

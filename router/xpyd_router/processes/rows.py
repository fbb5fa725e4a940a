"""Counters that all processes read: one row for each, written by it alone. Pure: memory is given.

A row has the worker's place in the limits (columns of `admission.gate`) and, for each slot, what it
has in flight on the instance there, and how many of those requests met a death. A cell is an int64
at a multiple of eight bytes: it is read and written whole. Nothing is locked: a sum may be of two
moments that lie some microseconds apart.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from xpyd_router.admission.gate import COLUMNS
from xpyd_router.fleet.loads import Work
from xpyd_router.fleet.registry import MAX_INSTANCES, InstanceKey

SLOTS = MAX_INSTANCES + 1024
"""More than instances: a slot that became free rests, till every worker has noticed."""
_SLOT_CELLS = 4
SUSPECTS = 3
"""The cell behind a slot's Work: requests that met a death and are tried there."""
_HEAD_CELLS = 8
_ROW_CELLS = _HEAD_CELLS + SLOTS * _SLOT_CELLS
CELL_BYTES = 8


def size_bytes(processes: int) -> int:
    """Memory for so many rows."""
    return processes * _ROW_CELLS * CELL_BYTES


class Rows:
    """All rows. `memory` has `size_bytes` bytes and begins with zeros."""

    def __init__(self, memory: memoryview, processes: int) -> None:
        cells = memory.cast("q")
        self._rows = [
            cells[number * _ROW_CELLS : (number + 1) * _ROW_CELLS] for number in range(processes)
        ]

    def admission(self, number: int) -> memoryview:
        """The limits' part of a row."""
        return self._rows[number][:COLUMNS]

    def other_admissions(self, number: int) -> list[memoryview]:
        """That part of all other rows."""
        return [row[:COLUMNS] for row in self.others(number)]

    def row(self, number: int) -> memoryview:
        """A whole row."""
        return self._rows[number]

    def others(self, number: int) -> list[memoryview]:
        """All rows but this one."""
        return [row for place, row in enumerate(self._rows) if place != number]

    def zero(self, number: int) -> None:
        """Its process ended, and with it all that it had in flight."""
        row = self._rows[number]
        row.cast("B")[:] = bytes(row.nbytes)


def cell_of(slot: int) -> int:
    """The first of a slot's cells."""
    if not 0 <= slot < SLOTS:
        raise ValueError(f"no slot {slot}")
    return _HEAD_CELLS + slot * _SLOT_CELLS


def write(row: memoryview | list[int], cell: int, work: Work) -> None:
    """Set a slot."""
    row[cell], row[cell + 1], row[cell + 2] = work


def total(rows: list[memoryview], cell: int) -> Work:
    """A slot's sum over rows."""
    requests = prompt_tokens = output_tokens = 0
    for row in rows:
        requests += row[cell]
        prompt_tokens += row[cell + 1]
        output_tokens += row[cell + 2]
    return Work(requests, prompt_tokens, output_tokens)


class Slots:
    """Who has which slot. The owner's: workers are told with each beat."""

    def __init__(self) -> None:
        self._of: OrderedDict[InstanceKey, int] = OrderedDict()
        self._free = deque(range(SLOTS))

    def __len__(self) -> int:
        return len(self._of)

    def of(self, key: InstanceKey) -> int:
        """The instance's slot; it gets the one that has been free for longest."""
        slot = self._of.get(key)
        if slot is None:
            slot = self._of[key] = self._free.popleft()
        return slot

    def free(self, key: InstanceKey) -> None:
        """The instance left."""
        slot = self._of.pop(key, None)
        if slot is not None:
            self._free.append(slot)

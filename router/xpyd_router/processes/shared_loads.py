"""Counters that all processes read, and loads that count what the other workers have in flight.

Each process has one row in shared memory, written by it alone: its place in the limits (columns of
`admission.Gate`), the use of each client key (columns of `keys.client`), and for each slot what it
has in flight on the instance there, and how many of those requests met the death of an instance. A
cell is an int64 at a multiple of eight bytes: it is read and written whole. Nothing is locked: a
sum may be of two moments some microseconds apart.

A worker's own calls count at once, those of others as of the last `refresh`: a moment old.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable

from xpyd_core.messages import Heartbeat
from xpyd_router.admission import COLUMNS
from xpyd_router.fleet.instances import MAX_INSTANCES, InstanceKey
from xpyd_router.fleet.loads import Load, LoadTable, Work
from xpyd_router.keys.client import KEY_COLUMNS, KEY_SLOTS

SLOTS = MAX_INSTANCES + 1024
"""More than instances: a slot that became free rests, till every worker has noticed."""
_SLOT_CELLS = 4
SUSPECTS = 3
"""The cell behind a slot's Work: requests that met a death and are tried there."""
_HEAD_CELLS = 8
_KEYS_AT = _HEAD_CELLS + SLOTS * _SLOT_CELLS
_ROW_CELLS = _KEYS_AT + KEY_SLOTS * KEY_COLUMNS
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
        """The part of a row that admission's limits use."""
        return self._rows[number][:COLUMNS]

    def other_admissions(self, number: int) -> list[memoryview]:
        """The limits' part of all other rows."""
        return [row[:COLUMNS] for row in self.others(number)]

    def keys(self, number: int) -> memoryview:
        """The part of a row that limits of client keys use."""
        return self._rows[number][_KEYS_AT:]

    def other_keys(self, number: int) -> list[memoryview]:
        """That part of all other rows."""
        return [row[_KEYS_AT:] for row in self.others(number)]

    def row(self, number: int) -> memoryview:
        """A whole row."""
        return self._rows[number]

    def others(self, number: int) -> list[memoryview]:
        """All rows but this one."""
        return [row for place, row in enumerate(self._rows) if place != number]

    def total(self, slot: int) -> Work:
        """What all processes have in flight on the instance of a slot."""
        return total(self._rows, cell_of(slot))

    def zero(self, number: int) -> None:
        """Clear the row of a process that ended: nothing of it is in flight."""
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
    """The instances' slots. The parent has it: workers get a slot's number with each beat."""

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


def make_memory(processes: int) -> int:
    """A descriptor of zeros for so many rows; not inherited by itself."""
    descriptor = os.memfd_create("xpyd-router-loads", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size_bytes(processes))
    return descriptor


def map_rows(descriptor: int, processes: int) -> Rows:
    """The rows in it, for as long as the process lives."""
    return Rows(memoryview(mmap.mmap(descriptor, size_bytes(processes))), processes)


_LEAST_AGE_S = 0.001
"""What others have is read again after this time: some dozen requests at full speed."""
_SHARE = 50
"""The pause is also this many times as long as reading took: reading takes 2 % of a core at most.
"""


class SharedLoad(Load):
    """A Load with a slot in its process's row."""

    __slots__ = ("_cell", "_row")

    def __init__(self, key: InstanceKey, row: memoryview, cell: int) -> None:
        super().__init__(key)
        self._row: memoryview | list[int] = row
        self._cell = cell
        write(row, cell, self.own)
        self.set_suspects(0)

    def begin(self, prompt_tokens: int, output_tokens: int = 0) -> None:
        super().begin(prompt_tokens, output_tokens)
        self._write()

    def end(self, prompt_tokens: int, output_tokens: int = 0) -> None:
        super().end(prompt_tokens, output_tokens)
        self._write()

    def refresh(self, others: list[memoryview]) -> None:
        """Count what other processes have there now."""
        self.set_others(total(others, self._cell))

    def set_suspects(self, count: int) -> None:
        """How many requests that met a death this process tries there."""
        self._row[self._cell + SUSPECTS] = count

    def is_suspected_by(self, others: list[memoryview]) -> bool:
        """Whether other processes try such a request there."""
        cell = self._cell + SUSPECTS
        return any(row[cell] for row in others)

    def unbind(self) -> None:
        """The instance left: another gets its slot soon. Calls that run still end here."""
        write(self._row, self._cell, Work())
        self.set_suspects(0)
        self._row, self._cell = [0, 0, 0, 0], 0

    def _write(self) -> None:
        row, cell = self._row, self._cell
        row[cell] = self._requests
        row[cell + 1] = self._prompt_tokens
        row[cell + 2] = self._output_tokens


class SharedLoadTable(LoadTable):
    """The owner of all loads of worker `number`."""

    def __init__(self, rows: Rows, number: int) -> None:
        super().__init__()
        self._row = rows.row(number)
        self._others = rows.others(number)
        self._slots: dict[InstanceKey, int] = {}
        self._bound: dict[InstanceKey, SharedLoad] = {}
        self._next_s = 0.0

    def bind(self, key: InstanceKey, slot: int) -> None:
        """The instance's slot, before its first `take`."""
        self._slots[key] = slot

    def take(self, key: InstanceKey, beat: Heartbeat) -> None:
        """See LoadTable; a beat's numbers include what other processes have there."""
        if (load := self._bound.get(key)) is not None:
            load.refresh(self._others)
        super().take(key, beat)

    def keep(self, members: Collection[InstanceKey]) -> list[InstanceKey]:
        """See LoadTable; an instance that left gives its slot back."""
        gone = super().keep(members)
        for key in gone:
            self._bound.pop(key).unbind()
            del self._slots[key]
        return gone

    def refresh(self) -> None:
        """Read what all others have now."""
        others = self._others
        for load in self._bound.values():
            load.refresh(others)

    def refresh_when_old(self, clock: Callable[[], float]) -> None:
        """Refresh all loads if the last refresh is more than a moment old. `clock`: monotonic
        seconds.
        """
        began_s = clock()
        if began_s >= self._next_s:
            self.refresh()
            ended_s = clock()
            self._next_s = ended_s + max(_LEAST_AGE_S, _SHARE * (ended_s - began_s))

    def refresh_one(self, key: InstanceKey) -> None:
        """Refresh the load of one instance."""
        if (load := self._bound.get(key)) is not None:
            load.refresh(self._others)

    def suspect(self, keys: Iterable[InstanceKey]) -> None:
        keys = tuple(keys)
        super().suspect(keys)
        self._write_suspects(keys)

    def clear(self, keys: Iterable[InstanceKey]) -> None:
        keys = tuple(keys)
        super().clear(keys)
        self._write_suspects(keys)

    def suspected(self) -> frozenset[InstanceKey]:
        """See LoadTable; with what the other processes try now."""
        others = self._others
        theirs = (key for key, load in self._bound.items() if load.is_suspected_by(others))
        return super().suspected().union(theirs)

    def _write_suspects(self, keys: Iterable[InstanceKey]) -> None:
        for key in keys:
            if (load := self._bound.get(key)) is not None:
                load.set_suspects(self._suspects[key])

    def _make(self, key: InstanceKey) -> Load:
        load = SharedLoad(key, self._row, cell_of(self._slots[key]))
        load.refresh(self._others)
        self._bound[key] = load
        return load

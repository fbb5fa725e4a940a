"""Loads that count what the other workers have in flight, too. Pure.

A worker's own calls count at once, others' as of the last `refresh`: a moment old. Each write goes
to the worker's own row as well, where the others read it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from xpyd_core.messages import Heartbeat
from xpyd_router.fleet.loads import Load, LoadTable, Work
from xpyd_router.fleet.registry import InstanceKey, Snapshot
from xpyd_router.policy.base import Alone, Pair, Policy, Want
from xpyd_router.processes.rows import SUSPECTS, Rows, cell_of, total, write

_LEAST_AGE_S = 0.001
"""What others have is read again after this time: some dozen requests at full speed."""
_SHARE = 50
"""And after so many times as long as reading took: it takes a fiftieth of a core at most."""


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
        """See Load."""
        super().begin(prompt_tokens, output_tokens)
        row, cell = self._row, self._cell
        row[cell] = self._requests
        row[cell + 1] = self._prompt_tokens
        row[cell + 2] = self._output_tokens

    def end(self, prompt_tokens: int, output_tokens: int = 0) -> None:
        """See Load."""
        super().end(prompt_tokens, output_tokens)
        row, cell = self._row, self._cell
        row[cell] = self._requests
        row[cell + 1] = self._prompt_tokens
        row[cell + 2] = self._output_tokens

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
        """The instance left: its slot is somebody else's soon. Calls that run still end here."""
        write(self._row, self._cell, Work())
        self.set_suspects(0)
        self._row, self._cell = [0, 0, 0, 0], 0


class SharedLoadTable(LoadTable):
    """The owner of all loads of worker `number`."""

    def __init__(self, rows: Rows, number: int) -> None:
        super().__init__()
        self._row = rows.row(number)
        self._others = rows.others(number)
        self._slots: dict[InstanceKey, int] = {}
        self._bound: dict[InstanceKey, SharedLoad] = {}

    def bind(self, key: InstanceKey, slot: int) -> None:
        """The instance's slot, before its first `take`."""
        self._slots[key] = slot

    def take(self, key: InstanceKey, beat: Heartbeat) -> None:
        """See LoadTable; a beat's figures hold what others have there."""
        if (load := self._bound.get(key)) is not None:
            load.refresh(self._others)
        super().take(key, beat)

    def keep(self, members: Collection[InstanceKey]) -> list[InstanceKey]:
        """See LoadTable; who left gives its slot back."""
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

    def refresh_one(self, key: InstanceKey) -> None:
        """The same for one instance."""
        if (load := self._bound.get(key)) is not None:
            load.refresh(self._others)

    def suspect(self, keys: Iterable[InstanceKey]) -> None:
        """See LoadTable."""
        keys = tuple(keys)
        super().suspect(keys)
        self._write_suspects(keys)

    def clear(self, keys: Iterable[InstanceKey]) -> None:
        """See LoadTable."""
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


class FreshPolicy:
    """A Policy that is asked with loads no older than a moment."""

    def __init__(self, policy: Policy, loads: SharedLoadTable, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._loads = loads
        self._clock = clock
        self._next_s = 0.0
        self.needs_session = policy.needs_session
        self.needs_marks = policy.needs_marks
        self.needs_paces = policy.needs_paces
        self.placed = policy.placed

    def pick(self, snapshot: Snapshot, want: Want) -> Pair | Alone | None:
        """See Policy."""
        began_s = self._clock()
        if began_s >= self._next_s:
            self._loads.refresh()
            ended_s = self._clock()
            self._next_s = ended_s + max(_LEAST_AGE_S, _SHARE * (ended_s - began_s))
        return self._policy.pick(snapshot, want)

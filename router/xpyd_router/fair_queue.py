"""The queue of requests that wait for a place: by priority, then in fair turns of the keys. Pure.

Each key has an Account of the tokens that it was served, divided by its weight (a virtual token
counter). Of the accounts that wait in one priority, the one with the least is next; of one account
the request that came first. An account that was idle begins at the virtual time, that of the
account served last: it saves nothing up. So a flood of one key delays that key alone
(docs/adr/0080).

Without keys all requests are of one account, and the order is that of their arrival.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar


class Cost(NamedTuple):
    """What one request takes of the limits while it runs, and of the line while it waits."""

    requests: int = 1
    tokens: int = 0
    """Prompt and allowed output, counted or estimated."""
    body_bytes: int = 0
    """What it holds of memory while it waits."""


Cells = list[int] | memoryview
"""Counters of one process, which others read where it is shared memory."""


@dataclass(eq=False, slots=True)
class Account:
    """The requests of one key. Its queue alone writes what follows `weight`."""

    weight: float = 1.0
    served: float = 0.0
    """Tokens that it was charged, by weight; a request's own are known at its end."""
    waiting: int = 0
    _cell: Cells = field(default_factory=lambda: [0])
    _elsewhere: Callable[[], int] | None = None

    def place(self, cell: Cells, elsewhere: Callable[[], int] | None) -> None:
        """Count those that have a place in this cell from now on. `elsewhere`: how many have one
        in other processes."""
        cell[0] = self._cell[0]
        self._cell, self._elsewhere = cell, elsewhere

    @property
    def running(self) -> int:
        """Its requests that have a place, in all processes."""
        elsewhere = self._elsewhere
        return self._cell[0] if elsewhere is None else self._cell[0] + elsewhere()

    def add_running(self, count: int) -> None:
        """The gate alone calls this."""
        self._cell[0] += count


@dataclass(eq=False)
class Entry:
    """One request that waits. `priority`: lower is earlier."""

    cost: Cost
    priority: int
    account: Account


E = TypeVar("E", bound=Entry)
_MOST_INVALID = 64
"""More items in the heap that are no turn's any more, than accounts, are cleared away."""


class _Line(Generic[E]):
    """Those of one priority. `_turns` is a heap with a valid item for each account that waits: the
    one whose number is in `_numbers`. An item that is too early is corrected when it is looked at.
    `_by_length`: accounts by how many of them wait, so that the longest is known.
    """

    def __init__(self) -> None:
        self._accounts: dict[Account, OrderedDict[E, None]] = {}
        self._turns: list[tuple[float, int, Account]] = []
        self._numbers: dict[Account, int] = {}
        self._made = 0
        self._by_length: dict[int, dict[Account, None]] = {}
        self._longest = 0

    @property
    def is_empty(self) -> bool:
        return not self._accounts

    @property
    def first(self) -> E:
        turns, accounts, numbers = self._turns, self._accounts, self._numbers
        while True:
            served, number, account = turns[0]
            if numbers.get(account) != number:
                heapq.heappop(turns)
            elif served < account.served:
                heapq.heappop(turns)
                self.set_turn(account)
            else:
                return next(iter(accounts[account]))

    def first_of(self, may: Callable[[Account], bool]) -> E | None:
        """Whose turn it is of the accounts that `may`. Looks at all that wait."""
        those = [account for account in self._accounts if may(account)]
        if not those:
            return None
        return next(iter(self._accounts[min(those, key=lambda account: account.served)]))

    def set_turn(self, account: Account) -> None:
        """Put an account that waits where it belongs by what it was served."""
        self._made += 1
        self._numbers[account] = self._made
        heapq.heappush(self._turns, (account.served, self._made, account))
        if len(self._turns) > 2 * len(self._numbers) + _MOST_INVALID:
            self._turns = [one for one in self._turns if self._numbers.get(one[2]) == one[1]]
            heapq.heapify(self._turns)

    @property
    def last(self) -> E:
        """The newest of the account that has most."""
        account = next(iter(self._by_length[self._longest]))
        return next(reversed(self._accounts[account]))

    def length(self, account: Account) -> int:
        """How many of the account wait."""
        return len(self._accounts.get(account, ()))

    def add(self, entry: E) -> None:
        account = entry.account
        entries = self._accounts.get(account)
        if entries is None:
            entries = self._accounts[account] = OrderedDict()
            self.set_turn(account)
        entries[entry] = None
        self._note(account, len(entries) - 1, len(entries))

    def remove(self, entry: E) -> bool:
        account = entry.account
        entries = self._accounts.get(account)
        if entries is None or entry not in entries:
            return False
        del entries[entry]
        if not entries:
            del self._accounts[account]
            del self._numbers[account]
        self._note(account, len(entries) + 1, len(entries))
        return True

    def _note(self, account: Account, before: int, now: int) -> None:
        by_length = self._by_length
        if before:
            same = by_length[before]
            del same[account]
            if not same:
                del by_length[before]
        if now:
            by_length.setdefault(now, {})[account] = None
        if now > self._longest:
            self._longest = now
        elif self._longest not in by_length:
            self._longest -= 1  # to `now`: one account changed, by one


class FairQueue(Generic[E]):
    """See the module. Add, first, last and remove in O(log n), but for one memmove of the distinct
    priorities."""

    def __init__(self) -> None:
        self._lines: dict[int, _Line[E]] = {}
        self._priorities: list[int] = []
        self._entries = 0
        self._bytes = 0
        self._time = 0.0
        """The virtual time."""

    def __len__(self) -> int:
        return self._entries

    @property
    def held_bytes(self) -> int:
        """Bodies of all waiting requests."""
        return self._bytes

    @property
    def first(self) -> E:
        """Whose turn it is. The line must not be empty."""
        return self._lines[self._priorities[0]].first

    def first_of(self, may: Callable[[Account], bool]) -> E | None:
        """Whose turn it is of the accounts that `may`, of the first priority. The line must not be
        empty."""
        return self._lines[self._priorities[0]].first_of(may)

    @property
    def last(self) -> E:
        """Who gives its place in a full queue: of the lowest priority the newest of the account
        that has most. The line must not be empty."""
        return self._lines[self._priorities[-1]].last

    def gives_way(self, last: E, entry: E) -> bool:
        """Whether `last`, which waits, has to leave the full queue for `entry`: it is of lower
        priority, or of an account that has more in the queue also when `entry` is there."""
        if last.priority != entry.priority:
            return last.priority > entry.priority
        line = self._lines[last.priority]
        return line.length(last.account) > line.length(entry.account) + 1

    def add(self, entry: E) -> None:
        """Add the entry behind the others of its account and priority."""
        line = self._lines.get(entry.priority)
        if line is None:
            line = self._lines[entry.priority] = _Line[E]()
            insort(self._priorities, entry.priority)
        account = entry.account
        if not account.waiting:
            self._wake(account)
        account.waiting += 1
        line.add(entry)
        self._entries += 1
        self._bytes += entry.cost.body_bytes

    def remove(self, entry: E) -> bool:
        """Whether the request waited in the queue."""
        line = self._lines.get(entry.priority)
        if line is None or not line.remove(entry):
            return False
        if line.is_empty:
            del self._lines[entry.priority]
            del self._priorities[bisect_left(self._priorities, entry.priority)]
        entry.account.waiting -= 1
        self._entries -= 1
        self._bytes -= entry.cost.body_bytes
        return True

    def charge(self, account: Account, tokens: int) -> None:
        """A request of the account begins, that may take so many tokens."""
        if not account.waiting:
            self._wake(account)
        self._time = max(self._time, account.served)
        account.served += tokens / account.weight

    def settle(self, account: Account, charged: int, used: int) -> None:
        """The request took `used` tokens. In a line of lower priority than the first, the account
        keeps its turn."""
        account.served += (used - charged) / account.weight
        if used < charged and account.waiting:
            line = self._lines[self._priorities[0]]
            if line.length(account):
                line.set_turn(account)

    def _wake(self, account: Account) -> None:
        """Give an account of which none waits the virtual time, where it is behind."""
        account.served = max(account.served, self._time)

"""Responses that are kept for `previous_response_id`: in memory, up to a size. Pure.

Each is kept for an owner, the name of a client's key; "" where clients need none. To another one it
is not there.
A process has its own; nothing is written anywhere. Of the owner that has most, the response that
was used longest ago goes first: a flood of one owner's takes nothing from the others. A long body
is read on a thread, so that `get` may be called there: it is one operation of an ordered dict.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

_ENTRY_BYTES = 1024
"""What an entry takes besides its texts, at least."""
_OBJECT_BYTES = 100


class Kept(NamedTuple):
    """What is kept of a response."""

    body: bytes
    """The response object."""
    items: tuple[bytes, ...]
    """The items of its request's input."""
    system: tuple[str, ...]
    """What was said to the model before the first turn, but for `instructions`: those of one
    request are not the next one's."""
    turns: tuple[bytes, ...]
    """The messages of the chat behind it."""
    calls: tuple[str, ...]
    """Ids of all tool calls in it."""
    owner: str = ""
    """Whose it is."""

    @property
    def size_bytes(self) -> int:
        """Its part of the limit. Messages of earlier responses count anew, though they are shared:
        the limit holds whichever of them goes first."""
        texts = (self.body, *self.items, *self.turns, *self.calls)
        count = len(self.system) + len(texts)
        system_bytes = 4 * sum(map(len, self.system))
        return _ENTRY_BYTES + sum(map(len, texts)) + system_bytes + _OBJECT_BYTES * count


class _Shelf:
    """What is kept for one owner."""

    def __init__(self) -> None:
        self.kept: OrderedDict[str, Kept] = OrderedDict()
        self.used_bytes = 0


class ResponseStore:
    """See the module."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._of: dict[str, _Shelf] = {}
        self.used_bytes = 0

    def __len__(self) -> int:
        return sum(len(shelf.kept) for shelf in self._of.values())

    def put(self, response_id: str, kept: Kept) -> bool:
        """Keep it; False where it alone is above the limit."""
        size = kept.size_bytes
        if size > self._limit_bytes:
            return False
        self.remove(response_id, kept.owner)
        while self.used_bytes + size > self._limit_bytes:
            owner, fullest = max(self._of.items(), key=lambda one: one[1].used_bytes)
            _, oldest = fullest.kept.popitem(last=False)
            self._forget(owner, fullest, oldest)
        shelf = self._of.setdefault(kept.owner, _Shelf())
        shelf.kept[response_id] = kept
        shelf.used_bytes += size
        self.used_bytes += size
        return True

    def get(self, response_id: str, owner: str = "") -> Kept | None:
        """What is kept of it for this owner, which was used just now."""
        shelf = self._of.get(owner)
        kept = None if shelf is None else shelf.kept.get(response_id)
        if shelf is not None and kept is not None:
            try:
                shelf.kept.move_to_end(response_id)
            except KeyError:  # gone meanwhile
                return kept
        return kept

    def remove(self, response_id: str, owner: str = "") -> bool:
        """Keep it no more; False where it is not kept for this owner."""
        shelf = self._of.get(owner)
        kept = None if shelf is None else shelf.kept.pop(response_id, None)
        if shelf is None or kept is None:
            return False
        self._forget(owner, shelf, kept)
        return True

    def _forget(self, owner: str, shelf: _Shelf, kept: Kept) -> None:
        shelf.used_bytes -= kept.size_bytes
        self.used_bytes -= kept.size_bytes
        if not shelf.kept:
            del self._of[owner]

"""Deadlines by key, values that expire, and tombstones of transfers that are over. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from typing import Generic, TypeVar

import msgspec

from xpyd_core.request_id import TransferKey

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
_MIN_STALE = 64


class Alarm:
    """The earliest time at which the Handler's tick has something to do. All Deadlines of one
    endpoint share it: each moves it to an earlier time, and the tick sets it anew."""

    def __init__(self) -> None:
        self.at = -math.inf


class Deadlines(Generic[K]):
    """Deadlines by key. A heap in which each key has an entry at its deadline or before: a later
    deadline, the usual change, costs no entry; what comes up too early goes back."""

    def __init__(self, alarm: Alarm | None = None) -> None:
        self._alarm = alarm or Alarm()
        self._at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._at)

    def set(self, key: K, at: float) -> None:
        """Set or move the deadline of `key` to `at`. Hot path."""
        before = self._at.get(key)
        self._at[key] = at
        if before is not None and before <= at:
            return
        if at < self._alarm.at:
            self._alarm.at = at
        self._push(key, at)
        if len(self._heap) > 2 * len(self._at) + _MIN_STALE:
            self._heap = [(time, order, key) for order, (key, time) in enumerate(self._at.items())]
            heapq.heapify(self._heap)
            self._order = len(self._heap)

    def clear(self, key: K) -> None:
        """Remove the deadline of `key`."""
        self._at.pop(key, None)

    def due(self, now: float) -> list[K]:
        """Remove and return the keys whose deadline has come, earliest first."""
        keys: list[K] = []
        while (first := self.next()) is not None and first <= now:
            key = heapq.heappop(self._heap)[2]
            del self._at[key]
            keys.append(key)
        return keys

    def next(self) -> float | None:
        """The earliest deadline, or None."""
        while self._heap:
            entry_at, _, key = self._heap[0]
            at = self._at.get(key)
            if at == entry_at:
                return at
            heapq.heappop(self._heap)
            if at is not None and at > entry_at:
                self._push(key, at)
        return None

    def _push(self, key: K, at: float) -> None:
        self._order += 1
        heapq.heappush(self._heap, (at, self._order, key))


class Remembered(Generic[K, V]):
    """Values that are forgotten `ttl_s` after they were last set: tombstones."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._values: dict[K, tuple[float, V]] = {}
        self.due_s = math.inf
        """When `purge` has something to do, at the earliest."""

    def __len__(self) -> int:
        return len(self._values)

    def set(self, key: K, value: V, now: float) -> None:
        """Remember `value` from now on."""
        if now >= self.due_s:
            self.purge(now)
        # Moved to the end: the dict stays ordered by time of expiry.
        self._values.pop(key, None)
        self._values[key] = (now + self._ttl_s, value)
        self.due_s = min(self.due_s, now + self._ttl_s)

    def get(self, key: K, now: float) -> V | None:
        """The value, or None where there is none or it has expired."""
        expiry, value = self._values.get(key, (0.0, None))
        return value if now < expiry else None

    def drop(self, key: K) -> None:
        """Forget it now."""
        self._values.pop(key, None)

    def purge(self, now: float) -> None:
        """Forget what has expired."""
        while self._values:
            key = next(iter(self._values))
            self.due_s = self._values[key][0]
            if self.due_s > now:
                return
            del self._values[key]
        self.due_s = math.inf


class _Stone(msgspec.Struct, frozen=True):
    last_epoch: int
    # The request of this key has gone on: no later epoch is of use either.
    closed: bool


class Tombstones:
    """Ended keys and released uuids, each remembered for `ttl_s`."""

    def __init__(self, ttl_s: float) -> None:
        self._keys: Remembered[TransferKey, _Stone] = Remembered(ttl_s)
        self._uuids: Remembered[str, bool] = Remembered(ttl_s)

    def __len__(self) -> int:
        return len(self._keys) + len(self._uuids)

    def end(self, key: TransferKey, epoch: int, now: float) -> None:
        """Remember that this epoch is over; a later one may be offered."""
        stone = self._keys.get(key, now)
        if stone is not None:
            epoch = max(epoch, stone.last_epoch)
        self._keys.set(key, _Stone(epoch, stone is not None and stone.closed), now)

    def close(self, key: TransferKey, now: float) -> None:
        """Refuse all OFFERs of this key from now on."""
        stone = self._keys.get(key, now)
        self._keys.set(key, _Stone(stone.last_epoch if stone else 0, True), now)

    def release(self, uuid: str, now: float) -> None:
        """Refuse all OFFERs of this uuid from now on."""
        self._uuids.set(uuid, True, now)

    def refusal(self, key: TransferKey, epoch: int, now: float) -> str | None:
        """Why an OFFER is refused: `released`, `finished` or `stale`; None when it is not."""
        if self._uuids.get(key.uuid, now):
            return "released"
        stone = self._keys.get(key, now)
        if stone is None:
            return None
        if stone.closed:
            return "finished"
        return "stale" if epoch <= stone.last_epoch else None

    def purge(self, now: float) -> None:
        """Forget what has expired."""
        self._keys.purge(now)
        self._uuids.purge(now)

"""What the reconciler remembers of a fleet from turn to turn. No I/O; times are arguments.

All of it spares calls or keeps a pace. A new process begins without it and comes to the same
writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, cast

from xpyd_operator.kube.kinds import Obj
from xpyd_operator.kube.look import Mark, Place, Reading, read
from xpyd_operator.kube.pacing import RecentEvents, StatusPace
from xpyd_operator.objects import Settings

TAKEN_S = 15.0
"""How long a name that another holds is not tried again."""
KEY_RETRY_S = 60.0
CONTESTED_APPLIES = 3
CONTESTED_S = 60.0
"""So many applies to one object within this time, and it rests until they are so long ago."""


class Memory:
    """One fleet's. Owned by the turn that runs."""

    def __init__(self, now: float) -> None:
        self.pace = StatusPace(now)
        self.told = RecentEvents()
        self.settled: dict[Place, Mark] = {}
        self._reading: tuple[str, int, Reading] | None = None
        self._taken: dict[Place, tuple[float, str]] = {}
        self._applies: dict[Place, deque[float]] = {}
        self._key_tried_at: float | None = None

    def read(self, document: Obj, settings: Settings) -> Reading:
        """The document's reading, made once for each generation."""
        metadata = document["metadata"]
        uid, generation = str(metadata["uid"]), int(metadata.get("generation") or 0)
        if self._reading is None or self._reading[:2] != (uid, generation):
            if self._reading is not None and self._reading[0] != uid:
                # Another fleet of the same name.
                self.settled.clear()
                self._key_tried_at = None
            self._reading = (uid, generation, read(document, settings))
        return self._reading[2]

    def taken(self, now: float) -> Mapping[Place, str]:
        """Names that were found in other hands not long ago."""
        self._taken = {p: item for p, item in self._taken.items() if now - item[0] < TAKEN_S}
        return {place: text for place, (_, text) in self._taken.items()}

    def found_taken(self, place: Place, holder: str, now: float) -> None:
        """A name is in other hands."""
        self._taken[place] = (now, holder)

    def contested(self, now: float) -> frozenset[Place]:
        """Places that are applied again and again, because someone changes them back."""
        return frozenset(
            place
            for place, times in self._applies.items()
            if len(times) == CONTESTED_APPLIES and now - times[0] < CONTESTED_S
        )

    def applied(self, place: Place, mark: Mark, now: float) -> None:
        """An object was applied. An apply of something else begins the count anew."""
        before = self.settled.get(place)
        if before is None or before.digest != mark.digest:
            self._applies[place] = deque(maxlen=CONTESTED_APPLIES)
        self._applies.setdefault(place, deque(maxlen=CONTESTED_APPLIES)).append(now)
        self.settled[place] = mark

    def forget_places(self, present: frozenset[Place]) -> None:
        """Keep only what concerns objects that are there."""
        self.settled = {p: mark for p, mark in self.settled.items() if p in present}
        self._applies = {p: times for p, times in self._applies.items() if p in present}

    def tried_key(self, now: float) -> None:
        """The KV key's Secret was made, or was there."""
        self._key_tried_at = now

    def has_key(self, status: Mapping[str, Any]) -> bool:
        """Whether the KV key's Secret was made once."""
        return self._key_tried_at is not None or bool(status.get("kvKeySecret"))

    def wants_key(self, reading: Reading, status: Mapping[str, Any], now: float) -> bool:
        """Whether to try to create it: at first, and when pods cannot mount their volumes."""
        if reading.fleet is None or reading.fleet.spec.kv_transfer.key_secret_ref is not None:
            return False
        if not self.has_key(status):
            return True
        if self._key_tried_at is not None and now - self._key_tried_at < KEY_RETRY_S:
            return False
        conditions = cast("list[dict[str, Any]]", status.get("conditions") or [])
        return any(condition.get("reason") == "VolumesNotMounted" for condition in conditions)

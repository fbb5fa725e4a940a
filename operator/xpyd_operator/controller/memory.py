"""What the reconciler remembers of a fleet from turn to turn. No I/O; times are arguments.

All of it spares calls or keeps a pace. A new process begins without it and comes to the same
writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, cast

from xpyd_operator.controller.kinds import Obj
from xpyd_operator.controller.look import Mark, Place, Reading, read
from xpyd_operator.controller.pacing import RecentEvents, StatusPace
from xpyd_operator.controller.writes import Effect, Write, effect_of
from xpyd_operator.manifests import Settings
from xpyd_operator.manifests.names import kv_secret_name

TAKEN_S = 15.0
"""How long a name that another holds is not tried again."""
KEY_RETRY_S = 60.0
MOST_MOVED = 5
CONTESTED_WRITES = 10
CONTESTED_S = 60.0
"""The same done to one object so often within this time, and it rests until that is so long ago.
A pool that is scaled up and down by turns comes nowhere near."""


class Memory:
    """One fleet's. Owned by the turn that runs."""

    def __init__(self, now: float) -> None:
        self.pace = StatusPace(now)
        self.told = RecentEvents()
        self.settled: dict[Place, Mark] = {}
        self._reading: tuple[str, int, Reading] | None = None
        self._taken: dict[Place, tuple[float, str]] = {}
        self._done: dict[Effect, deque[float]] = {}
        self._key_tried_at: float | None = None
        self._turns_moved = 0

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

    def contested(self, now: float) -> frozenset[Effect]:
        """What is done again and again, because somebody undoes it."""
        return frozenset(
            effect
            for effect, times in self._done.items()
            if len(times) == CONTESTED_WRITES and now - times[0] < CONTESTED_S
        )

    def wrote(self, write: Write, now: float) -> None:
        """A write was done."""
        effect = effect_of(write)
        if effect is not None:
            self._done.setdefault(effect, deque(maxlen=CONTESTED_WRITES)).append(now)

    def is_stuck(self, *, moved: bool) -> bool:
        """Whether turn after turn meets something else than it saw. `moved`: this one did.

        Once or twice somebody else wrote meanwhile; so often it is an admission webhook that says
        409 or 404, or a watch that brings nothing new.
        """
        self._turns_moved = self._turns_moved + 1 if moved else 0
        return self._turns_moved > MOST_MOVED

    def forget_old(self, present: frozenset[Place], now: float) -> None:
        """Keep only what concerns objects that are there, and writes of late."""
        self.settled = {p: mark for p, mark in self.settled.items() if p in present}
        self._done = {e: times for e, times in self._done.items() if now - times[-1] < CONTESTED_S}

    def tried_key(self, now: float) -> None:
        """The KV key's Secret was made, or was there."""
        self._key_tried_at = now

    def has_key(self, status: Mapping[str, Any], own: str) -> bool:
        """Whether the KV key's Secret, `own`, was made once."""
        return self._key_tried_at is not None or status.get("kvKeySecret") == own

    def wants_key(self, reading: Reading, uid: str, status: Mapping[str, Any], now: float) -> bool:
        """Whether to try to create it: at first, and when pods cannot mount their volumes."""
        if reading.fleet is None or not reading.fleet.spec.kv_transfer.has_own_key:
            return False
        own = kv_secret_name(reading.fleet.name, uid)
        if not self.has_key(status, own):
            return True
        if self._key_tried_at is not None and now - self._key_tried_at < KEY_RETRY_S:
            return False
        # Another trouble may be the reason that a condition names; its message has them all.
        waits = f"Secret {own}"
        conditions = cast("list[dict[str, Any]]", status.get("conditions") or [])
        return any(
            condition.get("reason") == "VolumesNotMounted"
            or waits in str(condition.get("message") or "")
            for condition in conditions
        )

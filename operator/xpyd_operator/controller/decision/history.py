"""What the reconciler remembers of a fleet from turn to turn, and the pace of its status writes.

All of it spares calls, keeps a pace or counts time: a new process starts without it and comes to
the same writes, to those that wait for a deadline later. The pods of a starting fleet change its
counts all the time, and each write of a status costs every watcher of the fleet. So statuses are
written at growing distances while a fleet starts, and at once when a condition changes that
`kubectl wait` may wait for. Times are arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from xpyd_operator.controller.decision.kinds import Obj
from xpyd_operator.controller.decision.standby import Standby
from xpyd_operator.controller.decision.state import AppliedVersion, ObjectRef, ParsedDocument, read
from xpyd_operator.controller.decision.writes import (
    WITHOUT,
    CreateKey,
    DeleteKey,
    Effect,
    Write,
    effect_of,
)
from xpyd_operator.manifests.names import KV_FOLDER, Settings
from xpyd_operator.status.children import Raw, fields, rows, text
from xpyd_operator.status.drains import DrainWatch
from xpyd_operator.status.events import EventText
from xpyd_operator.status.problems import SeenState, first_seen

_STEPS_S = (2.0, 6.0, 12.0)
"""Quiet after the first, second ... write; the last one for all that follow."""
_URGENT_S = 0.25
"""Quiet before an urgent write."""
_CALM_S = 30.0
"""After this time without a write, a fleet begins with the first step again."""
_POOLS_S = 5.0
"""Between two writes of the pools' statuses. An HPA looks every 15 s."""
_POOLS_READY_S = 1.0
"""The same pause where the fleet is ready: its pools' statuses must not deny it for long."""
_FIRST_POOLS_S = 30.0
"""A new fleet's pools get their first status when the fleet is ready, or after this time."""

_URGENT_CONDITIONS = ("Ready", "Available", "Degraded", "KeyRotated", "UpToDate")
_REPEAT_S = 60.0
_MOST_EVENTS = 20
"""Events of one fleet within _REPEAT_S."""


class StatusPace:
    """The pace of one fleet's status writes, its pools' included. `now`: when it was first seen."""

    def __init__(self, now: float) -> None:
        self._last = float("-inf")
        self._writes = 0
        self._first_pools_at = now + _FIRST_POOLS_S
        self._pools_at: float | None = None

    def wait_s(self, now: float, *, urgent: bool) -> float:
        """Seconds until a changed status may be written; 0: now."""
        if self._writes == 0:
            return 0.0
        step = _STEPS_S[min(self._writes, len(_STEPS_S)) - 1]
        return max(0.0, self._last + (_URGENT_S if urgent else step) - now)

    def wait_of_pools_s(self, now: float, *, ready: bool) -> float:
        """As wait_s, for the pools alone. `ready`: whether the fleet is."""
        if self._pools_at is None:
            return 0.0 if ready else max(0.0, self._first_pools_at - now)
        return max(0.0, self._pools_at + (_POOLS_READY_S if ready else _POOLS_S) - now)

    def wrote(self, now: float) -> None:
        """The fleet's status was written."""
        self._writes = 1 if now - self._last > _CALM_S else self._writes + 1
        self._last = now

    def wrote_pools(self, now: float) -> None:
        """The pools' statuses were written."""
        self._pools_at = now


def is_urgent(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> bool:
    """Whether `after` has news that a client may wait for, as a condition or another generation,
    or that the operator does."""
    if not before or before.get("observedGeneration") != after.get("observedGeneration"):
        return True
    if before.get("defaults") != after.get("defaults"):
        return True
    old, new = _conditions_of(before), _conditions_of(after)
    # Each decision about a canary is an Event of its own, and Events are between two statuses.
    was, canary = fields(before, "canary"), fields(after, "canary")
    if any(was.get(name) != canary.get(name) for name in ("revision", "phase", "step")):
        return True
    return any(
        old.get(name, {}).get("status") != new.get(name, {}).get("status")
        for name in _URGENT_CONDITIONS
    )


def _conditions_of(status: Raw | None) -> dict[str, Raw]:
    """A status' conditions by type."""
    return {str(condition.get("type")): condition for condition in rows(status, "conditions")}


class RecentEvents:
    """The Events that were posted about one fleet within the last minute. Bounded."""

    def __init__(self) -> None:
        self._posted: deque[tuple[float, EventText]] = deque(maxlen=_MOST_EVENTS)

    def is_new(self, event: EventText, now: float) -> bool:
        """Whether to post it: no repetition, and not above the limit. Remembers it if so."""
        while self._posted and now - self._posted[0][0] > _REPEAT_S:
            self._posted.popleft()
        if len(self._posted) == _MOST_EVENTS or any(posted == event for _, posted in self._posted):
            return False
        self._posted.append((now, event))
        return True


def is_ready(status: Mapping[str, Any]) -> bool:
    """Whether the status says that the fleet is as it should be."""
    return _conditions_of(status).get("Ready", {}).get("status") == "True"


TAKEN_S = 15.0
"""How long a name that another object holds is not tried again."""
KEY_RETRY_S = 60.0
MOST_MOVED = 5
CONTESTED_WRITES = 10
CONTESTED_S = 60.0
"""After so many equal writes to one object within this time, the write pauses as long; then each
single one does. A pool that is scaled up and down by turns stays far below."""
REMOVALS = 3
REMOVALS_S = 3600.0
"""The same for the removal of what other clients add, as each one may replace a pool's pods."""


def _bound(effect: Effect) -> tuple[int, float]:
    """How often within how many seconds a write may have this effect."""
    is_removal = effect[2].startswith(WITHOUT)
    return (REMOVALS, REMOVALS_S) if is_removal else (CONTESTED_WRITES, CONTESTED_S)


class FleetHistory:
    """The history of one fleet, owned by the turn that runs."""

    def __init__(self, now: float) -> None:
        self.pace = StatusPace(now)
        self.posted = RecentEvents()
        self.drains = DrainWatch()
        self.settled: dict[ObjectRef, AppliedVersion] = {}
        self._parsed: tuple[str, int, Settings, ParsedDocument] | None = None
        self._taken: dict[ObjectRef, tuple[float, str]] = {}
        self._done: dict[Effect, deque[float]] = {}
        self._contests: dict[Effect, tuple[float, Write]] = {}
        """Effects that were repeated too often: the last write, and when it was done."""
        self._pods_seen: dict[str, SeenState] | None = None
        """Of the last look at the pods, None: there was none."""
        self._key_tried_at: float | None = None
        self.made_keys: Mapping[str, str] = {}
        """Ids of the KV keys that were made, by slot."""
        self.deleted_key = ""
        """The slot whose Secret was deleted last."""
        self._turns_moved = 0
        self.standby = Standby()
        self.stood_by_for = ""
        """The release that reconciles the fleet in place of this one, as an Event has told."""

    def read(self, document: Obj, settings: Settings) -> ParsedDocument:
        """The parsed document, parsed once for each generation and settings."""
        metadata = document["metadata"]
        uid, generation = str(metadata["uid"]), int(metadata.get("generation") or 0)
        if self._parsed is None or self._parsed[:3] != (uid, generation, settings):
            if self._parsed is not None and self._parsed[0] != uid:
                # Another fleet of the same name.
                self.settled.clear()
                self._pods_seen = None
                self._key_tried_at = None
                self.made_keys, self.deleted_key = {}, ""
            self._parsed = (uid, generation, settings, read(document, settings))
        return self._parsed[3]

    def ages(self, pods: Iterable[Raw], now: float) -> Mapping[str, float]:
        """For how many seconds the state of each pod has been seen, by the pod's uid. Remembers
        these pods and no others."""
        self._pods_seen = first_seen(pods, self._pods_seen, now)
        return {uid: now - since for uid, (_, since) in self._pods_seen.items()}

    def taken(self, now: float) -> Mapping[ObjectRef, str]:
        """Names that another object was found to hold not long ago."""
        self._taken = {p: item for p, item in self._taken.items() if now - item[0] < TAKEN_S}
        return {place: text for place, (_, text) in self._taken.items()}

    def found_taken(self, place: ObjectRef, holder: str, now: float) -> None:
        """Another object holds a name."""
        self._taken[place] = (now, holder)

    def contested(self, now: float) -> frozenset[Effect]:
        """Effects that are repeated because another client undoes them."""
        return frozenset(
            effect for effect, (at, _) in self._contests.items() if now - at < _bound(effect)[1]
        )

    def contests(self, now: float) -> dict[Effect, tuple[Write, float]]:
        """Contested writes that were done not long ago, and for how many seconds that will be so.

        They may be undone at any moment, so the contest goes on although nothing is to be written.
        """
        return {
            effect: (write, CONTESTED_S - (now - at))
            for effect, (at, write) in self._contests.items()
            if now - at < CONTESTED_S
        }

    def wrote(self, write: Write, now: float) -> None:
        """A write was done."""
        effect = effect_of(write)
        if effect is None:
            return
        most, within_s = _bound(effect)
        times = self._done.setdefault(effect, deque(maxlen=most))
        times.append(now)
        is_often = len(times) == most and now - times[0] < within_s
        if is_often or effect in self._contests:
            self._contests[effect] = (now, write)

    def is_stuck(self, *, moved: bool) -> bool:
        """Whether each turn finds another state than it read. `moved`: this turn did.

        Once or twice another client wrote meanwhile. More often it is an admission webhook that
        answers 409 or 404, or a watch that brings nothing new.
        """
        self._turns_moved = self._turns_moved + 1 if moved else 0
        return self._turns_moved > MOST_MOVED

    def forget_old(self, present: frozenset[ObjectRef], now: float) -> None:
        """Keep only what concerns objects that exist, and recent writes."""
        self.settled = {p: mark for p, mark in self.settled.items() if p in present}
        self._done = {e: t for e, t in self._done.items() if now - t[-1] < _bound(e)[1]}
        self._contests = {
            e: item for e, item in self._contests.items() if now - item[0] < 2 * _bound(e)[1]
        }

    def changed_key(
        self, write: CreateKey | DeleteKey, now: float, made: Mapping[str, str]
    ) -> None:
        """A KV key's Secret was made, or was there, or was deleted. `made`: ids by slot."""
        self.made_keys = {**self.made_keys, **made}
        if isinstance(write, DeleteKey):
            self.deleted_key = write.slot
            self.made_keys = {s: i for s, i in self.made_keys.items() if s != write.slot}
        else:
            self.deleted_key = ""
            self._key_tried_at = now

    def has_key(self, status: Mapping[str, Any], own: str) -> bool:
        """Whether the KV key's Secret, `own`, was made once."""
        return self._key_tried_at is not None or status.get("kvKeySecret") == own

    def wants_key(
        self, parsed: ParsedDocument, own: str, status: Mapping[str, Any], now: float
    ) -> bool:
        """Whether to try to create it: at first, and when pods cannot start without it."""
        if parsed.fleet is None or not parsed.fleet.spec.kv_transfer.has_own_key:
            return False
        if not self.has_key(status, own):
            return True
        if self._key_tried_at is not None and now - self._key_tried_at < KEY_RETRY_S:
            return False
        # A condition's reason names only the first problem; its message has all of them.
        waits = (f"ConfigMap {own}", f"KV key file {KV_FOLDER}/")
        return any(
            condition.get("reason") == "VolumesNotMounted"
            or any(sign in text(condition, "message") for sign in waits)
            for condition in rows(status, "conditions")
        )

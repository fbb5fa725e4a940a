"""The cache of fleets and their objects, and the feed that fills it from the watches.

Lists, events and the answers to the operator's own writes enter the cache, whichever is newer; the
reconciler reads it. One event loop owns it. The feed knows which first lists have arrived. Before
all of them have, it wakes no fleet: an object that exists but is not in the cache yet would be
created again. No decision and no call is made here.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from xpyd_operator.controller.decision.kinds import FLEET, FLEET_LABEL, WATCHED, Kind, Obj
from xpyd_operator.status.children import is_leaving


@dataclass(frozen=True)
class Listed:
    """A list, or a chunk of one. `last`: objects that no chunk had do not exist."""

    kind: Kind
    namespace: str | None
    objects: Sequence[Obj]
    version: int
    first: bool
    last: bool


@dataclass(frozen=True)
class Present:
    """An object was added or changed."""

    kind: Kind
    obj: Obj


@dataclass(frozen=True)
class Gone:
    """An object was deleted, or lost the label that it is watched by."""

    kind: Kind
    obj: Obj


@dataclass(frozen=True)
class Missing:
    """The API server has no such kind any more."""

    kind: Kind


@dataclass(frozen=True)
class Unlisted:
    """The API server did not list the kind: no right to it, or a fault."""

    kind: Kind


Message = Listed | Present | Gone | Missing | Unlisted


T = TypeVar("T")

_MAX_REMOVED = 4096
"""Deletions that are remembered: our own until the watch delivers them, too, and the watch's,
because an older list may still hold the object."""


class FleetKey(NamedTuple):
    """A fleet's namespace and name."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass
class _FleetEntry:
    document: Obj | None = None
    children: dict[Kind, dict[str, Obj]] = field(default_factory=dict[Kind, dict[str, Obj]])


class Cache:
    """Objects by fleet. Methods that change it return the fleets that need a turn.

    Every object carries its resourceVersion. An older version than the one held is ignored, so that
    an event that was sent before our own write does not undo the write's answer.
    """

    def __init__(self, kinds: Iterable[Kind] = WATCHED) -> None:
        self._fleets: dict[FleetKey, _FleetEntry] = {}
        self._where: dict[Kind, dict[tuple[str, str], FleetKey]] = {kind: {} for kind in kinds}
        self._removed: OrderedDict[str, None] = OrderedDict()
        self._gone: OrderedDict[str, int] = OrderedDict()

    def document(self, key: FleetKey) -> Obj | None:
        """The fleet's object, None: there is none."""
        entry = self._fleets.get(key)
        return entry.document if entry else None

    def documents(self) -> Iterator[FleetKey]:
        """Every fleet that has an object."""
        return (key for key, entry in self._fleets.items() if entry.document is not None)

    def children(self, key: FleetKey) -> Mapping[Kind, Mapping[str, Obj]]:
        """The fleet's objects by kind and name. Read-only, and valid only until the next await."""
        entry = self._fleets.get(key)
        return entry.children if entry else {}

    def find(self, kind: Kind, namespace: str, name: str) -> Obj | None:
        """One object of any fleet."""
        key = self._where[kind].get((namespace, name))
        if key is None:
            return None
        return self._held(kind, key, name)

    def put(self, kind: Kind, obj: Obj) -> set[FleetKey]:
        """Take a trimmed object that exists; the result is empty if nothing is new."""
        namespace, name = obj["metadata"]["namespace"], obj["metadata"]["name"]
        before = self.find(kind, namespace, name)
        if before is not None and not _is_newer(obj, before):
            return set()
        if (_version(obj) or 0) <= self._gone.get(obj["metadata"]["uid"], -1):
            # From a list or an answer that is older than the object's deletion.
            return set()
        if obj["metadata"]["uid"] in self._removed and not is_leaving(obj):
            return set()
        key = self._key(kind, obj)
        touched: set[FleetKey] = set()
        old = self._where[kind].get((namespace, name))
        if old is not None and old != key:
            touched |= self._take_out(kind, namespace, name)
        if key is None:
            return touched
        self._hold(kind, key, name, obj)
        self._where[kind][namespace, name] = key
        if before is None or not _same(before, obj):
            touched.add(key)
        return touched

    def remove(self, kind: Kind, obj: Obj) -> set[FleetKey]:
        """Drop `obj`, which the watch reported as deleted."""
        metadata = obj["metadata"]
        self._removed.pop(metadata["uid"], None)
        # Not for ever: a watch with a selector also reports objects that lost their label.
        _note(self._gone, metadata["uid"], _version(obj) or 0)
        before = self.find(kind, metadata["namespace"], metadata["name"])
        if before is None or before["metadata"]["uid"] != metadata["uid"]:
            return set()
        return self._take_out(kind, metadata["namespace"], metadata["name"])

    def removed_by_us(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Drop an object whose deletion was accepted, before the watch delivers that."""
        before = self.find(kind, namespace, name)
        if before is not None and before["metadata"]["uid"] == uid:
            self._take_out(kind, namespace, name)
        _note(self._removed, uid, None)

    def keep_only(
        self, kind: Kind, namespace: str | None, uids: frozenset[str], version: int
    ) -> set[FleetKey]:
        """Drop what a list of `kind` did not have: it was deleted while no watch was open.

        `namespace`: where the list was made, None: everywhere. `version`: the list's own; what is
        younger than it cannot have been in it.
        """
        touched: set[FleetKey] = set()
        for place, name in list(self._where[kind]):
            held = self.find(kind, place, name)
            if held is None or namespace not in (None, place):
                continue
            if held["metadata"]["uid"] not in uids and (_version(held) or 0) <= version:
                touched |= self._take_out(kind, place, name)
        return touched

    def count(self, kind: Kind) -> int:
        """How many objects of `kind` are held."""
        return len(self._where[kind])

    def _key(self, kind: Kind, obj: Obj) -> FleetKey | None:
        metadata = obj["metadata"]
        if kind == FLEET:
            return FleetKey(metadata["namespace"], metadata["name"])
        fleet: str = metadata.get("labels", {}).get(FLEET_LABEL, "")
        return FleetKey(metadata["namespace"], fleet) if fleet else None

    def _held(self, kind: Kind, key: FleetKey, name: str) -> Obj | None:
        entry = self._fleets[key]
        return entry.document if kind == FLEET else entry.children.get(kind, {}).get(name)

    def _hold(self, kind: Kind, key: FleetKey, name: str, obj: Obj) -> None:
        entry = self._fleets.setdefault(key, _FleetEntry())
        if kind == FLEET:
            entry.document = obj
        else:
            entry.children.setdefault(kind, {})[name] = obj

    def _take_out(self, kind: Kind, namespace: str, name: str) -> set[FleetKey]:
        key = self._where[kind].pop((namespace, name))
        entry = self._fleets[key]
        if kind == FLEET:
            entry.document = None
        else:
            del entry.children[kind][name]
            if not entry.children[kind]:
                del entry.children[kind]
        if entry.document is None and not entry.children:
            del self._fleets[key]
        return {key}


def _version(obj: Obj) -> int | None:
    """The resourceVersion as a number: since 1.35 Kubernetes documents that they compare so, and
    they have always ascended. None: a server that uses other versions.
    """
    text: str = obj["metadata"].get("resourceVersion", "")
    return int(text) if text.isdecimal() else None


def _is_newer(obj: Obj, before: Obj) -> bool:
    new, old = _version(obj), _version(before)
    return new is None or old is None or new > old


def _same(before: Obj, after: Obj) -> bool:
    """Whether they differ in their resourceVersion at most."""
    if before.keys() != after.keys():
        return False
    for name in before:
        if name == "metadata":
            continue
        if before[name] != after[name]:
            return False
    old, new = before["metadata"], after["metadata"]
    return {**old, "resourceVersion": ""} == {**new, "resourceVersion": ""}


def _note(uids: OrderedDict[str, T], uid: str, what: T) -> None:
    uids[uid] = what
    while len(uids) > _MAX_REMOVED:
        uids.popitem(last=False)


logger = logging.getLogger(__name__)

_ListScope = tuple[Kind, str | None]
"""What one list is of: a kind in a namespace, or everywhere."""


class Feed:
    """Owned by the cache's loop. `wake(key, urgent)`; urgent: its document changed."""

    def __init__(self, cache: Cache, wake: Callable[[FleetKey, bool], None]) -> None:
        self._cache = cache
        self._wake_one = wake
        self._outstanding: dict[Kind, set[str | None]] = {}
        self._waived: set[Kind] = set()
        self._parts: dict[_ListScope, set[str]] = {}
        self.listed: frozenset[Kind] = frozenset()
        """Kinds whose first lists have come."""

    def expect(self, kinds: Iterable[Kind], places: Sequence[str | None]) -> None:
        """Watches of `kinds` begin; each will bring a list for every place."""
        for kind in kinds:
            self._outstanding[kind] = set(places)

    def waive(self, kind: Kind) -> None:
        """Do not wait for an optional kind that the API server does not list."""
        if kind.optional and kind not in self._waived and kind not in self.listed:
            logger.warning("%s cannot be listed; fleets that need them wait", kind.plural)
            self._waived.add(kind)
            self._wake(self._cache.documents())

    def forget(self, kind: Kind) -> None:
        """The server no longer has the kind, nor its objects."""
        self._outstanding.pop(kind, None)
        self._waived.discard(kind)
        self._parts = {place: uids for place, uids in self._parts.items() if place[0] != kind}
        self.listed -= {kind}
        self._cache.keep_only(kind, None, frozenset(), sys.maxsize)
        # It may have been the last missing kind: wakes until now were dropped.
        self._wake(self._cache.documents())

    def missing(self) -> list[str]:
        """Kinds whose first lists are still missing."""
        waits = self._outstanding.items()
        return sorted(k.plural for k, places in waits if places and k not in self._waived)

    @property
    def is_synced(self) -> bool:
        """Whether all first lists are in."""
        return bool(self._outstanding) and not self.missing()

    def receive(self, message: Listed | Present | Gone) -> None:
        """Take one message."""
        match message:
            case Listed():
                self._take_list(message)
            case Present(kind, obj):
                self._wake(self._cache.put(kind, obj), urgent=kind == FLEET)
            case Gone(kind, obj):
                self._wake(self._cache.remove(kind, obj), urgent=kind == FLEET)

    def _take_list(self, part: Listed) -> None:
        for obj in part.objects:
            self._wake(self._cache.put(part.kind, obj), urgent=part.kind == FLEET)
        uids = {str(obj["metadata"]["uid"]) for obj in part.objects}
        if not (part.first and part.last):
            # A whole list may arrive while another arrives in parts.
            place = (part.kind, part.namespace)
            if not part.first:
                uids |= self._parts.get(place, set())
            self._parts[place] = uids
            if not part.last:
                return
            del self._parts[place]
        gone = self._cache.keep_only(part.kind, part.namespace, frozenset(uids), part.version)
        self._wake(gone)
        self._note_list(part.kind, part.namespace)

    def _note_list(self, kind: Kind, namespace: str | None) -> None:
        places = self._outstanding.get(kind)
        if places is None or namespace not in places:
            return
        places.discard(namespace)
        if places:
            return
        self.listed |= {kind}
        self._waived.discard(kind)
        if self.is_synced:
            logger.info("all lists are in: %d fleets", self._cache.count(FLEET))
            self._wake(self._cache.documents())

    def _wake(self, keys: Iterable[FleetKey], *, urgent: bool = False) -> None:
        if self.is_synced:
            for key in list(keys):
                self._wake_one(key, urgent)

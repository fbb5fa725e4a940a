"""What the watches tell, into the cache; and who is to be woken by it.

It knows which first lists are in. Before all of them are, nobody is woken: what is there but was
not yet heard of would be created again.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence

from xpyd_operator.controller.cache import Cache, FleetKey
from xpyd_operator.controller.inbox import Gone, Listed, Present
from xpyd_operator.controller.kinds import FLEET, Kind

logger = logging.getLogger(__name__)

_Place = tuple[Kind, str | None]
"""What one list is of: a kind in a namespace, or everywhere."""


class Feed:
    """Owned by the cache's loop. `wake(key, urgent)`; urgent: its document changed."""

    def __init__(self, cache: Cache, wake: Callable[[FleetKey, bool], None]) -> None:
        self._cache = cache
        self._wake_one = wake
        self._outstanding: dict[Kind, set[str | None]] = {}
        self._waived: set[Kind] = set()
        self._parts: dict[_Place, set[str]] = {}
        self.listed: frozenset[Kind] = frozenset()
        """Kinds whose first lists are in."""

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
        """The server has the kind no more, and none of its objects."""
        self._outstanding.pop(kind, None)
        self._waived.discard(kind)
        self._parts = {place: uids for place, uids in self._parts.items() if place[0] != kind}
        self.listed -= {kind}
        self._cache.keep_only(kind, None, frozenset(), sys.maxsize)
        # It may have been the last that was waited for: wakes meanwhile were dropped.
        self._wake(self._cache.documents())

    def missing(self) -> list[str]:
        """Kinds that are not listed yet and have to be."""
        waits = self._outstanding.items()
        return sorted(k.plural for k, places in waits if places and k not in self._waived)

    @property
    def is_synced(self) -> bool:
        """Whether all first lists are in."""
        return bool(self._outstanding) and not self.missing()

    def hear(self, message: Listed | Present | Gone) -> None:
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
            # One that comes whole stands beside one that comes in parts.
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

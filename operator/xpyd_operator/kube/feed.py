"""What the watches tell, into the cache; and who is to be woken by it.

It knows which first lists are in. Before all of them are, nobody is woken: what is there but was
not yet heard of would be created again.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence

from xpyd_operator.kube.cache import Cache, FleetKey
from xpyd_operator.kube.inbox import Gone, Listed, Present
from xpyd_operator.kube.kinds import FLEET, Kind

logger = logging.getLogger(__name__)

_Place = tuple[Kind, str | None]
"""What one list is of: a kind in a namespace, or everywhere."""


class Feed:
    """Owned by the cache's loop. `wake(key, urgent)`; urgent: its document changed."""

    def __init__(self, cache: Cache, wake: Callable[[FleetKey, bool], None]) -> None:
        self._cache = cache
        self._wake_one = wake
        self._expected = False
        self._missing: set[_Place] = set()
        self._parts: dict[_Place, set[str]] = {}
        self.listed: frozenset[Kind] = frozenset()
        """Kinds whose first lists are in."""

    def expect(self, kinds: Iterable[Kind], places: Sequence[str | None]) -> None:
        """Watches of `kinds` begin; each will bring a list for every place."""
        self._expected = True
        self._missing.update((kind, place) for kind in kinds for place in places)

    def forget(self, kind: Kind) -> None:
        """The server has the kind no more, and none of its objects."""
        self._missing = {place for place in self._missing if place[0] != kind}
        self._parts = {place: uids for place, uids in self._parts.items() if place[0] != kind}
        self.listed -= {kind}
        self._wake(self._cache.keep_only(kind, None, frozenset(), sys.maxsize))

    def missing(self) -> list[str]:
        """Kinds that every cluster has and that are not listed yet."""
        return sorted({kind.plural for kind, _ in self._missing if not kind.optional})

    @property
    def is_synced(self) -> bool:
        """Whether all first lists are in."""
        return self._expected and not self._missing

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
        place = (part.kind, part.namespace)
        if part.first:
            self._parts[place] = set()
        uids = self._parts.setdefault(place, set())
        for obj in part.objects:
            uids.add(obj["metadata"]["uid"])
            self._wake(self._cache.put(part.kind, obj), urgent=part.kind == FLEET)
        if not part.last:
            return
        del self._parts[place]
        gone = self._cache.keep_only(part.kind, part.namespace, frozenset(uids), part.version)
        self._wake(gone)
        if place in self._missing:
            self._missing.remove(place)
            self._first_list(part.kind)

    def _first_list(self, kind: Kind) -> None:
        if all(other != kind for other, _ in self._missing):
            self.listed |= {kind}
        if not self._missing:
            logger.info("all lists are in: %d fleets", self._cache.count(FLEET))
            self._wake(self._cache.documents())

    def _wake(self, keys: Iterable[FleetKey], *, urgent: bool = False) -> None:
        if self.is_synced:
            for key in list(keys):
                self._wake_one(key, urgent)

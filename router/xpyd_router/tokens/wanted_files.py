"""Which tokenizer files the child must have, and which engine to fetch them from. Pure.

Files are known by the compatibility key, which names the checkpoint. They come from an engine that
is Ready; when it leaves (a restart may bring another chat template or block size) they are fetched
again from one that lives, and used meanwhile. `service` does what this says. Engines without files
are known by a 404, or are not asked (docs/adr/0057).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from xpyd_core.request_id import Address
from xpyd_router.fleet.instances import Instance, InstanceKey

MAX_KEPT = 8
_REFRESH_S = 10.0
"""Between two fetches of the same files: a fleet that restarts asks once."""
_MAX_BACKOFF_DOUBLINGS = 9


class Source(NamedTuple):
    """An engine that has the files."""

    instance: InstanceKey
    http: Address


class NextFetch(NamedTuple):
    """Fetch `key` from `source` now."""

    key: str
    source: Source


@dataclass(eq=False)
class _Entry:
    sources: tuple[Source, ...] = ()
    is_loaded: bool = False
    loaded_from: InstanceKey | None = None
    not_before_s: float = 0.0
    failures: int = 0
    """Since the last success: which engine is next, and how long to wait."""
    strikes: int = 0
    """How often the child died of these files. Never reset: they would kill it again."""

    @property
    def is_wanted(self) -> bool:
        """Whether an engine has the files, and the child not those of a living one."""
        is_fresh = self.is_loaded and any(s.instance == self.loaded_from for s in self.sources)
        return bool(self.sources) and not is_fresh


@dataclass(eq=False)
class WantedFiles:
    """The files that the child has and those that it lacks, of at most `max_kept` checkpoints."""

    max_kept: int = MAX_KEPT
    _entries: dict[str, _Entry] = field(default_factory=dict[str, _Entry])
    _lacking: set[InstanceKey] = field(default_factory=set[InstanceKey])
    """Engines that said that they have no files. A restart is another key."""
    without: InstanceKey | None = None
    """An engine that cannot be asked for files: it says neither compatibility nor incarnation."""

    def see(self, instances: Iterable[Instance]) -> list[str]:
        """Take notice of the instances in the fleet; the keys to be forgotten for want of room.

        Checkpoints beyond `max_kept` wait until one has no engine any more.
        """
        sources: dict[str, list[Source]] = {}
        present: set[InstanceKey] = set()
        for instance in instances:
            beat = instance.beat
            present.add(instance.key)
            if beat.state != "Ready" or instance.key in self._lacking:
                continue
            # Engines that do not beat have a version for compatibility, whatever their model.
            if not beat.compatibility or not instance.key.incarnation:
                self.without = instance.key
            else:
                source = Source(instance.key, instance.http)
                sources.setdefault(beat.compatibility, []).append(source)
        self._lacking &= present
        for key, entry in self._entries.items():
            entry.sources = tuple(sources.pop(key, ()))
        forgotten: list[str] = []
        for key, found in sources.items():
            if len(self._entries) >= self.max_kept:
                unused = next((k for k, e in self._entries.items() if not e.sources), None)
                if unused is None:
                    break
                del self._entries[unused]
                forgotten.append(unused)
            self._entries[key] = _Entry(tuple(found))
        return forgotten

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing that a child would be of use for."""
        return not any(entry.sources for entry in self._entries.values())

    def is_loaded(self, key: str) -> bool:
        """Whether the child has the files."""
        entry = self._entries.get(key)
        return entry is not None and entry.is_loaded

    def next_fetch(self, now: float) -> NextFetch | None:
        """What to fetch now, if anything; after a failure from the next engine."""
        for key, entry in self._entries.items():
            if entry.is_wanted and entry.not_before_s <= now:
                return NextFetch(key, entry.sources[entry.failures % len(entry.sources)])
        return None

    def loaded(self, fetch: NextFetch, now: float) -> None:
        """The child has the files."""
        if entry := self._entries.get(fetch.key):
            entry.is_loaded, entry.failures = True, 0
            entry.loaded_from = fetch.source.instance
            entry.not_before_s = now + _REFRESH_S

    def failed(self, fetch: NextFetch, now: float) -> None:
        """The files could not be had or read: another try after 1, 2, 4, ... 512 s."""
        if entry := self._entries.get(fetch.key):
            entry.not_before_s = now + _backoff_s(entry.failures)
            entry.failures += 1

    def lacks(self, fetch: NextFetch) -> None:
        """The engine has no files: it is not asked again."""
        self._lacking.add(fetch.source.instance)
        if entry := self._entries.get(fetch.key):
            entry.sources = tuple(s for s in entry.sources if s != fetch.source)

    def lost(self, blamed: str | None, now: float) -> None:
        """The child ended, with all it had, in work for `blamed`: that waits 1, 2, 4, ... 512 s."""
        for key, entry in self._entries.items():
            entry.is_loaded = False
            entry.not_before_s = min(entry.not_before_s, now)
            if key == blamed:
                entry.not_before_s = now + _backoff_s(entry.strikes)
                entry.strikes += 1


def _backoff_s(times: int) -> float:
    return float(2 ** min(times, _MAX_BACKOFF_DOUBLINGS))

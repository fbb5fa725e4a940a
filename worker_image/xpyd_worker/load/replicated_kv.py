"""The KV transfer of an engine with replicas: each replica's own, shown and driven as one.

A replica that moves KV has a connector, an address and an incarnation of its own, so that its peers
see an engine that comes and goes with it (docs/adr/0124). The server reads `places`, the heartbeat
`peers`, a scrape `samples`. What lost replicas counted stays counted: sums must not go down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace

from xpyd_core.distribution import Distribution
from xpyd_core.kv_outcome import PeerCounts
from xpyd_core.request_id import Address
from xpyd_kv.connector.build import Connector
from xpyd_kv.memory.api import StoreMetrics
from xpyd_kv.metrics import EndpointCounters, KvMetrics, together
from xpyd_worker.engine.request import EngineStats
from xpyd_worker.kv.engine import Kv, KvLoss, ProbePeer
from xpyd_worker.server.telemetry.metrics import AnySample, kv_samples

_STORE_FIELDS = tuple(one.name for one in fields(StoreMetrics))


class ReplicatedKv:
    """The Kv of an instance, over those of its replicas that are loaded: what `current` gives."""

    def __init__(self, current: Callable[[], Sequence[Kv]]) -> None:
        self._current = current
        self.counted = PeerCounts()
        """What became of the KV of a D's requests, which its server counts."""
        self._past = KvMetrics()
        self._past_counters = EndpointCounters()

    @property
    def loss(self) -> KvLoss:
        """Why the process has to end, if a replica's transfer says so."""
        return next((kv.loss for kv in self._current() if kv.loss.reason), KvLoss())

    @property
    def probe(self) -> ProbePeer | None:
        """The first replica's: for who asks no replica in particular."""
        return next((kv.probe for kv in self._current() if kv.probe is not None), None)

    @property
    def peers(self) -> PeerCounts:
        """What all have counted by peer, as of now."""
        found = PeerCounts()
        for one in (self.counted, self._past.peers, *(kv.peers for kv in self._current())):
            found.add(one)
        return found

    def peer_gone(self, address: Address) -> None:
        """A router says that what was at this KV address is dead."""
        for kv in self._current():
            kv.peer_gone(address)

    def drain(self) -> None:
        """Refuse new OFFERs, on each."""
        for kv in self._current():
            kv.drain()

    def retire(self, lost: Kv) -> None:
        """Keep what a replica has counted that is lost, and closed."""
        connector = lost.connector
        if connector is not None:
            _add(self._past, connector.metrics)
            self._past.open_transfers = 0
            past = together((self._past_counters, *_counters(lost, connector)))
            past.connections, past.connections_by, past.strangers = 0, {}, 0
            self._past_counters = past

    def samples(self, stats: EngineStats) -> Iterable[AnySample]:
        """All `xpyd_kv_*`, as sums."""
        metrics, counters, stores = KvMetrics(), [self._past_counters], list[StoreMetrics]()
        _add(metrics, self._past)
        for kv in self._current():
            connector = kv.connector
            if connector is None:
                continue
            _add(metrics, connector.metrics)
            counters += _counters(kv, connector)
            if connector.store is not None:
                stores.append(connector.store.metrics())
        return kv_samples(metrics, together(counters), _together(stores), stats)


def _counters(kv: Kv, connector: Connector) -> tuple[EndpointCounters, EndpointCounters]:
    return kv.counters or EndpointCounters(), connector.rank_counters


def _together(stores: Sequence[StoreMetrics]) -> StoreMetrics:
    """Sums; of fragmentation the worst."""
    sums = {name: sum(getattr(one, name) for one in stores) for name in _STORE_FIELDS}
    worst = max((one.pool_fragmentation for one in stores), default=0.0)
    return replace(StoreMetrics(**sums), pool_fragmentation=worst)


def _add(total: KvMetrics, part: KvMetrics) -> None:
    """Add each field: numbers, and counts, times and peers by name."""
    for name in (one.name for one in fields(KvMetrics)):
        own, more = getattr(total, name), getattr(part, name)
        if isinstance(own, int | float):
            setattr(total, name, own + more)
        elif isinstance(own, Distribution | PeerCounts):
            own.add(more)
        else:
            for key, count in dict(more).items():
                if isinstance(count, Distribution):
                    own.setdefault(key, Distribution()).add(count)
                else:
                    own[key] = own.get(key, 0) + count

"""The KV transfer's figures as samples for `/metrics`. An Aggregated instance shows zeros."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from xpyd_kv.session.metrics import KvMetrics
from xpyd_kv.store.api import StoreFigures
from xpyd_kv.transport.counters import Counters
from xpyd_kv.transport.settings import TRANSPORTS
from xpyd_worker.engine.request import EngineStats
from xpyd_worker.server.metrics import KvSample

_WHERE = ("direct", "buffer", "pool", "deferred")


def kv_samples(
    metrics: KvMetrics, counters: Counters, figures: StoreFigures, stats: EngineStats
) -> Iterable[KvSample]:
    """All `xpyd_kv_*` figures."""
    yield from _transfers(metrics, stats)
    yield from _connections(counters)
    yield from _store(figures)


def _transfers(metrics: KvMetrics, stats: EngineStats) -> Iterable[KvSample]:
    yield _counter("sent_bytes", "KV bytes sent", metrics.sent_bytes)
    yield _counter("received_bytes", "KV bytes received", metrics.received_bytes)
    yield _counter("received_tokens", "Tokens started from received KV", stats.received_tokens)
    yield _counter("skipped_tokens", "Offered tokens that D had cached", metrics.skipped_tokens)
    yield _counter("grant_waits", "GRANTs that P got", metrics.grant_waits)
    yield _counter("grant_wait_seconds", "Time from OFFER to GRANT", metrics.grant_wait_s)
    yield _counter(
        "checksum_mismatches", "DATA frames with a wrong checksum", metrics.checksum_mismatches
    )
    yield _counter(
        "pressure_cancels", "Transfers cancelled to free P's blocks", metrics.pressure_cancels
    )
    yield from _by("transfers", "Transfers that ended", "outcome", metrics.transfers, ())
    yield from _by("landings", "Where received KV landed", "where", metrics.landings, _WHERE)
    yield from _by("refused_data", "DATA frames refused", "reason", metrics.refused_data, ())
    yield from _by("not_received", "Requests without KV", "reason", metrics.not_received, ())
    yield from _by(
        "recomputed_requests",
        "Requests that computed a prompt whose KV was to come",
        "reason",
        stats.kv_recomputed,
        (),
    )


def _connections(counters: Counters) -> Iterable[KvSample]:
    yield _gauge("connections", "Open connections to peers", counters.connections)
    yield from _by("peers", "Peers that came up", "transport", counters.opened, TRANSPORTS)
    yield _counter("shared_bytes", "KV bytes through shared memory", counters.shared_bytes)
    yield _counter("auth_failed", "Handshakes without a key of the fleet", counters.auth_failed)
    yield _counter("junk_connections", "Strangers closed before AUTH", counters.junk_connections)
    yield _counter(
        "protocol_errors", "Peers closed for breaking the protocol", counters.protocol_errors
    )
    yield _counter("silent_peers", "Peers closed for not answering", counters.silent_peers)
    yield from _by("refused_handshakes", "Handshakes refused", "factor", counters.refused, ())


def _store(figures: StoreFigures) -> Iterable[KvSample]:
    yield _gauge("leases", "Landings held now", figures.leases)
    yield _gauge("buffer_bytes", "Size of the device buffer", figures.buffer_bytes)
    yield _gauge("buffer_used_bytes", "Device buffer in use", figures.buffer_used_bytes)
    yield _gauge("pool_bytes", "Size of the host pool", figures.pool_bytes)
    yield _gauge("pool_used_bytes", "Host pool in use", figures.pool_used_bytes)
    yield _gauge(
        "pool_high_water_bytes", "Most of the host pool in use", figures.pool_high_water_bytes
    )


def _counter(name: str, text: str, value: float) -> KvSample:
    return KvSample(f"xpyd_kv_{name}", "counter", text, float(value))


def _gauge(name: str, text: str, value: float) -> KvSample:
    return KvSample(f"xpyd_kv_{name}", "gauge", text, float(value))


def _by(
    name: str, text: str, label: str, values: Mapping[str, int], always: tuple[str, ...]
) -> Iterable[KvSample]:
    """One sample per label value; without any, one of 0, so that the metric is known."""
    # One step of the interpreter: another thread may add a value meanwhile.
    found = dict(values)
    for key in sorted({*found, *(always or (() if found else ("none",)))}):
        value = float(found.get(key, 0))
        yield KvSample(f"xpyd_kv_{name}", "counter", text, value, ((label, key),))

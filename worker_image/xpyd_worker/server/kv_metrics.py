"""The KV transfer's figures as samples for `/metrics`. An Aggregated instance shows zeros.

No label names a peer: a fleet has any number of them, and they come and go. Who is whose peer, and
over what, stands in the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from xpyd_core.distribution import Distribution
from xpyd_kv.memory.api import StoreMetrics
from xpyd_kv.metrics import Counters, KvMetrics, together
from xpyd_kv.transport.devices.nccl.library import NcclFigures
from xpyd_kv.transport.settings import TRANSPORTS
from xpyd_worker.engine.request import EngineStats
from xpyd_worker.server.samples import HistogramSample, Sample

if TYPE_CHECKING:
    from xpyd_worker.kv.engine import Kv

_WHERE = ("direct", "buffer", "pool", "deferred", "pulled")
_BESIDE = ("buffer", "pool")
_OUTCOMES = ("done", "failed")


def samples_of(kv: Kv, stats: EngineStats) -> Iterable[Sample | HistogramSample]:
    """The figures of a worker's transfer, its ranks' among them."""
    connector = kv.connector
    if connector is None:
        return kv_samples(KvMetrics(), Counters(), StoreMetrics(), stats)
    store = connector.store
    return kv_samples(
        connector.metrics,
        together((kv.counters or Counters(), connector.rank_counters)),
        store.figures() if store is not None else StoreMetrics(),
        stats,
        kv.transports.nccl if kv.transports is not None else None,
    )


def kv_samples(
    metrics: KvMetrics,
    counters: Counters,
    figures: StoreMetrics,
    stats: EngineStats,
    nccl: NcclFigures | None = None,
) -> Iterable[Sample | HistogramSample]:
    """All `xpyd_kv_*` figures."""
    yield from _moved(metrics, stats)
    yield from _transfers(metrics)
    yield from _without_kv(metrics, stats)
    yield from _connections(metrics, counters)
    yield from _store(figures)
    yield from _nccl(nccl or NcclFigures())


def _moved(metrics: KvMetrics, stats: EngineStats) -> Iterable[Sample]:
    yield _counter("sent_bytes", "KV bytes sent", metrics.sent_bytes)
    yield _counter("sent_frames", "DATA frames sent", metrics.sent_frames)
    yield _counter(
        "overlapped_bytes", "KV bytes sent before the prefill's end", metrics.overlapped_bytes
    )
    overlap = metrics.overlapped_bytes / metrics.sent_bytes if metrics.sent_bytes else 0.0
    yield _gauge("overlap_ratio", "Share of KV bytes sent before the prefill's end", overlap)
    yield _counter("received_bytes", "KV bytes received", metrics.received_bytes)
    yield _counter("received_frames", "DATA frames received", metrics.received_frames)
    yield _counter("received_tokens", "Tokens started from received KV", stats.received_tokens)
    yield _counter("skipped_tokens", "Offered tokens that D had cached", metrics.skipped_tokens)


def _transfers(metrics: KvMetrics) -> Iterable[Sample | HistogramSample]:
    yield from _by("transfers", "Transfers that ended", "outcome", metrics.transfers, _OUTCOMES)
    yield from _by("failed", "Transfers that failed", "reason", metrics.failed, ())
    yield _gauge("open_transfers", "Transfers that are not over", metrics.open_transfers)
    yield _counter("leases_expired", "Leases that ran out", metrics.leases_expired)
    yield HistogramSample("xpyd_kv_grant_wait_seconds", "OFFER to GRANT", metrics.grant_wait)
    found = dict(metrics.transfer_s) or {"none": Distribution()}
    for transport in sorted(found):
        labels = (("transport", transport),)
        yield HistogramSample(
            "xpyd_kv_transfer_seconds", "GRANT until all is there", found[transport], labels
        )
    yield HistogramSample(
        "xpyd_kv_after_prefill_seconds", "End of the prefill to DONE", metrics.after_prefill_s
    )
    yield _counter(
        "checksum_mismatches", "DATA frames with a wrong checksum", metrics.checksum_mismatches
    )
    yield _counter(
        "pressure_cancels", "Transfers cancelled to free P's blocks", metrics.pressure_cancels
    )
    yield from _by("spilled", "Prompts moved out of P's blocks", "where", metrics.spilled, _BESIDE)
    yield _counter("spilled_bytes", "KV bytes moved out of P's blocks", metrics.spilled_bytes)
    yield _counter("held_seconds", "Time that P's steps waited for D", metrics.held_s)
    yield from _by("landings", "Where received KV landed", "where", metrics.landings, _WHERE)
    yield from _by("refused_data", "DATA frames refused", "reason", metrics.refused_data, ())


def _without_kv(metrics: KvMetrics, stats: EngineStats) -> Iterable[Sample]:
    yield from _by("not_received", "Requests without KV", "reason", metrics.not_received, ())
    yield from _by(
        "recomputed_requests",
        "Requests that computed a prompt whose KV was to come",
        "reason",
        stats.kv_recomputed,
        (),
    )
    yield from _by(
        "recomputed_tokens",
        "Prompt tokens computed because their KV did not come",
        "reason",
        stats.kv_recomputed_tokens,
        (),
    )


def _connections(metrics: KvMetrics, counters: Counters) -> Iterable[Sample]:
    yield from _by(
        "connections",
        "Open connections to peers",
        "transport",
        counters.connections_by,
        TRANSPORTS,
        kind="gauge",
    )
    yield from _by("probes", "Self-tests", "outcome", metrics.probes, ())
    yield from _by("peers", "Peers that came up", "transport", counters.opened, TRANSPORTS)
    yield _counter("shared_bytes", "KV bytes beside the first connection", counters.shared_bytes)
    yield _counter("auth_failed", "Handshakes without a key of the fleet", counters.auth_failed)
    yield _counter("junk_connections", "Strangers closed before AUTH", counters.junk_connections)
    yield _counter(
        "protocol_errors", "Peers closed for breaking the protocol", counters.protocol_errors
    )
    yield _counter("silent_peers", "Peers closed for not answering", counters.silent_peers)
    yield _counter("quarantines", "Times that a P was refused for a while", counters.quarantines)
    yield from _by("paths_failed", "Lent memory not usable", "transport", counters.paths_failed, ())
    yield from _by("handshake_refused", "Handshakes refused", "factor", counters.refused, ())


def _nccl(figures: NcclFigures) -> Iterable[Sample]:
    yield _gauge("nccl_communicators", "NCCL communicators now", figures.communicators)
    yield _gauge("nccl_memory_bytes", "GPU memory that they take", figures.memory_bytes)
    yield _counter("nccl_made", "NCCL communicators made", figures.made)
    yield from _by("nccl_ended", "NCCL communicators ended", "reason", figures.ended, ())


def _store(figures: StoreMetrics) -> Iterable[Sample]:
    yield _gauge("leases", "Landings and spilled prompts held now", figures.leases)
    free = {
        "direct": figures.direct_free_bytes,
        "buffer": figures.buffer_bytes - figures.buffer_used_bytes,
        "pool": figures.pool_bytes - figures.pool_used_bytes,
    }
    yield from _by("credits_free_bytes", "Room for KV", "where", free, (), kind="gauge")
    yield _gauge("buffer_bytes", "Size of the device buffer", figures.buffer_bytes)
    yield _gauge("buffer_used_bytes", "Device buffer in use", figures.buffer_used_bytes)
    yield _gauge("pool_bytes", "Size of the host pool", figures.pool_bytes)
    yield _gauge("pool_used_bytes", "Host pool in use", figures.pool_used_bytes)
    yield _gauge(
        "pool_high_water_bytes", "Most of the host pool in use", figures.pool_high_water_bytes
    )
    yield _gauge(
        "pool_fragmentation",
        "Share of the pool's free memory outside of its largest free piece",
        figures.pool_fragmentation,
    )


def _counter(name: str, text: str, value: float) -> Sample:
    return Sample(f"xpyd_kv_{name}", "counter", text, float(value))


def _gauge(name: str, text: str, value: float) -> Sample:
    return Sample(f"xpyd_kv_{name}", "gauge", text, float(value))


def _by(
    name: str,
    text: str,
    label: str,
    values: Mapping[str, int],
    always: tuple[str, ...],
    *,
    kind: str = "counter",
) -> Iterable[Sample]:
    """One sample per label value; without any, one of 0, so that the metric is known."""
    # One step of the interpreter: another thread may add a value meanwhile.
    found = dict(values)
    for key in sorted({*found, *(always or (() if found else ("none",)))}):
        value = float(found.get(key, 0))
        yield Sample(f"xpyd_kv_{name}", kind, text, value, ((label, key),))

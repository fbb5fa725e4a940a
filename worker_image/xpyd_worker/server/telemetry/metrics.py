"""`/metrics`: the counters of engine, ranks, requests and KV transfer, read at scrape time.

Owners of counters keep plain values; this module turns them into Prometheus' families when
Prometheus asks. Metric names are stable between versions. Besides our names there are the few of
vLLM that schedulers read from the engine itself (docs/metrics.md). No label names a peer: a fleet
has any number of them; the log says which peer uses which transport. An Aggregated instance shows
zeros for its KV transfer, an engine of one process shows no ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from xpyd_core.distribution import Distribution
from xpyd_core.parallel.ranks import Sizes
from xpyd_kv.memory.api import StoreMetrics
from xpyd_kv.metrics import EndpointCounters, KvMetrics, together
from xpyd_kv.transport.devices.nccl.library import NcclMetrics
from xpyd_kv.transport.settings import TRANSPORTS
from xpyd_worker.engine.request import EngineStats
from xpyd_worker.grammar.compiler import GrammarMetrics
from xpyd_worker.parsers.registry import TOOL_FAMILIES
from xpyd_worker.replicas.coordinator import Counts
from xpyd_worker.server.bridge import RequestMetrics

if TYPE_CHECKING:
    from xpyd_worker.kv.engine import Kv
    from xpyd_worker.ranks.start.messages import RankReady
    from xpyd_worker.ranks.watch.judge import Shown


Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


@dataclass(frozen=True)
class Sample:
    """One number. `labels` name one child of the metric."""

    name: str
    kind: str  # "counter" (name without _total) or "gauge"
    help: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class HistogramSample:
    """One distribution. `labels` name one child of the metric."""

    name: str
    help: str
    values: Distribution
    labels: tuple[tuple[str, str], ...] = ()


AnySample = Sample | HistogramSample


def families(samples: Iterable[AnySample]) -> Iterable[Metric]:
    """The samples by metric; those of one name have the same kind and names of labels."""
    found: dict[str, Family] = {}
    for sample in samples:
        family = found.get(sample.name)
        if family is None:
            names = [key for key, _ in sample.labels]
            family = found[sample.name] = _kind_of(sample)(sample.name, sample.help, labels=names)
        labels = [value for _, value in sample.labels]
        if isinstance(sample, Sample):
            assert not isinstance(family, HistogramMetricFamily)
            family.add_metric(labels, sample.value)
        else:
            assert isinstance(family, HistogramMetricFamily)
            bounds = [*map(str, sample.values.bounds), "+Inf"]
            counts = map(float, sample.values.cumulative())
            buckets = list(zip(bounds, counts, strict=True))
            family.add_metric(labels, buckets, sample.values.sum)
    return found.values()


def _kind_of(sample: AnySample) -> type[Family]:
    if isinstance(sample, HistogramSample):
        return HistogramMetricFamily
    return CounterMetricFamily if sample.kind == "counter" else GaugeMetricFamily


_PREFIX = "xpyd_engine_"
_ENGINE_COUNTERS = (
    ("forward", "forwards", "Forward passes"),
    ("prompt_tokens_computed", "prompt_tokens_computed", "Prompt tokens that entered a forward"),
    ("output_tokens_computed", "output_tokens_computed", "Output tokens that entered a forward"),
    ("preemptions", "preemptions", "Requests preempted"),
    ("prefix_hit_tokens", "prefix_hit_tokens", "Prompt tokens found in the prefix cache"),
    ("prefix_query_tokens", "prefix_query_tokens", "Prompt tokens looked up in the prefix cache"),
    ("spec_decode_num_drafts", "spec_drafts", "Drafts that were verified"),
    ("spec_decode_num_draft_tokens", "spec_draft_tokens", "Tokens of these drafts"),
    ("spec_decode_num_accepted_tokens", "spec_accepted_tokens", "Draft tokens that were accepted"),
)
_ENGINE_GAUGES = (
    ("requests_running", "running", "Requests in the running batch"),
    ("requests_waiting", "waiting", "Requests that wait for their start"),
    ("kv_blocks_total", "blocks_total", "Blocks of the paged KV cache"),
    ("kv_blocks_free", "blocks_free", "Blocks with reference count 0, cached ones included"),
)
_STEPS = (
    ("step_seconds", "seconds", "Forward and sampling of one step"),
    ("step_tokens", "tokens", "Tokens that entered the forward of one step"),
    ("step_sequences", "sequences", "Sequences in one step"),
)
_REQUESTS = (
    ("ttft_seconds", "ttft", "Submit to first token"),
    ("itl_seconds", "itl", "Gap of two consecutive tokens of a choice"),
    ("tpot_seconds", "tpot", "Mean gap of a choice's tokens"),
    ("e2e_seconds", "e2e", "Submit to last token"),
    ("queue_seconds", "queue", "Submit to the first step"),
    ("request_prompt_tokens", "request_prompt_tokens", "Prompt tokens of a request"),
    ("request_output_tokens", "request_output_tokens", "Output tokens of a request"),
)
_REASONS = ("stop", "length", "abort", "error")


def engine_samples(stats: EngineStats) -> Iterable[AnySample]:
    """The engine's own metrics."""
    for name, attribute, text in _ENGINE_COUNTERS:
        yield Sample(_PREFIX + name, "counter", text, float(getattr(stats, attribute)))
    for name, attribute, text in _ENGINE_GAUGES:
        yield Sample(_PREFIX + name, "gauge", text, float(getattr(stats, attribute)))
    yield Sample(
        f"{_PREFIX}kv_usage_ratio", "gauge", "Share of KV blocks in use, 0 to 1", kv_usage(stats)
    )
    for reason in sorted({*_REASONS, *stats.finished}):
        value, labels = float(stats.finished.get(reason, 0)), (("finish_reason", reason),)
        yield Sample(
            f"{_PREFIX}requests", "counter", "Requests that ended, by reason", value, labels
        )
    for place, count in sorted({0: 0, **stats.spec_accepted_at}.items()):
        yield Sample(
            f"{_PREFIX}spec_decode_num_accepted_tokens_per_pos",
            "counter",
            "Draft tokens that were accepted, by their place in the draft, from 0 on",
            float(count),
            (("position", str(place)),),
        )
    for name, attribute, text in _STEPS:
        yield HistogramSample(_PREFIX + name, text, getattr(stats.steps, attribute))


def kv_usage(stats: EngineStats) -> float:
    """The share of KV blocks that something refers to, 0 to 1."""
    return 1 - stats.blocks_free / stats.blocks_total if stats.blocks_total else 0.0


def request_samples(metrics: RequestMetrics) -> Iterable[AnySample]:
    """Latencies and sizes of requests."""
    for name, attribute, text in _REQUESTS:
        yield HistogramSample(_PREFIX + name, text, getattr(metrics, attribute))
    yield Sample(
        f"{_PREFIX}prompt_tokens",
        "counter",
        "Prompt tokens of requests that had a first token",
        metrics.prompt_tokens,
    )
    yield Sample(
        f"{_PREFIX}output_tokens", "counter", "Tokens that requests put out", metrics.output_tokens
    )


def parser_samples(malformed_calls: Mapping[str, int]) -> Iterable[Sample]:
    """What parsers found, those of other packages from their first such call on."""
    text = "Tool calls that were not whole, or none at all, by parser"
    for parser in sorted({*TOOL_FAMILIES, *malformed_calls}):
        value, labels = float(malformed_calls.get(parser, 0)), (("parser", parser),)
        yield Sample(f"{_PREFIX}malformed_tool_calls", "counter", text, value, labels)


def grammar_samples(metrics: GrammarMetrics) -> Iterable[AnySample]:
    """What structured output costs before a request starts."""
    for name, text, value in (
        ("compiled", "Grammars compiled, refused ones included", metrics.compiled),
        ("cache_hits", "Requests whose grammar was compiled before", metrics.hits),
        ("failures", "Grammars that could not be compiled", metrics.failures),
    ):
        yield Sample(f"{_PREFIX}grammar_{name}", "counter", text, float(value))
    text = "Memory of the kept grammars, by what trials of them took"
    yield Sample(f"{_PREFIX}grammar_kept_bytes", "gauge", text, float(metrics.kept_bytes))
    yield HistogramSample(
        f"{_PREFIX}grammar_compile_seconds", "Time to compile a grammar", metrics.seconds
    )


def vllm_samples(stats: EngineStats, *, model: str, block_size: int) -> Iterable[AnySample]:
    """What the Gateway API inference extension's endpoint picker, and llm-d's, scrape."""
    labels = (("model_name", model),)
    for name, value in (
        ("num_requests_running", stats.running),
        ("num_requests_waiting", stats.waiting),
        ("kv_cache_usage_perc", kv_usage(stats)),
    ):
        yield Sample(f"vllm:{name}", "gauge", "As vLLM's", float(value), labels)
    sizes = (("block_size", str(block_size)), ("num_gpu_blocks", str(stats.blocks_total)))
    yield Sample("vllm:cache_config_info", "gauge", "As vLLM's", 1.0, (*labels, *sizes))


class _SampleCollector(Collector):
    """Makes families of `samples` when Prometheus asks."""

    def __init__(self, samples: Callable[[], Iterable[AnySample]]) -> None:
        self._samples = samples

    def collect(self) -> Iterable[Metric]:
        return families(self._samples())


class ServerMetrics:
    """The registry. `requests` is filled by the bridge."""

    def __init__(self) -> None:
        self.requests = RequestMetrics()
        self.malformed_calls = Counter[str]()
        """By parser; filled by the requests' generations."""
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_SampleCollector(lambda: request_samples(self.requests)))
        self._registry.register(_SampleCollector(lambda: parser_samples(self.malformed_calls)))

    def watch(
        self,
        stats: Callable[[], EngineStats],
        more: Callable[[EngineStats], Iterable[AnySample]],
        *,
        model: str,
        block_size: int,
        load_s: float,
        grammars: GrammarMetrics | None = None,
    ) -> None:
        """Show a loaded engine's metrics from now on, and what `more` gives: its KV transfer's and
        its ranks'. `load_s`: from the process' start to there."""

        def samples() -> Iterable[AnySample]:
            now = stats()
            yield from engine_samples(now)
            yield Sample(f"{_PREFIX}load_seconds", "gauge", "Start of the process to Ready", load_s)
            yield from more(now)
            yield from grammar_samples(grammars or GrammarMetrics())
            yield from vllm_samples(now, model=model, block_size=block_size)

        self._registry.register(_SampleCollector(samples))

    def render(self) -> tuple[bytes, str]:
        """Body and content type of an answer to Prometheus."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


_WHERE = ("direct", "buffer", "pool", "deferred", "pulled")
_BESIDE = ("buffer", "pool")
_OUTCOMES = ("done", "failed")


def samples_of(kv: Kv, stats: EngineStats) -> Iterable[Sample | HistogramSample]:
    """The metrics of a worker's transfer, its ranks' among them."""
    connector = kv.connector
    if connector is None:
        return kv_samples(KvMetrics(), EndpointCounters(), StoreMetrics(), stats)
    store = connector.store
    return kv_samples(
        connector.metrics,
        together((kv.counters or EndpointCounters(), connector.rank_counters)),
        store.metrics() if store is not None else StoreMetrics(),
        stats,
        kv.transports.nccl if kv.transports is not None else None,
    )


def kv_samples(
    metrics: KvMetrics,
    counters: EndpointCounters,
    store: StoreMetrics,
    stats: EngineStats,
    nccl: NcclMetrics | None = None,
) -> Iterable[Sample | HistogramSample]:
    """All `xpyd_kv_*` metrics."""
    yield from _moved(metrics, stats)
    yield from _transfers(metrics)
    yield from _without_kv(metrics, stats)
    yield from _connections(metrics, counters)
    yield from _store(store)
    yield from _nccl(nccl or NcclMetrics())


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


def _connections(metrics: KvMetrics, counters: EndpointCounters) -> Iterable[Sample]:
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
    yield _counter("shared_bytes", "KV bytes over further connections", counters.shared_bytes)
    yield _counter("auth_failed", "Handshakes without a key of the fleet", counters.auth_failed)
    yield _counter("junk_connections", "Strangers closed before AUTH", counters.junk_connections)
    yield _counter(
        "protocol_errors", "Peers closed for breaking the protocol", counters.protocol_errors
    )
    yield _counter("silent_peers", "Peers closed for not answering", counters.silent_peers)
    yield _counter("quarantines", "Times that a P was refused for a while", counters.quarantines)
    yield from _by("paths_failed", "Lent memory not usable", "transport", counters.paths_failed, ())
    yield from _by("handshake_refused", "Handshakes refused", "factor", counters.refused, ())


def _nccl(nccl: NcclMetrics) -> Iterable[Sample]:
    yield _gauge("nccl_communicators", "NCCL communicators now", nccl.communicators)
    yield _gauge("nccl_memory_bytes", "GPU memory that they take", nccl.memory_bytes)
    yield _counter("nccl_made", "NCCL communicators made", nccl.made)
    yield from _by("nccl_ended", "NCCL communicators ended", "reason", nccl.ended, ())


def _store(store: StoreMetrics) -> Iterable[Sample]:
    yield _gauge("leases", "Landings and spilled prompts held now", store.leases)
    free = {
        "direct": store.direct_free_bytes,
        "buffer": store.buffer_bytes - store.buffer_used_bytes,
        "pool": store.pool_bytes - store.pool_used_bytes,
    }
    yield from _by("credits_free_bytes", "Room for KV", "where", free, (), kind="gauge")
    yield _gauge("buffer_bytes", "Size of the device buffer", store.buffer_bytes)
    yield _gauge("buffer_used_bytes", "Device buffer in use", store.buffer_used_bytes)
    yield _gauge("pool_bytes", "Size of the host pool", store.pool_bytes)
    yield _gauge("pool_used_bytes", "Host pool in use", store.pool_used_bytes)
    yield _gauge(
        "pool_high_water_bytes", "Most of the host pool in use", store.pool_high_water_bytes
    )
    yield _gauge(
        "pool_fragmentation",
        "Share of the pool's free memory outside of its largest free piece",
        store.pool_fragmentation,
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


_RANK_PREFIX = "xpyd_engine_rank_"


def rank_samples(
    sizes: Sizes,
    *,
    shown: Sequence[Shown],
    ready: Sequence[RankReady],
    fits: Sequence[int],
    first: int = 0,
) -> Iterable[Sample]:
    """All `xpyd_engine_rank_*`, by rank: as the watch has seen it last, what it said as it started,
    and blocks of KV that it has room for. `first`: the number of the first rank."""
    for rank, (now, one, blocks) in enumerate(zip(shown, ready, fits, strict=True)):
        place = sizes.coordinates(rank)
        number = str(first + rank)
        labels = (("rank", number), ("stage", str(place.stage)), ("tensor", str(place.tensor)))
        processor_s = now.beat.processor_ns / 1e9
        for name, kind, text, value in (
            ("up", "gauge", "1 while the rank gives signs of life", now.is_up),
            ("steps", "counter", "Steps that it has launched", now.beat.steps),
            ("processor_seconds", "counter", "What its threads computed", processor_s),
            ("weight_bytes", "gauge", "Its weights", one.weight_bytes),
            ("kv_cache_bytes", "gauge", "Its KV cache", one.cache_bytes),
            ("kv_blocks_fit", "gauge", "KV blocks that it has room for", blocks),
        ):
            yield Sample(_RANK_PREFIX + name, kind, text, float(value), labels)


def replica_samples(rows: Sequence[tuple[Counts | None, int]], scalings: int) -> Iterable[Sample]:
    """How often replicas came or went, and all `xpyd_engine_replica_*`, by replica, with vLLM's
    label: its requests, None where it takes none, and how often it was started again."""
    text = "Times that replicas came or went"
    yield Sample(f"{_PREFIX}scalings", "counter", text, float(scalings))
    for number, (counts, restarts) in enumerate(rows):
        labels = (("engine", str(number)),)
        waiting, running = counts or (0, 0)
        for name, kind, text, value in (
            ("up", "gauge", "1 while the replica takes requests", counts is not None),
            ("requests_waiting", "gauge", "Its requests that wait for their start", waiting),
            ("requests_running", "gauge", "Its requests in the running batch", running),
            ("restarts", "counter", "Times that it was started again", restarts),
        ):
            yield Sample(f"{_PREFIX}replica_{name}", kind, text, float(value), labels)

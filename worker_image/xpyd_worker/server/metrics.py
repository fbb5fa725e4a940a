"""`/metrics`: counters of engine and KV transfer, read at scrape time, and latency histograms.

Names are stable between versions. The registry is this object's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from xpyd_kv.figures import Distribution
from xpyd_worker.engine.request import EngineStats

_TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

_ENGINE_COUNTERS = (
    ("forward", "forwards", "Forward passes"),
    ("prompt_tokens_computed", "prompt_tokens_computed", "Prompt tokens that entered a forward"),
    ("output_tokens_computed", "output_tokens_computed", "Output tokens that entered a forward"),
    ("preemptions", "preemptions", "Requests preempted"),
    ("prefix_hit_tokens", "prefix_hit_tokens", "Prompt tokens found in the prefix cache"),
    ("prefix_query_tokens", "prefix_query_tokens", "Prompt tokens looked up in the prefix cache"),
)
_ENGINE_GAUGES = (
    ("requests_running", "running", "Requests in the running batch"),
    ("requests_waiting", "waiting", "Requests that wait for their start"),
    ("kv_blocks_total", "blocks_total", "Blocks of the paged KV cache"),
    ("kv_blocks_free", "blocks_free", "Blocks with reference count 0, cached ones included"),
)


@dataclass(frozen=True)
class KvSample:
    """One figure of the KV transfer. `labels` name one child of the metric."""

    name: str
    kind: str  # "counter" (name without _total) or "gauge"
    help: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class KvHistogram:
    """One distribution of the KV transfer. `labels` name one child of the metric."""

    name: str
    help: str
    values: Distribution
    labels: tuple[tuple[str, str], ...] = ()


KvSamples = Callable[[], Iterable[KvSample | KvHistogram]]


class _EngineCollector(Collector):
    """Reads the counters when Prometheus asks."""

    def __init__(self, stats: Callable[[], EngineStats], kv: KvSamples) -> None:
        self._stats = stats
        self._kv = kv

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        for name, attribute, text in _ENGINE_COUNTERS:
            yield CounterMetricFamily(
                f"xpyd_engine_{name}", text, value=float(getattr(stats, attribute))
            )
        for name, attribute, text in _ENGINE_GAUGES:
            yield GaugeMetricFamily(
                f"xpyd_engine_{name}", text, value=float(getattr(stats, attribute))
            )
        yield _finished(stats.finished)
        yield from _families(self._kv())


def _finished(finished: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(
        "xpyd_engine_requests", "Requests that ended, by reason", labels=["finish_reason"]
    )
    for reason in sorted({"stop", "length", "abort", "error", *finished}):
        family.add_metric([reason], float(finished.get(reason, 0)))
    return family


def _families(samples: Iterable[KvSample | KvHistogram]) -> Iterable[Metric]:
    families: dict[str, CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily] = {}
    for sample in samples:
        family = families.get(sample.name)
        if family is None:
            family = _kind_of(sample)(
                sample.name, sample.help, labels=[key for key, _ in sample.labels]
            )
            families[sample.name] = family
        labels = [value for _, value in sample.labels]
        if isinstance(sample, KvSample):
            assert not isinstance(family, HistogramMetricFamily)
            family.add_metric(labels, sample.value)
        else:
            assert isinstance(family, HistogramMetricFamily)
            bounds = [*map(str, sample.values.bounds), "+Inf"]
            counts = map(float, sample.values.cumulative())
            buckets = list(zip(bounds, counts, strict=True))
            family.add_metric(labels, buckets, sample.values.sum)
    return families.values()


def _kind_of(
    sample: KvSample | KvHistogram,
) -> type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
    if isinstance(sample, KvHistogram):
        return HistogramMetricFamily
    return CounterMetricFamily if sample.kind == "counter" else GaugeMetricFamily


class ServerMetrics:
    """The registry; also the bridge's LatencyObserver."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._ttft = self._histogram("ttft", "Submit to first token", _TTFT_BUCKETS_S)
        self._itl = self._histogram("itl", "Gap between two outputs of a request", _ITL_BUCKETS_S)
        self._e2e = self._histogram("e2e", "Submit to last token", _E2E_BUCKETS_S)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"xpyd_engine_{name}_seconds", text, buckets=buckets, registry=self._registry
        )

    def watch(self, stats: Callable[[], EngineStats], kv: KvSamples) -> None:
        """Show the engine's and the KV transfer's figures from now on."""
        self._registry.register(_EngineCollector(stats, kv))

    def ttft(self, seconds: float) -> None:
        """One request's time to its first token."""
        self._ttft.observe(seconds)

    def itl(self, seconds: float) -> None:
        """One gap between two outputs of a request."""
        self._itl.observe(seconds)

    def e2e(self, seconds: float) -> None:
        """One request's whole time."""
        self._e2e.observe(seconds)

    def render(self) -> tuple[bytes, str]:
        """Body and content type of an answer to Prometheus."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

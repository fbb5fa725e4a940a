"""`/metrics`: figures of engine, ranks, requests and KV transfer, all read at scrape time.

Names are stable between versions. The registry is this object's own. Beside our names stand the
few of vLLM that schedulers read from the engine itself; dashboards go through Prometheus, which can
rename (docs/metrics.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from xpyd_worker.engine.request import EngineStats
from xpyd_worker.server.latency import RequestFigures
from xpyd_worker.server.samples import AnySample, HistogramSample, Sample, families

_PREFIX = "xpyd_engine_"
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
    """The engine's own figures."""
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
    for name, attribute, text in _STEPS:
        yield HistogramSample(_PREFIX + name, text, getattr(stats.steps, attribute))


def kv_usage(stats: EngineStats) -> float:
    """The share of KV blocks that something refers to, 0 to 1."""
    return 1 - stats.blocks_free / stats.blocks_total if stats.blocks_total else 0.0


def request_samples(figures: RequestFigures) -> Iterable[AnySample]:
    """Latencies and sizes of requests."""
    for name, attribute, text in _REQUESTS:
        yield HistogramSample(_PREFIX + name, text, getattr(figures, attribute))
    yield Sample(
        f"{_PREFIX}prompt_tokens",
        "counter",
        "Prompt tokens of requests that had a first token",
        figures.prompt_tokens,
    )
    yield Sample(
        f"{_PREFIX}output_tokens", "counter", "Tokens that requests put out", figures.output_tokens
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
        self.requests = RequestFigures()
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_SampleCollector(lambda: request_samples(self.requests)))

    def watch(
        self,
        stats: Callable[[], EngineStats],
        more: Callable[[EngineStats], Iterable[AnySample]],
        *,
        model: str,
        block_size: int,
        load_s: float,
    ) -> None:
        """Show a loaded engine's figures from now on, and what `more` gives: its KV transfer's and
        its ranks'. `load_s`: from the process' start to there."""

        def samples() -> Iterable[AnySample]:
            now = stats()
            yield from engine_samples(now)
            yield Sample(f"{_PREFIX}load_seconds", "gauge", "Start of the process to Ready", load_s)
            yield from more(now)
            yield from vllm_samples(now, model=model, block_size=block_size)

        self._registry.register(_SampleCollector(samples))

    def render(self) -> tuple[bytes, str]:
        """Body and content type of an answer to Prometheus."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

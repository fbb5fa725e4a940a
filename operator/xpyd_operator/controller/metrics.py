"""The operator's metrics, all named xpyd_operator_*."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class OperatorMetrics:
    """One set per operator, in its own CollectorRegistry. prometheus_client locks: any thread."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        prefix = "xpyd_operator_"
        self.reconciles = Counter(
            f"{prefix}reconciles", "Turns of fleets that ended", ("result",), registry=registry
        )
        self.reconcile_seconds = Histogram(
            f"{prefix}reconcile_seconds",
            "A turn, with its calls",
            registry=registry,
            buckets=_SECONDS,
        )
        self._api_calls = Counter(
            f"{prefix}api_calls",
            "Requests to the API server",
            ("verb", "resource", "code"),
            registry=registry,
        )
        self._watch_events = Counter(
            f"{prefix}watch_events", "Changes heard of", ("kind",), registry=registry
        )
        self._queue_depth = Gauge(
            f"{prefix}queue_depth", "Fleets that are due and wait for a worker", registry=registry
        )
        self._fleets = Gauge(f"{prefix}fleets", "Fleets there are", registry=registry)
        self._events_dropped = Counter(
            f"{prefix}events_dropped", "Events that were not posted", registry=registry
        )

    def count_call(self, verb: str, resource: str, code: str) -> None:
        """One request ended; code: HTTP status, or "error" where there was no answer."""
        self._api_calls.labels(verb, resource, code).inc()

    def count_watch_event(self, kind: str) -> None:
        """A watch told of a change."""
        self._watch_events.labels(kind).inc()

    def count_dropped_event(self) -> None:
        """An event was not posted."""
        self._events_dropped.inc()

    def render(self, *, queue_depth: int, fleets: int) -> bytes:
        """The text exposition."""
        self._queue_depth.set(queue_depth)
        self._fleets.set(fleets)
        return generate_latest(self._registry)

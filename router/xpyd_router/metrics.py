"""The router's metrics, all named xpyd_router_*. The hot path keeps the label children."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from xpyd_router.fleet.registry import Instance, Standing
from xpyd_router.requests.trace import Trace

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

_STATES: dict[Standing, str] = {
    "Good": "Ready",
    "Ejected": "Ejected",
    "Open": "CircuitOpen",
    "HalfOpen": "HalfOpen",
    "Trial": "HalfOpen",
}


class RouterMetrics:
    """One set per router, in its own CollectorRegistry."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        prefix = "xpyd_router_"
        self.requests = Counter(
            f"{prefix}requests", "Requests answered", ("endpoint", "status"), registry=registry
        )
        self.errors = Counter(
            f"{prefix}errors",
            "Failed calls to engines and broken streams",
            ("phase", "cause"),
            registry=registry,
        )
        self.retries = Counter(f"{prefix}retries", "Requests tried again", registry=registry)
        self.request_seconds = Histogram(
            f"{prefix}request_seconds",
            "From request to last byte",
            ("endpoint",),
            registry=registry,
            buckets=_SECONDS,
        )
        self.ttft_seconds = Histogram(
            f"{prefix}ttft_seconds",
            "From request to first byte of the answer",
            ("endpoint",),
            registry=registry,
            buckets=_SECONDS,
        )
        self.in_flight = Gauge(f"{prefix}in_flight", "Requests being served", registry=registry)
        self.waiting = Gauge(
            f"{prefix}waiting", "Requests waiting for a pair to return", registry=registry
        )
        self.heartbeats = Counter(
            f"{prefix}heartbeats", "Messages on the discovery port", ("result",), registry=registry
        )
        self.releases = Counter(
            f"{prefix}releases", "Abandoned transfers told to D", ("result",), registry=registry
        )
        self.ejections = Counter(
            f"{prefix}ejections",
            "Instances taken out of rotation until they answer a probe",
            ("cause",),
            registry=registry,
        )
        self.breaker_openings = Counter(
            f"{prefix}breaker_openings", "Circuit breakers that opened", registry=registry
        )
        self.probes = Counter(
            f"{prefix}probes", "GET /health of instances", ("result",), registry=registry
        )
        self.poisoned_requests = Counter(
            f"{prefix}poisoned_requests",
            "Requests refused because instances die of them",
            registry=registry,
        )
        self._ended: dict[tuple[str, int], tuple[Counter, Histogram, Histogram]] = {}
        self._instances = Gauge(
            f"{prefix}instances", "Known instances", ("type", "state"), registry=registry
        )

    def began(self) -> None:
        """A request came."""
        self.in_flight.inc()

    def ended(self, trace: Trace, status: int, now_s: float) -> None:
        """It was answered, or its client left."""
        key = (trace.endpoint, status)
        children = self._ended.get(key)
        if children is None:
            children = self._ended[key] = (
                self.requests.labels(trace.endpoint, str(status)),
                self.request_seconds.labels(trace.endpoint),
                self.ttft_seconds.labels(trace.endpoint),
            )
        requests, seconds, ttft = children
        self.in_flight.dec()
        requests.inc()
        seconds.observe(now_s - trace.started_s)
        if trace.first_s is not None:
            ttft.observe(trace.first_s)

    def render(self, instances: Iterable[Instance]) -> bytes:
        """The text exposition, with the gauge of `instances` as they are now."""
        self._instances.clear()
        tally = Tally((i.beat.type, state_of(i)) for i in instances)
        for (kind, state), count in sorted(tally.items()):
            self._instances.labels(kind, state).set(count)
        return generate_latest(self._registry)


def state_of(instance: Instance) -> str:
    """The state as people see it: its beat's, but for a Ready one that gets no or few requests."""
    if instance.beat.state != "Ready":
        return instance.beat.state
    return _STATES[instance.standing]

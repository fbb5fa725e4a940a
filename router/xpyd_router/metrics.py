"""The router's metrics, all named xpyd_router_*; `request_metrics` has those of each request."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from xpyd_core.kv_outcome import AloneCause
from xpyd_core.tls import WatchedContext
from xpyd_router.canary import CanaryTable
from xpyd_router.errors import FailureCause
from xpyd_router.fleet.instances import Instance, Lost, ShownState, Standing
from xpyd_router.key_metrics import KeyTable
from xpyd_router.request_metrics import (
    PHASES,
    Exposition,
    InstanceTable,
    KvTable,
    ObjectiveTable,
    RequestTable,
)

_QUEUE_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_STATES: dict[Standing, ShownState] = {
    "Good": "Ready",
    "Ejected": "Ejected",
    "Open": "CircuitOpen",
    "HalfOpen": "HalfOpen",
    "Trial": "HalfOpen",
}


class RouterMetrics:
    """Metrics of the router in a CollectorRegistry of their own. `clock` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.requests = RequestTable()
        self.instances = InstanceTable(clock)
        self.kv = KvTable("xpyd_router_kv_outcomes_total", "Tries, by what became of the KV")
        self.kv_probes = KvTable("xpyd_router_kv_probes_total", "Probes of pairs, by their result")
        self.objectives = ObjectiveTable()
        self.keys = KeyTable()
        self.canary = CanaryTable()
        self._registry = CollectorRegistry()
        self.errors = self._counter(
            "errors", "Failed calls to engines and broken streams", "phase", "cause"
        )
        self.retries = self._counter("retries", "Requests tried again")
        self.drain_cuts = self._counter(
            "drain_cuts", "Calls that an instance cut as its drain ended", "outcome"
        )
        for outcome in ("continued", "failed"):
            # There from the start: no increase() sees a series that begins with 1.
            self.drain_cuts.labels(outcome)
        self.waiting = self._gauge("waiting", "Requests waiting for a pair")
        self.prefill_on_decode = self._counter(
            "prefill_on_decode", "Tries whose prompt D computed because no P was there"
        )
        self.no_pair = self._counter(
            "no_pair",
            "Tries that found no pair, by what was missing and what was done",
            "lost",
            "then",
        )
        self.queue_length = self._gauge("queue_length", "Requests that wait for a place")
        self.queue_seconds = Histogram(
            "xpyd_router_queue_seconds",
            "Time in the queue of requests that had to wait, however it ended",
            registry=self._registry,
            buckets=_QUEUE_SECONDS,
        )
        self.rejected = self._counter("rejected", "Requests refused a place", "reason")
        self.tokens_in_flight = self._gauge(
            "tokens_in_flight", "Prompts and allowed outputs of the requests being served"
        )
        self.heartbeats = self._counter("heartbeats", "Messages on the discovery port", "result")
        self.releases = self._counter("releases", "Releases of transfers, sent to D", "result")
        self.ejections = self._counter(
            "ejections", "Instances taken out of rotation until they answer a probe", "cause"
        )
        self.breaker_openings = self._counter("breaker_openings", "Circuit breakers that opened")
        self.probes = self._counter("probes", "GET /health of instances", "result")
        self.introductions = self._counter(
            "introductions", "Prompts of the router's own through pairs of two engines", "result"
        )
        self.poisoned_requests = self._counter(
            "poisoned_requests", "Requests refused because instances die of them"
        )
        self.token_counts = self._counter(
            "token_counts", "Requests whose tokens were asked for", "result"
        )
        self.tokenizer_loads = self._counter(
            "tokenizer_loads", "Tokenizer files asked of engines", "result"
        )
        self.workers = self._gauge("workers", "Processes that serve requests")
        self.workers.set(1)
        self.worker_deaths = self._counter(
            "worker_deaths", "Processes that ended and were replaced"
        )
        self.displaced_connections = self._counter(
            "displaced_connections",
            "Connections that waited for their clients and were closed to make room",
        )
        self.tls_handshakes = self._counter("tls_handshakes", "TLS handshakes of clients", "result")
        self.tls_reloads = self._counter(
            "tls_reloads", "Changes of certificates' files", "use", "result"
        )
        self.tls_not_after = self._gauge(
            "tls_not_after_seconds", "Unix time at which the certificate in use ends", "use"
        )
        self.kv_pairs = self._gauge("kv_pairs", "Pairs that are probed, by the last probe", "state")
        self._instances = self._gauge("instances", "Known instances", "type", "state")
        self._has_pair = self._gauge(
            "has_pair", "1: a pair or an aggregated instance can be picked; 0: requests wait"
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"xpyd_router_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"xpyd_router_{name}", text, labels, registry=self._registry)

    def watch_certificate(self, context: WatchedContext, use: str) -> None:
        """Show the end and the reloads of what `context` loads."""

        def loaded(is_good: bool) -> None:
            self.tls_reloads.labels(use, "ok" if is_good else "failed").inc()
            self.tls_not_after.labels(use).set(context.not_after_s)

        for result in ("ok", "failed"):
            # There from the start: no increase() sees a series that begins with 1.
            self.tls_reloads.labels(use, result)
        self.tls_not_after.labels(use).set(context.not_after_s)
        context.on_reload = loaded

    def failed(self, instance: Instance, cause: FailureCause) -> None:
        """A call to `instance` failed."""
        self.errors.labels(PHASES[instance.beat.type], cause).inc()
        self.instances.of(instance).errors[cause] += 1

    def stands_in(self, instance: Instance, lost: Lost) -> AloneCause:
        """`instance` serves a request alone, as there is no pair; why."""
        self.no_pair.labels(lost, "alone").inc()
        if instance.beat.type == "P":
            return "no_decode"
        self.prefill_on_decode.inc()
        return "no_prefill"

    def retried(self, instance: Instance) -> None:
        """A request is tried again because `instance` failed."""
        self.retries.inc()
        self.instances.of(instance).retries += 1

    def render(self, instances: Iterable[Instance], *, has_pair: bool = False) -> bytes:
        """The text exposition, with the gauges of `instances` as they are now."""
        known = tuple(instances)
        self._has_pair.set(has_pair)
        self._instances.clear()
        tally = Tally((i.beat.type, state_of(i)) for i in known)
        for (kind, state), count in sorted(tally.items()):
            self._instances.labels(kind, state).set(count)
        self.instances.keep(known)
        self.kv.keep(self.instances.names)
        self.kv_probes.keep({instance.name for instance in known})
        out = Exposition()
        self.requests.write(out)
        self.instances.write(out)
        self.kv.write(out)
        self.kv_probes.write(out)
        self.objectives.write(out)
        self.keys.write(out)
        self.canary.write(out)
        return generate_latest(self._registry) + out.text()


def only(text: bytes, names: frozenset[str]) -> bytes:
    """Of a text exposition the metrics with these names."""
    kept: list[bytes] = []
    is_kept = False
    for line in text.splitlines():
        if line.startswith(b"# HELP "):
            is_kept = line.split(b" ", 3)[2].decode() in names
        if is_kept:
            kept.append(line)
    return b"\n".join([*kept, b""])


def state_of(instance: Instance) -> ShownState:
    """The state as people see it: its beat's, but for a Ready one that gets no or few requests.

    An operator's cordon is shown before health: it is why the instance gets no requests.
    """
    if instance.beat.state != "Ready":
        return instance.beat.state
    return "Cordoned" if instance.is_cordoned else _STATES[instance.standing]

"""Metrics that every request and every token writes: plain numbers, no lock.

prometheus_client takes a lock and about a microsecond for each write, and 1 to 10 us of the event
loop for each line of text; a hundred instances have some 6,000 lines. `Exposition` writes these
numbers as text when /metrics is read. `metrics` owns the tables and holds what is counted rarely.

Series of an instance go by the name that it gives itself, so a restarted pod continues its series.
Series of a name that no instance has are dropped after five minutes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from xpyd_core.distribution import Distribution
from xpyd_core.kv_outcome import Cause, Outcome
from xpyd_router.access_log import Trace
from xpyd_router.errors import FailureCause
from xpyd_router.fleet.instances import MAX_INSTANCES, Instance, InstanceKey

Kind = Literal["counter", "gauge"]
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def labels_of(values: Mapping[str, str]) -> str:
    """`values` as they are written between a sample's braces, sorted as the client library does."""
    return ",".join(f'{name}="{values[name].translate(_ESCAPES)}"' for name in sorted(values))


@cache
def _bounds_of(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return (*(str(float(bound)) for bound in bounds), "+Inf")


class Exposition:
    """Families of metrics, one behind the other; `text` at the end. Labels as of `labels_of`."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def numbers(
        self, name: str, kind: Kind, meaning: str, samples: Iterable[tuple[str, float]]
    ) -> None:
        """A family of counters (their name ends in _total) or gauges: labels and value of each."""
        self._begin(name, kind, meaning)
        for labels, value in samples:
            self._lines.append(f"{name}{{{labels}}} {value}" if labels else f"{name} {value}")

    def histograms(
        self, name: str, meaning: str, samples: Iterable[tuple[str, Distribution]]
    ) -> None:
        """A family of histograms; each has at least one label."""
        self._begin(name, "histogram", meaning)
        lines = self._lines
        for labels, values in samples:
            counts = values.cumulative()
            begin = f'{name}_bucket{{{labels},le="'
            lines += [
                f'{begin}{bound}"}} {count}'
                for bound, count in zip(_bounds_of(values.bounds), counts, strict=True)
            ]
            lines.append(f"{name}_count{{{labels}}} {counts[-1]}")
            lines.append(f"{name}_sum{{{labels}}} {values.sum}")

    def text(self) -> bytes:
        """All of it."""
        return "\n".join([*self._lines, ""]).encode()

    def _begin(self, name: str, kind: str, meaning: str) -> None:
        self._lines.append(f"# HELP {name} {meaning}")
        self._lines.append(f"# TYPE {name} {kind}")


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(slots=True, eq=False)
class EndpointMetrics:
    """The metrics of one endpoint, written at each request's end."""

    statuses: Counter[int] = field(default_factory=Counter[int])
    seconds: Distribution = field(default_factory=lambda: Distribution(_SECONDS))
    ttft_s: Distribution = field(default_factory=lambda: Distribution(_SECONDS))
    body_bytes: int = 0
    response_bytes: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def take(self, trace: Trace, status: int, now_s: float) -> None:
        """A request that ended with `status`."""
        self.statuses[status] += 1
        self.seconds.observe(now_s - trace.started_s)
        if trace.first_s is not None:
            self.ttft_s.observe(trace.first_s)
        self.body_bytes += trace.body_bytes
        self.response_bytes += trace.sent_bytes
        self.prompt_tokens += trace.prompt_tokens or 0
        self.output_tokens += trace.output_tokens or 0


class RequestTable:
    """Owner of the metrics of all requests."""

    def __init__(self) -> None:
        self._endpoints: dict[str, EndpointMetrics] = {}
        self.in_flight = 0
        """Requests that came and are not answered yet."""

    def began(self) -> None:
        """A request came."""
        self.in_flight += 1

    def ended(self, trace: Trace, status: int, now_s: float) -> None:
        """The request was answered, or its client left."""
        self.in_flight -= 1
        metrics = self._endpoints.get(trace.endpoint)
        if metrics is None:
            metrics = self._endpoints[trace.endpoint] = EndpointMetrics()
        metrics.take(trace, status, now_s)

    def write(self, out: Exposition) -> None:
        """All numbers as Prometheus metrics."""
        found = [(f'endpoint="{name}"', f) for name, f in sorted(self._endpoints.items())]
        out.numbers("xpyd_router_in_flight", "gauge", "Requests served", [("", self.in_flight)])
        out.numbers(
            "xpyd_router_requests_total",
            "counter",
            "Requests answered",
            [
                (f'{labels},status="{status}"', count)
                for labels, f in found
                for status, count in sorted(f.statuses.items())
            ],
        )
        out.histograms(
            "xpyd_router_request_seconds",
            "From request to last byte",
            [(labels, f.seconds) for labels, f in found],
        )
        out.histograms(
            "xpyd_router_ttft_seconds",
            "From request to first byte of a stream",
            [(labels, f.ttft_s) for labels, f in found],
        )
        for name, meaning, values in (
            ("request_bytes", "Bodies of requests", [f.body_bytes for _, f in found]),
            ("response_bytes", "Bodies of answers", [f.response_bytes for _, f in found]),
            ("prompt_tokens", "Prompt tokens, where known", [f.prompt_tokens for _, f in found]),
            ("output_tokens", "Output tokens, where known", [f.output_tokens for _, f in found]),
        ):
            samples = zip([labels for labels, _ in found], values, strict=True)
            out.numbers(f"xpyd_router_{name}_total", "counter", meaning, samples)


Objective = Literal["ttft", "itl"]
Word = Literal["met", "missed", "unknown"]


def word(time_s: float | None, objective_s: float) -> Word:
    """What `time_s` is to the objective; None: not known."""
    if time_s is None:
        return "unknown"
    return "met" if time_s <= objective_s else "missed"


class ObjectiveTable:
    """Owner of these counts."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[Objective, Word, Word]] = Counter()
        """Counts by objective, what was expected, and the result."""

    def count(self, objective: Objective, *, predicted: Word, result: Word) -> None:
        """A request ended."""
        self.counts[objective, predicted, result] += 1

    def write(self, out: Exposition) -> None:
        """All of them as one metric."""
        out.numbers(
            "xpyd_router_objectives_total",
            "counter",
            "Streams with an objective",
            [
                (f'objective="{objective}",predicted="{predicted}",result="{result}"', count)
                for (objective, predicted, result), count in sorted(self.counts.items())
            ],
        )


Revisions = Literal["same", "other", "unknown"]
"""Of a pair; unknown: one of the two names none."""
Phase = Literal["prefill", "decode", "aggregated"]
PHASES: dict[str, Phase] = {"P": "prefill", "D": "decode", "A": "aggregated"}
KEEP_S = 300.0
"""How long the series of a name stay that no instance bears: until scrapes have seen the last."""
MAX_NAMES = 2 * MAX_INSTANCES
MAX_PAIRS = 4096
"""Pairs with a series of their own; more are counted together."""
_MAX_LABEL = 128
_OTHER = "other"
# The engine's own, so that both sides' quantiles can be compared.
CALL_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0),
)


@dataclass(slots=True, eq=False)
class InstanceMetrics:
    """The metrics of one name. Mutable; calls to the instance write them."""

    name: str
    phase: Phase
    seen_s: float
    """When an instance last bore the name."""
    labels: str = field(init=False)
    calls: int = 0
    """Begun; those of `call_s` have ended."""
    sent_bytes: int = 0
    received_bytes: int = 0
    retries: int = 0
    errors: Counter[FailureCause] = field(default_factory=Counter[FailureCause])
    paired: dict[InstanceMetrics, int] = field(default_factory=dict["InstanceMetrics", int])
    """For a P: how often with which D."""
    ttft_s: Distribution = field(default_factory=lambda: Distribution(CALL_SECONDS))
    itl_s: Distribution = field(default_factory=lambda: Distribution(TOKEN_SECONDS))
    call_s: Distribution = field(default_factory=lambda: Distribution(CALL_SECONDS))

    def __post_init__(self) -> None:
        self.labels = labels_of({"engine": self.name, "phase": self.phase})

    @property
    def in_flight(self) -> int:
        """Calls that have not ended."""
        return self.calls - self.call_s.count


class CallMetrics:
    """The metrics of one call to an instance, from its beginning to `end`, which must follow."""

    __slots__ = ("_clock", "_gaps_s", "_last_s", "_metrics", "_started_s")

    def __init__(
        self,
        metrics: InstanceMetrics,
        clock: Callable[[], float],
        sent_bytes: int,
        gaps_s: Distribution | None = None,
    ) -> None:
        """`gaps_s`: where the gaps of a stream count, too."""
        self._metrics = metrics
        self._gaps_s = gaps_s
        self._clock = clock
        self._started_s = clock()
        self._last_s = 0.0
        metrics.calls += 1
        metrics.sent_bytes += sent_bytes

    def answered(self, size_bytes: int, *, is_first_token: bool) -> None:
        """The whole answer is here."""
        metrics = self._metrics
        metrics.received_bytes += size_bytes
        if is_first_token:
            metrics.ttft_s.observe(self._clock() - self._started_s)

    def streamed(self, chunks: int, size_bytes: int) -> None:
        """A piece of the stream came, with this many chunks. Called for every token."""
        metrics = self._metrics
        metrics.received_bytes += size_bytes
        if not chunks:
            return
        now_s = self._clock()
        last_s, self._last_s = self._last_s, now_s
        if last_s > 0 and self._gaps_s is not None:
            self._gaps_s.observe_each((now_s - last_s) / chunks, chunks)
        if last_s > 0 and chunks == 1:
            metrics.itl_s.observe(now_s - last_s)
        elif last_s > 0:
            # Several at once waited for each other on the way: each took its part of the gap.
            metrics.itl_s.observe_each((now_s - last_s) / chunks, chunks)
        elif last_s == 0:
            metrics.ttft_s.observe(now_s - self._started_s)

    def interrupted(self) -> None:
        """The client did not take what came: the gap until the next piece is not the engine's."""
        if self._last_s > 0:
            self._last_s = -1.0

    def end(self) -> float:
        """The call is over, however it went; seconds that it took."""
        seconds = self._clock() - self._started_s
        self._metrics.call_s.observe(seconds)
        return seconds


class InstanceTable:
    """Owner of all InstanceMetrics. `clock` is monotonic seconds, never 0."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_name: dict[tuple[str, Phase], InstanceMetrics] = {}
        self._by_key: dict[InstanceKey, InstanceMetrics] = {}
        self._pairs = 0
        self._other_pairs = 0
        self._revisions: dict[Revisions, int] = {"same": 0, "other": 0, "unknown": 0}

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def names(self) -> frozenset[str]:
        """The names that have series."""
        return frozenset(name for name, _ in self._by_name)

    def of(self, instance: Instance) -> InstanceMetrics:
        """The instance's metrics."""
        return self._by_key.get(instance.key) or self._enter(instance)

    def call(
        self, instance: Instance, sent_bytes: int, gaps_s: Distribution | None = None
    ) -> CallMetrics:
        """A call to `instance` begins."""
        return CallMetrics(self.of(instance), self._clock, sent_bytes, gaps_s)

    def paired(self, prefill: Instance, decode: Instance) -> None:
        """P and D were picked for a try."""
        mine, its = prefill.beat.fleet_revision, decode.beat.fleet_revision
        known: Revisions = "same" if mine == its else "other"
        self._revisions[known if mine and its else "unknown"] += 1
        pairs, partner = self.of(prefill).paired, self.of(decode)
        if partner in pairs:
            pairs[partner] += 1
        elif self._pairs < MAX_PAIRS:
            self._pairs += 1
            pairs[partner] = 1
        else:
            self._other_pairs += 1

    def keep(self, instances: Iterable[Instance]) -> None:
        """`instances` are in the fleet now; forget instances that left long ago."""
        now_s = self._clock()
        self._by_key.clear()
        for instance in instances:
            self.of(instance).seen_s = now_s
        oldest_s = now_s - KEEP_S
        gone = [f for f in self._by_name.values() if f.seen_s < oldest_s and not f.in_flight]
        for metrics in gone:
            del self._by_name[metrics.name, metrics.phase]
        if gone:
            self._forget_pairs(frozenset(gone))

    def write(self, out: Exposition) -> None:
        """All numbers as Prometheus metrics."""
        everyone = [self._by_name[key] for key in sorted(self._by_name)]
        for name, kind, meaning, value in _NUMBERS:
            out.numbers(name, kind, meaning, [(f.labels, value(f)) for f in everyone])
        out.numbers(
            "xpyd_router_engine_errors_total",
            "counter",
            "Failed calls, by engine",
            [
                (f'cause="{cause}",{f.labels}', count)
                for f in everyone
                for cause, count in sorted(f.errors.items())
            ],
        )
        for name, meaning, values in _HISTOGRAMS:
            found = [(f.labels, values(f)) for f in everyone]
            # Sixty lines of zeros for each that was never called would be most of the text.
            out.histograms(name, meaning, [(labels, v) for labels, v in found if v.count])
        pairs = [
            (labels_of({"prefill": f.name, "decode": d.name}), count)
            for f in everyone
            for d, count in f.paired.items()
        ]
        if self._other_pairs:
            other = labels_of({"prefill": _OTHER, "decode": _OTHER})
            pairs.append((other, self._other_pairs))
        out.numbers("xpyd_router_pairs_total", "counter", "Tries, by P and D", pairs)
        out.numbers(
            "xpyd_router_pair_revisions_total",
            "counter",
            "Tries, by whether P and D are of one fleet revision",
            [(f'revisions="{word}"', count) for word, count in self._revisions.items()],
        )

    def _enter(self, instance: Instance) -> InstanceMetrics:
        phase = PHASES[instance.beat.type]
        name = instance.name[:_MAX_LABEL]
        metrics = self._by_name.get((name, phase))
        if metrics is None:
            if len(self._by_name) >= MAX_NAMES:
                # The metrics are not scraped, or `keep` had made room.
                self._by_name.clear()
                self._forget_pairs(None)
            metrics = InstanceMetrics(name, phase, self._clock())
            self._by_name[name, phase] = metrics
        if len(self._by_key) >= MAX_NAMES:
            self._by_key.clear()
        self._by_key[instance.key] = metrics
        return metrics

    def _forget_pairs(self, gone: frozenset[InstanceMetrics] | None) -> None:
        """Pairs without the instances in `gone`; None: without all."""
        for metrics in self._by_name.values():
            for partner in [d for d in metrics.paired if gone is None or d in gone]:
                del metrics.paired[partner]
        self._pairs = sum(len(metrics.paired) for metrics in self._by_name.values())


class KvTable:
    """Owner of the counts of what became of KV, by P and D, as the metric `name`. An instance that
    served alone has the other's place empty."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self._counts: dict[tuple[str, str, Outcome, Cause], int] = {}

    def count(self, instances: tuple[Instance, ...], outcome: Outcome, cause: Cause) -> None:
        """An engine answered a try on `instances`, or the try failed for the KV."""
        first, last = instances[0], instances[-1]
        prefill = first.name if first.beat.type == "P" else ""
        decode = last.name if last.beat.type != "P" else ""
        key = (prefill, decode, outcome, cause)
        counts = self._counts
        if key not in counts and len(counts) >= MAX_PAIRS:
            key = (_OTHER, _OTHER, outcome, cause)
        counts[key] = counts.get(key, 0) + 1

    def keep(self, names: Container[str]) -> None:
        """Forget instances that are not among `names`."""
        kept = {"", _OTHER}
        for key in list(self._counts):
            if any(name not in kept and name[:_MAX_LABEL] not in names for name in key[:2]):
                del self._counts[key]

    def write(self, out: Exposition) -> None:
        """All of them as one metric."""
        samples = [
            (
                labels_of(
                    {
                        "prefill": prefill[:_MAX_LABEL],
                        "decode": decode[:_MAX_LABEL],
                        "outcome": outcome,
                        "cause": cause,
                    }
                ),
                count,
            )
            for (prefill, decode, outcome, cause), count in sorted(self._counts.items())
        ]
        out.numbers(self._name, "counter", self._text, samples)


_NUMBERS: tuple[tuple[str, Kind, str, Callable[[InstanceMetrics], int]], ...] = (
    ("xpyd_router_engine_requests_total", "counter", "Calls to the engine", lambda f: f.calls),
    ("xpyd_router_engine_in_flight", "gauge", "Calls that run", lambda f: f.in_flight),
    (
        "xpyd_router_engine_retries_total",
        "counter",
        "Requests tried again because the engine failed",
        lambda f: f.retries,
    ),
    (
        "xpyd_router_engine_sent_bytes_total",
        "counter",
        "Bodies sent to the engine",
        lambda f: f.sent_bytes,
    ),
    (
        "xpyd_router_engine_received_bytes_total",
        "counter",
        "Answers of the engine",
        lambda f: f.received_bytes,
    ),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[InstanceMetrics], Distribution]], ...] = (
    (
        "xpyd_router_engine_ttft_seconds",
        "From the call to its first token",
        lambda f: f.ttft_s,
    ),
    (
        "xpyd_router_engine_itl_seconds",
        "Gap between two chunks of a stream",
        lambda f: f.itl_s,
    ),
    ("xpyd_router_engine_call_seconds", "From the call to its end", lambda f: f.call_s),
)

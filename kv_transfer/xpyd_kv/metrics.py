"""Counts what transfers and connections do, and limits the log lines that peers can cause.

One thread writes each field, any thread may read. Ranks of other processes send their counts to the
engine's process, which adds them up. Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import cast

from xpyd_core.distribution import Distribution

MAX_NAMES = 64
OTHER = "other"


class Names(Counter[str]):
    """Counts by name, where a peer may have chosen the name: over MAX_NAMES it becomes `other`."""

    def add(self, name: str, count: int = 1) -> None:
        """`count` more under `name`."""
        if name not in self and len(self) >= MAX_NAMES:
            name = OTHER
        self[name] += count


_MAX_KEYS = 256


class RateLimit:
    """One per `interval_s`."""

    def __init__(self, interval_s: float = 5.0) -> None:
        self._interval_s = interval_s
        self._next = float("-inf")
        self._left_out = 0

    def take(self, now: float) -> int | None:
        """How many were left out since the last one, or None: leave this one out too."""
        if now < self._next:
            self._left_out += 1
            return None
        left_out, self._left_out = self._left_out, 0
        self._next = now + self._interval_s
        return left_out


class RateLimits:
    """One per `interval_s` for each key; of more than 256 keys the oldest is forgotten."""

    def __init__(self, interval_s: float = 60.0) -> None:
        self._interval_s = interval_s
        self._limits: dict[object, RateLimit] = {}

    def take(self, key: object, now: float) -> int | None:
        """As RateLimit's, for `key`."""
        limit = self._limits.pop(key, None) or RateLimit(self._interval_s)
        while len(self._limits) >= _MAX_KEYS:
            del self._limits[next(iter(self._limits))]
        self._limits[key] = limit  # The last used is the youngest.
        return limit.take(now)


@dataclass
class KvMetrics:
    """Exported by the server as `xpyd_kv_*` (docs/metrics.md).

    Written on the I/O thread: bytes and frames sent and received, `overlapped_bytes` (sent before
    P's prefill had ended), transfers{outcome}, failed{reason}, `open_transfers` (now),
    `leases_expired`, `grant_wait`, `transfer_s` (from GRANT until all had arrived, by transport),
    `after_prefill_s` (from the end of P's prefill to DONE), refused_data{reason},
    checksum_mismatches. On the engine's: landings{where}, skipped_tokens, not_received{reason} (a
    request got no KV), pressure_cancels, spilled{where} and spilled_bytes (KV that P moved out of
    its blocks), held_s (P's steps waited for D). On the I/O thread again:
    probes{outcome}.
    """

    sent_bytes: int = 0
    sent_frames: int = 0
    overlapped_bytes: int = 0
    received_bytes: int = 0
    received_frames: int = 0
    transfers: Counter[str] = field(default_factory=Counter[str])
    failed: Names = field(default_factory=Names)
    open_transfers: int = 0
    leases_expired: int = 0
    grant_wait: Distribution = field(default_factory=Distribution)
    transfer_s: dict[str, Distribution] = field(default_factory=dict[str, Distribution])
    after_prefill_s: Distribution = field(default_factory=Distribution)
    refused_data: Counter[str] = field(default_factory=Counter[str])
    checksum_mismatches: int = 0
    landings: Counter[str] = field(default_factory=Counter[str])
    skipped_tokens: int = 0
    not_received: Counter[str] = field(default_factory=Counter[str])
    pressure_cancels: int = 0
    spilled: Counter[str] = field(default_factory=Counter[str])
    spilled_bytes: int = 0
    held_s: float = 0.0
    probes: Names = field(default_factory=Names)

    def transferred(self, transport: str, seconds: float) -> None:
        """A transfer has come to its end over `transport`, `seconds` after its GRANT."""
        if transport not in self.transfer_s:
            self.transfer_s[transport] = Distribution()
        self.transfer_s[transport].observe(seconds)

    def ended(self, reason: str) -> None:
        """A transfer has ended; '' when its KV arrived."""
        self.transfers["failed" if reason else "done"] += 1
        if reason:
            self.failed.add(reason)


@dataclass
class EndpointCounters:
    """Since the start, but for `connections` and `strangers`, which are now."""

    connections: int = 0
    """Open peers now."""
    connections_by: dict[str, int] = field(default_factory=dict[str, int])
    """The same, by the transport agreed on."""
    opened: dict[str, int] = field(default_factory=dict[str, int])
    """Peers that came up, by the transport agreed on."""
    strangers: int = 0
    """Accepted connections now that have not proved themselves."""
    sent_bytes: int = 0
    received_bytes: int = 0
    """Whole streams, DATA and all."""
    shared_bytes: int = 0
    """KV bytes that moved beside the peers' first connections: lent, or fetched by us."""
    auth_failed: int = 0
    """Handshakes in which one side did not show a key of the fleet, seen from this side."""
    junk_connections: int = 0
    """Accepted connections closed for breaking the protocol or saying nothing before AUTH."""
    protocol_errors: int = 0
    """Authenticated peers closed for breaking the protocol."""
    silent_peers: int = 0
    """Peers closed for not answering PINGs or not reading their control frames."""
    corrupt_frames: int = 0
    """DATA frames whose checksum was wrong."""
    quarantines: int = 0
    """Times that a P was put into quarantine."""
    paths_failed: Names = field(default_factory=Names)
    """Connections that ended because what P lends could not be opened or read, by transport."""
    refused: Names = field(default_factory=Names)
    """Handshakes refused, by factor (`incompatible`) or by reason (`auth`, `version`, ...)."""

    def numbers(self) -> dict[str, int]:
        """The plain ones, by their fields."""
        values = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in values if isinstance(value, int)}

    def named(self) -> dict[str, dict[str, int]]:
        """The others, likewise."""
        values = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {
            name: dict(cast("dict[str, int]", value))
            for name, value in values
            if isinstance(value, dict)
        }

    def add(self, numbers: Mapping[str, int], named: Mapping[str, Mapping[str, int]]) -> None:
        """Count these, too: as `numbers` and `named` give them, or what they have changed by."""
        for name, more in numbers.items():
            setattr(self, name, getattr(self, name) + more)
        for name, counts in named.items():
            own: dict[str, int] = getattr(self, name)
            for key, more in counts.items():
                if isinstance(own, Names):
                    own.add(key, more)
                else:
                    own[key] = own.get(key, 0) + more


def together(parts: Iterable[EndpointCounters]) -> EndpointCounters:
    """Their sum."""
    total = EndpointCounters()
    for part in parts:
        total.add(part.numbers(), part.named())
    return total


@dataclass(frozen=True, kw_only=True)
class RankCounts:
    """What a rank has counted since it last said so: see KvMetrics."""

    sent_bytes: int = 0
    sent_frames: int = 0
    overlapped_bytes: int = 0
    received_bytes: int = 0
    received_frames: int = 0
    checksum_mismatches: int = 0
    refused_data: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, kw_only=True)
class EndpointCounts:
    """What a rank's endpoint has counted since the rank last reported it, by the fields of
    EndpointCounters: only what has changed."""

    numbers: dict[str, int] = field(default_factory=dict[str, int])
    named: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])


TELL_S = 1.0
"""Far under the period in which anybody scrapes."""

_NUMBERS = (
    "sent_bytes",
    "sent_frames",
    "overlapped_bytes",
    "received_bytes",
    "received_frames",
    "checksum_mismatches",
)


class RankMetricsDelta:
    """Of one rank: what it has not reported yet. On its I/O thread."""

    def __init__(self, metrics: KvMetrics) -> None:
        self.metrics = metrics
        self._told = dict.fromkeys(_NUMBERS, 0)
        self._refused: Counter[str] = Counter()

    def take(self) -> RankCounts:
        """What was counted since the last call."""
        now: dict[str, int] = {name: getattr(self.metrics, name) for name in _NUMBERS}
        more = {name: now[name] - self._told[name] for name in _NUMBERS}
        self._told = now
        refused = Counter(self.metrics.refused_data)
        new = refused - self._refused
        self._refused = refused
        return RankCounts(**more, refused_data=dict(new))


def add(metrics: KvMetrics, counts: RankCounts) -> None:
    """Into the engine's, on its I/O thread."""
    for name in _NUMBERS:
        setattr(metrics, name, getattr(metrics, name) + getattr(counts, name))
    metrics.refused_data.update(counts.refused_data)


class EndpointMetricsDelta:
    """Of one rank's endpoint: what it has not reported yet. On its I/O thread."""

    def __init__(self, counters: EndpointCounters) -> None:
        self._counters = counters
        self._numbers: dict[str, int] = {}
        self._named: dict[str, dict[str, int]] = {}

    def take(self) -> EndpointCounts:
        """What has changed since the last call."""
        numbers, named = self._counters.numbers(), self._counters.named()
        found = EndpointCounts(
            numbers=_changes(numbers, self._numbers),
            named={
                name: changes
                for name, counts in named.items()
                if (changes := _changes(counts, self._named.get(name, {})))
            },
        )
        self._numbers, self._named = numbers, named
        return found


class MetricsReporter:
    """Calls `tell` with what has changed, at most once in TELL_S. The Handler's tick asks it."""

    def __init__(
        self,
        figures: RankMetricsDelta,
        counters: EndpointCounters,
        tell: Callable[[RankCounts, EndpointCounts], None],
    ) -> None:
        self._figures = figures
        self._endpoint = EndpointMetricsDelta(counters)
        self._tell = tell
        self._next_s = float("-inf")

    def tick(self, now: float) -> float:
        """See Handler."""
        if now >= self._next_s:
            self._next_s = now + TELL_S
            figures, endpoint = self._figures.take(), self._endpoint.take()
            if figures != RankCounts() or endpoint != EndpointCounts():
                self._tell(figures, endpoint)
        return self._next_s


def _changes(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: change for name, value in now.items() if (change := value - before.get(name, 0))}

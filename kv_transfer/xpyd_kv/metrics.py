"""Counts what transfers and connections do, and limits the log lines that peers can cause.

One thread writes each field, any thread may read. Ranks of other processes send their counts to the
engine's process, which adds them up. Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Generic, TypeVar

from xpyd_core.distribution import Distribution
from xpyd_core.kv_outcome import PeerCounts

MAX_NAMES = 64
OTHER = "other"


class Names(Counter[str]):
    """Counts by name, where a peer may have chosen the name: names over MAX_NAMES are `other`."""

    def add(self, name: str, count: int = 1) -> None:
        """Count `count` more under `name`."""
        if name not in self and len(self) >= MAX_NAMES:
            name = OTHER
        self[name] += count


_MAX_KEYS = 256


class RateLimit:
    """Lets one log line through per `interval_s`."""

    def __init__(self, interval_s: float = 5.0) -> None:
        self._interval_s = interval_s
        self._next = float("-inf")
        self._left_out = 0

    def take(self, now: float) -> int | None:
        """The number of lines left out since the last one; None: leave this one out too."""
        if now < self._next:
            self._left_out += 1
            return None
        left_out, self._left_out = self._left_out, 0
        self._next = now + self._interval_s
        return left_out


class RateLimits:
    """Lets one log line through per `interval_s` and key; of 257 keys the oldest is forgotten."""

    def __init__(self, interval_s: float = 60.0) -> None:
        self._interval_s = interval_s
        self._limits: dict[object, RateLimit] = {}

    def take(self, key: object, now: float) -> int | None:
        """See RateLimit.take."""
        limit = self._limits.pop(key, None) or RateLimit(self._interval_s)
        while len(self._limits) >= _MAX_KEYS:
            del self._limits[next(iter(self._limits))]
        self._limits[key] = limit  # The last used is the youngest.
        return limit.take(now)


@dataclass
class RankCounters:
    """Counted by each rank, for what it sends and receives, on its I/O thread.

    Ranks report every field of this class, and the engine's KvMetrics has their sum.
    """

    sent_bytes: int = 0
    sent_frames: int = 0
    overlapped_bytes: int = 0
    """Sent before P's prefill had ended."""
    received_bytes: int = 0
    received_frames: int = 0
    checksum_mismatches: int = 0
    refused_data: Counter[str] = field(default_factory=Counter[str])
    """By reason."""


@dataclass
class KvMetrics(RankCounters):
    """Exported by the server as `xpyd_kv_*` (docs/metrics.md).

    The engine's I/O thread writes transfers{outcome}, failed{reason}, `open_transfers` (now),
    `leases_expired`, `grant_wait`, `transfer_s` (from GRANT until all had arrived, by transport),
    `after_prefill_s` (from the end of P's prefill to DONE) and probes{outcome}. The engine's thread
    writes landings{where}, skipped_tokens, not_received{reason} (a request got no KV),
    pressure_cancels, spilled{where} and spilled_bytes (KV that P moved out of its blocks), held_s
    (P's steps waited for D).
    """

    transfers: Counter[str] = field(default_factory=Counter[str])
    failed: Names = field(default_factory=Names)
    open_transfers: int = 0
    leases_expired: int = 0
    grant_wait: Distribution = field(default_factory=Distribution)
    transfer_s: dict[str, Distribution] = field(default_factory=dict[str, Distribution])
    after_prefill_s: Distribution = field(default_factory=Distribution)
    landings: Counter[str] = field(default_factory=Counter[str])
    skipped_tokens: int = 0
    not_received: Counter[str] = field(default_factory=Counter[str])
    pressure_cancels: int = 0
    spilled: Counter[str] = field(default_factory=Counter[str])
    spilled_bytes: int = 0
    held_s: float = 0.0
    probes: Names = field(default_factory=Names)
    peers: PeerCounts = field(default_factory=PeerCounts)
    """P's, by the KV address of D; for heartbeats."""

    def transferred(self, transport: str, seconds: float) -> None:
        """A transfer has come to its end over `transport`, `seconds` after its GRANT."""
        if transport not in self.transfer_s:
            self.transfer_s[transport] = Distribution()
        self.transfer_s[transport].observe(seconds)

    def ended(self, reason: str, *, peer: str = "") -> None:
        """A transfer has ended; '' when its KV arrived. `peer`: where P sent it."""
        self.transfers["failed" if reason else "done"] += 1
        if peer:
            self.peers.count(peer, reason)
        if reason:
            self.failed.add(reason)


@dataclass
class EndpointCounters:
    """Counted by one endpoint since its start; `connections` and `strangers` are of now.

    Ranks report every field of this class.
    """

    connections: int = 0
    """Open peers now."""
    connections_by: dict[str, int] = field(default_factory=dict[str, int])
    """Open peers now, by the transport agreed on."""
    opened: dict[str, int] = field(default_factory=dict[str, int])
    """Peers that came up, by the transport agreed on."""
    strangers: int = 0
    """Accepted connections now that have not proved themselves."""
    sent_bytes: int = 0
    received_bytes: int = 0
    """All bytes of the streams, those of DATA too."""
    shared_bytes: int = 0
    """KV bytes that moved outside the peers' first connections: lent, or fetched by us."""
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


Counters = RankCounters | EndpointCounters
C = TypeVar("C", bound=Counters)
Counts = dict[str, int | dict[str, int]]
"""Counts by the fields of RankCounters or of EndpointCounters: numbers, and counts by name."""


def add(counters: Counters, counts: Mapping[str, int | Mapping[str, int]]) -> None:
    """Add `counts`, a whole or a change, to `counters`."""
    for name, more in counts.items():
        own = getattr(counters, name)
        if isinstance(more, int):
            setattr(counters, name, own + more)
            continue
        for key, count in more.items():
            if isinstance(own, Names):
                own.add(key, count)
            else:
                own[key] = own.get(key, 0) + count


def together(parts: Iterable[EndpointCounters]) -> EndpointCounters:
    """The sum of the counters of several endpoints."""
    total = EndpointCounters()
    for part in parts:
        add(total, vars(part))
    return total


class MetricsDelta(Generic[C]):
    """The counts of a rank that it has not reported yet. Owned by its I/O thread.

    `counters` has the fields of `kind`, and maybe others, which are not reported.
    """

    def __init__(self, counters: C, kind: type[Counters]) -> None:
        self.counters = counters
        self._reported: Counts = {}
        self._names = tuple(field.name for field in fields(kind))

    def take(self) -> Counts:
        """The changes since the last call."""
        more: Counts = {}
        for name in self._names:
            now: int | dict[str, int] = getattr(self.counters, name)
            before = self._reported.get(name)
            if isinstance(now, int):
                change = now - before if isinstance(before, int) else now
            elif not now:
                continue
            else:
                then = before if isinstance(before, dict) else {}
                change = {k: new for k, count in now.items() if (new := count - then.get(k, 0))}
            if change:
                more[name] = change
                self._reported[name] = now if isinstance(now, int) else dict(now)
        return more


REPORT_S = 1.0
"""Far under the period in which Prometheus scrapes."""


class MetricsReporter:
    """Reports the changes of a rank's and its endpoint's counters, at most once in REPORT_S.

    The Handler's tick calls it.
    """

    def __init__(
        self,
        counted: MetricsDelta[KvMetrics],
        counters: EndpointCounters,
        report: Callable[[Counts, Counts], None],
    ) -> None:
        self._counted = counted
        self._endpoint = MetricsDelta(counters, EndpointCounters)
        self._report = report
        self._next_s = float("-inf")

    def tick(self, now: float) -> float:
        """See Handler."""
        if now >= self._next_s:
            self._next_s = now + REPORT_S
            counted, endpoint = self._counted.take(), self._endpoint.take()
            if counted or endpoint:
                self._report(counted, endpoint)
        return self._next_s

"""What transfers count, on its way to vLLM's own /metrics.

The scheduler's object takes the changes once in a step, vLLM carries them to the API server's
process, and there they are added to Prometheus' counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xpyd_kv.connector.build import Connector
from xpyd_kv.metrics import MetricsDelta, RankCounters
from xpyd_kv.vllm.engine_api import KVConnectorPromMetrics, KVConnectorStats, VllmConfig

COUNTERS: Mapping[str, tuple[str, str]] = {
    "transfers": ("outcome", "KV transfers that have ended"),
    "failed": ("reason", "KV transfers that failed"),
    "landings": ("where", "Where D took room for KV"),
    "not_received": ("reason", "Requests of D that got no KV"),
    "sent_bytes": ("", "KV bytes sent"),
    "received_bytes": ("", "KV bytes received"),
    "skipped_tokens": ("", "Offered tokens that D had cached"),
    "recomputed_tokens": ("", "Prompt tokens that D computed although P had"),
    "leases_expired": ("", "KV that was held for a silent peer, and given up"),
    "pressure_cancels": ("", "Transfers that P gave up for their blocks"),
    "checksum_mismatches": ("", "DATA frames whose checksum was wrong"),
}
"""Name, its label ('' for none), and what it counts; `xpyd_kv_NAME_total` in /metrics."""


@dataclass
class _Counted(RankCounters):
    """The fields of KvMetrics that are reported."""

    transfers: Counter[str] = field(default_factory=Counter[str])
    failed: Counter[str] = field(default_factory=Counter[str])
    landings: Counter[str] = field(default_factory=Counter[str])
    not_received: Counter[str] = field(default_factory=Counter[str])
    skipped_tokens: int = 0
    leases_expired: int = 0
    pressure_cancels: int = 0


class KvStats(KVConnectorStats):
    """Counts by name: numbers, or numbers by a label's value."""

    def reset(self) -> None:
        """Forget the counts."""
        self.data.clear()

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KvStats:
        """Add the other's counts to these."""
        for name, more in other.data.items():
            if isinstance(more, int):
                self.data[name] = self.data.get(name, 0) + more
            else:
                own = self.data.setdefault(name, {})
                for label, count in more.items():
                    own[label] = own.get(label, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """One number for each name, for vLLM's log."""
        return {
            name: more if isinstance(more, int) else sum(more.values())
            for name, more in self.data.items()
        }


class StatsTaker:
    """Takes the changes of a connector's counts since the last call. vLLM's thread."""

    def __init__(self, connector: Connector) -> None:
        self._delta = MetricsDelta(connector.metrics, _Counted)
        self._recomputed = 0

    def take(self, recomputed_tokens: int) -> KvStats | None:
        """The changes; None where nothing was counted."""
        data: dict[str, Any] = {k: v for k, v in self._delta.take().items() if k in COUNTERS}
        if recomputed_tokens > self._recomputed:
            data["recomputed_tokens"] = recomputed_tokens - self._recomputed
            self._recomputed = recomputed_tokens
        return KvStats(data) if data else None


class KvPrometheus(KVConnectorPromMetrics):
    """The counters of `xpyd_kv_*` in the API server's process."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._values = per_engine_labelvalues
        self._counters = {
            name: self._counter_cls(
                name=f"xpyd_kv_{name}_total",
                documentation=text,
                labelnames=[*labelnames, *([label] if label else [])],
            )
            for name, (label, text) in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what one engine counted."""
        values = self._values[engine_idx]
        for name, more in transfer_stats_data.items():
            counter = self._counters[name]
            if isinstance(more, int):
                counter.labels(*values).inc(more)
                continue
            for label, count in more.items():
                counter.labels(*values, label).inc(count)

"""Counters of the transfers, as plain fields. Each field has one writing thread; any may read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class KvMetrics:
    """Exported by the server as `xpyd_kv_<field>` (counters with `_total`, dicts with one label).

    Written on the I/O thread: sent/received bytes, transfers{outcome}, grant waits,
    refused_data{reason}, checksum_mismatches. On the engine's: landings{where},
    skipped_tokens, not_received{reason} (a request got no KV), pressure_cancels.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    transfers: Counter[str] = field(default_factory=Counter[str])
    grant_waits: int = 0
    grant_wait_s: float = 0.0
    refused_data: Counter[str] = field(default_factory=Counter[str])
    checksum_mismatches: int = 0
    landings: Counter[str] = field(default_factory=Counter[str])
    skipped_tokens: int = 0
    not_received: Counter[str] = field(default_factory=Counter[str])
    pressure_cancels: int = 0

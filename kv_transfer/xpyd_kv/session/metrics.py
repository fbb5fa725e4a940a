"""Figures of the transfers, as plain fields. Each field has one writing thread; any may read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from xpyd_core.distribution import Distribution
from xpyd_kv.figures import Names


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

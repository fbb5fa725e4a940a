"""Plain numbers for metrics. The I/O thread writes, anyone reads."""

from __future__ import annotations

from dataclasses import dataclass, field

_MAX_NAMES = 64


@dataclass
class Counters:
    """Since the start, but for `connections`, which is now."""

    connections: int = 0
    """Open peers now."""
    opened: dict[str, int] = field(default_factory=dict[str, int])
    """Peers that came up, by the transport agreed on."""
    strangers: int = 0
    """Accepted connections now that have not proved themselves."""
    sent_bytes: int = 0
    received_bytes: int = 0
    """Whole streams, DATA and all."""
    shared_bytes: int = 0
    """KV bytes that went through shared memory: lent and copied by D, or copied by us."""
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
    refused: dict[str, int] = field(default_factory=dict[str, int])
    """Handshakes refused, by factor (`incompatible`) or by reason (`version`, `role`, ...)."""

    def count_refused(self, name: str) -> None:
        """One more under `name`, which a peer may have chosen: the number of names is bounded."""
        if name not in self.refused and len(self.refused) >= _MAX_NAMES:
            name = "other"
        self.refused[name] = self.refused.get(name, 0) + 1

"""Plain numbers for metrics. The I/O thread writes, anyone reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import cast

from xpyd_kv.figures import Names


@dataclass
class Counters:
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


def together(parts: Iterable[Counters]) -> Counters:
    """Their sum."""
    total = Counters()
    for part in parts:
        total.add(part.numbers(), part.named())
    return total

"""What is counted of client keys: requests and tokens by name, refusals, reads of the key file.

There are at most as many names as a key file may have; those of keys that are gone stay, as
counters do, until there are twice as many, and are then counted together.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from xpyd_router.access_log import Trace
from xpyd_router.request_metrics import Exposition, labels_of

MAX_SHOWN = 2048
_OTHER = "other"


@dataclass(slots=True)
class _Use:
    """The counts of one name."""

    statuses: dict[int, int] = field(default_factory=dict[int, int])
    prompt_tokens: int = 0
    output_tokens: int = 0


class KeyTable:
    """Owner of these counts."""

    def __init__(self) -> None:
        self.refusals: Counter[str] = Counter()
        """Requests without a key that counts, by the reason."""
        self.loads: Counter[str] = Counter()
        """Reads of the key file that changed something, or failed."""
        self._uses: dict[str, _Use] = {}

    def ended(self, trace: Trace, status: int) -> None:
        """A request with a key was answered, or its client left."""
        use = self._uses.get(trace.key)
        if use is None:
            name = trace.key if len(self._uses) < MAX_SHOWN else _OTHER
            use = self._uses.setdefault(name, _Use())
        use.statuses[status] = use.statuses.get(status, 0) + 1
        use.prompt_tokens += trace.prompt_tokens or 0
        use.output_tokens += trace.output_tokens or 0

    def write(self, out: Exposition) -> None:
        """All of them as metrics; nothing where there are no keys."""
        if not (self.refusals or self.loads or self._uses):
            return
        uses = sorted(self._uses.items())
        out.numbers(
            "xpyd_router_key_requests_total",
            "counter",
            "Requests answered, by the client's key",
            [
                (labels_of({"key": name, "status": str(status)}), count)
                for name, use in uses
                for status, count in sorted(use.statuses.items())
            ],
        )
        for kind in ("prompt", "output"):
            out.numbers(
                f"xpyd_router_key_{kind}_tokens_total",
                "counter",
                f"Tokens of {kind}s, where known, by the client's key",
                [(labels_of({"key": name}), getattr(use, f"{kind}_tokens")) for name, use in uses],
            )
        for name, meaning, label, counts in (
            ("key_refusals", "Requests without a valid key", "reason", self.refusals),
            ("key_file_loads", "Key files taken, or refused", "result", self.loads),
        ):
            out.numbers(
                f"xpyd_router_{name}_total",
                "counter",
                meaning,
                [(labels_of({label: value}), count) for value, count in sorted(counts.items())],
            )

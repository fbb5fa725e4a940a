"""What is counted of client keys: requests and tokens by name, refusals, reads of the key file.

There are at most as many names as a key file may have; those of keys that are gone stay, as
counters do, until there are twice as many, and are then counted together.
"""

from __future__ import annotations

from collections import Counter

from xpyd_router.access_log import Trace
from xpyd_router.request_metrics import Exposition, labels_of

MAX_SHOWN = 2048
_OTHER = "other"


class KeyTable:
    """Owner of these counts."""

    def __init__(self) -> None:
        self.refusals: Counter[str] = Counter()
        """Requests without a key that counts, by the reason."""
        self.loads: Counter[str] = Counter()
        """Reads of the key file that changed something, or failed."""
        self._requests: Counter[tuple[str, int]] = Counter()
        self._prompt_tokens: Counter[str] = Counter()
        self._output_tokens: Counter[str] = Counter()

    def ended(self, trace: Trace, status: int) -> None:
        """A request with a key was answered, or its client left."""
        name = trace.key
        if name not in self._prompt_tokens and len(self._prompt_tokens) >= MAX_SHOWN:
            name = _OTHER
        self._requests[name, status] += 1
        self._prompt_tokens[name] += trace.prompt_tokens or 0
        self._output_tokens[name] += trace.output_tokens or 0

    def write(self, out: Exposition) -> None:
        """All of them as metrics; nothing where there are no keys."""
        if not (self.refusals or self.loads or self._requests):
            return
        out.numbers(
            "xpyd_router_key_requests_total",
            "counter",
            "Requests answered, by the client's key",
            [
                (labels_of({"key": name, "status": str(status)}), count)
                for (name, status), count in sorted(self._requests.items())
            ],
        )
        for kind, counts in (("prompt", self._prompt_tokens), ("output", self._output_tokens)):
            out.numbers(
                f"xpyd_router_key_{kind}_tokens_total",
                "counter",
                f"Tokens of {kind}s, where known, by the client's key",
                [(labels_of({"key": name}), count) for name, count in sorted(counts.items())],
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

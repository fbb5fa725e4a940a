"""What admission works with: a request's cost, the limits, and who goes first. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from xpyd_core.errors import ApiError

_CLASSES = {"high": -100, "normal": 0, "low": 100}
PRIORITY_HEADER = "X-Xpyd-Priority"


class Cost(NamedTuple):
    """What one request takes of the limits while it runs, and of the line while it waits."""

    requests: int = 1
    tokens: int = 0
    """Prompt and allowed output, counted or estimated."""
    body_bytes: int = 0
    """What it holds of memory while it waits."""


@dataclass(frozen=True)
class Limits:
    """Of one router. Without queue entries nobody waits: who is over a limit is refused."""

    requests: int | None = None
    """Requests in flight; None: no limit."""
    tokens: int | None = None
    """Tokens in flight, of prompts and allowed outputs; None: no limit."""
    queue_entries: int = 1024
    """Requests that wait: about a minute's at 17 requests/s, the longest that they may."""
    queue_bytes: int = 256 * 1024 * 1024
    """Bodies of the requests that wait."""
    queue_timeout_s: float = 60.0
    """How long a request waits for a place; clients' own read timeouts are longer."""


def read_priority(fields: Mapping[str, Any], header: str | None) -> int:
    """A request's place in line: lower is earlier, 0 without a wish.

    `fields` is the body, whose `priority` is vLLM's; `header` is PRIORITY_HEADER's value, a class
    or a number. The header wins: a gateway sets it, and it does not reach the engines, which take
    a body's `priority` only where they schedule by it. Raises ApiError 400.
    """
    if header:
        wish = _CLASSES.get(header.strip().lower())
        if wish is not None:
            return wish
        try:
            return _bounded(int(header))
        except ValueError:
            message = f"{PRIORITY_HEADER}: expected High, Normal, Low or an integer"
            raise ApiError(400, message, param=PRIORITY_HEADER) from None
    value = fields.get("priority")
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int):
        raise ApiError(400, "priority: expected an integer", param="priority")
    return _bounded(value)


def _bounded(value: int) -> int:
    """Within 64 bits: what engines take, and what compares in constant time."""
    return max(-(2**63), min(value, 2**63 - 1))

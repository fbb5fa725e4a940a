"""The errors of calls to the Kubernetes API, and what to do about each.

    KubeError
    |-- Conflict      409: the object changed, or exists already; 410: what the call began from is
    |                 too old. Observe again
    |-- NotFound      404: no such object, or no such API
    |-- Refused       4xx: the server refuses it; a retry of the same call is useless
    |   |-- Forbidden 403: RBAC, or a quota
    |   `-- Invalid   422, 400: the object breaks a rule; the message names the field
    `-- Unavailable   no answer in time, 5xx, or 429 more often than is retried; later
        `-- Throttled 429 with the server's own Retry-After

`str(error)` is the server's message: made for people, without credentials.
"""

from __future__ import annotations

import json
from typing import Any, cast

from xpyd_core.errors import XpydError

_MAX_MESSAGE = 512
_NO_SUCH_FIELD = "failed to create typed patch object"


class KubeError(XpydError):
    """Base of all of them. `status` 0: there was no answer. `reason`: the server's word."""

    def __init__(self, message: str, *, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class Conflict(KubeError):
    """The object is not as the caller thought: other version, other uid, or already there."""


class NotFound(KubeError):
    """No such object, or its API is not installed."""


class Refused(KubeError):
    """The server understood and will not do it."""


class Forbidden(Refused):
    """Not allowed: RBAC, a quota, or admission."""


class Invalid(Refused):
    """The object breaks a rule of its schema."""


class Unavailable(KubeError):
    """No useful answer now; the same call may work later."""


class Throttled(Unavailable):
    """The server asked for `retry_after_s` seconds of quiet."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, status=429, reason="TooManyRequests")
        self.retry_after_s = retry_after_s


def error_of(status: int, body: bytes, retry_after: str | None) -> KubeError:
    """The error behind an answer of 400 and above. `body` is a Status object, or anything."""
    message, reason = _read_status(body)
    message = message or f"HTTP {status}"
    if status == 429:
        return Throttled(message, retry_after_s=_seconds(retry_after))
    if status == 500 and _NO_SUCH_FIELD in message:
        # A field that the kind does not have, or of another type: server-side apply's own check
        # does not know how to say 422.
        return Invalid(message, status=status, reason=reason)
    if status >= 500:
        return Unavailable(message, status=status, reason=reason)
    tree: dict[int, type[KubeError]] = {
        400: Invalid,
        403: Forbidden,
        404: NotFound,
        409: Conflict,
        # Not NotFound: the object may well be there, and a deletion would count as done.
        410: Conflict,
        422: Invalid,
    }
    return tree.get(status, Refused)(message, status=status, reason=reason)


def _read_status(body: bytes) -> tuple[str, str]:
    try:
        parsed: object = json.loads(body)
    except ValueError:
        return body[:_MAX_MESSAGE].decode(errors="replace").strip(), ""
    if not isinstance(parsed, dict):
        return "", ""
    fields = cast("dict[str, Any]", parsed)
    return str(fields.get("message") or "")[:_MAX_MESSAGE], str(fields.get("reason") or "")


def _seconds(retry_after: str | None) -> float:
    try:
        return max(0.0, float(retry_after or 1))
    except ValueError:
        # The other form of the header is a date; the API server does not send it.
        return 1.0

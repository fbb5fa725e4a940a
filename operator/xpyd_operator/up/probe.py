"""Is a pod there? Short HTTP GETs with a deadline; anything unexpected is a no.

Blocking: the supervisor calls this in a thread.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any, cast

TIMEOUT_S = 1.0
_MAX_ANSWER_BYTES = 4 << 20


def get(host: str, port: int, path: str) -> bytes | None:
    """The body of a 200 answer, None for anything else."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.read(_MAX_ANSWER_BYTES) if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def is_healthy(host: str, port: int) -> bool:
    """Whether /health answers 200."""
    return get(host, port, "/health") is not None


def routable(host: str, port: int) -> frozenset[str] | None:
    """HTTP addresses of the instances that the router has as Ready; None: no router there."""
    body = get(host, port, "/instances")
    if body is None:
        return None
    try:
        return frozenset(_ready(json.loads(body)))
    except ValueError:
        return None


def _ready(answer: object) -> Iterator[str]:
    rows = cast("dict[str, Any]", answer).get("instances") if isinstance(answer, dict) else answer
    for row in cast("list[Any]", rows) if isinstance(rows, list) else []:
        if isinstance(row, dict):
            instance = cast("dict[str, Any]", row)
            if instance.get("state") == "Ready":
                yield str(instance.get("http_address"))

"""The API server's audit log as tests count it: who made which call."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Call:
    """One call that the API server answered."""

    verb: str
    """get, list, watch, create, update, patch, delete, deletecollection."""
    resource: str
    """The plural name, with "/status" or the like for a subresource; "" for other URLs."""
    namespace: str
    name: str
    user: str
    user_agent: str
    code: int
    """The HTTP status."""
    url: str

    @property
    def writes(self) -> bool:
        """Whether it could change something."""
        return self.verb not in ("get", "list", "watch")


def mark(log: Path) -> int:
    """The log's present end."""
    return log.stat().st_size if log.exists() else 0


def calls(log: Path, *, user: str | None, user_agent: str | None, after: int) -> list[Call]:
    """The calls logged after a mark, of the user and user agent if given."""
    if not log.exists():
        return []
    with log.open("rb") as lines:
        lines.seek(after)
        # A line that is being written has no end yet.
        found = [_call(json.loads(line)) for line in lines if line.endswith(b"\n")]
    return [
        call
        for call in found
        if (user is None or call.user == user)
        and (user_agent is None or call.user_agent.startswith(user_agent))
    ]


def _call(event: dict[str, Any]) -> Call:
    target = event.get("objectRef", {})
    parts = [target.get("resource", ""), target.get("subresource", "")]
    return Call(
        verb=event["verb"],
        resource="/".join(part for part in parts if part),
        namespace=target.get("namespace", ""),
        name=target.get("name", ""),
        user=event["user"].get("username", ""),
        user_agent=event.get("userAgent", ""),
        code=event.get("responseStatus", {}).get("code", 0),
        url=event["requestURI"],
    )

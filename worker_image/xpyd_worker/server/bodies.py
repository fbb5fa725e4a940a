"""How much of all request bodies may lie in memory at once, on every route.

A body is charged with the bytes that have come of it, not with the length that its head names: a
client that says much and sends nothing holds nothing. What comes beyond the bound is thrown away,
and whoever reads that body (responses.py) answers 503. The charge ends when the body is parsed, or
with the request. Loop only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from xpyd_core.errors import ApiError
from xpyd_worker.server.asgi import AsgiApp, Message, Receive, Scope, Send

# Above the router's own bound (32 MiB), since it adds a continuation's ids to the body.
MAX_BODY_BYTES = 48 * 1024 * 1024
MAX_READING_BYTES = 1024**3
_SCOPE_KEY = "xpyd.body"


class BodyBudget:
    """The bytes of bodies that were not parsed yet, of at most `limit_bytes`."""

    def __init__(self, limit_bytes: int = MAX_READING_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self.used_bytes = 0

    def take(self, count: int) -> bool:
        """Charge `count` bytes, unless that would be too many."""
        if self.used_bytes + count > self._limit_bytes:
            return False
        self.used_bytes += count
        return True

    def give_back(self, count: int) -> None:
        """Charge them no more."""
        self.used_bytes -= count


class BodyCharge:
    """What one request's body is charged with."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._bytes = 0
        self._is_refused = False

    def take(self, count: int) -> bool:
        """Charge what has come; False: it, and all that follows, is to be thrown away."""
        # What is behind the largest body is not kept by anybody.
        count = min(count, MAX_BODY_BYTES - self._bytes)
        if self._is_refused or not self._budget.take(count):
            self._is_refused = True
            return False
        self._bytes += count
        return True

    def check(self) -> None:
        """ApiError 503 where some of the body was thrown away."""
        if self._is_refused:
            raise ApiError(503, "too many large requests are being read", retry_after_s=1)

    def end(self) -> None:
        """The body is parsed, or nobody will read it. May be called again."""
        self._budget.give_back(self._bytes)
        self._bytes = 0


class ChargedBodies:
    """ASGI middleware: each request has a BodyCharge, which `charge_of` finds."""

    def __init__(self, app: AsgiApp, budget: BodyBudget) -> None:
        self._app = app
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        charge = BodyCharge(self._budget)
        scope[_SCOPE_KEY] = charge

        async def receive_charged() -> Message:
            message = await receive()
            if message["type"] != "http.request" or charge.take(len(message.get("body", b""))):
                return message
            # To the reader the body ends here.
            return {**message, "body": b"", "more_body": False}

        try:
            await self._app(scope, receive_charged, send)
        finally:
            charge.end()


def charge_of(scope: Mapping[str, Any]) -> BodyCharge:
    """The charge of the request with this ASGI scope."""
    return cast("BodyCharge", scope[_SCOPE_KEY])

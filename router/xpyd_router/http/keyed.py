"""What a request with a client key goes by: who it is of, what engines are told, its limits.

Where clients need a key, every path needs one but those below, which say nothing of requests or are
for those who run the fleet. Engines get no key, but the salt of its cached prefixes.
"""

from __future__ import annotations

import asyncio
from typing import cast

from xpyd_core.bodies import BodyBudget, BodyCharge
from xpyd_core.errors import ApiError
from xpyd_router.access_log import Trace
from xpyd_router.admission import SPARE_PART, Ticket
from xpyd_router.app_state import Keys
from xpyd_router.errors import unknown_model
from xpyd_router.fair_queue import Cost
from xpyd_router.fleet.instances import Snapshot
from xpyd_router.http.asgi import Scope
from xpyd_router.keys.client import UNCOUNTED, Client, Header
from xpyd_router.keys.ring import REVOKED, Refused

_CLIENT = "xpyd.client"
"""Where a scope has its Client."""
_OPEN = frozenset(("/health", "/readiness", "/version", "/metrics", "/instances", "/openapi.json"))
_ADMIN = "/admin/"


def _is_open(scope: Scope) -> bool:
    path: str = scope["path"]
    return path in _OPEN or path.startswith(_ADMIN) or scope["method"] == "OPTIONS"


async def client_of(scope: Scope, keys: Keys) -> ApiError | None:
    """Put the Client of the request into its scope, where its path needs a key; or why the request
    is refused."""
    if _is_open(scope):
        return None
    found = keys.ring.find(scope["headers"]) or await keys.ring.verify(scope["headers"])
    if isinstance(found, Client):
        scope[_CLIENT] = found
        return None
    if isinstance(found, Refused):
        address = cast("tuple[str, int] | None", scope.get("client"))
        host = address[0] if address else "-"
        keys.audit.refused(found.reason, scope["path"], host, scope["headers"])
        return found.error
    return found


def owner_of(scope: Scope) -> Client | None:
    """Who the request of this scope is of; None where no key is needed."""
    return cast("Client | None", scope.get(_CLIENT))


def check_model(owner: Client, model: str, snapshot: Snapshot) -> None:
    """ApiError 404, as for a model that is not there, where the key may not use it."""
    if not owner.may_use(model):
        raise unknown_model(model, owner.only(snapshot.known_models))


class _BodiesOfKey(BodyBudget):
    """What the open bodies of one key take of `everyone`'s memory. Of that, a sixteenth is kept for
    keys that hold less than that."""

    def __init__(self, limit_bytes: int, everyone: BodyBudget) -> None:
        super().__init__(limit_bytes)
        self._everyone = everyone
        self._few_bytes = limit_bytes // SPARE_PART
        self._most_bytes = limit_bytes - self._few_bytes

    def take(self, count: int) -> bool:
        """See BodyBudget."""
        is_much = self.used_bytes + count > self._few_bytes
        if is_much and self._everyone.used_bytes + count > self._most_bytes:
            return False
        if not self._everyone.take(count):
            return False
        self.used_bytes += count
        return True

    def give_back(self, count: int) -> None:
        """See BodyBudget."""
        self.used_bytes -= count
        self._everyone.give_back(count)


class OpenBodies:
    """The memory of all open bodies: a flood of one key's long ones leaves the other keys room."""

    def __init__(self, limit_bytes: int, max_body_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._max_body_bytes = max_body_bytes
        self._all = BodyBudget(limit_bytes)

    def charge(self, owner: Client | None) -> BodyCharge:
        """What the next body of `owner` is charged with; None: no key is needed."""
        budget = self._all
        if owner is not None:
            if owner.bodies is None:
                owner.bodies = _BodiesOfKey(self._limit_bytes, budget)
            budget = owner.bodies
        return BodyCharge(budget, self._max_body_bytes)


class Hold:
    """What one request uses of its key's limits; its owner calls `leave` at the end. Made in the
    task of the request."""

    __slots__ = ("_cost", "_held", "_is_refused", "_owner", "_task", "_trace")

    def __init__(self, owner: Client, trace: Trace, loop: asyncio.AbstractEventLoop) -> None:
        trace.key = owner.name
        self._owner = owner
        self._trace = trace
        self._cost: Cost | None = None
        self._held = UNCOUNTED
        self._is_refused = False
        # Without the loop it takes four times as long.
        self._task = cast("asyncio.Task[None]", asyncio.current_task(loop))
        owner.running.add(self._task)

    def take(self, cost: Cost, headers: list[Header]) -> None:
        """Take it, and add to `headers` what is left. ApiError 429 where the limits are reached."""
        owner = self._owner
        if owner.is_gone:
            raise REVOKED.error
        if owner.is_limited:
            self._held = owner.enter(cost)
            headers += owner.headers()
        self._cost = cost

    def refused(self, headers: list[Header]) -> None:
        """The answer is a refusal, with these headers; engines have done nothing for it."""
        headers += self._owner.headers()
        self._is_refused = True

    def leave(self, ticket: Ticket | None) -> None:
        """The request ended: give all back, but what it took."""
        self._owner.running.discard(self._task)
        if self._cost is None:
            return
        used = self._used()
        if ticket is not None:
            ticket.used = used
        if self._held is not UNCOUNTED:
            self._owner.leave(self._held, self._cost.tokens, used)

    def _used(self) -> int | None:
        trace = self._trace
        if trace.prompt_tokens is None and trace.output_tokens is None:
            # One that left the queue was tried nowhere.
            return 0 if self._is_refused or not trace.tries else None
        return (trace.prompt_tokens or 0) + (trace.output_tokens or 0)

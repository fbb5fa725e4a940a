"""Which requests are let in: 503 while the instance starts, drains or is full. Loop only.

The lifecycle is the instance's state as the fleet sees it; main owns it and changes it. A request
counts from its head on, since reading its body and tokenizing its prompts takes memory and time
before the engine, which has a limit of its own, gets it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from xpyd_core.bodies import BodyBudget
from xpyd_core.errors import ApiError
from xpyd_core.messages import InstanceState
from xpyd_core.openai import MAX_PROMPTS
from xpyd_worker.server.http.bodies import MAX_OPEN_BYTES
from xpyd_worker.server.openai.jobs import keys_of
from xpyd_worker.server.request_ids import RequestId
from xpyd_worker.server.service import Service

_RETRY_AFTER_S = 1


class Lifecycle:
    """The state, and the listeners that are called when it changes."""

    def __init__(self) -> None:
        self.state: InstanceState = "Starting"
        self.failed = False
        self.is_awaited = False
        """While Draining: a router may not know it yet, or has given a request that did not come
        so far. New requests are taken until that is over."""
        self._listeners: list[Callable[[], None]] = []

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` at every change."""
        self._listeners.append(listener)

    def become(self, state: InstanceState) -> None:
        """Change the state; states never go back."""
        self.state = state
        for listener in self._listeners:
            listener()

    def fail(self) -> None:
        """The engine has ended by itself: nothing can be served any more."""
        self.failed = True
        self.become("Gone")

    @property
    def is_serving(self) -> bool:
        """Whether requests are worked on (no new ones while Draining)."""
        return self.state in ("Ready", "Draining") and not self.failed

    def admit(self, is_expected: Callable[[], bool]) -> None:
        """503 unless a request may come in. While Draining, where no router knows of others, only
        one whose KV is here already."""
        is_open = self.state == "Ready" or (self.state == "Draining" and self.is_awaited)
        if is_open and not self.failed:
            return
        if self.state == "Draining" and is_expected():
            return
        reason = "failed" if self.failed else self.state.lower()
        raise ApiError(503, f"this instance is {reason}", retry_after_s=_RETRY_AFTER_S)


# Answers whose prompts are done but whose clients read slowly count as requests, not as prompts.
_REQUESTS_PER_PROMPT = 2
_FULL = "too many requests are waiting"


class RequestGate:
    """The requests of the inference routes that are under way."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self.requests = 0
        """Requests under way, each from its head to the last byte of its answer."""
        self.preparing = 0
        """Prompts admitted that the engine does not have yet."""
        self.bodies = BodyBudget(MAX_OPEN_BYTES)
        """The budget of the bodies, of all routes, that are being read."""

    def enter(self, service: Service, request_id: RequestId) -> Admitted:
        """Let the current task's request in to have its body read; ApiError 503 otherwise. It
        leaves when the task ends."""
        # The number of prompts is in the body, and the first prompt may be the one that has
        # no KV.
        self._lifecycle.admit(lambda: is_expected(service, request_id, MAX_PROMPTS))
        is_full = self.requests >= _REQUESTS_PER_PROMPT * service.max_requests
        if is_full and not is_expected(service, request_id, MAX_PROMPTS):
            raise ApiError(503, _FULL, retry_after_s=1)
        admitted = Admitted(self, service, request_id)
        task = asyncio.current_task()
        assert task is not None, "handlers run in a task"
        task.add_done_callback(admitted.leave)
        return admitted


class Admitted:
    """One request that was let in."""

    def __init__(self, admission: RequestGate, service: Service, request_id: RequestId) -> None:
        self._admission = admission
        self._service = service
        self._request_id = request_id
        self._preparing = 0
        admission.requests += 1

    def prepare(self, prompts: int) -> None:
        """The body is parsed: let its prompts in, or ApiError 503 where the engine is full."""
        service, admission = self._service, self._admission
        under_way = service.bridge.open_requests + admission.preparing
        if under_way + prompts > service.max_requests and not is_expected(
            service, self._request_id, prompts
        ):
            raise ApiError(503, _FULL, retry_after_s=1)
        self._preparing = prompts
        admission.preparing += prompts

    def submitted(self) -> None:
        """The engine has the prompts and counts them."""
        self._admission.preparing -= self._preparing
        self._preparing = 0

    def leave(self, _task: asyncio.Task[Any]) -> None:
        """The request is over, however it ended."""
        self.submitted()
        self._admission.requests -= 1


def is_expected(service: Service, request_id: RequestId, prompts: int) -> bool:
    """Whether KV of one of its prompts was granted here: then no other instance can serve the
    request as well."""
    if service.instance.role != "Decode":
        return False
    keys = keys_of(request_id, prompts)
    return any(service.bridge.offered(key) is not None for key in keys)

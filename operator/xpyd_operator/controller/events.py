"""Posts Events: most in a task of its own, so that no turn waits for one.

A decision's Event has to exist though the operator is killed, so its turn waits for it: it is made
before the status that says the decision, and named by the status that it replaces, so that an
operator that makes it again finds it there.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import sha256
from secrets import token_hex

from xpyd_operator.controller.client import FIELD_MANAGER, Api
from xpyd_operator.controller.decision.errors import Conflict, KubeError
from xpyd_operator.controller.decision.kinds import Obj
from xpyd_operator.status.events import EventText

logger = logging.getLogger(__name__)

_MOST_WAITING = 1000


class EventPoster:
    """A bounded queue of Events; `run` is the one task that posts them."""

    def __init__(
        self,
        api: Api,
        *,
        dropped: Callable[[], None],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._api = api
        self._dropped = dropped
        self._now = now
        self._waiting: asyncio.Queue[Obj] = asyncio.Queue(_MOST_WAITING)
        self._instance = socket.gethostname()

    def post(self, about: Obj, text: EventText) -> None:
        """Queue an Event about an object."""
        try:
            self._waiting.put_nowait(self._event(about, text, token_hex(8)))
        except asyncio.QueueFull:
            self._dropped()

    async def post_now(self, about: Obj, text: EventText) -> None:
        """Make an Event about an object as it was read, once, however often this is called."""
        metadata = about["metadata"]
        named = [metadata["uid"], metadata["resourceVersion"], text.reason, text.message]
        name = sha256("\n".join(named).encode()).hexdigest()[:16]
        await self._create(self._event(about, text, name), attempts=None)

    def _event(self, about: Obj, text: EventText, name: str) -> Obj:
        metadata = about["metadata"]
        time = self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{metadata['name']}.{name}",
                "namespace": metadata["namespace"],
            },
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
            },
            "reason": text.reason,
            "message": text.message,
            "type": text.type,
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": FIELD_MANAGER,
            "reportingInstance": self._instance,
            "firstTimestamp": time,
            "lastTimestamp": time,
            "count": 1,
        }

    async def run(self) -> None:
        """Post the queued Events, until cancelled."""
        while True:
            await self._create(await self._waiting.get(), attempts=1)

    async def _create(self, event: Obj, attempts: int | None) -> None:
        """Make the Event, unless it is there; one that the API does not take is dropped."""
        try:
            await self._api.create(event, attempts=attempts)
        except Conflict as conflict:
            logger.debug("the event %s is there: %s", event["reason"], conflict)
        except KubeError as error:
            self._dropped()
            name, reason = event["involvedObject"]["name"], event["reason"]
            logger.warning("the event %s of fleet %s was not posted: %s", reason, name, error)

"""Posts Events in a task of its own, so that no turn waits for one."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from secrets import token_hex

from xpyd_operator.controller.client import FIELD_MANAGER, Api
from xpyd_operator.controller.decision.errors import KubeError
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
        metadata = about["metadata"]
        time = self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
        event: Obj = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{metadata['name']}.{token_hex(8)}",
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
        try:
            self._waiting.put_nowait(event)
        except asyncio.QueueFull:
            self._dropped()

    async def run(self) -> None:
        """Post the queued Events, until cancelled."""
        while True:
            event = await self._waiting.get()
            try:
                await self._api.create(event)
            except KubeError as error:
                self._dropped()
                name, reason = event["involvedObject"]["name"], event["reason"]
                logger.warning("the event %s of fleet %s was not posted: %s", reason, name, error)

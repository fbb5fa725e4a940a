"""Asks the instances of a list how they are, and beats for them. One task for each.

Once a period: GET /health, /v1/models and /version. An engine that answers the first gets a beat; a
dead one gets none, so it is not picked: it leaves when beats are missing, sooner where a probe or a
call finds it dead. It comes back with its next answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from xpyd_core.errors import ProtocolError
from xpyd_core.request_id import Address
from xpyd_router.errors import CallFailed
from xpyd_router.fleet.listed import ListedInstance, listed_beat
from xpyd_router.fleet.view import FleetView
from xpyd_router.upstream.client import Dialer, UpstreamClient

logger = logging.getLogger(__name__)
_MODELS, _VERSION = "/v1/models", "/version"
_TIMEOUT_S = 2.0
_TAKEN = frozenset({"new", "refreshed", "replaced"})
_MAX_ANSWER_BYTES = 1024 * 1024


class Asker:
    """See the module. `period_s`: between two questions."""

    def __init__(
        self,
        fleet: FleetView,
        listed: Sequence[ListedInstance],
        *,
        period_s: float,
        dialer: Dialer | None = None,
    ) -> None:
        self._fleet = fleet
        self._listed = listed
        self._period_s = period_s
        self._dialer = dialer

    async def run(self) -> None:
        """Ask until cancelled; then no question is left."""
        upstream = UpstreamClient(self._dialer)
        try:
            async with asyncio.TaskGroup() as tasks:
                for one in self._listed:
                    tasks.create_task(self._keep(upstream, one))
        finally:
            await upstream.close()

    async def _keep(self, upstream: UpstreamClient, one: ListedInstance) -> None:
        before = ""
        said: dict[str, bytes] = {}
        while True:
            try:
                complaint = await self._ask(upstream, one, said)
            except ProtocolError as error:
                complaint = str(error)
            except Exception:  # the task's edge: the instance must be asked again
                logger.exception("static instance %s", one.http)
                complaint = "could not be asked"
            if complaint != before:
                logger.warning("static instance %s: %s", one.http, complaint or "answers again")
            before = complaint
            await asyncio.sleep(self._period_s)

    async def _ask(
        self, upstream: UpstreamClient, one: ListedInstance, said: dict[str, bytes]
    ) -> str:
        """Give the fleet a beat of the engine; why there is none, or nothing. `said`: its answers
        by path, which hold where one is missing: without its version an engine that is busy would
        have no partner, and without its models get requests for every name."""
        to = one.address
        if await self._get(upstream, to, "/health") is None:
            said.clear()  # it may be another one that answers next
            return "no 2xx for GET /health"
        for path in (_MODELS, _VERSION):
            said[path] = await self._get(upstream, to, path) or said.get(path, b"")
        beat = listed_beat(one, said[_MODELS], said[_VERSION], period_s=self._period_s)
        outcome = self._fleet.apply(beat)
        return "" if outcome in _TAKEN else f"the registry does not take it: {outcome}"

    @staticmethod
    async def _get(upstream: UpstreamClient, to: Address, path: str) -> bytes | None:
        """The body of a 2xx answer; None where there is none in time."""
        head = f"GET {path} HTTP/1.1\r\nHost: {to}\r\n\r\n".encode("ascii")
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                exchange = await upstream.start(to, head, b"", instance=None, timeout_s=_TIMEOUT_S)
                try:
                    answer = await exchange.read(_MAX_ANSWER_BYTES)
                finally:
                    upstream.end(exchange)
        except (CallFailed, TimeoutError):
            return None
        return answer.body if 200 <= answer.status < 300 else None

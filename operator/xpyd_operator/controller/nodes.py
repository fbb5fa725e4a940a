"""Which nodes are cordoned: asked at intervals, since few ever are and a watch would bring all.

The API server picks them, so that an answer is empty nearly always, however many nodes there are.
A fleet with pods on a node that was cordoned, or uncordoned, is woken. A chart may withhold the
right to list nodes; then `cordoned` is None, and it is asked more rarely. See docs/adr/0107.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from xpyd_operator.controller.client import Api
from xpyd_operator.controller.decision.cache import Cache, FleetKey
from xpyd_operator.controller.decision.errors import Forbidden, KubeError
from xpyd_operator.controller.decision.kinds import NODE, POD
from xpyd_operator.status.children import name_of, text

logger = logging.getLogger(__name__)
PERIOD_S = 3.0
"""`kubectl drain` tries a refused eviction again every 5 s."""
_FORBIDDEN_S = 60.0


class NodeReader:
    """See the module. `wake` plans a turn of a fleet; `may`: the operator has the right to ask."""

    def __init__(
        self, api: Api, cache: Cache, wake: Callable[[FleetKey], None], *, may: bool = True
    ) -> None:
        self._api = api
        self._cache = cache
        self._wake = wake
        self._may = may
        self._cordoned: frozenset[str] | None = frozenset() if may else None
        self._asked = asyncio.Event()

    def cordoned(self) -> frozenset[str] | None:
        """Names of nodes that take no new pods; None: the operator may not list nodes."""
        return self._cordoned

    async def asked(self) -> None:
        """Wait for the first answer: a budget must not change only because none has come."""
        await self._asked.wait()

    async def run(self) -> None:
        """Ask at intervals, until cancelled."""
        while True:
            try:
                if self._may:
                    await self.look()
            finally:
                self._asked.set()
            await asyncio.sleep(_FORBIDDEN_S if self._cordoned is None else PERIOD_S)

    async def look(self) -> None:
        """Ask once. What the API server does not answer stays as it was."""
        before = self._cordoned
        try:
            found = await self._api.list(NODE, None, fields="spec.unschedulable=true")
        except Forbidden:
            if before is not None:
                logger.info("this operator may not list nodes: it does not see which are cordoned")
            self._cordoned = None
        except KubeError as error:
            logger.debug("cordoned nodes were not listed: %s", error)
        else:
            self._cordoned = frozenset(name_of(node) for node in found.get("items") or ())
        if before == self._cordoned:
            return
        changed = (before or frozenset()) ^ (self._cordoned or frozenset())
        is_right = (before is None) != (self._cordoned is None)
        for key in list(self._cache.documents()):
            pods = self._cache.children(key).get(POD, {}).values()
            if is_right or any(text(pod, "spec", "nodeName") in changed for pod in pods):
                self._wake(key)

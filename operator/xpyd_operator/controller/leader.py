"""Which operator works, and for which fleets: the shell around `election`.

Leader holds the Lease of this release: it renews it, says how long writes may still begin, and
gives it back at the end. Releases knows which fleets are another release's, by their mark, and asks
for that one's Lease, to find that it is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from xpyd_core.errors import UserError
from xpyd_operator.controller.client import Api
from xpyd_operator.controller.decision.election import Election, OwnerWatch
from xpyd_operator.controller.decision.errors import Conflict, KubeError, NotFound
from xpyd_operator.controller.decision.kinds import LEASE, Obj

logger = logging.getLogger(__name__)

LOOK_S = 30.0
"""Between two looks at a fleet that another release reconciles."""
_ASK_S = 10.0
"""So long an answer about another release holds, for all of its fleets."""


def place_of(release: str) -> tuple[str, str]:
    """Namespace and name of a release's Lease; UserError where the text names none."""
    namespace, _, name = release.partition("/")
    if not namespace or not name or "/" in name:
        raise UserError(f"--release {release}: expected NAMESPACE/NAME")
    return namespace, name


class Leader:
    """Takes part in the election, in the loop that runs it. `api`: for the Lease alone."""

    def __init__(
        self,
        api: Api,
        election: Election,
        *,
        clock: Callable[[], float],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._election = election
        self._clock = clock
        self._now = now
        self._sleep = sleep
        self._was_elected = False

    @property
    def holder(self) -> str:
        """Who held the Lease when it was last read."""
        return self._election.holder

    def leads(self) -> bool:
        """Whether this operator may begin a write."""
        return self._election.leads(self._clock())

    def write_s(self) -> float:
        """Seconds within which a write that begins now must be over; 0: none may begin."""
        return self._election.write_s(self._clock())

    def is_lost(self) -> bool:
        """Whether it led, and does not any more."""
        return self._was_elected and not self.leads()

    async def run(self, elected: Callable[[], None]) -> None:
        """Stand by, call `elected` once, renew; returns when the Lease is lost."""
        terms, told = self._election.terms, ""
        while not self.is_lost():
            try:
                async with asyncio.timeout(terms.retry_s):
                    await self._round()
            except (KubeError, TimeoutError) as error:
                logger.warning("the Lease: %s", str(error) or "no answer in time")
            if self.leads() and not self._was_elected:
                logger.info("leads as %s", self._election.identity)
                self._was_elected = True
                elected()
            elif not self._was_elected and self.holder != told:
                told = self.holder
                logger.info("stands by: %s leads", told)
            await self._sleep(terms.retry_s)

    async def _round(self) -> None:
        namespace, name = self._election.place
        try:
            self._election.heard(await self._api.get(LEASE, namespace, name), self._clock())
        except NotFound:
            self._election.heard(None, self._clock())
        wall = self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        proposal = self._election.proposal(self._clock(), wall)
        if proposal is None:
            return
        is_new, lease = proposal
        begun = self._clock()
        try:
            after = await self._write(lease, is_new=is_new)
        except (Conflict, NotFound):
            return  # Another candidate was first; the next round sees it.
        self._election.won(after, begun=begun, now=self._clock())

    async def _write(self, lease: Obj, *, is_new: bool) -> Obj:
        if is_new:
            return await self._api.create(lease)
        namespace, name = self._election.place
        return await self._api.patch(LEASE, namespace, name, lease)

    async def resign(self) -> None:
        """Give the Lease back, so that a standby begins at once."""
        farewell = self._election.farewell()
        self._election.left()
        if farewell is None:
            return
        try:
            async with asyncio.timeout(self._election.terms.retry_s):
                await self._write(farewell, is_new=False)
        except (KubeError, TimeoutError) as error:
            logger.warning("the Lease was not given back: %s", str(error) or "no answer in time")


class Releases:
    """Which fleets this operator reconciles. `own`: its release; "": it marks none."""

    def __init__(self, api: Api, own: str, *, clock: Callable[[], float]) -> None:
        self.own = own
        self._api = api
        self._clock = clock
        self._watch = OwnerWatch()
        self._asked: dict[str, tuple[float, bool]] = {}

    async def may_reconcile(self, owner: str) -> bool:
        """Whether this operator may work on a fleet with that mark: its own, none, or that of a
        release which is gone for long."""
        if owner in ("", self.own):
            return True
        asked_at, is_gone = self._asked.get(owner, (float("-inf"), False))
        if self._clock() - asked_at >= _ASK_S:
            is_gone = await self._is_gone(owner)
            self._asked[owner] = (self._clock(), is_gone)
        return is_gone

    async def _is_gone(self, owner: str) -> bool:
        lease: Obj | None = None
        try:
            lease = await self._api.get(LEASE, *place_of(owner))
        except (NotFound, UserError):
            pass  # A mark that names no Lease, and one that is not there, are the same.
        except KubeError as error:
            # Without an answer, or the right to ask, it may be there.
            logger.debug("the Lease of %s: %s", owner, error)
            return False
        return self._watch.is_gone(owner, lease, self._clock())

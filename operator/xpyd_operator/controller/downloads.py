"""Reads how far downloads of models are: every 5 s one GET of the pod of each Job that runs.

A pod that downloads has no token of the API server, so it writes its progress nowhere; it answers
`GET /progress`. Only pods are asked that a Job of the fleet's own made: any pod can have labels. A
fleet whose download moved by a percent is woken; its turn takes the progress from here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import aiohttp

from xpyd_core.request_id import Address
from xpyd_operator.controller.decision.cache import Cache, FleetKey
from xpyd_operator.controller.decision.kinds import JOB, POD, controller_of
from xpyd_operator.manifests.names import PROGRESS_PORT
from xpyd_operator.status.children import is_true, text
from xpyd_operator.status.models import DownloadProgress, is_of_job, read_progress

logger = logging.getLogger(__name__)
PERIOD_S = 5.0
_ANSWER_S = 3.0
_AT_ONCE = 32
_MOST_BYTES = 1 << 16


class DownloadReader:
    """See the module. `wake` plans a turn of a fleet; `port` is that of every download."""

    def __init__(
        self, cache: Cache, wake: Callable[[FleetKey], None], *, port: int = PROGRESS_PORT
    ) -> None:
        self._cache = cache
        self._wake = wake
        self._port = port
        self._found: dict[FleetKey, DownloadProgress] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)

    def progress(self, key: FleetKey) -> DownloadProgress | None:
        """What the fleet's download said last; None: none runs, or none has answered."""
        return self._found.get(key)

    async def run(self) -> None:
        """Read at intervals, until cancelled."""
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                try:
                    await self.look(session)
                except Exception:  # a task's edge: a round that broke must not end all later ones
                    logger.exception("what downloads say was not read")
                await asyncio.sleep(PERIOD_S)

    async def look(self, session: aiohttp.ClientSession) -> None:
        """One round over all fleets with a Job that runs."""
        asked = {
            key: address
            for key in list(self._cache.documents())
            if (address := self._address(key)) is not None
        }
        self._found = {key: said for key, said in self._found.items() if key in asked}
        answers = await asyncio.gather(*(self._ask(session, one) for one in asked.values()))
        for key, answer in zip(asked, answers, strict=True):
            before = self._found.get(key)
            if answer is None:
                continue
            self._found[key] = answer
            if _shown(before) != _shown(answer):
                self._wake(key)

    def _address(self, key: FleetKey) -> str | None:
        """Of the pod that downloads; None where none runs."""
        children = self._cache.children(key)
        jobs = children.get(JOB, {})
        uid = text(self._cache.document(key), "metadata", "uid")
        mine = [
            name
            for name, job in jobs.items()
            if controller_of(job) == uid and not is_true(job, "Complete")
        ]
        if not mine:
            return None
        for pod in children.get(POD, {}).values():
            if is_of_job(pod, mine) and text(pod, "status", "phase") == "Running":
                return text(pod, "status", "podIP") or None
        return None

    async def _ask(self, session: aiohttp.ClientSession, address: str) -> DownloadProgress | None:
        url = f"http://{Address(address, self._port)}/progress"
        try:
            async with self._slots, session.get(url, allow_redirects=False) as answer:
                if answer.status != 200:
                    return None
                return read_progress(await answer.content.read(_MOST_BYTES))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.debug("download %s: %s", address, error)
            return None


def _shown(progress: DownloadProgress | None) -> object:
    """What of a progress a status shows."""
    if progress is None:
        return None
    percent = 100 * progress.done_bytes // (progress.total_bytes or 1)
    return progress.phase, percent, progress.total_bytes, progress.message

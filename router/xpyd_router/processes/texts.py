"""The metrics of all processes, gathered within a deadline."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from itertools import count

from xpyd_router.processes.events import GiveText, Text
from xpyd_router.processes.merge import Families, merge, parse, retire
from xpyd_router.processes.staff import Worker

_GATHER_S = 2.0
"""Of the 5 s that a worker waits, and the 10 s of a scraper."""


class Texts:
    """The owner's. `own` gives the owner's own text. A worker that does not answer in time counts
    with what it said last.
    """

    def __init__(self, own: Callable[[], bytes]) -> None:
        self._own = own
        self._numbers = count(1)
        self._open: dict[tuple[int, Worker], asyncio.Future[bytes]] = {}
        self._last: dict[Worker, Families] = {}
        self._past: Families = {}

    def take(self, worker: Worker, event: Text) -> None:
        """A worker's answer."""
        answer = self._open.get((event.ask, worker))
        if answer is not None and not answer.done():
            answer.set_result(event.text)

    def retire(self, worker: Worker) -> None:
        """Its process ended: what it counted, as far as anybody has seen it, remains."""
        last = self._last.pop(worker, None)
        if last is not None:
            self._past = retire(self._past, last)

    async def gather(self, workers: list[Worker]) -> bytes:
        """The whole router's metrics."""
        number, loop = next(self._numbers), asyncio.get_running_loop()
        asked = {one: loop.create_future() for one in workers if one.is_ready}
        processes = {one: one.process for one in asked}
        for worker, answer in asked.items():
            self._open[number, worker] = answer
            worker.send(GiveText(number))
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GATHER_S):
                    await asyncio.gather(*asked.values())
        finally:
            for worker in asked:
                del self._open[number, worker]
        texts = {
            worker: answer.result()
            for worker, answer in asked.items()
            if answer.done() and not answer.cancelled() and worker.process is processes[worker]
        }
        # Some megabytes in a large fleet: beats are heard meanwhile.
        parsed = await asyncio.to_thread(lambda: {w: parse(text) for w, text in texts.items()})
        for worker, families in parsed.items():
            if worker.process is processes[worker]:
                self._last[worker] = families
        shown, past, own = list(self._last.values()), self._past, self._own()
        return await asyncio.to_thread(lambda: merge(parse(own), shown, past))

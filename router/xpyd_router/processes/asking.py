"""What a worker asks its owner, and the answers: within a deadline, or none; and whether the owner
is heard at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from xpyd_core.errors import ApiError
from xpyd_router.fleet.registry import InstanceKey
from xpyd_router.processes.events import (
    AskMetrics,
    Cordon,
    Done,
    Metrics,
    Ping,
    Pong,
    ToOwner,
    ToWorker,
)

_ANSWER_S = 5.0
_MAX_OPEN = 4096
SILENCE_S = 10.0
"""Without a ping, which come every second: then the owner is stuck."""

Answer = Metrics | Done


class Asking:
    """One per worker: a serving.whole.Whole. `tell` reaches the owner."""

    def __init__(self, tell: Callable[[ToOwner], None], clock: Callable[[], float]) -> None:
        self._tell = tell
        self._clock = clock
        self._heard_s = clock()
        self._numbers = count(1)
        self._open: dict[int, asyncio.Future[Answer]] = {}

    @property
    def is_current(self) -> bool:
        """See Whole."""
        return self._clock() - self._heard_s < SILENCE_S

    def take(self, event: ToWorker) -> None:
        """An answer, or a sign of life; other events are not for here."""
        if isinstance(event, Ping):
            self._heard_s = self._clock()
            self._tell(Pong())
        elif isinstance(event, Metrics | Done):
            answer = self._open.get(event.ask)
            if answer is not None and not answer.done():
                answer.set_result(event)

    async def metrics(self) -> bytes:
        """See Whole."""
        answer = await self._ask(AskMetrics, _ANSWER_S)
        assert isinstance(answer, Metrics)
        return answer.text

    async def cordon(self, key: InstanceKey, *, is_cordoned: bool) -> None:
        """See Whole."""
        await self._ask(lambda ask: Cordon(ask, key, is_cordoned), _ANSWER_S)

    async def _ask(self, question: Callable[[int], ToOwner], deadline_s: float) -> Answer:
        number = next(self._numbers)
        if len(self._open) >= _MAX_OPEN:
            raise _no_answer()
        self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._tell(question(number))
            async with asyncio.timeout(deadline_s):
                return await self._open[number]
        except TimeoutError as error:
            raise _no_answer() from error
        finally:
            del self._open[number]


def _no_answer() -> ApiError:
    return ApiError(503, "the router's processes do not answer each other; try again")

"""An event loop whose clock jumps to the next timer instead of sleeping."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    """Adds to the clock what a real selector would have waited."""

    now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("every task waits, and no timer is set")
        self.now_s += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

        self.timers: list[asyncio.TimerHandle] = []

    def time(self) -> float:
        return self._jumping.now_s

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = super().call_at(when, callback, *args, context=context)
        self.timers.append(timer)
        return timer


def pending_timers() -> int:
    """Timers of the running virtual loop that wait for their time."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return sum(not timer.cancelled() and timer.when() > loop.time() for timer in loop.timers)


def run_virtually(test: Coroutine[Any, Any, T]) -> T:
    """What `test` returns. `loop.time` and timers are virtual; sockets must not be used."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(test)

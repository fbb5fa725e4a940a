"""Loading beside HTTP: slow, blocking work on a daemon thread, awaited until a stop comes first.

Between main and loading.py; knows neither.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run_unless(stopped: asyncio.Event, work: Callable[[], T]) -> T | None:
    """`work()` on a thread of its own, or None when `stopped` is set before it ends.

    Raises what `work` raises. The thread is a daemon: nobody waits for a load that is not wanted.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            outcome: T | BaseException = work()
        except BaseException as error:  # raised again where `work` is awaited
            outcome = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, outcome)

    def settle(outcome: T | BaseException) -> None:
        if result.done():
            return
        if isinstance(outcome, BaseException):
            result.set_exception(outcome)
        else:
            result.set_result(outcome)

    threading.Thread(target=run, name="load", daemon=True).start()
    stopping = asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait({result, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return result.result() if result.done() else None
    finally:
        stopping.cancel()
        if not result.done():
            result.cancel()

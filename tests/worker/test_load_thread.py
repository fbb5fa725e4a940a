"""Loading on a thread: its value, its error, and a stop that comes first."""

from __future__ import annotations

import asyncio
import threading

import pytest

from xpyd_core.errors import UserError
from xpyd_worker.main import run_unless


async def test_what_the_work_gives_or_raises_comes_back() -> None:
    def refuse() -> int:
        raise UserError("no such model")

    assert await run_unless(asyncio.Event(), lambda: 7) == 7
    with pytest.raises(UserError, match="no such model"):
        await run_unless(asyncio.Event(), refuse)


async def test_a_stop_does_not_wait_for_the_work() -> None:
    stopped, go_on, ended = asyncio.Event(), threading.Event(), threading.Event()

    def work() -> int:
        assert go_on.wait(10)
        ended.set()
        return 7

    loading = asyncio.create_task(run_unless(stopped, work))
    await asyncio.sleep(0)
    stopped.set()
    assert await loading is None
    go_on.set()
    assert await asyncio.to_thread(ended.wait, 10)

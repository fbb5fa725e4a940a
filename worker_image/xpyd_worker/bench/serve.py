"""A load on a server: requests at their times, at most so many at once, and what they took."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from xpyd_worker.bench.client import Target, ask_streaming
from xpyd_worker.bench.figures import Sample
from xpyd_worker.bench.prompts import Ask


async def run_load(
    target: Target,
    asks: Sequence[Ask],
    times_s: Sequence[float],
    *,
    max_concurrency: int | None = None,
    done: Callable[[Sample], None] = lambda _: None,
) -> list[Sample]:
    """Send `asks[i]` at `times_s[i]` from now on (ascending), later where `max_concurrency` are
    under way. The samples stand in the asks' order; `done` hears of each as it ends."""
    turn = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()

    async def one(ask: Ask) -> Sample:
        async with turn:
            sample = await ask_streaming(target, ask)
        done(sample)
        return sample

    start_s = time.perf_counter()
    tasks: list[asyncio.Task[Sample]] = []
    async with asyncio.TaskGroup() as group:
        for ask, at_s in zip(asks, times_s, strict=True):
            wait_s = start_s + at_s - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.append(group.create_task(one(ask)))
    return [task.result() for task in tasks]

"""Threads for long texts, so that encoding one holds up neither streams nor the engine, and for
what a long answer takes to write."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from xpyd_core.errors import ApiError

T = TypeVar("T")
# More would take the cores from the engine. A megabyte takes about half a second.
_THREADS = 2
_MAX_JOBS = 64


class TextThreads:
    """A few threads and a bounded queue before them. Main closes it."""

    def __init__(self, *, threads: int = _THREADS, max_jobs: int = _MAX_JOBS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._slots = threading.BoundedSemaphore(max_jobs)

    async def run(self, work: Callable[[], T]) -> T:
        """`work()` on a thread; ApiError 503 when too much waits already.

        Cancelled, work that waits is dropped; what runs ends by itself and keeps its slot so long.
        """
        if not self._slots.acquire(blocking=False):
            message = "too many long texts are being tokenized"
            raise ApiError(503, message, retry_after_s=1)
        future = self._pool.submit(work)
        future.add_done_callback(self._free)
        return await asyncio.wrap_future(future)

    async def finish(self, work: Callable[[], T]) -> T:
        """`work()` for the answer to a request that was computed: behind what waits, and never
        refused. The requests that were let in bound how many there are."""
        return await asyncio.wrap_future(self._pool.submit(work))

    def _free(self, _future: Future[T]) -> None:
        self._slots.release()

    def close(self) -> None:
        """Start nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

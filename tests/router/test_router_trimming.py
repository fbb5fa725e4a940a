"""The memory of a burst goes back to the system once the burst is over."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import subprocess
import sys

import pytest

from xpyd_router.http.server import BurstEnd, trim_after_bursts


def told(*in_flight: int) -> list[int]:
    """At which of these looks a burst is over."""
    burst_end = BurstEnd()
    return [at for at, count in enumerate(in_flight) if burst_end.is_over(count)]


def test_a_burst_is_over_once_when_an_eighth_of_it_is_left() -> None:
    assert told(0, 256, 256, 100, 33, 31, 0, 0) == [5]


def test_each_burst_is_over_for_itself() -> None:
    assert told(64, 0, 0, 64, 8, 7, 0, 40, 0) == [1, 4, 8]


def test_few_requests_are_no_burst() -> None:
    assert told(31, 0, 20, 0) == []


def test_steady_load_is_left_alone() -> None:
    assert told(*[900, 300, 700, 200] * 20) == []


def test_the_heap_is_trimmed_after_a_burst_and_not_before() -> None:
    in_flight, trimmed = 100, asyncio.Event()

    async def work() -> None:
        nonlocal in_flight
        task = asyncio.create_task(trim_after_bursts(lambda: in_flight, trimmed.set, 0.001))
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await trimmed.wait()
            assert not trimmed.is_set()
            in_flight = 1
            async with asyncio.timeout(10.0):
                await trimmed.wait()
        finally:
            task.cancel()

    asyncio.run(work())


# In a process of its own: what others left free in this one's heap would be taken first. The pieces
# are below glibc's threshold for mappings; every 50th stays and pins the heap's end.
_FREED = """
from xpyd_router.http.server import trimmer

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

trim = trimmer()
pieces = [bytes(100_000) for _ in range(1000)]
kept = pieces[49::50]
del pieces
before = resident_bytes()
trim()
print(before - resident_bytes())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc has it")
def test_free_memory_in_the_middle_of_the_heap_goes_back() -> None:
    argv = [sys.executable, "-c", _FREED]
    said = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60.0).stdout
    assert int(said) > 50_000_000

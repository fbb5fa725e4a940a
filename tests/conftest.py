"""What all tests share: how torch's threads wait, in which order files start, until when long ones
do, logging as it was, and, for a machine with a GPU, where nothing is installed, a stand-in for a
package."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

# Read when torch is imported, here and in what the tests start. OpenMP's threads otherwise spin
# while they wait for each other: on busy cores that was four fifths of transformers' CPU time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# A shell's background job ignores Ctrl-C, and what the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Sum:
    """Eight bytes, as xxhash's; both ends of a test's connection make the same."""

    def __init__(self, data: bytes = b"") -> None:
        self._hash = hashlib.blake2b(data, digest_size=8)
        self.update = self._hash.update

    def digest(self) -> bytes:
        return self._hash.digest()


try:
    import xxhash  # noqa: F401
except ModuleNotFoundError:
    sys.modules["xxhash"] = SimpleNamespace(xxh3_64=Sum)  # pyright: ignore[reportArgumentType]


LONG_UNTIL, LONG_ORDER = (os.environ.get(f"XPYD_LONG_{what}", "") for what in ("UNTIL", "ORDER"))
"""Seconds since 1970: from then on no long test begins; what the order of their files follows."""
NO_TIME = "no time was left for long tests"
COROUTINE_S = 120.0
"""Deadline of a test that is a coroutine, unless its mark `patience` names one."""
_LOOPS = ("both_loops", "uv_loop", "virtual_loop")
"""Fixtures (tests/router/conftest.py) that give a factory of event loops."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine under a deadline, on a loop of its own: asyncio's, or that of
    a fixture."""
    test, given = pyfuncitem.obj, pyfuncitem.funcargs
    if not inspect.iscoroutinefunction(test):
        return None
    work = test(**{name: given[name] for name in inspect.signature(test).parameters})
    mark = pyfuncitem.get_closest_marker("patience")

    async def bounded() -> None:
        async with asyncio.timeout(mark.args[0] if mark else COROUTINE_S):
            await work

    loop = next((given[name] for name in _LOOPS if name in given), None)
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(bounded())
    return True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first (pytest-xdist gives files out in this order), so that what ends
    last is short; where long ones may find no time left, files with these last. Within a file the
    order stays."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    long = {item.path for item in items if item.get_closest_marker("long")} if LONG_UNTIL else set()

    def place(item: pytest.Item) -> tuple[bool, bytes, bool]:
        is_late, named = item.path in long, f"{LONG_ORDER} {item.path}".encode()
        turn = hashlib.sha256(named).digest() if is_late and LONG_ORDER else b""
        return is_late, turn, item.path not in slow

    items.sort(key=place)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the fixtures: those of a file of long tests alone are not made in vain."""
    if LONG_UNTIL and item.get_closest_marker("long") and time.time() > float(LONG_UNTIL):
        pytest.skip(NO_TIME)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the long tests that were left out, and how many cases each has."""
    skipped: list[pytest.TestReport] = terminalreporter.stats.get("skipped", [])
    late = Counter(one.nodeid.partition("[")[0] for one in skipped if NO_TIME in str(one.longrepr))
    if late:
        terminalreporter.section(f"{NO_TIME}: {late.total()}")
        for name, cases in late.items():
            terminalreporter.write_line(f"{cases:3} {name}")


@pytest.fixture(autouse=True)
def logging_of_one_test() -> Iterator[None]:
    """Undo the logging that a program sets up which a test runs in this process."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
    # pytest's own handlers are of a class of their own.
    for handler in [one for one in root.handlers if type(one) is logging.StreamHandler]:
        root.removeHandler(handler)

"""What all tests share: how torch's threads wait, in which order files start, logging as it was,
and, for a machine with a GPU, where nothing is installed, a stand-in for a package."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

# Read when torch is imported, here and in what the tests start. OpenMP's threads otherwise spin
# while they wait for each other: on busy cores that was four fifths of transformers' CPU time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


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


COROUTINE_S = 20.0
"""For a test that is a coroutine."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, on a loop of its own."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    asyncio.run(asyncio.wait_for(test(**arguments), COROUTINE_S))
    return True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first (pytest-xdist gives files out in this order), so that what ends
    last is short. Within these and the others the order stays."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


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

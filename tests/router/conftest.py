"""What several modules share: how coroutines are tests, their event loops, both ways of answers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator

import pytest
import uvloop

from tests.router.fakes import PATIENCE_S, Loop, run, server
from tests.router.virtual_time import VirtualLoop


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, under the deadline of all tests or of its mark `patience`; in
    virtual time there is none. Its event loop is asyncio's own, or that of a fixture below."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = pyfuncitem.funcargs
    names = inspect.signature(pyfuncitem.obj).parameters
    work = pyfuncitem.obj(**{name: given[name] for name in names})
    if "virtual_loop" in given:
        run(work, VirtualLoop, patience_s=None)
    else:
        mark = pyfuncitem.get_closest_marker("patience")
        patience_s = mark.args[0] if mark else PATIENCE_S
        run(work, given.get("both_loops") or given.get("uv_loop"), patience_s)
    return True


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop])
def both_loops(request: pytest.FixtureRequest) -> Loop:
    """Each test once in uvloop's event loop, once in asyncio's."""
    return request.param


@pytest.fixture
def uv_loop() -> Loop:
    """The router's own event loop."""
    return uvloop.new_event_loop


@pytest.fixture
def virtual_loop() -> None:
    """An event loop whose clock jumps."""


@pytest.fixture(params=["direct", "plain"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test once with answers written to the transport, once through plain ASGI."""
    token = server.set(request.param)
    yield
    server.reset(token)

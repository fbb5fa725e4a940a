"""What several modules share: event loops of tests that are coroutines, both ways of answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import uvloop

from tests.router.fakes import Loop, server
from tests.router.virtual_time import VirtualLoop
from tests.tls_kit import is_tls


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop])
def both_loops(request: pytest.FixtureRequest) -> Loop:
    """Each test once in uvloop's event loop, once in asyncio's."""
    return request.param


@pytest.fixture
def uv_loop() -> Loop:
    """The router's own event loop."""
    return uvloop.new_event_loop


@pytest.fixture
def virtual_loop(request: pytest.FixtureRequest) -> Loop:
    """An event loop whose clock jumps: a test on it has no deadline."""
    request.applymarker(pytest.mark.patience(None))
    return VirtualLoop


@pytest.fixture(params=["direct", "plain"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test once with answers written to the transport, once through plain ASGI."""
    token = server.set(request.param)
    yield
    server.reset(token)


@pytest.fixture(params=[False, True], ids=["tcp", "tls"])
def plain_and_tls(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Each test once over TCP, once over TLS."""
    token = is_tls.set(request.param)
    yield request.param
    is_tls.reset(token)

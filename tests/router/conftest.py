"""What several modules share: both ways of answers to the client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.router.fakes import server


@pytest.fixture(params=["direct", "plain"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test once with answers written to the transport, once through plain ASGI."""
    token = server.set(request.param)
    yield
    server.reset(token)

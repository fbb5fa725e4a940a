"""What several modules share: both ways of answers to the client, the benchmark's programs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.router.bench.programs import Programs, programs
from tests.router.fakes import server


@pytest.fixture(params=["direct", "plain"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test once with answers written to the transport, once through plain ASGI."""
    token = server.set(request.param)
    yield
    server.reset(token)


@pytest.fixture(scope="session")
def bench_programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """The mock engine and the load generator, compiled now."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return programs()

"""What several modules share: the programs of the router's benchmark, compiled once."""

from __future__ import annotations

import pytest

from bench.router.programs import Programs, programs


@pytest.fixture(scope="session")
def bench_programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """The mock engine and the load generator, compiled now."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return programs()

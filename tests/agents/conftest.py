"""One P and one D with the demo model serve all suites and clients; nothing is drawn at random."""

from collections.abc import Iterator

import pytest

from tests.agents.suites import MODEL
from tests.e2e.harness import Fleet, fleet


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet that no test may damage."""
    names = ("--served-model-name", "demo", MODEL)
    greedy = ("--override-generation-config", '{"temperature": 0}')
    folder = tmp_path_factory.mktemp("agents")
    with fleet(folder, prefill=1, decode=1, flags=(*names, *greedy)) as running:
        yield running

"""One 1P3D fleet and one set of transformers' answers serve all end-to-end tests that can share."""

import json
from collections.abc import Iterator

import pytest

from tests.e2e.harness import DEMO_MODEL, Fleet, fleet
from tests.e2e.oracle import Case, make_cases


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """Prompts of the demo model with transformers' greedy answers."""
    made = make_cases(DEMO_MODEL)
    dump = [{"prompt": c.prompt, "ids": c.ids} for c in made]
    (tmp_path_factory.mktemp("oracle") / "cases.json").write_text(json.dumps(dump))
    return made


@pytest.fixture(scope="session")
def fleet_1p3d(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A 1P3D fleet that no test may damage."""
    with fleet(tmp_path_factory.mktemp("1p3d"), prefill=1, decode=3) as running:
        yield running

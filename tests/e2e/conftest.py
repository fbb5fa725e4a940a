"""What end-to-end tests share: transformers' answers, and for a module's tests a 1P3D fleet."""

import fcntl
import json
import os
from collections.abc import Iterator

import pytest

from tests.e2e.harness import DEMO_MODEL, Fleet, fleet
from tests.e2e.oracle import Case, make_cases


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """Prompts of the demo model with transformers' greedy answers. The first of pytest-xdist's
    processes that needs them makes them for all."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return make_cases(DEMO_MODEL)
    with (tmp_path_factory.getbasetemp().parent / "cases.json").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if not (text := file.read()):
            text = json.dumps([(case.prompt, case.ids) for case in make_cases(DEMO_MODEL)])
            file.write(text)
            file.flush()
    return [Case(tuple(prompt), tuple(ids)) for prompt, ids in json.loads(text)]


@pytest.fixture(scope="module")
def fleet_1p3d(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A 1P3D fleet that no test may damage. It beats all the time, a tenth of a core: so it ends
    with its module."""
    with fleet(tmp_path_factory.mktemp("1p3d"), prefill=1, decode=3) as running:
        yield running

"""Long tests find no time where .ci/run has none left: none begins, all others run, and the summary
names them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
LATE = """import pytest

@pytest.fixture
def engine():
    raise AssertionError("made in vain")

@pytest.mark.long
@pytest.mark.parametrize("case", [1, 2])
def test_long(engine, case): ...

def test_other(): ...
"""


def run(folder: Path, until: str) -> str:
    shutil.copy(CONFTEST, folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = long\n")
    (folder / "test_a.py").write_text(LATE)
    (folder / "test_b.py").write_text("def test_quick(): ...\n")
    words = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(folder)]
    env = {**os.environ, "XPYD_LONG_UNTIL": until, "XPYD_LONG_ORDER": ""}
    return subprocess.run(
        words, cwd=folder, env=env, capture_output=True, text=True, timeout=60
    ).stdout


@pytest.mark.parametrize("left_s", [None, 3600])
def test_long_tests_run_while_there_is_time(tmp_path: Path, left_s: int | None) -> None:
    said = run(tmp_path, "" if left_s is None else str(time.time() + left_s))
    assert said.count("made in vain") > 1
    assert "2 passed, 2 errors" in said
    assert (said.index("test_quick") < said.index("test_other")) == bool(left_s)


def test_none_begins_when_there_is_no_time_left(tmp_path: Path) -> None:
    said = run(tmp_path, "1")
    assert "2 passed, 2 skipped" in said
    assert "no time was left for long tests: 2" in said
    assert "  2 test_a.py::test_long" in said

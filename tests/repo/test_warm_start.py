"""A program started warm behaves as one that `python -m` starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.warm_start import PRELOADED, ROOT, WarmProcess, start_warm

PROGRAM = "tests.repo.warm_program"


def start(log: Path, *arguments: str) -> WarmProcess:
    with log.open("wb") as file:
        return start_warm(
            [PROGRAM, *arguments], stderr=file, env={"OF_THE_PROGRAM": "1", **os.environ}
        )


@pytest.mark.parametrize("name", PRELOADED)
def test_what_is_imported_before_exists(name: str) -> None:
    assert find_spec(name)


def test_it_has_its_own_arguments_environment_session_and_output(tmp_path: Path) -> None:
    process = start(tmp_path / "log", "say", "--flag")
    assert process.wait(60) == 0
    said = json.loads((tmp_path / "log").read_text())
    assert said == {
        "arguments": ["say", "--flag"],
        "name": "__main__",
        "own": "1",
        "session": process.pid,
        "pid": process.pid,
        "folder": str(ROOT),
        "threads": 1,
        "descriptors": [0, 1, 2],
        "signals": [signal.SIG_DFL, signal.SIG_DFL],
    }


@pytest.mark.parametrize(
    ("how", "status", "last"),
    [
        ("3", 3, ""),
        ("text", 1, "the end"),
        ("raise", 1, "ValueError: the end"),
        ("atexit", 0, "at the exit"),
    ],
)
def test_it_ends_with_the_status_of_the_program(
    tmp_path: Path, how: str, status: int, last: str
) -> None:
    assert start(tmp_path / "log", how).wait(60) == status
    assert [*(tmp_path / "log").read_text().splitlines(), ""][-1 if not last else -2] == last


def test_a_signal_ends_it_and_two_run_at_once(tmp_path: Path) -> None:
    first, second = (start(tmp_path / name, "sleep") for name in ("first", "second"))
    assert first.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(0.01)
    first.terminate()
    assert first.wait(60) == -signal.SIGTERM
    assert second.poll() is None
    second.kill()
    assert second.wait(60) == second.poll() == -signal.SIGKILL
    second.terminate()

"""`.ci/run` with a make that only notes what it is asked for: what runs, and what decides."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci/run"
MAKE = """#!/usr/bin/env bash
part=$1
[[ $* == *ONLY_SLOW* ]] && part=slow
echo "$*" >> "$ASKED"
echo "output of $part"
[[ $* == *--last-failed* ]] && times=2 || times=1
[[ " $FAILS " != *" $part:$times "* ]]
"""


def run(folder: Path, fails: str = "") -> tuple[int, list[str], list[str]]:
    """Exit status, lines of output, and what make was asked for."""
    (folder / ".ci").mkdir()
    (folder / "bin").mkdir()
    shutil.copy(SCRIPT, folder / ".ci/run")
    make = folder / "bin/make"
    make.write_text(MAKE)
    make.chmod(0o755)
    asked = folder / "asked"
    done = subprocess.run(
        [folder / ".ci/run"],
        env={
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "ASKED": str(asked),
            "FAILS": fails,
            "TMPDIR": str(folder),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    left = sorted(path.name for path in folder.iterdir())
    assert left == [".ci", "asked", "bin"], "it leaves nothing"
    return done.returncode, done.stdout.splitlines(), asked.read_text().splitlines()


def test_all_parts_run_once_and_each_is_shown_whole(tmp_path: Path) -> None:
    status, lines, asked = run(tmp_path)
    assert status == 0
    assert sorted(line.split(" PYTEST_ARGS")[0] for line in asked) == [
        "setup",
        "test ONLY_SLOW=1",
        "test-cluster",
        "verify",
    ]
    assert lines == [
        "output of setup",
        "output of verify",
        "output of slow",
        "=== cluster",
        "output of test-cluster",
    ]


@pytest.mark.parametrize("part", ["verify", "test-cluster", "slow"])
def test_a_part_that_fails_twice_fails_the_run_and_is_shown_last(tmp_path: Path, part: str) -> None:
    status, lines, asked = run(tmp_path, f"{part}:1 {part}:2")
    assert status == 1
    assert len(asked) == 5
    header, first, again, second = lines[-4:]
    assert header == f"=== {part.removeprefix('test-')} failed"
    assert again.startswith("FAILED ONCE: ")
    assert first == second == f"output of {part}"


@pytest.mark.parametrize("part", ["verify", "test-cluster", "slow"])
def test_what_fails_once_is_run_again_by_itself(tmp_path: Path, part: str) -> None:
    status, _, asked = run(tmp_path, f"{part}:1")
    assert status == 0
    [again] = [line for line in asked if "--last-failed" in line]
    first, same = [line for line in asked if again.startswith(line)]
    assert same == again
    assert f"cache_dir=.pytest_cache/{part.removeprefix('test-')}" in first

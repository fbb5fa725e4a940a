"""`.ci/run` with a make that only notes what it is asked for: what runs, and what decides."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci/run"
MAKE = """#!/usr/bin/env bash
part=$1
[[ $* == *ONLY=node* ]] && part=test-node
[[ $* == *ONLY=changes* ]] && part=test-changes
echo "$*" >> "$ASKED"
echo "output of $part"
[[ $* == *--last-failed* ]] && times=2 || times=1
[[ " $HANGS " != *" $part "* ]] || exit 124
if [[ " $FAILS " == *" $part:$times "* ]]; then
  [[ $part == test-* ]] && echo "1 failed, 10 passed, 2 skipped in 3.21s"
  exit 1
fi
[[ $part == test-* ]] && echo "==== $((30 / times)) passed, 5 deselected in 61.00s (0:01:01) ===="
exit 0
"""
HEADER = "=== parts; behind setup and collect they ran at once"
# The targets as the make above calls them, and the parts of the table.
PARTS = {
    "test-all": "tests",
    "test-cluster": "cluster",
    "test-changes": "changes",
    "test-node": "node",
    "test-agents": "agents",
    "test-vllm": "vllm",
}


def run(folder: Path, fails: str = "", hangs: str = "") -> tuple[int, list[str], list[str]]:
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
            "HANGS": hangs,
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


def times(lines: list[str]) -> dict[str, str]:
    """Of each part, what the table says of it but its time."""
    table = [line.split() for line in lines[lines.index(HEADER) + 1 : -1]]
    assert all(re.fullmatch(r"[0-9]+:[0-9]{2}", line[1]) for line in table)
    return {line[0]: " ".join(line[2:]) for line in table}


def test_all_parts_run_once_and_each_is_shown_whole(tmp_path: Path) -> None:
    status, lines, asked = run(tmp_path)
    assert status == 0
    assert sorted(line.split(" PYTEST_ARGS")[0] for line in asked) == [
        "cluster-images",
        "collect",
        "lint type imports",
        "setup",
        "test-agents",
        f"test-all WORKERS={len(os.sched_getaffinity(0))}",
        "test-cluster ONLY=changes",
        "test-cluster ONLY=node and not changes",
        "test-cluster ONLY=not node",
        "test-vllm",
    ]
    summary = "==== 30 passed, 5 deselected in 61.00s (0:01:01) ===="
    assert lines[: lines.index(HEADER)] == [
        "output of setup",
        "=== tests",
        "output of test-all",
        summary,
        "=== checks",
        "output of lint",
        "=== agents",
        "output of test-agents",
        summary,
        "=== images",
        "output of cluster-images",
        "=== cluster",
        "output of test-cluster",
        summary,
        "=== changes",
        "output of test-changes",
        summary,
        "=== node",
        "output of test-node",
        summary,
        "=== vllm",
        "output of test-vllm",
        summary,
    ]


def test_it_ends_with_the_time_of_each_part_and_the_sums(tmp_path: Path) -> None:
    _, lines, _ = run(tmp_path)
    parts = dict.fromkeys(("setup", "collect", "checks", "images", *PARTS.values()), "ok")
    assert times(lines) == {**parts, "whole": ""}
    assert lines[-1] == "180 passed, 0 failed, 0 skipped"


@pytest.mark.parametrize("part", PARTS)
def test_tests_that_fail_twice_fail_the_run_and_are_shown_last(tmp_path: Path, part: str) -> None:
    status, lines, asked = run(tmp_path, f"{part}:1 {part}:2")
    assert status == 1
    assert len(asked) == 11
    name = PARTS[part]
    assert times(lines)[name] == "failed"
    assert lines[-1] == "170 passed, 1 failed, 4 skipped"
    shown = lines[lines.index(f"=== {name} failed") + 1 : lines.index(HEADER)]
    assert [line for line in shown if line.startswith("output")] == [f"output of {part}"] * 2
    assert any(line.startswith("FAILED ONCE: ") for line in shown)


@pytest.mark.parametrize("part", PARTS)
def test_what_fails_once_is_run_again_by_itself(tmp_path: Path, part: str) -> None:
    status, lines, asked = run(tmp_path, f"{part}:1")
    assert status == 0
    [again] = [line for line in asked if "--last-failed" in line]
    first, same = [line for line in asked if again.startswith(line)]
    assert same == again
    name = PARTS[part]
    assert f"cache_dir=.pytest_cache/{name}" in first
    assert lines[-1] == "175 passed, 0 failed, 2 skipped"


@pytest.mark.parametrize("part", PARTS)
def test_what_runs_out_of_its_time_is_not_run_again(tmp_path: Path, part: str) -> None:
    status, lines, asked = run(tmp_path, hangs=part)
    assert status == 1
    assert times(lines)[PARTS[part]] == "failed"
    assert not any("--last-failed" in line for line in asked)


def test_a_check_that_fails_fails_the_run_and_counts(tmp_path: Path) -> None:
    status, lines, _ = run(tmp_path, "lint:1")
    assert status == 1
    assert times(lines)["checks"] == "failed"
    assert lines[-1] == "180 passed, 1 failed, 0 skipped"


def test_tests_that_cannot_be_imported_are_not_run(tmp_path: Path) -> None:
    status, lines, asked = run(tmp_path, "collect:1")
    assert status == 1
    assert times(lines)["collect"] == "failed"
    assert lines[-1] == "0 passed, 1 failed, 0 skipped"
    assert not any(line.startswith("test-") for line in asked)

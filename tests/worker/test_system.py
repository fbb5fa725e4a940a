"""The age of a process counts from its making, not from the first line of Python."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from xpyd_worker.system import process_age_s

# Of this child alone: the parent's clock tells when it was made.
CHILD = (
    "import time; from xpyd_worker.system import process_age_s;"
    "print(time.clock_gettime(time.CLOCK_BOOTTIME) - process_age_s(), time.monotonic())"
)
TICK_S = 0.02


def test_a_process_is_as_old_as_its_making() -> None:
    made_s, monotonic_s = time.clock_gettime(time.CLOCK_BOOTTIME), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60, check=True
    )
    found_s, asked_s = map(float, done.stdout.split())
    # Made after this, and before it could ask.
    assert made_s - TICK_S <= found_s <= made_s + (asked_s - monotonic_s)


def test_a_command_with_spaces_and_parentheses_is_no_field(tmp_path: Path) -> None:
    stat, own = tmp_path / "stat", Path("/proc/self/stat").read_text()
    begin, _, rest = own.partition("(")
    stat.write_text(f"{begin}(a) b (c){rest.rpartition(')')[2]}")
    first, second = process_age_s(stat), process_age_s()
    assert first is not None
    assert second is not None
    assert 0 < first <= second


def test_a_system_that_does_not_say_gives_none(tmp_path: Path) -> None:
    assert process_age_s(tmp_path / "stat") is None

"""What benchmarks share when they are done: JSON for machines, tables in the page beside it."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

END = "<!-- end of what is measured -->\n"


def put_measured(page: str, begin: str, measured: str) -> str:
    """The page with `measured` in place of what stands between the line `begin` and END."""
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(END)
    return before + begin + measured + END + after


def where_measured(made: dict[str, Any]) -> str:
    """When, on which machine, and with which versions."""
    machine = made["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in made["versions"].items())
    return (
        f"{made['date']}: {machine['cores']} cores ({machine['processor']}), "
        f"{machine['memoryGiB']} GiB, Linux {machine['linux']}; {versions}. "
    )


def not_measured(made: dict[str, Any]) -> str:
    """With which flags of ours, and what is not there."""
    flags = f" Ours with `{' '.join(made['ownArgs'])}`." if made["ownArgs"] else ""
    absent = (f"\nNot measured: {name} ({why})." for name, why in made["absent"].items())
    return flags + "".join(absent)


def write_report(
    made: dict[str, Any], output: Path, renew: Callable[[str, dict[str, Any]], str]
) -> None:
    """Write `made` to `output`, and the page beside it as `renew` makes it of the old one."""
    text = json.dumps(made, indent=1)
    # A line for a round, not for a number.
    text = re.sub(r"\[[-\d.,\s]+\]", lambda numbers: " ".join(numbers[0].split()), text)
    output.write_text(text + "\n")
    page = output.with_suffix(".md")
    if page.exists():
        page.write_text(renew(page.read_text(), made))


def say(text: str) -> None:
    """A line of progress, with the time, on standard error."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()

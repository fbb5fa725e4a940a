"""`python -m tests.journeys [J1 ...]`: trace the journeys and print their files, calls and sums."""

from __future__ import annotations

import logging
import sys

from tests.journeys.journeys import JOURNEYS
from tests.journeys.trace import ROOT, common


def report(name: str) -> str:
    """Calls by file in order of first entry, and their sums."""
    files, least = common(JOURNEYS[name]())
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in files)
    sums = f"{len(files)} files ({lines} lines), {least.functions} functions, {len(least)} calls"
    return "\n".join([*(f"{calls:6} {file}" for file, calls in files.items()), f"{name}: {sums}"])


logging.disable(logging.WARNING)
for name in sys.argv[1:] or JOURNEYS:
    sys.stdout.write(report(name) + "\n\n")

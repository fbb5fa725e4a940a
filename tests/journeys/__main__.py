"""`python -m tests.journeys [--write] [J1 ...]`: print files, calls and sums of the journeys.

`--write` puts them into docs/architecture.md instead.
"""

from __future__ import annotations

import logging
import sys

from tests.journeys.journeys import JOURNEYS
from tests.journeys.page import PAGE, sums, table, written
from tests.journeys.trace import common


def main(arguments: list[str]) -> None:
    logging.disable(logging.WARNING)
    names = [name for name in arguments if name in JOURNEYS] or list(JOURNEYS)
    for name in names:
        files, least = common(JOURNEYS[name]())
        if "--write" in arguments:
            text = written(PAGE.read_text(), name, table(files))
            PAGE.write_text(written(text, f"{name} now", sums(files, least)))
        else:
            calls = [f"{number:6} {file}\n" for file, number in files.items()]
            sys.stdout.write("".join(calls))
        sys.stdout.write(f"{name}: {sums(files, least)}\n")


main(sys.argv[1:])

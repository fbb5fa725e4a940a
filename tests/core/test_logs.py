"""What processes are told of the logging of the one that starts them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from xpyd_core.logs import JsonFormatter, format_in_use, level_in_use, set_up_logging


@pytest.fixture(autouse=True)
def root() -> Iterator[logging.Logger]:
    found = logging.getLogger()
    level, handlers = found.level, found.handlers[:]
    yield found
    found.handlers[:] = handlers
    found.setLevel(level)


@pytest.mark.parametrize(
    ("level", "name"), [(5, "debug"), (20, "info"), (25, "warning"), (40, "error"), (99, "error")]
)
def test_the_level_is_the_least_that_is_printed(
    root: logging.Logger, level: int, name: str
) -> None:
    root.setLevel(level)
    assert level_in_use() == name


def test_the_format_is_that_of_the_commands_and_text_elsewhere(root: logging.Logger) -> None:
    set_up_logging("info", "text")
    assert (level_in_use(), format_in_use()) == ("info", "text")
    set_up_logging("warning", "json")
    assert (level_in_use(), format_in_use()) == ("warning", "json")
    # A program's own handler.
    root.handlers[:] = [logging.StreamHandler()]
    assert format_in_use() == "text"
    root.handlers[0].setFormatter(JsonFormatter())
    assert format_in_use() == "json"

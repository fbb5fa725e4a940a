"""Text from outside: whole numbers, bounded while they are text, and quotes. Pure."""

from __future__ import annotations

_MOST_DIGITS = 9
"""More than any port, rank or layer. int() takes time for many, and raises beyond 4,300."""
_MOST_SHOWN = 40


def whole_number(text: str) -> int | None:
    """Of at most nine ASCII digits; None of anything else."""
    if len(text) > _MOST_DIGITS or not (text.isascii() and text.isdigit()):
        return None
    return int(text)


def clipped(text: str) -> str:
    """As a message has it: the beginning of what is long."""
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."

"""Numbers from text: bounded whole ones, and byte sizes as people write them (`8e9`, `4Gi`, `10%`).

Pure. The text comes from outside, so what a message quotes of it is cut.
"""

from __future__ import annotations

import re
from fractions import Fraction

from xpyd_core.errors import UserError

_MOST_DIGITS = 9
"""More than any port, rank or layer. int() takes time for many, and raises beyond 4,300."""
_MOST_SHOWN = 40
_UNITS = {"": 1}
_UNITS.update({unit: 1000**power for power, unit in enumerate("kMGTPE", 1)})
_UNITS.update({f"{unit}i": 1024**power for power, unit in enumerate("KMGTPE", 1)})
_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)(?:[eE]([0-9]{1,2})|([kMGTPE]|[KMGTPE]i)?)")
_PERCENT = re.compile(r"([1-9][0-9]?)%")


def whole_number(text: str) -> int | None:
    """The number of at most nine ASCII digits; None for anything else."""
    if len(text) > _MOST_DIGITS or not (text.isascii() and text.isdigit()):
        return None
    return int(text)


def clipped(text: str) -> str:
    """The text as a message shows it: the beginning of a long one."""
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def parse_bytes(text: str | int, *, of: int | None = None) -> int:
    """A size in bytes, rounded down. `of` is what a percentage is taken of; None refuses one.

    Raises UserError that says what is allowed.
    """
    text = str(text)
    if (percent := _PERCENT.fullmatch(text)) and of is not None:
        return of * int(percent[1]) // 100
    match = _SIZE.fullmatch(text)
    if match is None:
        more = ", 10%" if of is not None else ""
        raise UserError(
            f"{clipped(text)!r} is not a size; write bytes like 1073741824, 8e9, 4Gi or 500M{more}"
        )
    number, exponent, unit = match.groups()
    factor = 10 ** int(exponent) if exponent else _UNITS[unit or ""]
    return int(Fraction(number) * factor)


def format_bytes(count: int) -> str:
    """A size for people, in powers of 1024: `512 B`, `1.5 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        # What one digit behind the point rounds to 1024 is 1 of the next unit.
        if value < (1024 if unit == "B" else 1023.95):
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"

"""Safe reading of API objects. Pure.

What the API server holds was written by many hands and versions, so nothing here raises: a field
that is missing or of a strange type reads as empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

Raw = Mapping[str, Any]
"""One object, or a part of one, as JSON has it."""

MOST_TEXT = 240
_ELLIPSIS = "..."


def at(obj: object, *path: str) -> object:
    """The field at `path`, None where there is none."""
    found: Any = obj
    for key in path:
        # Hot: a cast is a call, and as dear as all else here.
        if not isinstance(found, dict):
            return None
        found = found.get(key)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return cast("object", found)


def fields(obj: object, *path: str) -> Raw:
    """The map at `path`."""
    value = at(obj, *path)
    return cast("Raw", value) if isinstance(value, dict) else {}


def rows(obj: object, *path: str) -> list[Raw]:
    """The maps of the list at `path`."""
    value = at(obj, *path)
    if not isinstance(value, list):
        return []
    return [cast("Raw", v) for v in cast("list[object]", value) if isinstance(v, dict)]


def text(obj: object, *path: str) -> str:
    """The text at `path`."""
    value = at(obj, *path)
    return value if isinstance(value, str) else ""


def count(obj: object, *path: str) -> int:
    """The whole number at `path`; 0 where there is none or a negative one."""
    value = at(obj, *path)
    return max(0, value) if isinstance(value, int) and not isinstance(value, bool) else 0


def condition(obj: object, kind: str) -> Raw:
    """The object's status condition of that type."""
    listed = at(obj, "status", "conditions")
    if isinstance(listed, list):
        for row in cast("list[object]", listed):
            if isinstance(row, dict) and cast("Raw", row).get("type") == kind:
                return cast("Raw", row)
    return {}


def is_true(obj: object, kind: str) -> bool:
    """Whether the object's status condition of that type is True."""
    return text(condition(obj, kind), "status") == "True"


def moment(value: str) -> datetime | None:
    """An RFC 3339 time with its zone."""
    try:
        found = datetime.fromisoformat(value)
        return found.astimezone(UTC) if found.tzinfo else None
    except (ValueError, OverflowError):
        return None


def seconds_between(before: str, after: str) -> float | None:
    """Between two RFC 3339 times; None where one is none."""
    first, second = moment(before), moment(after)
    return (second - first).total_seconds() if first and second else None


def short(value: str, most: int = MOST_TEXT) -> str:
    """`value` in one line of at most `most` characters, all of them printable."""
    # Only what can matter is looked at: a termination message may be long.
    line = " ".join(value[: 4 * most].split())
    line = "".join(c if c.isprintable() else "?" for c in line)
    if len(line) <= most and len(value) <= 4 * most:
        return line
    return line[: most - len(_ELLIPSIS)].rstrip() + _ELLIPSIS


def tail(value: str, most: int = MOST_TEXT) -> str:
    """As short(), but of a long text the end: errors name the outermost layer first."""
    line = short(value[-4 * most :], 4 * most)
    return line if len(line) <= most else _ELLIPSIS + line[len(_ELLIPSIS) - most :].lstrip()

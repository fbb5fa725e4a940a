"""How deep and how large a parsed document is, without recursion. Pure."""

from __future__ import annotations

from typing import Literal, cast


def excess(
    document: object, *, most_levels: int, most_values: int | None = None
) -> Literal["deep", "many"] | None:
    """What there is too much of, None: nothing. A value that stands in several places counts in
    each of them; one that contains itself is too deep."""
    level, count = [document], 0
    for _ in range(most_levels):
        below: list[object] = []
        for value in level:
            if isinstance(value, dict):
                below += cast("dict[object, object]", value).values()
            elif isinstance(value, list):
                below += cast("list[object]", value)
            # Asked for each: one level can be a thousand times the one before.
            if most_values is not None and count + len(below) > most_values:
                return "many"
        if not below:
            return None
        count += len(below)
        level = below
    return "deep"

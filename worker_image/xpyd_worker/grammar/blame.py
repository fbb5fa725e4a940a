"""Finds the place in a JSON schema of what the compiler refuses: its messages name none. Pure.

By trying parts of the schema: the innermost one that is refused alone, and in that the keyword
without which it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from xpyd_worker.grammar.schema import children, objects_in

_OF_ROOT = ("$defs", "definitions", "x-guidance")


def place_of_error(schema: Mapping[str, Any], error_of: Callable[[object], str]) -> tuple[str, str]:
    """The place below the schema's own, such as `.properties.a.pattern`, and what is wrong there;
    `error_of` says it of a schema, empty where that is right.

    A part is tried with the definitions of the root. One whose references lead elsewhere is not.
    """
    error = error_of(schema)
    root = {key: schema[key] for key in _OF_ROOT if key in schema}
    place, node = "", dict(schema)
    while True:
        for below, child in children(node, place):
            if isinstance(child, dict) and _is_whole(cast("object", child)):
                inner = cast("dict[str, Any]", child)
                if found := error_of({**root, **inner}):
                    place, node, error = below, inner, found
                    break
        else:
            break
    # The type last: most others need it.
    for keyword in sorted(node.keys() - set(_OF_ROOT), key=lambda one: (one == "type", one)):
        rest = {key: value for key, value in node.items() if key != keyword}
        if not error_of({**root, **rest}):
            return f"{place}.{keyword}", error
    return place, error


def _is_whole(part: object) -> bool:
    """Whether none of its references is into another part of the root than its definitions."""
    for node in objects_in(part):
        to = str(node.get("$ref", ""))
        if to.startswith("#") and not to.startswith(("#/$defs/", "#/definitions/")):
            return False
    return True

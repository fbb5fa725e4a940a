"""Whether an object of the API server is as the operator wants it. Pure.

The API server returns more than it was sent (defaults, status, other writers' fields) and rewrites
some values (0.5 CPU becomes 500m). `contains` allows for both: it checks only that every wanted
value is still there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from hashlib import sha256
from typing import cast

from xpyd_operator.manifests.names import JsonObject

_ITEM_KEYS = ("uid", "mountPath", "name")
"""The keys that identify the items of a list, the most specific first."""
_QUANTITY_MAPS = ("limits", "requests")
_QUANTITIES = ("sizeLimit", "divisor", "storage")
_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:[eE]([+-]?\d{1,3})|([numkMGTPE]|[KMGTPE]i)?)")
_UNITS = {"": Fraction(1)}
_UNITS.update({unit: Fraction(1, 1000**power) for power, unit in enumerate("mun", 1)})
_UNITS.update({unit: Fraction(1000**power) for power, unit in enumerate("kMGTPE", 1)})
_UNITS.update({f"{unit}i": Fraction(1024**power) for power, unit in enumerate("KMGTPE", 1)})


def desired_hash(obj: JsonObject) -> str:
    """16 hex digits over the whole object, the same for equal objects."""
    text = json.dumps(obj, sort_keys=True, separators=(",", ":"))
    return sha256(text.encode()).hexdigest()[:16]


def contains(observed: object, desired: object) -> bool:
    """Whether every value of `desired` is in `observed`. What is missing counts as empty or 0."""
    return _contains(observed, desired, quantity=False)


def _contains(observed: object, desired: object, *, quantity: bool) -> bool:
    if isinstance(desired, dict):
        if not isinstance(observed, dict):
            return not desired and not observed
        wanted, found = cast("JsonObject", desired), cast("JsonObject", observed)
        return all(
            _contains(
                found.get(key),
                value,
                quantity=quantity or key in _QUANTITIES or key in _QUANTITY_MAPS,
            )
            for key, value in wanted.items()
        )
    if isinstance(desired, list):
        if not isinstance(observed, list):
            return not desired and not observed
        pairs = _pairs(cast("list[object]", observed), cast("list[object]", desired))
        return pairs is not None and all(_contains(a, b, quantity=quantity) for a, b in pairs)
    if not desired and not observed:
        return True
    if quantity:
        ours, theirs = quantity_value(desired), quantity_value(observed)
        if ours is not None and theirs is not None:
            return ours == theirs
    # True == 1 in Python, not in JSON.
    return observed == desired and isinstance(observed, bool) == isinstance(desired, bool)


def _pairs(observed: list[object], desired: list[object]) -> list[tuple[object, object]] | None:
    """Items to compare, by key where they have one (others may have added more), else in order."""
    key = _item_key(desired)
    if key is None:
        if len(observed) != len(desired):
            return None
        return list(zip(observed, desired, strict=True))
    found = {item[key]: item for item in _maps(observed) if key in item}
    return [(found.get(item[key]), item) for item in _maps(desired)]


def _item_key(items: list[object]) -> str | None:
    maps = list(_maps(items))
    for key in _ITEM_KEYS:
        values = [item.get(key) for item in maps]
        if len(maps) == len(items) and maps and all(isinstance(v, str) for v in values):
            return key if len(set(values)) == len(values) else None
    return None


def _maps(items: list[object]) -> Iterator[JsonObject]:
    return (cast("JsonObject", item) for item in items if isinstance(item, dict))


def quantity_value(value: object) -> Fraction | None:
    """A Kubernetes quantity such as 500m, 4Gi, 1e3 or 0.5 as a number; None: it is not one."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    match = _NUMBER.fullmatch(str(value))
    if match is None:
        return None
    number, exponent, unit = match.groups()
    return Fraction(number) * (Fraction(10) ** int(exponent) if exponent else _UNITS[unit or ""])

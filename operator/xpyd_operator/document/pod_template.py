"""The types of a pod template's spec: as a CRD's schema, and as a check for where no schema is.

The API server refuses a value of a wrong type, and a field that does not exist, when a document is
applied, as it does with a Deployment. `xpyd up` and operators with an older CRD check the same
here. Neither knows what is required: a template is merged over the operator's pods. The table is
Kubernetes' own. See docs/adr/0049.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, cast

from xpyd_operator.document.base import INT_OR_STRING
from xpyd_operator.document.pod_fields import TABLE

POD_SPEC = "PodSpec"
_ANY = "any"
_QUANTITY = "quantity"
_SCALARS: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
    "number": (int, float),
    "integer,string": (int, str),
    _QUANTITY: (str, int, float),
}
_EXPECTED = {
    "integer,string": "integer or string",
    _QUANTITY: "a quantity like 500m, 2 or 4Gi",
}
QUANTITY_PATTERN = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"
"""What Kubernetes parses (apimachinery, resource.ParseQuantity)."""


@cache
def _types() -> Mapping[str, Mapping[str, str]]:
    """Type -> field -> kind: a scalar, any, another type, a [list] of a kind or a {map} to one."""
    found: dict[str, dict[str, str]] = {}
    fields: dict[str, str] = {}
    for token in TABLE.split():
        name, is_field, kind = token.partition("=")
        if is_field:
            fields[name] = kind
        else:
            fields = found.setdefault(name.removesuffix(":"), {})
    return found


def pod_schema(kind: str = POD_SPEC) -> dict[str, Any]:
    """The schema of a kind in the form that a CRD takes."""
    if kind.startswith("["):
        items = pod_schema(kind[1:-1])
        return {"type": "array", "items": items, "x-kubernetes-list-type": "atomic"}
    if kind.startswith("{"):
        return {"type": "object", "additionalProperties": pod_schema(kind[1:-1])}
    if kind == _ANY:
        return {"x-kubernetes-preserve-unknown-fields": True}
    if kind == _QUANTITY:
        # A CRD cannot say "text or any number": there only text is checked.
        return {"x-kubernetes-preserve-unknown-fields": True, "pattern": QUANTITY_PATTERN}
    if kind == "integer,string":
        return {INT_OR_STRING: True, "anyOf": [{"type": "integer"}, {"type": "string"}]}
    if kind in _SCALARS:
        return {"type": kind}
    fields = _types()[kind].items()
    return {"type": "object", "properties": {name: pod_schema(below) for name, below in fields}}


def without_nulls(value: object) -> object:
    """Without the fields whose value is null, which the API server drops."""
    if isinstance(value, list):
        return [without_nulls(item) for item in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, object]", value)
    return {key: without_nulls(below) for key, below in fields.items() if below is not None}


def pod_mistakes(path: str, value: object, kind: str = POD_SPEC) -> Iterator[str]:
    """One line for each value below `path` that has not the type of `kind`; null is absent."""
    if value is None or kind == _ANY:
        return
    if kind.startswith("["):
        if not isinstance(value, list):
            yield f"{path}: expected a list"
            return
        for index, item in enumerate(cast("list[object]", value)):
            if item is None:
                yield f"{path}[{index}]: an item of a list may not be null"
            yield from pod_mistakes(f"{path}[{index}]", item, kind[1:-1])
    elif kind in _SCALARS:
        if not _is_scalar(value, kind):
            expected = _EXPECTED.get(kind, kind)
            yield f"{path}: expected {expected}, got {_short(value)}"
    elif not isinstance(value, dict):
        yield f"{path}: expected a map"
    else:
        fields = _types().get(kind)
        for name, below in cast("dict[str, object]", value).items():
            if fields is None:
                yield from pod_mistakes(f"{path}[{name}]", below, kind[1:-1])
            elif name in fields:
                yield from pod_mistakes(f"{path}.{name}", below, fields[name])
            else:
                near = get_close_matches(name, fields, 1)
                hint = f"did you mean {near[0]}?" if near else "take it out"
                yield f"{path}.{name}: not a field of {kind}; {hint}"


def _is_scalar(value: object, kind: str) -> bool:
    # True is an int in Python, not in JSON.
    if isinstance(value, bool) != (kind == "boolean") or not isinstance(value, _SCALARS[kind]):
        return False
    if kind == _QUANTITY and isinstance(value, str):
        return re.fullmatch(QUANTITY_PATTERN, value) is not None
    return True


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."

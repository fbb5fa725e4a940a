"""Every rule and bound of a CRD's schema, with the words in which the API server refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]
_ANY = r"[^:]+"
_BOUNDS = {
    "maximum": "in body should be less than or equal to {}",
    "minimum": "in body should be greater than or equal to {}",
    "maxLength": "Too long: may not be more than {} bytes",
    "minLength": "in body should be at least {} chars long",
    "maxItems": "must have at most {} items",
    "maxProperties": "must have at most {} items",
    "minItems": "in body should have at least {} items",
}
_UNBOUNDED = {"boolean": (), "integer": ("maximum", "minimum"), "string": ("maxLength",)}


@dataclass(frozen=True)
class Constraint:
    """`path` is a pattern: list indexes and map keys are left open."""

    path: str
    what: str
    words: str

    def is_broken_by(self, line: str) -> bool:
        """Whether the server's line is about this constraint."""
        return bool(re.match(rf"{self.path}: ", line)) and self.words in line

    def __str__(self) -> str:
        return f"{self.path} {self.what}"


def constraints(node: Schema, path: str = "") -> Iterator[Constraint]:
    """All of a schema, from its root."""
    for rule in node.get("x-kubernetes-validations", ()):
        at = f"{path}{re.escape(rule.get('fieldPath', ''))}".removeprefix("\\.")
        yield Constraint(at, f"rule {rule['rule']}", rule["message"])
    for key, words in _BOUNDS.items():
        if key in node:
            yield Constraint(path, key, words.format(node[key]))
    if "enum" in node:
        values = ", ".join(f'"{value}"' for value in node["enum"])
        yield Constraint(path, "enum", f"supported values: {values}")
    if node.get("x-kubernetes-list-type") in ("map", "set"):
        yield Constraint(rf"{path}\[\d+\]", "no duplicates", "Duplicate value")
    yield from _below(node, path)


def _below(node: Schema, path: str) -> Iterator[Constraint]:
    for name in node.get("required", ()):
        yield Constraint(_child(path, name), "required", "Required value")
    for name, child in node.get("properties", {}).items():
        # The name's bounds are those of every object; the status is the operator's to write.
        if path or name == "spec":
            yield from constraints(child, _child(path, name))
    if "items" in node:
        yield from constraints(node["items"], rf"{path}\[\d+\]")
    if isinstance(node.get("additionalProperties"), dict):
        yield from constraints(node["additionalProperties"], rf"{path}\.{_ANY}")


def _child(path: str, name: str) -> str:
    return rf"{path}\.{re.escape(name)}" if path else re.escape(name)


def unbounded(node: Schema, path: str = "") -> Iterator[str]:
    """What a CRD must not have: a node without type or bound, $ref, nullable.

    What a pod template holds is Kubernetes' own, and no rule reads it.
    """
    if path.endswith(".template.spec"):
        return
    if "$ref" in node or "nullable" in node:
        yield f"{path}: $ref or nullable"
    if "x-kubernetes-int-or-string" in node:
        if "maxLength" not in node:
            yield f"{path}: no maxLength"
        return
    kind = node.get("type")
    if kind is None:
        yield f"{path}: no type"
    if kind == "array" and ("maxItems" not in node or "x-kubernetes-list-type" not in node):
        yield f"{path}: no maxItems or list type"
    if "additionalProperties" in node and "maxProperties" not in node:
        yield f"{path}: no maxProperties"
    large = "enum" in node or node.get("format") in ("int64", "date-time")
    if not large and any(bound not in node for bound in _UNBOUNDED.get(kind or "", ())):
        yield f"{path}: no bound"
    for name, child in node.get("properties", {}).items():
        yield from unbounded(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield from unbounded(node[key], f"{path}[]")

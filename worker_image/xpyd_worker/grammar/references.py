"""Looks where the references of a JSON schema lead, and whether what refers to itself ends. Pure.

A schema that only values without an end fit, such as an object that must have a member of its own
kind, would be followed until max_tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard, cast
from urllib.parse import unquote

from xpyd_core.bodies import refuse
from xpyd_core.complaints import shown

_MOST_ROUNDS = 64
"""Of references behind each other, where they come in the worst order. What is behind more of them
is taken to have an end."""
_ENDLESS = "only a value without an end fits it: it needs itself inside again"
Node = Mapping[str, Any]


def checked_references(root: object, nodes: Sequence[tuple[str, Node]]) -> object:
    """`root` without the schemas that only values without an end fit; `nodes`: all of its schemas
    that are objects, with their places. ApiError 400 for a `$ref` into the root that leads nowhere
    or only to itself, and where nothing else is left."""
    if any("$id" in node for _, node in nodes):
        return root  # then a reference may be to another one
    refers = False
    for place, node in nodes:
        refers = "$ref" in node or refers
        _check_reference(root, node, place)
    if not refers:
        return root
    endless = _Endless(root, [node for _, node in nodes])
    if not endless:
        return root
    if not endless.has_end(root):
        places = {id(node): place for place, node in nodes}
        raise refuse(places[endless.cause(root)], _ENDLESS)
    return endless.without(root)


def _check_reference(root: object, node: Node, place: str) -> None:
    at, seen = cast("object", node), list[object]()
    while isinstance(at, dict):
        to = cast("dict[str, object]", at).get("$ref")
        if not _is_local(to):
            break
        seen.append(cast("object", at))
        try:
            at = _referred(root, to)
        except LookupError:
            raise refuse(f"{place}.$ref", f"{shown(to)} is nowhere in the schema") from None
        if any(at is one for one in seen):
            raise refuse(f"{place}.$ref", "refers to itself, and so to no schema")


def _is_local(to: object) -> TypeGuard[str]:
    return isinstance(to, str) and (to == "#" or to.startswith("#/"))


def _referred(root: object, to: str) -> object:
    at = root
    for token in to.split("/")[1:]:
        key = unquote(token).replace("~1", "/").replace("~0", "~")
        at = (
            cast("list[object]", at)[int(key)]
            if isinstance(at, list) and key.isdecimal()
            else (cast("dict[str, object]", at)[key] if isinstance(at, dict) else _nowhere(key))
        )
    return at


def _nowhere(key: str) -> object:
    raise KeyError(key)


class _Endless:
    """The schemas that only values without an end fit: those left over when, round by round, the
    ones that a value fits with all its parts known are taken out. Some are not found."""

    def __init__(self, root: object, nodes: Sequence[Node]) -> None:
        self._root = root
        self._left = {id(node): node for node in nodes}
        for _ in range(_MOST_ROUNDS):
            found = [key for key, node in reversed(self._left.items()) if self._fits(node)]
            if not found:
                return
            for key in found:
                del self._left[key]
        self._left = {}

    def __bool__(self) -> bool:
        return bool(self._left)

    def has_end(self, schema: object) -> bool:
        """Whether a value that ends fits it, as far as is known."""
        return id(schema) not in self._left

    def _fits(self, node: Node) -> bool:
        return all(any(map(self.has_end, some)) for some in self._wanted(node))

    def _wanted(self, node: Node) -> Iterator[Sequence[object]]:
        """Groups of schemas inside: of each group one must have an end."""
        if _is_local(to := node.get("$ref")):
            yield [_referred(self._root, to)]
        yield from ([one] for one in node.get("allOf", ()))
        yield from (node[keyword] for keyword in ("anyOf", "oneOf") if node.get(keyword))
        types = node.get("type")
        if types == "object":
            yield from ([one] for one in _members(node))
        elif types == "array":
            yield from ([one] for one in _items(node))

    def cause(self, schema: object) -> int:
        """Where a client can mend it: the innermost schema without an end that is written inside
        this one, and not referred to. Its id."""
        at = cast("Node", schema)
        while "$ref" not in at:
            groups = [some for some in self._wanted(at) if not any(map(self.has_end, some))]
            at = cast("Node", groups[0][0])
        return id(at)

    def without(self, schema: object) -> object:
        """A copy in which no value fits these schemas."""
        if isinstance(schema, list):
            return [self.without(one) for one in cast("list[object]", schema)]
        if not isinstance(schema, dict):
            return schema
        if not self.has_end(cast("object", schema)):
            return False
        return {key: self.without(one) for key, one in cast("dict[str, object]", schema).items()}


def _members(node: Node) -> Iterator[object]:
    """The schemas of the members that an object must have."""
    properties = cast("Node", node.get("properties", {}))
    if node.get("patternProperties"):
        yield from (properties[name] for name in node.get("required", ()) if name in properties)
    else:
        others = node.get("additionalProperties", True)
        yield from (properties.get(name, others) for name in node.get("required", ()))


def _items(node: Node) -> Iterator[object]:
    """The schemas of the items that a list must have."""
    least = int(node.get("minItems", 0))
    first = cast("Sequence[object]", node.get("prefixItems", ()))[:least]
    yield from first
    if least > len(first):
        yield node.get("items", True)

"""JSON of the API server, however deep. Pure.

A fleet's templates keep unknown fields, and the API server takes documents of ten thousand levels,
far beyond what Python's recursion can read. No real object is so deep, but anybody who may make a
fleet could stop the operator for all others: what lies below MAX_DEPTH is read as null.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar

from msgspec.json import Decoder

from xpyd_operator.controller.kinds import POD, Kind
from xpyd_operator.document.load import excess

T = TypeVar("T")

MAX_DEPTH = 100
"""A pod template's deepest field lies at about 20."""
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]', re.DOTALL)


class _PodMetadata(TypedDict, total=False):
    name: Any
    namespace: Any
    uid: Any
    resourceVersion: Any
    labels: Any
    annotations: Any
    creationTimestamp: Any
    deletionTimestamp: Any
    finalizers: Any
    ownerReferences: Any


class _PodSpec(TypedDict, total=False):
    nodeName: Any
    volumes: Any
    resourceClaims: Any
    readinessGates: Any
    initContainers: Any
    containers: Any


class _Pod(TypedDict, total=False):
    """What `trim` looks at: the rest, above all managedFields, is half of each event."""

    metadata: _PodMetadata | None
    spec: _PodSpec | None
    status: Any


class _PodEvent(TypedDict):
    type: str
    object: _Pod


_ANYTHING: Decoder[Any] = Decoder()
_POD_EVENT: Decoder[Any] = Decoder(_PodEvent)


def parse(body: bytes, use: Callable[[Any], T], decoder: Decoder[Any] = _ANYTHING) -> T:
    """What `use` makes of the parsed body; of a shallow form where that is too deep for either.

    `use` may change what it gets, and may be called twice. Raises ValueError for what is no JSON.
    """
    try:
        return use(decoder.decode(body))
    except RecursionError:
        return use(decoder.decode(shallow(body)))


def parse_event(kind: Kind, line: bytes, use: Callable[[Any], T]) -> T:
    """As parse, of one line of a watch of `kind`; fields of pods that nobody reads are skipped."""
    return parse(line, use, _POD_EVENT if kind == POD else _ANYTHING)


def shallow(body: bytes) -> bytes:
    """The JSON text with null in place of maps and lists below MAX_DEPTH."""
    kept: list[bytes] = []
    depth = start = 0
    for token in _TOKEN.finditer(body):
        mark = token[0]
        if mark in (b"{", b"["):
            depth += 1
            if depth == MAX_DEPTH + 1:
                kept += [body[start : token.start()], b"null"]
        elif mark in (b"}", b"]"):
            if depth == MAX_DEPTH + 1:
                start = token.end()
            depth -= 1
    return b"".join((*kept, body[start:]))


def measured(parsed: object) -> object:
    """`parsed` as it is. Raises RecursionError where it is deeper than MAX_DEPTH."""
    if excess(parsed, most_levels=MAX_DEPTH + 1):
        raise RecursionError("deeper than MAX_DEPTH")
    return parsed

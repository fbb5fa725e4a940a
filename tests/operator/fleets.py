"""Small fleets on CPUs: documents, and the fleets that are parsed from them.

The operator's tests and the cluster's begin with one and say only what theirs has besides.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.document.load import parse_fleet

Document = dict[str, Any]


def cpu_pool(name: str, role: str, **more: Any) -> Document:
    """One of spec.pools, whose instances are pods on the CPU."""
    return {"name": name, "role": role, "resources": {"gpus": 0}, **more}


def prefill_and_decode(*, prefill: int = 1, decode: int = 1, **more: Any) -> list[Document]:
    """Two pools with so many replicas; `more` goes into both."""
    return [
        cpu_pool("prefill", "Prefill", replicas=prefill, **more),
        cpu_pool("decode", "Decode", replicas=decode, **more),
    ]


def document(name: str = "f", **spec: Any) -> Document:
    """1P1D unless `spec` has other pools."""
    base = {"model": {"uri": "hf://org/name"}, "pools": prefill_and_decode()}
    return {
        "apiVersion": "xpyd.dev/v1alpha1",
        "kind": "InferenceFleet",
        "metadata": {"name": name},
        "spec": base | spec,
    }


def changed(document: Document, changes: dict[str, Any]) -> Document:
    """A copy with values at dotted paths; a number is a list index."""
    result = copy.deepcopy(document)
    for path, value in changes.items():
        *above, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        node: Any = result
        for part in above:
            node = node[part] if isinstance(part, int) else node.setdefault(part, {})
        node[last] = value
    return result


def parsed(name: str = "f", **spec: Any) -> InferenceFleet:
    """The fleet of that document."""
    return parse_fleet(json.dumps(document(name, **spec)).encode(), source="f")

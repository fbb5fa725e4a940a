"""Fields of a fleet's objects that other clients added: which are removed, which are reported.

Server-side apply restores what the operator applies and keeps what others add: another key in a
Service's selector left the fleet without endpoints while it was Ready. The object's managedFields
say who set which field. Defaults, and what admission webhooks put into the operator's own writes,
belong to no other client and are no drift; nor are labels, annotations and finalizers, which are
others' to set, nor what is written through a subresource, as an HPA does.

The cache keeps of managedFields what is needed here: nothing, for nearly every object.

See docs/adr/0048.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from xpyd_operator.controller.decision.kinds import (
    BUDGET,
    DEPLOYMENT,
    LEADER_WORKER_SET,
    NETWORK_POLICY,
    POOL,
    SERVICE,
    Kind,
    Obj,
    kind_of,
)

_REMOVED: Mapping[Kind, tuple[str, ...]] = {
    SERVICE: ("spec.selector",),
    BUDGET: ("spec.selector",),
    NETWORK_POLICY: ("spec",),
    DEPLOYMENT: ("spec.template.spec",),
    LEADER_WORKER_SET: (
        "spec.leaderWorkerTemplate.leaderTemplate.spec",
        "spec.leaderWorkerTemplate.workerTemplate.spec",
    ),
}
"""Where an addition decides which pods serve, what runs in them or who reaches them. Elsewhere it
is an administrator's setting, such as a Service's externalIPs or a paused Deployment."""
_MISSING = object()
Step = str | Mapping[str, Any]
"""A field's name, or the key fields of a list's item."""


@dataclass(frozen=True)
class Added:
    """A field that another client added. `path`: as people write it; `manager`: who set it."""

    path: str
    manager: str
    steps: tuple[Step, ...]
    removed: bool

    def __str__(self) -> str:
        return f"{self.path} (set by {self.manager})"


def added_fields(observed: Obj, desired: Obj) -> tuple[Added, ...]:
    """What other clients added to an object beyond `desired`; in the order of their paths."""
    kind = kind_of(desired)
    entries = cast("list[Obj]", observed["metadata"].get("managedFields") or ())
    if kind == POOL or not entries:
        # A pool's spec has no field that is not the operator's, but replicas.
        return ()
    found: dict[str, Added] = {}
    for entry in entries:
        manager = str(entry.get("manager"))
        for steps in _beyond(entry.get("fieldsV1"), observed, desired):
            if _is_metadata(steps):
                continue
            path = _written(steps)
            found.setdefault(path, Added(path, manager, steps, _is_removed(kind, path)))
    return tuple(found[path] for path in sorted(found))


def without(observed: Obj, desired: Obj, added: Iterable[Added]) -> Obj:
    """A copy of the observed object without these fields."""
    left = deepcopy(observed)
    for field in added:
        *above, last = field.steps
        parent: object = left
        wanted: object = desired
        for step in above:
            parent, wanted = _child(parent, step), _child(wanted, step)
        before, keeps = _child(parent, last), _child(wanted, last)
        if before is _MISSING:
            continue
        if isinstance(parent, list):
            # More than one where items lack the key field.
            while (item := _child(cast("list[object]", parent), last)) is not _MISSING:
                cast("list[object]", parent).remove(item)
        elif isinstance(parent, dict) and isinstance(last, str):
            if keeps is _MISSING:
                del cast("Obj", parent)[last]
            else:
                cast("Obj", parent)[last] = _common(before, keeps)
    return left


def _is_metadata(steps: tuple[Step, ...]) -> bool:
    """Whether it is below the metadata of a pod template, as that of `kubectl rollout restart`."""
    pairs = pairwise(step for step in steps if isinstance(step, str))
    return any(last == "metadata" and above.lower().endswith("template") for above, last in pairs)


def _is_removed(kind: Kind, path: str) -> bool:
    if kind == SERVICE and path.startswith("spec.ports["):
        # A whole port; a nodePort of one is a setting.
        return path.endswith("]")
    places = _REMOVED.get(kind, ())
    return any(path == p or path.startswith((f"{p}.", f"{p}[")) for p in places)


def _beyond(managed: object, observed: object, desired: object) -> Iterator[tuple[Step, ...]]:
    """Paths in a fieldsV1 at which the observed object has more than the desired one."""
    if not isinstance(managed, dict):
        return
    for key, below in cast("Obj", managed).items():
        step = _step(key)
        if step is None:
            continue
        have = _child(observed, step)
        wanted = _child(desired, step)
        if have is _MISSING:
            continue
        if wanted is _MISSING:
            yield (step,)
        elif any(name != "." for name in cast("Obj", below or {})):
            yield from ((step, *rest) for rest in _beyond(below, have, wanted))
        elif _common(have, wanted) != have:
            # A map or a list that has one owner for the whole.
            yield (step,)


def _step(key: str) -> Step | None:
    """The step of a key of fieldsV1; None: it leads to nothing that is compared."""
    kind, _, rest = key.partition(":")
    if kind == "f" and rest:
        return rest
    if kind != "k":
        return None
    try:
        fields: object = json.loads(rest)
    except ValueError:
        return None
    return cast("Obj", fields) if isinstance(fields, dict) and fields else None


def _child(value: object, step: Step) -> object:
    if isinstance(step, str):
        found = cast("Obj", value).get(step, _MISSING) if isinstance(value, dict) else _MISSING
        # An empty value is as good as none.
        return _MISSING if found in (None, "", [], {}) else found
    items = cast("list[object]", value) if isinstance(value, list) else []
    for item in items:
        # A key field that is missing has its default.
        if isinstance(item, dict) and all(
            cast("Obj", item).get(name, want) == want for name, want in step.items()
        ):
            return cast("Obj", item)
    return _MISSING


def _common(have: object, wanted: object) -> object:
    """What is left of `have` without the keys that `wanted` lacks. Lists stay: an apply compares
    them."""
    if not isinstance(have, dict) or not isinstance(wanted, dict):
        return cast("object", have)
    left, right = cast("Obj", have), cast("Obj", wanted)
    return {key: _common(value, right[key]) for key, value in left.items() if key in right}


def _written(steps: Iterable[Step]) -> str:
    text = ""
    for step in steps:
        if isinstance(step, str):
            text += f".{step}" if step.replace("-", "").isalnum() else f"[{step}]"
        else:
            text += f"[{','.join(str(value) for value in step.values())}]"
    return text.removeprefix(".")

"""What a turn reports: the statuses of a fleet and of its pools, as patches. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from xpyd_operator.controller.decision.errors import Forbidden, KubeError
from xpyd_operator.controller.decision.kinds import Obj, kind_of
from xpyd_operator.controller.decision.state import (
    Apply,
    Look,
    Remove,
    Scale,
    Write,
    describe,
    is_leaving,
    pool_of,
)
from xpyd_operator.manifests.names import kv_secret_name
from xpyd_operator.status import (
    INVALID,
    INVALID_TEMPLATE,
    Problem,
    find_problems,
    fleet_status,
    invalid_pool_statuses,
    invalid_status,
    leaving_status,
    pool_statuses,
)


@dataclass(frozen=True)
class Report:
    """The fleet's status as it is and as it should be, and merge patches of its pools' statuses,
    by object name, where those differ.
    """

    before: dict[str, Any]
    after: dict[str, Any]
    pools: Mapping[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])


def status_of(obj: Obj) -> dict[str, Any]:
    """The object's status, empty where it has none."""
    return cast("dict[str, Any]", obj.get("status") or {})


def report(look: Look, problems: Sequence[Problem], *, has_key: bool) -> Report:
    """The statuses after a turn. `problems`: what the objects do not say themselves."""
    leaving, reading = is_leaving(look.document), look.reading
    if not leaving and (reading.fleet is None or reading.complaints):
        after, pools = _invalid(look), invalid_pool_statuses(look.own)
    else:
        after, pools = _obeyed(look, problems, has_key=has_key)
    patches: dict[str, dict[str, Any]] = {}
    # The pools' objects go with the fleet.
    for obj in () if leaving else cast("tuple[Obj, ...]", look.own.pools):
        wanted = pools.get(str(obj["spec"].get("poolName")))
        if wanted is not None and wanted != status_of(obj):
            patches[obj["metadata"]["name"]] = merge_patch(status_of(obj), wanted)
    return Report(status_of(look.document), after, patches)


def _invalid(look: Look) -> dict[str, Any]:
    return invalid_status(
        status_of(look.document),
        look.reading.complaints,
        seen=look.seen,
        children=look.own,
        now=look.now,
        generation=_generation(look),
        reason=INVALID if look.reading.fleet is None else INVALID_TEMPLATE,
    )


def _obeyed(
    look: Look, problems: Sequence[Problem], *, has_key: bool
) -> tuple[dict[str, Any], Mapping[str, dict[str, Any]]]:
    """The fleet's status and its pools'."""
    reading, children, seen = look.reading, look.own, look.seen
    before = status_of(look.document)
    problems = (*problems, *find_problems(children, look.now))
    if reading.fleet is None:
        status = leaving_status(
            before,
            problems,
            seen=seen,
            children=children,
            now=look.now,
            generation=_generation(look),
        )
        return status, {}
    want = replace(reading.want, stopping=is_leaving(look.document))
    kv = reading.fleet.spec.kv_transfer
    own_secret = kv_secret_name(reading.fleet.name, look.uid) if has_key else ""
    theirs = kv.key_secret_ref.name if kv.key_secret_ref else ""
    status = fleet_status(
        reading.fleet,
        want=want,
        seen=seen,
        children=children,
        problems=problems,
        before=before,
        now=look.now,
        generation=_generation(look),
        key_secret=own_secret if kv.has_own_key else theirs,
        namespace=look.document["metadata"]["namespace"],
    )
    return status, pool_statuses(reading.fleet, want=want, seen=seen, children=children)


def _generation(look: Look) -> int:
    return int(look.document["metadata"].get("generation") or 0)


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch (RFC 7386) that makes `after` of `before`."""
    patch: dict[str, Any] = {name: None for name in before if name not in after}
    for name, value in after.items():
        old: object = before.get(name)
        if old == value:
            continue
        if isinstance(value, dict) and isinstance(old, dict):
            below = cast("dict[str, Any]", old), cast("dict[str, Any]", value)
            patch[name] = merge_patch(*below)
        else:
            patch[name] = value
    return patch


def problem_of(write: Write, error: KubeError) -> Problem:
    """A write that the API server refused, as a condition tells it."""
    match write:
        case Apply(obj):
            name = f"{kind_of(obj).name} {obj['metadata']['name']}"
        case Scale(kind, name) | Remove(kind, name):
            name = f"{kind.name} {name}"
        case _:
            name = describe(write)
    reason = "Refused"
    if isinstance(error, Forbidden):
        reason = "QuotaExceeded" if "exceeded quota" in str(error) else "Forbidden"
    return Problem("Degraded", reason, pool_of(write), f"{name}: {error}")

"""The status of a fleet whose document cannot be obeyed. Pure.

What runs goes on as it was and nobody scales it, but instances still come and go: what is counted
is counted, what the document says stays as the last good one said it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xpyd_operator.plan import FleetSeen, FleetWant
from xpyd_operator.status.children import NOTHING, Children, Counts, is_pool_object
from xpyd_operator.status.conditions import INVALID, conditions, conditions_of_invalid
from xpyd_operator.status.pools import ROLES, pool_rows
from xpyd_operator.status.problems import Problem, in_order
from xpyd_operator.status.raw import Raw, at, count, fields, rows, text


def invalid_status(
    before: Raw | None,
    messages: Iterable[str],
    *,
    seen: FleetSeen,
    children: Children,
    now: str,
    generation: int,
    reason: str = INVALID,
) -> dict[str, Any]:
    """`messages`: the mistakes, one per line. `reason`: what kind of mistakes they are."""
    found = conditions_of_invalid(
        list(messages),
        pool_rows(FleetWant("", ()), seen, children),
        before=before or {},
        now=now,
        generation=generation,
        reason=reason,
    )
    return {**_counted(before or {}, children, generation), "conditions": found}


def leaving_status(
    before: Raw | None,
    problems: Sequence[Problem],
    *,
    seen: FleetSeen,
    children: Children,
    now: str,
    generation: int,
) -> dict[str, Any]:
    """Of such a fleet while it is being deleted, which needs nothing of its document."""
    found = conditions(
        pool_rows(FleetWant("", (), stopping=True), seen, children),
        in_order(problems),
        stopping=True,
        before=before or {},
        now=now,
        generation=generation,
    )
    return {**_counted(before or {}, children, generation), "conditions": found}


def invalid_pool_statuses(children: Children) -> dict[str, dict[str, Any]]:
    """The status of each pool's own object, by the pool's name; one that never had any has none."""
    found: dict[str, dict[str, Any]] = {}
    for pool in children.pools:
        status, name = fields(pool, "status"), text(pool, "spec", "poolName")
        if status and is_pool_object(pool):
            have = list(_counts_of(name, children).values())
            ready = sum(c.ready for c in have)
            found[name] = {
                **status,
                "observedGeneration": count(pool, "metadata", "generation"),
                "replicas": sum(c.staying for c in have),
                "readyReplicas": ready,
                "updatedReplicas": min(ready, count(status, "updatedReplicas")),
                "drainingReplicas": sum(c.draining for c in have),
            }
    return found


def _counted(before: Raw, children: Children, generation: int) -> dict[str, Any]:
    """The status before with the numbers of now, its conditions left out."""
    status = {name: value for name, value in before.items() if name != "conditions"}
    status["observedGeneration"] = generation
    if not isinstance(at(before, "pools"), list):
        return status
    pools = [_pool(pool, children) for pool in rows(before, "pools")]
    status["pools"] = pools
    if summary := fields(before, "summary"):
        status["summary"] = {**summary, **_ready_of(summary, pools)}
    return status


def _pool(before: Raw, children: Children) -> dict[str, Any]:
    have = _counts_of(text(before, "name"), children)
    return {
        **before,
        "readyReplicas": sum(c.ready for c in have.values()),
        "updatedReplicas": have.get(text(before, "revision"), NOTHING).ready,
        "drainingReplicas": sum(c.draining for c in have.values()),
    }


def _ready_of(summary: Raw, pools: Sequence[Raw]) -> dict[str, str]:
    """The summary's entries of roles, `ready/wanted`."""
    found: dict[str, str] = {}
    for role in ROLES:
        if role.lower() in summary:
            mine = [pool for pool in pools if text(pool, "role") == role]
            ready = sum(count(pool, "readyReplicas") for pool in mine)
            wanted = sum(count(pool, "replicas") for pool in mine)
            found[role.lower()] = f"{ready}/{wanted}"
    return found


def _counts_of(pool: str, children: Children) -> Mapping[str, Counts]:
    """By revision."""
    return {rev: have for (name, rev), have in children.counts.items() if name == pool}

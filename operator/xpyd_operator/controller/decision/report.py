"""What a turn reports: the statuses of a fleet and of its pools, as merge patches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from xpyd_operator.controller.decision.errors import Forbidden, KubeError
from xpyd_operator.controller.decision.kinds import Obj, kind_of, merge_patch
from xpyd_operator.controller.decision.pods import (
    move_problems,
    replica_problems,
    unguarded_pools,
)
from xpyd_operator.controller.decision.revisions import canary_view
from xpyd_operator.controller.decision.state import FleetState, signing_secret
from xpyd_operator.controller.decision.writes import (
    Apply,
    DeleteObject,
    RemoveFields,
    Scale,
    Write,
    describe,
    pool_of,
)
from xpyd_operator.plan.fleet import pools_wanted
from xpyd_operator.status.children import Raw, is_leaving, rows, text
from xpyd_operator.status.conditions import INVALID, INVALID_TEMPLATE
from xpyd_operator.status.fleet import (
    fleet_status,
    invalid_pool_statuses,
    invalid_status,
    leaving_status,
    pool_statuses,
)
from xpyd_operator.status.problems import Problem, find_problems

NO_ROW: Raw = {}


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


def report(
    state: FleetState, problems: Sequence[Problem], *, has_key: bool, standby: Raw = NO_ROW
) -> Report:
    """The statuses after a turn. `problems`: those that the objects do not show. `standby`: the
    condition of a release that stands by, which stays as it is; empty: there is none."""
    leaving = is_leaving(state.document)
    if not leaving and state.is_held:
        after, pools = _invalid(state, problems), invalid_pool_statuses(state.own)
    else:
        after, pools = _obeyed(state, problems, has_key=has_key)
    if standby:
        after = {**after, "conditions": [*after["conditions"], standby]}
    patches: dict[str, dict[str, Any]] = {}
    # The pools' objects go with the fleet.
    for obj in () if leaving else cast("tuple[Obj, ...]", state.own.pools):
        wanted = pools.get(str(obj["spec"].get("poolName")))
        if wanted is not None and wanted != status_of(obj):
            patches[obj["metadata"]["name"]] = merge_patch(status_of(obj), wanted)
    return Report(status_of(state.document), after, patches)


def _invalid(state: FleetState, problems: Sequence[Problem]) -> dict[str, Any]:
    before = status_of(state.document)
    sizes = {pool.name: pool.replicas for pool in pools_wanted(state.want, state.seen.pools)}
    pools = [
        {**row, "replicas": sizes.get(text(row, "name"), row.get("replicas"))}
        for row in rows(before, "pools")
    ]
    refused = [problem.message for problem in problems if problem.kind == "Degraded"]
    return invalid_status(
        {**before, "pools": pools} if pools else before,
        [*state.parsed.mistakes, *refused],
        seen=state.seen,
        children=state.own,
        now=state.now,
        generation=_generation(state),
        reason=INVALID if state.parsed.fleet is None else INVALID_TEMPLATE,
        unknown=state.parsed.unknown,
    )


def _obeyed(
    state: FleetState, problems: Sequence[Problem], *, has_key: bool
) -> tuple[dict[str, Any], Mapping[str, dict[str, Any]]]:
    """The fleet's status and its pools'."""
    parsed, children, seen = state.parsed, state.own, state.seen
    before = status_of(state.document)
    wrong = [Problem("Degraded", INVALID_TEMPLATE, "", line) for line in parsed.mistakes]
    deadline_s = parsed.fleet.spec.rollout.progress_deadline_seconds if parsed.fleet else math.inf
    wanted = {(pool.name, pool.revision) for pool in state.want.pools}
    # While a rollout is paused nothing is to become ready.
    awaited = () if state.is_paused else wanted
    problems = (*wrong, *problems, *find_problems(children, state.ages, deadline_s, awaited))
    problems = (*problems, *move_problems(state), *replica_problems(state))
    if state.model is not None and (found := state.model.problem) is not None:
        problems = (*problems, found)
    if parsed.fleet is None:
        status = leaving_status(
            before,
            problems,
            seen=seen,
            children=children,
            now=state.now,
            generation=_generation(state),
        )
        return status, {}
    want = replace(parsed.want, stopping=is_leaving(state.document))
    kv = parsed.fleet.spec.kv_transfer
    own_secret = signing_secret(state.document, state.children) if has_key else ""
    theirs = kv.key_secret_ref.name if kv.key_secret_ref else ""
    status = fleet_status(
        parsed.fleet,
        want=want,
        seen=seen,
        children=children,
        problems=problems,
        before=before,
        now=state.now,
        generation=_generation(state),
        key_secret=own_secret if kv.has_own_key else theirs,
        namespace=state.document["metadata"]["namespace"],
        kv=state.kv,
        has_pair=state.has_pair,
        loads=state.loads,
        model=state.model,
        key=None if state.rotation is None else state.rotation.verdict,
        upgrade=state.upgrade,
        canary=canary_view(state),
        alone=unguarded_pools(state),
        unknown=parsed.unknown,
    )
    pools = pool_statuses(parsed.fleet, want=want, seen=seen, children=children, loads=state.loads)
    return status, pools


def _generation(state: FleetState) -> int:
    return int(state.document["metadata"].get("generation") or 0)


def problem_of(write: Write, error: KubeError) -> Problem:
    """The problem of a write that the API server refused, for a condition."""
    match write:
        case Apply(obj):
            name = f"{kind_of(obj).name} {obj['metadata']['name']}"
        case Scale(kind, name) | DeleteObject(kind, name) | RemoveFields(kind, name):
            name = f"{kind.name} {name}"
        case _:
            name = describe(write)
    reason = "Refused"
    if isinstance(error, Forbidden):
        reason = "QuotaExceeded" if "exceeded quota" in str(error) else "Forbidden"
    return Problem("Degraded", reason, pool_of(write), f"{name}: {error}")

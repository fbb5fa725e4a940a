"""`kubectl xpyd why`: the operator's last decisions, and what the next one waits for.

Decisions are the fleet's Events. What is next comes from the pure plan, run over what the cluster
has: the same that the operator runs, and nothing is written. Pods say what holds them up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import ceil
from typing import Any

from xpyd_core.errors import UserError
from xpyd_operator.cluster.page import ago, concerns_of, movement_of, wrapped
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.document.load import parse_object
from xpyd_operator.document.rollout import Canary
from xpyd_operator.manifests.refusals import document_mistakes
from xpyd_operator.manifests.volumes import model_in_pod
from xpyd_operator.plan.canary import CanaryPool, stable_revisions
from xpyd_operator.plan.fleet import canary_pools, plan, pools_waiting, pools_wanted
from xpyd_operator.plan.template import fleet_want
from xpyd_operator.plan.values import (
    ROUTER,
    CanaryStage,
    DeleteWorkload,
    DrainPool,
    FleetSeen,
    FleetWant,
    PoolWant,
    PutWorkload,
    WorkloadSeen,
)
from xpyd_operator.status.children import (
    Children,
    Raw,
    condition,
    count,
    fields,
    fleet_seen,
    is_leaving,
    is_true,
    moment,
    rows,
    seconds_between,
    text,
)
from xpyd_operator.status.conditions import INVALID, INVALID_TEMPLATE
from xpyd_operator.status.problems import find_problems
from xpyd_operator.status.upgrades import with_revisions

Json = dict[str, Any]

MOST_EVENTS = 20


@dataclass(frozen=True)
class Decision:
    """One Event of the operator. `times`: how often, `at`: the last time."""

    at: datetime | None
    type: str
    reason: str
    message: str
    times: int = 1


def decisions_of(fleet: Raw, events: Iterable[Raw]) -> tuple[Decision, ...]:
    """The last of the fleet's Events, newest last; those of an earlier fleet of the name not."""
    uid = text(fleet, "metadata", "uid")
    found: list[Decision] = []
    for event in events:
        about = fields(event, "involvedObject") or fields(event, "regarding")
        if uid and text(about, "uid") not in ("", uid):
            continue
        times = max(1, count(event, "count"), count(event, "series", "count"))
        message = text(event, "message") or text(event, "note")
        found.append(
            Decision(_time(event), text(event, "type"), text(event, "reason"), message, times)
        )
    first = datetime.min
    found.sort(key=lambda one: one.at.replace(tzinfo=None) if one.at else first)
    return tuple(found[-MOST_EVENTS:])


def _time(event: Raw) -> datetime | None:
    names = (("series", "lastObservedTime"), ("lastTimestamp",), ("eventTime",))
    times = (moment(text(event, *path)) for path in (*names, ("metadata", "creationTimestamp")))
    return next((at for at in times if at is not None), None)


@dataclass(frozen=True)
class Wait:
    """What a pool, or the fleet where `pool` is "", waits for. `by`: the bound or the pod."""

    pool: str
    what: str
    by: tuple[str, ...] = ()
    next: str = ""


def waits_of(fleet: Raw, children: Children, now: str) -> tuple[Wait, ...]:
    """What each pool that is not as wanted waits for, by the plan and by the pods."""
    try:
        parsed = parse_object(dict(fleet))
    except UserError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        return (Wait("", "waits for a valid document", tuple(lines)),)
    if mistakes := _mistakes(fleet, parsed):
        return (Wait("", "waits for a valid document", mistakes),)
    status = fields(fleet, "status")
    # The operator's images count in a revision, so the revisions are those that it wrote down.
    known = {text(row, "name"): text(row, "revision") for row in rows(status, "pools")}
    want = fleet_want(parsed, model=model_in_pod(parsed), in_cluster=True)
    want = with_revisions(want, {name: rev for name, rev in known.items() if rev})
    want = replace(want, stopping=is_leaving(fleet))
    seen = fleet_seen(children, status)
    stage = _stage(want, seen, parsed.spec.rollout.canary, fields(status, "canary"))
    want = replace(want, canary=stage)
    ages = {text(p, "metadata", "uid"): _age(p, now) for p in children.pods}
    deadline_s = float(parsed.spec.rollout.progress_deadline_seconds)
    problems = find_problems(children, ages, deadline_s)
    found: list[Wait] = []
    for pool, steps in _steps(want, seen).items():
        by = [p.message for p in problems if p.pool == pool and p.kind != "Drifted"]
        waits = _pool_wait(pool, want, seen)
        if waits is not None or steps:
            bounds, what = waits if waits is not None else ((), "as wanted")
            found.append(Wait(pool, what, (*by, *bounds), "; ".join(steps)))
    whole = [p.message for p in problems if not p.pool and p.kind != "Drifted"]
    return (*found, *((Wait("", "waits for its objects", tuple(whole)),) if whole else ()))


def _mistakes(fleet: Raw, parsed: InferenceFleet) -> tuple[str, ...]:
    """Why the operator makes no new pods of the document; () also where its pods run already."""
    if is_leaving(fleet):
        return ()
    status = fields(fleet, "status")
    if count(status, "observedGeneration") < count(fleet, "metadata", "generation"):
        return document_mistakes(parsed, text(status, "defaults", "workerImage"))
    is_held = text(condition(fleet, "Progressing"), "reason") in (INVALID, INVALID_TEMPLATE)
    return (text(condition(fleet, "Ready"), "message"),) if is_held else ()


def _stage(want: FleetWant, seen: FleetSeen, rules: Canary | None, row: Raw) -> CanaryStage | None:
    """What the canary is to the plan, as far as the fleet's status says."""
    phase, stable = text(row, "phase"), tuple(sorted(stable_revisions(want, seen).items()))
    if rules is None or not stable or phase not in ("Running", "Promoting", "Failed"):
        return None
    engines = [pool for pool in want.pools if pool.name != ROUTER]
    wanted = {(pool.name, pool.revision) for pool in engines} - set(stable)
    # What routers say is not in the status: when all know of it, the first instances are asked for.
    begun = any((one.workload.pool, one.workload.revision) in wanted for one in seen.workloads)
    step = min(max(0, count(row, "step") - 1), len(rules.weights) - 1)
    weights = (0,) if phase == "Failed" else rules.weights[step : step + 2]
    stages = [CanaryStage(stable, weight, begun) for weight in weights]
    # The instances of a step come before the share that the status has.
    return next((one for one in stages if not _shrinks(replace(want, canary=one), seen)), stages[0])


def _shrinks(want: FleetWant, seen: FleetSeen) -> bool:
    """Whether more is on trial than this stage wants."""
    pools = canary_pools(want, seen)
    return any(pool.seen and pool.seen.workload.replicas > pool.target for pool in pools)


def _age(pod: Raw, now: str) -> float:
    """For how long the state of a pod has lasted that should not last (first_seen); 0: there is
    none. The operator may have begun to look later."""
    if is_leaving(pod):
        until = seconds_between(text(pod, "metadata", "deletionTimestamp"), now) or 0.0
        return max(0.0, until + count(pod, "metadata", "deletionGracePeriodSeconds"))
    if is_true(pod, "Ready"):
        return 0.0
    since = [text(pod, "metadata", "creationTimestamp")]
    since += [text(condition(pod, one), "lastTransitionTime") for one in ("PodScheduled", "Ready")]
    lasted = [found for at in since if (found := seconds_between(at, now)) is not None]
    return max(0.0, min(lasted, default=0.0))


def _steps(want: FleetWant, seen: FleetSeen) -> dict[str, list[str]]:
    """By pool, what the plan would write next; a pool whose step waits has an empty list."""
    names = [pool.name for pool in want.pools]
    names += [one.workload.pool for one in seen.workloads if one.workload.pool not in names]
    found: dict[str, list[str]] = {name: [] for name in names}
    for action in plan(want, seen, 0.0).actions:
        match action:
            case PutWorkload(workload):
                words = f"revision {workload.revision} to {workload.replicas} instances"
                found[workload.pool].append(words)
            case DrainPool(pool):
                found[pool].append("all instances leave")
            case DeleteWorkload(pool, revision):
                found[pool].append(f"revision {revision} is forgotten")
            case _:
                pass
    return found


def _pool_wait(name: str, want: FleetWant, seen: FleetSeen) -> tuple[tuple[str, ...], str] | None:
    """The bounds of a pool and what it waits for, None where it is as wanted."""
    pool = next((one for one in want.pools if one.name == name), None)
    mine = [one for one in seen.workloads if one.workload.pool == name]
    alive = sum(one.alive for one in mine)
    if pool is None or want.stopping:
        return ((), f"{alive} instances to leave") if alive else None
    trial = next((one for one in canary_pools(want, seen) if one.want.name == name), None)
    if trial is not None:
        return _trial_wait(trial, mine)
    sizes = {size.name: size.replicas for size in pools_wanted(want, seen.pools)}
    wanted = sizes[name]
    new = next((one for one in mine if one.workload.revision == pool.revision), None)
    ready = new.ready if new else 0
    old = [one for one in mine if one is not new and one.alive]
    if ready >= wanted and not old:
        extra = alive - wanted
        return ((), f"{extra} instances to leave") if extra > 0 else None
    what = f"{ready} of {wanted} instances of revision {pool.revision} ready"
    if old:
        parts = ", ".join(f"{one.workload.revision} {one.ready}/{one.alive}" for one in old)
        what += f"; older: {parts}"
    bounds = [_bound(pool, wanted, alive, sum(one.ready for one in mine))] if old else []
    if other := pools_waiting(want, seen).get(name, ""):
        bounds.append(f"{name} waits for {other}")
    return tuple(bounds), what


def _trial_wait(
    trial: CanaryPool, mine: Sequence[WorkloadSeen]
) -> tuple[tuple[str, ...], str] | None:
    """The same of a pool of which a revision is on trial, or failed: the fleet's Progressing says
    what the canary waits for."""
    revision, new = trial.want.revision, trial.seen
    old = [one for one in mine if one is not new and one.alive]
    ready, alive = (new.ready, new.alive) if new else (0, 0)
    what = f"{ready} of {trial.target} instances of revision {revision} on trial ready"
    if alive > trial.target:
        what = f"{alive - trial.target} instances of revision {revision} on trial to leave"
    elif not trial.target and sum(one.ready for one in old) == trial.stable:
        return None
    parts = ", ".join(f"{one.workload.revision} {one.ready}/{one.alive}" for one in old)
    return (), f"{what}; stay: {parts or 'none'}"


def _bound(pool: PoolWant, wanted: int, alive: int, ready: int) -> str:
    """How far the rollout may go, in numbers."""
    most = wanted + ceil(wanted * pool.surge_percent / 100)
    missing = 0
    if pool.unavailable_percent and wanted:
        missing = max(1, wanted * pool.unavailable_percent // 100)
    return (
        f"{alive} instances run and at most {most} may (rollout.maxSurgePercent"
        f" {pool.surge_percent}); {ready} are ready and at least {wanted - missing} must be"
        f" (rollout.maxUnavailablePercent {pool.unavailable_percent})"
    )


def why_json(fleet: Raw, events: Sequence[Raw], children: Children, now: str) -> Json:
    """All of it for machines."""
    word, message = movement_of(fleet)
    return {
        "fleet": text(fleet, "metadata", "name"),
        "decisions": [
            {
                "time": one.at.isoformat().replace("+00:00", "Z") if one.at else "",
                "type": one.type,
                "reason": one.reason,
                "message": one.message,
                "times": one.times,
            }
            for one in decisions_of(fleet, events)
        ],
        "outcome": word,
        "message": message,
        "waits": [
            {"pool": one.pool, "what": one.what, "by": list(one.by), "next": one.next}
            for one in waits_of(fleet, children, now)
        ],
    }


def why_text(fleet: Raw, events: Sequence[Raw], children: Children, now: str) -> str:
    """The same for people: decisions with the newest last, then what is waited for."""
    name = text(fleet, "metadata", "name")
    space = text(fleet, "metadata", "namespace")
    parts = [wrapped(f"fleet {space}/{name}" if space else f"fleet {name}", "", "  ")]
    decisions = decisions_of(fleet, events)
    if not decisions:
        parts.append(
            "  no Events: the cluster keeps them for an hour, unless it is told otherwise\n"
        )
    for one in decisions:
        at = f"{one.at:%Y-%m-%dT%H:%M:%SZ}" if one.at else "?"
        times = f" ({one.times} times)" if one.times > 1 else ""
        mark = "! " if one.type == "Warning" else "  "
        words = f"{at}  {one.reason}: {one.message}{times}"
        parts.append(wrapped(words, mark, " " * 6))
    parts.append(wrapped(f"now  {': '.join(movement_of(fleet))}", "", " " * 6))
    for wait in waits_of(fleet, children, now):
        parts.append(wrapped(f"{wait.pool or 'fleet'}: {wait.what}", "  ", " " * 6))
        parts += [wrapped(f"by {words}", " " * 4, " " * 6) for words in wait.by]
        if wait.next:
            parts.append(wrapped(f"next: {wait.next}", " " * 4, " " * 6))
    for concern in concerns_of(fleet):
        for_ = ago(concern.since, now)
        head = f"{concern.type}={concern.status} {concern.reason}" + (
            f" for {for_}" if for_ else ""
        )
        parts.append(wrapped(f"{head}: {concern.message}", "", " " * 6))
    return "".join(parts)

"""What a turn writes into pods themselves: readiness gates, which pod goes first, and how many
replicas its engine should have. Pure.

Deployments make and delete the pods. Three things the operator says of a single one: whether its
readiness gate is open (docs/adr/0106); right before a scale-down of which only some pods go, what
it costs to lose it (docs/adr/0107); and where replicas come and go, their number (docs/adr/0134).
At other times costs are not written: each is an update of a pod that all its watchers get, and
would be old by the time that somebody scales.
"""

from __future__ import annotations

from collections.abc import Iterator

from xpyd_operator.controller.decision.state import FleetState
from xpyd_operator.controller.decision.writes import SetCost, SetGate, SetReplicas
from xpyd_operator.manifests.names import (
    ANNOTATION_COST,
    ANNOTATION_MAX_REPLICAS,
    ANNOTATION_REPLICAS,
)
from xpyd_operator.manifests.pods import has_replicas, pods_per_instance
from xpyd_operator.plan.fleet import pools_guarded, pools_moving, pools_wanted
from xpyd_operator.plan.values import Plan, PutWorkload
from xpyd_operator.status.children import (
    Key,
    Raw,
    count,
    is_finished,
    is_leaving,
    is_of_workload,
    key_of,
    name_of,
    pod_specs,
    replicas_of,
    rows,
    short,
    spec_of,
    text,
)
from xpyd_operator.status.problems import Problem
from xpyd_operator.status.routable import gated_pods, is_due, meant

_GOES_FIRST = -1
"""Of a pod on a cordoned node; one that has nothing to do costs 0."""
_SEES_NO_NODES = "the operator may not list nodes (chart value operator.readNodes)"


def gate_writes(state: FleetState) -> Iterator[SetGate]:
    """The gates that are not as they should be."""
    for pod in gated_pods(state.own):
        gate = meant(pod, state.gates)
        if gate is not None and is_due(pod, gate):
            yield SetGate(name_of(pod), text(pod, "metadata", "uid"), gate)


def replica_writes(state: FleetState) -> Iterator[SetReplicas]:
    """How many replicas pods should have that have not been told so, each within what it was made
    for. A new one is told at once; of those that serve one after the other, when the one before has
    as many as it should."""
    for pool in state.parsed.fleet.spec.pools if state.parsed.fleet and not state.is_held else ():
        if pool.parallelism.max_data is None:
            continue
        pods = {name_of(pod): pod for pod in _staying(state, pool.name)}
        told = {name: _told(pod) for name, pod in sorted(pods.items())}
        wanted = {name: _wanted(pod, pool.parallelism.data) for name, pod in pods.items()}
        changing = [name for name in told if _is_changing(state, pods[name], wanted[name])]
        others = [name for name, size in told.items() if size not in (None, wanted[name])]
        # One that is at another number than the document's by now goes on to that.
        mine = [name for name in others if name in changing]
        due = [name for name, size in told.items() if size is None]
        due += (mine or ([] if changing else others))[:1]
        for name in due:
            uid = text(pods[name], "metadata", "uid")
            yield SetReplicas(name, uid, pool.name, told[name], wanted[name])


def _staying(state: FleetState, pool: str) -> Iterator[Raw]:
    """The pods of a pool whose engines have room for replicas."""
    specs = pod_specs(state.own)
    for pod, key in _running(state, pool):
        if is_of_workload(pod, key) and has_replicas(spec_of(pod, specs)):
            yield pod


def _running(state: FleetState, pool: str) -> Iterator[tuple[Raw, Key]]:
    """The pods of a pool that neither leave nor have ended, and whose they are."""
    for pod in state.own.pods:
        key = key_of(pod)
        if key is not None and key[0] == pool and not (is_leaving(pod) or is_finished(pod)):
            yield pod, key


def _told(pod: Raw) -> int | None:
    value = text(pod, "metadata", "annotations", ANNOTATION_REPLICAS)
    return int(value) if value.isdecimal() else None


def _wanted(pod: Raw, data: int) -> int:
    """How many replicas of the document's a pod has room for: one of another revision has less."""
    most = text(pod, "metadata", "annotations", ANNOTATION_MAX_REPLICAS)
    return min(data, int(most)) if most.isdecimal() else data


def _is_changing(state: FleetState, pod: Raw, wanted: int) -> bool:
    """Whether an instance serves with another number of replicas than it was told, or may have
    ended of the number that it is meant to have: it runs, and no router has it."""
    told, has = _told(pod), state.replicas.get(name_of(pod))
    if has is not None:
        return told is not None and has.replicas != told
    return told == wanted and text(pod, "status", "phase") == "Running"


def replica_problems(state: FleetState) -> tuple[Problem, ...]:
    """Instances that cannot have as many replicas as they should, one of each pool."""
    found: list[Problem] = []
    for pool in state.parsed.fleet.spec.pools if state.parsed.fleet else ():
        if pool.parallelism.max_data is None:
            all_said = (_lost(state, pod) for pod, _ in _running(state, pool.name))
        else:
            data = pool.parallelism.data
            all_said = (_unscaled(state, pod, data) for pod in _staying(state, pool.name))
        if said := next(filter(None, all_said), ""):
            found.append(Problem("Degraded", "ReplicasNotScaled", pool.name, said))
    return tuple(found)


def _lost(state: FleetState, pod: Raw) -> str:
    """What an instance says of replicas that it has lost; "": it has all."""
    has = state.replicas.get(name_of(pod))
    if has is None or not has.problem:
        return ""
    return f"{short(name_of(pod), 80)}: {short(has.problem)}; they are started again"


def _unscaled(state: FleetState, pod: Raw, data: int) -> str:
    """Why an instance has not as many replicas as it should; "": it has, or may yet."""
    name, told, has = name_of(pod), _told(pod), state.replicas.get(name_of(pod))
    if not _is_changing(state, pod, _wanted(pod, data)):
        return ""
    if has is not None:
        return (
            ""
            if not has.problem
            else (
                f"{short(name, 80)} has {has.replicas} replicas and should have {told}: "
                f"{short(has.problem)}; it is tried again"
            )
        )
    ended = sum(count(one, "restartCount") for one in rows(pod, "status", "containerStatuses"))
    return (
        ""
        if not ended
        else (
            f"{short(name, 80)} was told {told} replicas, ended {ended} times and is at no router: "
            "the others of its pool stay as they are until it serves"
        )
    )


def shrinking(state: FleetState, made: Plan) -> frozenset[Key]:
    """Deployments of which some pods go and others stay."""
    sizes = {key: replicas_of(one) for one in state.own.deployments if (key := key_of(one))}
    puts = (action.workload for action in made.actions if isinstance(action, PutWorkload))
    return frozenset(
        (one.pool, one.revision)
        for one in puts
        if 0 < one.replicas < sizes.get((one.pool, one.revision), 0)
    )


def cost_writes(state: FleetState, made: Plan) -> Iterator[SetCost]:
    """The costs to write before these actions, so that what has least to do goes first."""
    keys = shrinking(state, made)
    for pod in state.own.pods if keys and state.busy is not None else ():
        key = key_of(pod)
        if key not in keys or is_leaving(pod) or is_finished(pod) or not is_of_workload(pod, key):
            continue
        cost = _cost(state, pod)
        if cost is not None and cost != _written(pod):
            yield SetCost(name_of(pod), text(pod, "metadata", "uid"), cost)


def _cost(state: FleetState, pod: Raw) -> int | None:
    """None: no router has said anything, and what is written stays."""
    if text(pod, "spec", "nodeName") in (state.cordoned or ()):
        return _GOES_FIRST
    if not state.busy:
        return None
    load = state.busy.get(name_of(pod))
    return 0 if load is None else load.requests + load.kv_leases


def _written(pod: Raw) -> int:
    value = text(pod, "metadata", "annotations", ANNOTATION_COST)
    return int(value) if value.removeprefix("-").isdecimal() else 0


def guarded_pools(state: FleetState) -> frozenset[str]:
    """The pools whose only instance no eviction may take: the operator sees the cordoned node, and
    moves it. Of several pods of an instance it could not choose which go."""
    if state.cordoned is None or state.parsed.fleet is None:
        return frozenset()
    return pools_guarded(state.want, state.seen) - _grouped(state)


def _grouped(state: FleetState) -> frozenset[str]:
    pools = state.parsed.fleet.spec.pools if state.parsed.fleet else ()
    return frozenset(pool.name for pool in pools if pods_per_instance(pool) > 1)


def unguarded_pools(state: FleetState) -> dict[str, str]:
    """The pools whose only instance an eviction takes before another one serves, and why."""
    sizes = {pool.name: pool.replicas for pool in pools_wanted(state.want, state.seen.pools)}
    grouped = _grouped(state)
    found: dict[str, str] = {}
    for pool in state.want.pools if not state.want.stopping else ():
        if sizes[pool.name] != 1:
            continue
        if not pool.surge_percent:
            found[pool.name] = "rollout.maxSurgePercent is 0"
        elif pool.name in grouped:
            found[pool.name] = "an instance of several pods is not moved"
        elif state.cordoned is None:
            found[pool.name] = _SEES_NO_NODES
    return found


def move_problems(state: FleetState) -> tuple[Problem, ...]:
    """Only instances on cordoned nodes for whose successors there is no room."""
    found: list[Problem] = []
    unplaced = {seen.workload.pool for seen in state.seen.workloads if seen.unplaced}
    for pool in sorted(pools_moving(state.want, state.seen) & unplaced):
        nodes = (
            text(pod, "spec", "nodeName")
            for pod in state.own.pods
            if (key := key_of(pod)) and key[0] == pool and is_of_workload(pod, key)
        )
        node = next((one for one in nodes if one in (state.cordoned or ())), "")
        message = (
            f"{pool}: its only instance is on the cordoned node {short(node, 80)} and stays there, "
            "as no node has room for one that takes its place: add a node, uncordon this one, or "
            "delete the pod if requests may wait for the next one"
        )
        found.append(Problem("Capacity", "NoRoomToMove", pool, message))
    return tuple(found)

"""Decides what one turn of a fleet writes to its objects.

    FleetState --decide--> Turn(stages of writes, problems)

plan() decides about workloads. Here its actions become writes of objects, the support objects are
compared with what they should be, and names that other objects hold are found. The writes of a
stage do not depend on each other; a later stage may depend on an earlier one.

An object is applied where a hash of the wanted one is new, or where the observed one lacks some of
it (`compare`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from xpyd_operator.controller.decision.compare import contains, desired_hash
from xpyd_operator.controller.decision.drift import added_fields, without
from xpyd_operator.controller.decision.election import operator_of
from xpyd_operator.controller.decision.kinds import (
    CLAIM_TEMPLATE,
    JOB,
    MISSING_APIS,
    POOL,
    SUPPORT,
    Obj,
    controller_of,
    holder_of,
    kind_of,
    merge_patch,
)
from xpyd_operator.controller.decision.pods import (
    cost_writes,
    gate_writes,
    guarded_pools,
    replica_writes,
    shrinking,
)
from xpyd_operator.controller.decision.revisions import (
    canary_maps,
    forgotten,
    recorded,
    want_with_canary,
    with_pause,
)
from xpyd_operator.controller.decision.state import (
    AppliedVersion,
    FleetState,
    ObjectRef,
    applied_version_of,
)
from xpyd_operator.controller.decision.writes import (
    Apply,
    DeleteKey,
    DeleteObject,
    RemoveFields,
    Scale,
    SetFinalizers,
    Write,
    describe,
    effect_of,
    pool_of,
)
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.manifests.names import ANNOTATION_APPLIED, FINALIZER, LABEL_POOL
from xpyd_operator.manifests.objects import pool_object, support_objects, workload_objects
from xpyd_operator.plan.fleet import plan, pools_wanted
from xpyd_operator.plan.values import (
    DeleteWorkload,
    DrainPool,
    Plan,
    PoolWant,
    PutWorkload,
    Workload,
)
from xpyd_operator.status.children import Children, is_leaving, key_of, replicas_of
from xpyd_operator.status.problems import Problem

_UNSETTLED_RECHECK_S = 10.0
"""Events wake a fleet; this is for findings that only time brings, such as volumes that are not
mounted for half a minute."""
_TAKEN_RECHECK_S = 15.0


@dataclass(frozen=True)
class Turn:
    """What a turn decided. `again`: the rest can be decided only after these writes. `asks_loads`:
    it is to be decided again when routers have said what each instance has.

    `problems`: those that only the decision knows. `compared`: objects that are as they should be.
    """

    stages: tuple[tuple[Write, ...], ...] = ()
    problems: tuple[Problem, ...] = ()
    compared: Mapping[ObjectRef, AppliedVersion] = field(
        default_factory=dict[ObjectRef, AppliedVersion]
    )
    recheck_after: float | None = None
    again: bool = False
    asks_loads: bool = False


def decide(state: FleetState) -> Turn:
    """The writes that bring the fleet nearer to its document; none when it is there."""
    metadata = state.document["metadata"]
    finalizers = tuple(cast("list[str]", metadata.get("finalizers") or []))
    if is_leaving(state.document):
        return _stop(state, finalizers)
    if FINALIZER not in finalizers or state.operator not in ("", operator_of(state.document)):
        names = dict.fromkeys((*finalizers, FINALIZER))
        add = SetFinalizers((*names,), metadata["resourceVersion"], state.operator)
        return Turn(stages=((add,),), again=True)
    if state.parsed.fleet is None or not (state.want.pools or state.waits_for_model):
        # No fleet, or a new one with mistakes.
        return Turn()
    return _Decision(state, state.parsed.fleet).turn()


def _stop(state: FleetState, finalizers: tuple[str, ...]) -> Turn:
    if FINALIZER not in finalizers:
        return Turn()
    want = replace(state.parsed.want, stopping=True)
    if not state.seen.workloads:
        left = tuple(name for name in finalizers if name != FINALIZER)
        return Turn(((SetFinalizers(left, state.document["metadata"]["resourceVersion"]),),))
    made = plan(want, state.seen_leaving, 0.0)
    scales, removals = _from_plan(made, frozenset(), _Workloads(state.own))
    stages, problems = _uncontested(state, (scales, removals))
    return Turn(stages, problems, recheck_after=_UNSETTLED_RECHECK_S)


def _uncontested(
    state: FleetState, stages: Iterable[Iterable[Write]]
) -> tuple[tuple[tuple[Write, ...], ...], tuple[Problem, ...]]:
    """The writes that are not contested, and a problem for each of the others."""
    left: list[tuple[Write, ...]] = []
    problems: list[Problem] = []
    for stage in stages:
        writes: list[Write] = []
        for write in stage:
            if effect_of(write) not in state.contested:
                writes.append(write)
                continue
            problems += contest_problems(write)
        if writes:
            left.append(tuple(writes))
    return tuple(left), tuple(problems)


def contest_problems(write: Write) -> tuple[Problem, ...]:
    """What a fleet's conditions say of a write that another client undoes."""
    text = f"{describe(write)}: another client undoes it again and again; it waits"
    found = Problem("Degraded", "Contested", pool_of(write), text)
    if isinstance(write, RemoveFields):
        return found, Problem("Drifted", "FieldsReturn", write.pool, text)
    return (found,)


class _Workloads:
    """The fleet's Deployments and LeaderWorkerSets by pool and revision."""

    def __init__(self, children: Children) -> None:
        self._found: dict[tuple[str, str], Obj] = {}
        for obj in (*children.deployments, *children.leader_worker_sets):
            key = key_of(obj)
            if key is not None:
                self._found.setdefault(key, cast("Obj", obj))

    def get(self, pool: str, revision: str) -> Obj | None:
        return self._found.get((pool, revision))

    def of_pool(self, pool: str) -> list[Obj]:
        return [obj for (name, _), obj in sorted(self._found.items()) if name == pool]

    def keys(self) -> Iterable[tuple[str, str]]:
        return self._found.keys()


def _from_plan(
    made: Plan, rendered: frozenset[tuple[str, str]], workloads: _Workloads
) -> tuple[list[Scale], list[DeleteObject]]:
    """The plan's actions on workloads that are not rendered: old ones, and those that leave."""
    scales: list[Scale] = []
    removals: list[DeleteObject] = []
    for action in made.actions:
        match action:
            case PutWorkload(workload) if (workload.pool, workload.revision) not in rendered:
                found = workloads.get(workload.pool, workload.revision)
                scales += [_scale(found, workload.replicas)] if found else []
            case DrainPool(pool):
                scales += [_scale(obj, 0) for obj in workloads.of_pool(pool) if replicas_of(obj)]
            case DeleteWorkload(pool, revision):
                found = workloads.get(pool, revision)
                if found is not None and not is_leaving(found):
                    # With the version: it must still be empty when it is deleted.
                    removals.append(_remove(found, exact=True))
            case _:
                pass
    return scales, removals


def _scale(obj: Obj, replicas: int) -> Scale:
    metadata = obj["metadata"]
    return Scale(kind_of(obj), metadata["name"], replicas, metadata["resourceVersion"])


def _remove(obj: Obj, *, exact: bool = False) -> DeleteObject:
    metadata = obj["metadata"]
    version = metadata["resourceVersion"] if exact else ""
    return DeleteObject(kind_of(obj), metadata["name"], metadata["uid"], version)


class _Decision:
    """One turn's decision for a fleet. Used once.

    Of a fleet whose document is held back, workloads are only scaled where the document has another
    revision, and objects of the whole fleet are only created where they are missing.
    """

    def __init__(self, state: FleetState, fleet: InferenceFleet) -> None:
        self._state = state
        self._fleet = fleet
        self._want = want_with_canary(state)
        self._held = state.holds_back
        document = {(pool.name, pool.revision) for pool in state.parsed.want.pools}
        mine = {(pool.name, pool.revision) for pool in state.want.pools}
        self._rendered = frozenset(document & mine) - state.kept
        self._seen = state.seen
        self._workloads = _Workloads(state.own)
        self._problems: list[Problem] = []
        self._compared: dict[ObjectRef, AppliedVersion] = {}
        self._removals: dict[ObjectRef, RemoveFields] = {}

    def turn(self) -> Turn:
        """The decision."""
        state = self._state
        made = plan(self._want, self._seen, 0.0)
        keys, order = state.key_changes
        maps = canary_maps(state)
        guarded = guarded_pools(state)
        support = (*support_objects(self._fleet, state.placement, guarded=guarded), *order, *maps)
        # What runs needs the objects that it has, also where it is not the document's yet.
        keeps, records = self._held or state.is_paused, recorded(state)
        wanted = filter(self._is_missing, support) if keeps else support
        first: list[Write] = [*self._applied((*wanted, *records)), *self._pools()]
        first += [*gate_writes(state), *cost_writes(state, made), *replica_writes(state)]
        second: list[Write] = list(self._newest(made))
        scales, removals = _from_plan(made, self._rendered, self._workloads)
        leftovers = () if state.is_held else self._leftovers(support)
        last: list[Write] = [*removals, *(w for w in leftovers if w.kind == JOB or not keeps)]
        last += forgotten(state, records)
        second += self._additions_removed((*first, *second))
        stages, contested = _uncontested(state, (keys, first, (*second, *scales), last))
        recheck = None if made.recheck_after is None else _UNSETTLED_RECHECK_S
        if state.rotation is not None and state.rotation.order.is_moving:
            recheck = _UNSETTLED_RECHECK_S
        if state.taken or contested:
            recheck = min(recheck or _TAKEN_RECHECK_S, _TAKEN_RECHECK_S)
        return Turn(
            stages,
            (*self._problems, *contested),
            self._compared,
            recheck_after=recheck,
            again=any(isinstance(one, DeleteKey) or one.anew for one in keys),
            asks_loads=state.busy is None and bool(shrinking(state, made)),
        )

    def _is_missing(self, obj: Obj) -> bool:
        """Whether an object of the whole fleet, or of a pool that goes on, does not exist."""
        metadata, there = obj["metadata"], self._state.children.get(kind_of(obj), {})
        goes_on = {None, *(pool.name for pool in self._want.pools)}
        return metadata["labels"].get(LABEL_POOL) in goes_on and metadata["name"] not in there

    def _applied(self, objects: Iterable[Obj], pool: str = "") -> Iterator[Apply]:
        for obj in objects:
            write = self._apply(obj, pool)
            if write is not None:
                yield write

    def _apply(
        self, obj: Obj, pool: str, *, hashed: Obj | None = None, guarded: bool = False
    ) -> Apply | None:
        """The write that brings the object to `obj`; None: it is so already, or cannot be.

        `hashed`: the part that the hash is over. `guarded`: refuse to overwrite another version
        than the one that was looked at.
        """
        kind, name = kind_of(obj), str(obj["metadata"]["name"])
        if kind.optional and kind not in self._state.served:
            reason, text = MISSING_APIS[kind]
            text = f"pool {pool}: {text}" if pool else text
            self._problems.append(Problem("Degraded", reason, pool, text))
            return None
        observed = self._state.children.get(kind, {}).get(name)
        holder = self._state.taken.get((kind, name), "") if observed is None else ""
        if observed is not None and controller_of(observed) not in (None, self._state.uid):
            holder = holder_of(observed)
        if holder:
            text = f"{kind.name} {name} is needed and belongs to {holder}; it is left alone"
            self._problems.append(Problem("Degraded", "NameConflict", pool, text))
            return None
        digest = desired_hash(obj if hashed is None else hashed)
        stamped = _stamped(obj, digest)
        if observed is None:
            return Apply(stamped, digest, create=True)
        if is_leaving(observed) or kind == JOB:  # what a Job runs never changes
            # Its name is free soon; the watch delivers that.
            return None
        self._find_additions(observed, stamped, pool)
        before = self._state.settled.get((kind, name))
        if before is not None and (before.uid, before.digest) != (
            observed["metadata"]["uid"],
            digest,
        ):
            before = None
        now = applied_version_of(observed, digest, contained=True)
        if before is not None and before.version == now.version:
            return None
        if contains(observed, stamped):
            self._compared[kind, name] = now
            return None
        if before is not None and not before.contained and before.generation == now.generation > 0:
            # Applied, and the server stored something else: another apply would end the same.
            return None
        version = observed["metadata"]["resourceVersion"] if guarded else ""
        return Apply(stamped, digest, resource_version=version)

    def _find_additions(self, observed: Obj, desired: Obj, pool: str) -> None:
        added = added_fields(observed, desired)
        if not added:
            return
        kind, metadata = kind_of(desired), observed["metadata"]
        stay = [str(field) for field in added if not field.removed]
        if stay:
            text = f"{kind.name} {metadata['name']}: others added {', '.join(stay)}"
            self._problems.append(Problem("Drifted", "FieldsAdded", pool, text))
        if go := [field for field in added if field.removed]:
            self._removals[kind, metadata["name"]] = RemoveFields(
                kind,
                metadata["name"],
                pool,
                merge_patch(observed, without(observed, desired, go)),
                tuple(str(field) for field in go),
                metadata["resourceVersion"],
            )

    def _additions_removed(self, writes: Iterable[Write]) -> list[RemoveFields]:
        """Removals from objects that this turn does not apply: the next turn sees the answer."""
        applied = {
            (kind_of(w.obj), w.obj["metadata"]["name"]) for w in writes if isinstance(w, Apply)
        }
        return [write for place, write in self._removals.items() if place not in applied]

    def _pools(self) -> Iterator[Write]:
        by_name = {pool.name: pool for pool in self._fleet.spec.pools}
        for pool in pools_wanted(self._want, self._seen.pools):
            if pool.name not in by_name:  # the router, or not in the document that is held back
                continue
            obj = pool_object(
                self._fleet, by_name[pool.name], pool.replicas, pool.declared, self._state.placement
            )
            before = self._state.children.get(POOL, {}).get(obj["metadata"]["name"])
            if self._held and before is not None:
                continue
            if before is not None and _is_of_another_role(before, obj, self._state.uid):
                # The role cannot change; the next turn creates a new object.
                yield _remove(before)
                continue
            # Others write replicas: a scale alone is no reason to apply.
            fixed = {key: value for key, value in obj["spec"].items() if key != "replicas"}
            write = self._apply(obj, pool.name, hashed={**obj, "spec": fixed}, guarded=True)
            if write is not None:
                yield write

    def _newest(self, made: Plan) -> Iterator[Apply]:
        """Workloads of the newest revisions, with the plan's replicas or those that they have."""
        puts = {
            (action.workload.pool, action.workload.revision): action.workload
            for action in made.actions
            if isinstance(action, PutWorkload)
        }
        for pool in self._want.pools:
            if (pool.name, pool.revision) not in self._rendered:
                continue
            workload = puts.get((pool.name, pool.revision)) or self._as_it_is(pool)
            if workload is not None:
                objects = workload_objects(self._fleet, workload, self._state.placement)
                yield from self._applied(with_pause(self._state, objects), pool.name)

    def _as_it_is(self, pool: PoolWant) -> Workload | None:
        found = self._workloads.get(pool.name, pool.revision)
        if found is None:
            return None
        return Workload(pool.name, pool.revision, replicas_of(found), pool.template)

    def _leftovers(self, support: Iterable[Obj]) -> Iterator[DeleteObject]:
        """Objects of a pool, a setting or a model (all that ends while one comes) that are over."""
        wanted = {(kind_of(obj), obj["metadata"]["name"]) for obj in support}
        for kind in SUPPORT:
            for name, obj in self._state.children.get(kind, {}).items():
                if (kind, name) not in wanted and self._is_ours(obj):
                    yield _remove(obj)
        pools = {pool.name for pool in self._want.pools}
        busy = pools | {seen.workload.pool for seen in self._seen.workloads}
        for obj in self._state.children.get(POOL, {}).values():
            if obj["spec"].get("poolName") not in busy and self._is_ours(obj):
                yield _remove(obj)
        revisions = {(pool.name, pool.revision) for pool in self._want.pools}
        revisions.update(self._workloads.keys())
        for obj in self._state.children.get(CLAIM_TEMPLATE, {}).values():
            if key_of(obj) not in revisions and self._is_ours(obj):
                yield _remove(obj)

    def _is_ours(self, obj: Obj) -> bool:
        """Whether the operator created it for this fleet, and it is not being deleted already."""
        return controller_of(obj) == self._state.uid and not is_leaving(obj)


def _is_of_another_role(before: Obj, obj: Obj, uid: str) -> bool:
    if controller_of(before) != uid or is_leaving(before):
        return False
    return before["spec"].get("role") != obj["spec"]["role"]


def _stamped(obj: Obj, digest: str) -> Obj:
    metadata = obj["metadata"]
    annotations = {**metadata.get("annotations", {}), ANNOTATION_APPLIED: digest}
    return {**obj, "metadata": {**metadata, "annotations": annotations}}

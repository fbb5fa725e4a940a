"""The history of a fleet's revisions, as ControllerRevisions that the fleet owns, what a pause
changes in a turn, and the ConfigMap of a canary (docs/adr/0105).

A record is made when its revision begins, and never changes but in its number: the current one has
the highest, also where the document goes back to an earlier one. So nothing is remembered
elsewhere, and a lost operator begins where another one ended. It has what the operator adds to the
document, so that an undo brings the images back, too. See docs/adr/0096 and docs/adr/0119.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import cast

from xpyd_operator.controller.decision.kinds import (
    CONFIG_MAP,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    Obj,
    controller_of,
)
from xpyd_operator.controller.decision.state import FleetState
from xpyd_operator.controller.decision.writes import DeleteObject
from xpyd_operator.manifests import names
from xpyd_operator.manifests.objects import canary_map
from xpyd_operator.manifests.volumes import model_in_pod
from xpyd_operator.plan.revisions import record_of, revision_id
from xpyd_operator.plan.values import CanaryStage, FleetWant
from xpyd_operator.status.canary import (
    CanaryState,
    CanaryView,
    advance,
    read_state,
    revision_on_trial,
    view,
    written,
)
from xpyd_operator.status.children import count, is_leaving, text
from xpyd_operator.status.upgrades import own_defaults


def recorded(state: FleetState) -> tuple[Obj, ...]:
    """The record of the revision that the document makes, as it should be; () while it makes none:
    it is held back, or a pause keeps it from beginning."""
    fleet = state.parsed.fleet
    if fleet is None or state.parsed.mistakes or state.holds_back or _is_kept_back(state):
        return ()
    defaults = own_defaults(state.document, state.settings).of_pods
    name = names.revision_name(fleet.name, revision_id(fleet, model_in_pod(fleet), defaults))
    mine = _records(state)
    before = next((obj for obj in mine if obj["metadata"]["name"] == name), None)
    others = max((_number(obj) for obj in mine if obj is not before), default=0)
    number = _number(before) if before is not None else 0
    labels = names.fleet_labels(fleet.name, names.ENGINE_APP)
    obj = names.owned_object("apps/v1", "ControllerRevision", name, labels, fleet, state.placement)
    # The API server lets nobody change it.
    data: Obj = {"spec": record_of(state.document["spec"]), "defaults": defaults}
    if before is not None:
        data = before["data"]
    return ({**obj, "data": data, "revision": number if number > others else others + 1},)


def forgotten(state: FleetState, current: Iterable[Obj]) -> Iterator[DeleteObject]:
    """The oldest records beyond the document's limit, and the one of the same document that an
    operator made which recorded no images; none while no revision is current."""
    fleet, kept = state.parsed.fleet, {obj["metadata"]["name"] for obj in current}
    if fleet is None or not kept:
        return
    bare = names.revision_name(fleet.name, revision_id(fleet, model_in_pod(fleet)))
    earlier = [obj for obj in _records(state) if obj["metadata"]["name"] not in kept]
    earlier.sort(key=_number, reverse=True)
    told = [obj for obj in earlier if obj["metadata"]["name"] != bare]
    left = told[: fleet.spec.rollout.history_limit]
    for obj in (obj for obj in earlier if obj not in left):
        if not is_leaving(obj):
            yield DeleteObject(CONTROLLER_REVISION, obj["metadata"]["name"], obj["metadata"]["uid"])


def canary_of(state: FleetState) -> CanaryState | None:
    """How far the canary of the document is; None: it wants none, or is held back. A pause keeps
    what is there."""
    fleet = state.parsed.fleet
    if fleet is None or fleet.spec.rollout.canary is None or state.holds_back:
        return None
    before = read_state(canary_object(state))
    if state.want.paused and (before is None or before.revision != revision_on_trial(state.want)):
        return None
    return advance(
        before,
        rules=fleet.spec.rollout.canary,
        want=state.want,
        seen=state.seen,
        report=state.routers_canary,
        promote=text(state.document, "metadata", "annotations", names.ANNOTATION_PROMOTE),
        now=state.now,
    )


def canary_object(state: FleetState) -> Obj | None:
    """The ConfigMap of the fleet's canary."""
    name = names.canary_name(state.document["metadata"]["name"])
    found = state.children.get(CONFIG_MAP, {}).get(name)
    return found if found is not None and controller_of(found) == state.uid else None


def want_with_canary(state: FleetState) -> FleetWant:
    """What the turn works towards, and what the canary is to the plan. While the document is held
    back for its mistakes, what is on trial stays as it is, and what failed goes."""
    if state.is_held:
        before = read_state(canary_object(state))
        stage = before.stage_held if before is not None else None
        return replace(state.want, canary=stage, paused=state.want.paused or stage is not None)
    return replace(state.want, canary=_canary_stage(state))


def _canary_stage(state: FleetState) -> CanaryStage | None:
    found, fleet = canary_of(state), state.parsed.fleet
    if found is None or fleet is None or fleet.spec.rollout.canary is None:
        return None
    return found.stage(fleet.spec.rollout.canary, state.routers_canary)


def canary_view(state: FleetState) -> CanaryView | None:
    """What the status says of the canary."""
    found, fleet = canary_of(state), state.parsed.fleet
    if found is None or fleet is None or fleet.spec.rollout.canary is None:
        return None
    return view(
        found,
        fleet=fleet.name,
        rules=fleet.spec.rollout.canary,
        want=state.want,
        seen=state.seen,
        report=state.routers_canary,
        deadline_s=fleet.spec.rollout.progress_deadline_seconds,
        now=state.now,
    )


def canary_maps(state: FleetState) -> tuple[Obj, ...]:
    """The ConfigMap of the canary as it should be, where the document wants one."""
    fleet, found = state.parsed.fleet, canary_of(state)
    if fleet is None or fleet.spec.rollout.canary is None:
        return ()
    before = canary_object(state)
    if found is None and before is not None:  # held back, or paused
        data = cast("dict[str, str]", before.get("data") or {})
    else:
        data = written(found, fleet.spec.rollout.canary, state.want)
    return (canary_map(fleet, state.placement, data),)


def with_pause(state: FleetState, objects: Iterable[Obj]) -> Iterator[Obj]:
    """The objects of a workload, with the mark by which a Deployment's progress deadline does not
    run while the fleet's rollout is paused. A Deployment that is marked can be scaled."""
    mixed = state.pools_paused
    for obj in objects:
        is_there = obj["metadata"]["name"] in state.children.get(DEPLOYMENT, {})
        if obj["metadata"]["labels"][names.LABEL_POOL] in mixed and is_there:
            yield {**obj, "spec": {**obj["spec"], "paused": True}}
        else:
            yield obj


def _is_kept_back(state: FleetState) -> bool:
    """Whether a pause keeps the document's revision of a pool from beginning."""
    if not state.is_paused:
        return False
    there = {(w.workload.pool, w.workload.revision) for w in state.seen.workloads}
    return any((pool.name, pool.revision) not in there for pool in state.want.pools)


def _records(state: FleetState) -> list[Obj]:
    return [*cast("tuple[Obj, ...]", state.own.records)]


def _number(obj: Obj) -> int:
    return count(obj, "revision")

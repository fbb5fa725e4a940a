"""The history of a fleet's revisions, as ControllerRevisions that the fleet owns, and what a pause
changes in a turn.

A record is made when its revision begins, and never changes but in its number: the current one has
the highest, also where the document goes back to an earlier one. So nothing is remembered
elsewhere, and a lost operator begins where another one ended. See docs/adr/0096.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from xpyd_operator.controller.decision.kinds import (
    CONTROLLER_REVISION,
    DEPLOYMENT,
    Obj,
    controller_of,
)
from xpyd_operator.controller.decision.state import DeleteObject, FleetState
from xpyd_operator.manifests import names
from xpyd_operator.manifests.volumes import model_in_pod
from xpyd_operator.plan.revisions import record_of, revision_id
from xpyd_operator.status.children import count, is_leaving


def recorded(state: FleetState) -> tuple[Obj, ...]:
    """The record of the revision that the document makes, as it should be; () while it makes none:
    it is held back, or a pause keeps it from beginning."""
    fleet = state.parsed.fleet
    if fleet is None or state.parsed.mistakes or state.holds_back or _is_kept_back(state):
        return ()
    name = names.revision_name(fleet.name, revision_id(fleet, model_in_pod(fleet)))
    mine = _records(state)
    before = next((obj for obj in mine if obj["metadata"]["name"] == name), None)
    others = max((_number(obj) for obj in mine if obj is not before), default=0)
    number = _number(before) if before is not None else 0
    labels = names.fleet_labels(fleet.name, names.ENGINE_APP)
    obj = names.owned_object("apps/v1", "ControllerRevision", name, labels, fleet, state.placement)
    # The API server lets nobody change it.
    data = before["data"] if before is not None else {"spec": record_of(state.document["spec"])}
    return ({**obj, "data": data, "revision": number if number > others else others + 1},)


def forgotten(state: FleetState, current: Iterable[Obj]) -> Iterator[DeleteObject]:
    """The oldest records beyond the document's limit; none while no revision is current."""
    fleet, kept = state.parsed.fleet, {obj["metadata"]["name"] for obj in current}
    if fleet is None or not kept:
        return
    earlier = [obj for obj in _records(state) if obj["metadata"]["name"] not in kept]
    earlier.sort(key=_number, reverse=True)
    for obj in earlier[fleet.spec.rollout.history_limit :]:
        if not is_leaving(obj):
            yield DeleteObject(CONTROLLER_REVISION, obj["metadata"]["name"], obj["metadata"]["uid"])


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
    found = state.children.get(CONTROLLER_REVISION, {}).values()
    return [obj for obj in found if controller_of(obj) == state.uid]


def _number(obj: Obj) -> int:
    return count(obj, "revision")

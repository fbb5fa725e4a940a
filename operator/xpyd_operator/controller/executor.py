"""Does the writes of a fleet's turn, several at a time, and puts the answers into the cache.

The Outcome says what the API refused, whether an object changed during the turn, and who holds a
name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from secrets import token_hex
from typing import cast

from xpyd_core.keys import key_ids
from xpyd_operator.controller.client import NEVER_CURRENT, STRATEGIC, Api
from xpyd_operator.controller.decision.cache import Cache, FleetKey
from xpyd_operator.controller.decision.errors import Conflict, KubeError, NotFound, Refused
from xpyd_operator.controller.decision.kinds import (
    FLEET,
    FLEET_LABEL,
    POD,
    POOL,
    SECRET,
    Kind,
    Obj,
    controller_of,
    holder_of,
    kind_of,
    trim,
)
from xpyd_operator.controller.decision.state import (
    AppliedVersion,
    FleetState,
    ObjectRef,
    applied_version_of,
)
from xpyd_operator.controller.decision.writes import (
    Apply,
    CreateKey,
    DeleteKey,
    DeleteObject,
    RemoveFields,
    Scale,
    SetCost,
    SetFinalizers,
    SetGate,
    SetReplicas,
    Write,
    describe,
)
from xpyd_operator.manifests.names import (
    ANNOTATION_COST,
    ANNOTATION_OPERATOR,
    ANNOTATION_REPLICAS,
    ROUTABLE,
    kv_secret_name,
)
from xpyd_operator.manifests.objects import kv_secret
from xpyd_operator.status.routable import Gate

logger = logging.getLogger(__name__)

AT_ONCE = 8
"""Writes of one fleet under way together."""
KEY_BYTES = 32


@dataclass
class Outcome:
    """The results of a turn's writes."""

    refused: list[tuple[Write, Refused]] = field(default_factory=list[tuple[Write, Refused]])
    failed: KubeError | None = None
    """A failure that no write caused; the turn was given up."""
    unsure: bool = False
    """A pool's object changed since the turn read it: replicas are unknown, no stage followed."""
    moved: list[tuple[Write, KubeError]] = field(default_factory=list[tuple[Write, KubeError]])
    """Writes that found another state than the turn saw; the next turn reads it again."""
    taken: dict[ObjectRef, str] = field(default_factory=dict[ObjectRef, str])
    applied: dict[ObjectRef, AppliedVersion] = field(
        default_factory=dict[ObjectRef, AppliedVersion]
    )
    done: list[Write] = field(default_factory=list[Write])
    made_keys: dict[str, str] = field(default_factory=dict[str, str])


class WriteExecutor:
    """Does the writes of a turn as one client, and puts the answers into one cache."""

    def __init__(self, api: Api, cache: Cache) -> None:
        self._api = api
        self._cache = cache

    async def execute(
        self, key: FleetKey, state: FleetState, stages: Iterable[tuple[Write, ...]]
    ) -> Outcome:
        """Do the stages in order; a stage in which the API did not answer is the last."""
        outcome = Outcome()
        for stage in stages:
            waiting = list(reversed(stage))
            async with asyncio.TaskGroup() as group:
                for _ in range(min(AT_ONCE, len(waiting))):
                    group.create_task(self._some(key, state, waiting, outcome))
            if outcome.failed is not None or outcome.unsure:
                break
        return outcome

    async def _some(
        self, key: FleetKey, state: FleetState, waiting: list[Write], outcome: Outcome
    ) -> None:
        while waiting and outcome.failed is None:
            write = waiting.pop()
            try:
                await self._one(key, state, write, outcome)
                outcome.done.append(write)
                logger.info("%s: %s", key, describe(write))
            except (Conflict, NotFound) as error:
                logger.debug("%s: %s: %s", key, describe(write), error)
                outcome.moved.append((write, error))
                outcome.unsure |= isinstance(write, Apply) and kind_of(write.obj) == POOL
            except Refused as error:
                logger.warning("%s: %s: %s", key, describe(write), error)
                outcome.refused.append((write, error))
            except KubeError as error:
                outcome.failed = error

    async def _one(self, key: FleetKey, state: FleetState, write: Write, outcome: Outcome) -> None:
        match write:
            case Apply():
                await self._apply(state, write, outcome)
            case Scale(kind, name, replicas, version):
                body = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
                self._keep(kind, await self._api.patch(kind, key.namespace, name, body))
            case RemoveFields(kind, name, patch=patch, resource_version=version):
                body = {**patch, "metadata": {"resourceVersion": version}}
                self._keep(kind, await self._api.patch(kind, key.namespace, name, body))
            case DeleteObject(kind, name, uid, version):
                await self._delete((kind, key.namespace, name), uid, version)
            case CreateKey():
                await self._make_key(state, write, outcome)
            case DeleteKey(slot):
                await self._delete_key(key.namespace, kv_secret_name(key.name, state.uid, slot))
            case SetGate(name, uid, gate):
                await self._set_gate(key, name, uid, gate, state.now)
            case SetCost() | SetReplicas():
                body = {"metadata": {"uid": write.uid, "annotations": _annotations(write)}}
                self._keep(POD, await self._api.patch(POD, key.namespace, write.name, body))
            case SetFinalizers(finalizers, version, operator):
                metadata: Obj = {"finalizers": [*finalizers], "resourceVersion": version}
                if operator:
                    metadata["annotations"] = {ANNOTATION_OPERATOR: operator}
                body = {"metadata": metadata}
                after = await self._api.patch(FLEET, key.namespace, key.name, body)
                # Without its last finalizer the object is gone; the watch will deliver that.
                if finalizers:
                    self._keep(FLEET, after)

    async def _delete(self, place: tuple[Kind, str, str], uid: str, version: str) -> None:
        try:
            await self._api.delete(*place, uid=uid, resource_version=version)
        except NotFound:
            # One answer may be wrong, and what is taken for gone is deleted by nobody.
            if await self._exists(place, uid):
                raise
        self._cache.removed_by_us(*place, uid)

    async def _exists(self, place: tuple[Kind, str, str], uid: str) -> bool:
        try:
            found = await self._api.get(*place)
        except NotFound:
            return False
        return found["metadata"]["uid"] == uid

    async def _delete_key(self, namespace: str, name: str) -> None:
        """Delete a Secret, which the operator may not read: what is not found is asked twice."""
        try:
            await self._api.delete(SECRET, namespace, name)
        except NotFound:
            with contextlib.suppress(NotFound):
                await self._api.delete(SECRET, namespace, name)

    async def _set_gate(self, key: FleetKey, name: str, uid: str, gate: Gate, now: str) -> None:
        row = {
            "type": ROUTABLE,
            "status": str(gate.is_open),
            "reason": gate.reason,
            "message": gate.message,
            "lastTransitionTime": now,
        }
        body = {"metadata": {"uid": uid}, "status": {"conditions": [row]}}
        place = (POD, key.namespace, name)
        self._keep(POD, await self._api.patch(*place, body, sub="status", how=STRATEGIC))

    async def _apply(self, state: FleetState, write: Apply, outcome: Outcome) -> None:
        kind, metadata = kind_of(write.obj), write.obj["metadata"]
        version = NEVER_CURRENT if write.create else write.resource_version
        obj = write.obj
        if version:
            obj = {**obj, "metadata": {**metadata, "resourceVersion": version}}
        try:
            after = await self._api.apply(obj)
        except Conflict as conflict:
            if not write.create:
                raise
            try:
                unlabelled = await self._find_holder(state, kind, metadata["name"], outcome)
            except NotFound:
                # The name does not exist: the first answer has the reason.
                raise conflict from None
            if not unlabelled:
                raise
            # The watch does not see an object without its label. This restores the label, and the
            # next turn sees the rest: a pool's replicas are written by others.
            body = {"metadata": {"labels": metadata["labels"], "resourceVersion": unlabelled}}
            place = (metadata["namespace"], metadata["name"])
            self._keep(kind, await self._api.patch(kind, *place, body))
            raise
        outcome.applied[kind, metadata["name"]] = applied_version_of(after, write.hash)
        self._keep(kind, after)

    async def _find_holder(self, state: FleetState, kind: Kind, name: str, outcome: Outcome) -> str:
        """Find the holder of a name that exists and is not among the fleet's objects. Returns the
        object's version where it is the fleet's and has lost its label; else ""."""
        namespace = state.document["metadata"]["namespace"]
        found = await self._api.get(kind, namespace, name)
        labels = cast("dict[str, str]", found["metadata"].get("labels") or {})
        labelled = labels.get(FLEET_LABEL) == state.document["metadata"]["name"]
        if controller_of(found) == state.uid and not labelled:
            return str(found["metadata"]["resourceVersion"])
        if controller_of(found) == state.uid or (controller_of(found) is None and labelled):
            # The object is ours; the watch was late.
            self._keep(kind, found)
        else:
            outcome.taken[kind, name] = holder_of(found)
        return ""

    async def _make_key(self, state: FleetState, write: CreateKey, outcome: Outcome) -> None:
        if state.parsed.fleet is None:
            return
        key = token_hex(KEY_BYTES)
        secret = kv_secret(state.parsed.fleet, state.placement, key, write.slot)
        metadata = secret["metadata"]
        if write.anew:
            await self._delete_key(metadata["namespace"], metadata["name"])
        try:
            await self._api.create(secret)
        except Conflict as conflict:
            # `anew`: the old one has not gone yet. Other conflicts, as a quota's, made nothing.
            if write.anew or conflict.reason != "AlreadyExists":
                raise
            # It exists. The operator does not read Secrets.
            logger.debug("%s: the Secret is there", state.document["metadata"]["name"])
        else:
            (outcome.made_keys[write.slot],) = key_ids((key.encode(),))

    def _keep(self, kind: Kind, obj: Obj) -> None:
        self._cache.put(kind, trim(kind, obj))


def _annotations(write: SetCost | SetReplicas) -> dict[str, str]:
    if isinstance(write, SetCost):
        return {ANNOTATION_COST: str(write.cost)}
    return {ANNOTATION_REPLICAS: str(write.after)}

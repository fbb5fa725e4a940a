"""Does a turn's writes, some at a time, and lets the cache have the answers at once.

It decides nothing about fleets. What a write comes to is told in an Outcome: what the API refused,
whether the fleet changed under the turn, whose a name turned out to be.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from secrets import token_hex
from typing import cast

from xpyd_operator.controller.cache import Cache, FleetKey
from xpyd_operator.controller.client import NEVER_CURRENT, Api
from xpyd_operator.controller.errors import Conflict, KubeError, NotFound, Refused
from xpyd_operator.controller.kinds import FLEET, FLEET_LABEL, POOL, Kind, Obj, kind_of
from xpyd_operator.controller.look import Look, Mark, Place, controller_of, holder_of, mark_of
from xpyd_operator.controller.trim import trim
from xpyd_operator.controller.writes import (
    Apply,
    MakeKey,
    Remove,
    Scale,
    SetFinalizers,
    Write,
    describe,
)
from xpyd_operator.manifests import kv_secret

logger = logging.getLogger(__name__)

AT_ONCE = 8
"""Writes of one fleet under way together."""
KEY_BYTES = 32


@dataclass
class Outcome:
    """What the writes of a turn came to."""

    refused: list[tuple[Write, Refused]] = field(default_factory=list[tuple[Write, Refused]])
    failed: KubeError | None = None
    """A failure that has nothing to do with the write itself; the turn was given up."""
    unsure: bool = False
    """A pool's object was not as it was seen, so its replicas are not known: this was the last
    stage."""
    moved: list[tuple[Write, KubeError]] = field(default_factory=list[tuple[Write, KubeError]])
    """What met something else than was seen: look again."""
    taken: dict[Place, str] = field(default_factory=dict[Place, str])
    applied: dict[Place, Mark] = field(default_factory=dict[Place, Mark])
    done: list[Write] = field(default_factory=list[Write])


class Performer:
    """Writes as one client, into one cache."""

    def __init__(self, api: Api, cache: Cache) -> None:
        self._api = api
        self._cache = cache

    async def perform(
        self, key: FleetKey, look: Look, stages: Iterable[tuple[Write, ...]]
    ) -> Outcome:
        """Do the stages in order; a stage in which the API did not answer is the last."""
        outcome = Outcome()
        for stage in stages:
            waiting = list(reversed(stage))
            async with asyncio.TaskGroup() as group:
                for _ in range(min(AT_ONCE, len(waiting))):
                    group.create_task(self._some(key, look, waiting, outcome))
            if outcome.failed is not None or outcome.unsure:
                break
        return outcome

    async def _some(
        self, key: FleetKey, look: Look, waiting: list[Write], outcome: Outcome
    ) -> None:
        while waiting and outcome.failed is None:
            write = waiting.pop()
            try:
                await self._one(key, look, write, outcome)
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

    async def _one(self, key: FleetKey, look: Look, write: Write, outcome: Outcome) -> None:
        match write:
            case Apply():
                await self._apply(look, write, outcome)
            case Scale(kind, name, replicas, version):
                body = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
                self._keep(kind, await self._api.patch(kind, key.namespace, name, body))
            case Remove(kind, name, uid, version):
                await self._api.delete(kind, key.namespace, name, uid=uid, resource_version=version)
                self._cache.removed_by_us(kind, key.namespace, name, uid)
            case MakeKey():
                await self._make_key(look)
            case SetFinalizers(finalizers, version):
                body = {"metadata": {"finalizers": [*finalizers], "resourceVersion": version}}
                after = await self._api.patch(FLEET, key.namespace, key.name, body)
                # Without its last finalizer the object is gone; the watch will say so.
                if finalizers:
                    self._keep(FLEET, after)

    async def _apply(self, look: Look, write: Apply, outcome: Outcome) -> None:
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
                unlabelled = await self._look_closer(look, kind, metadata["name"], outcome)
            except NotFound:
                # What was refused is no name that exists: the first answer has the reason.
                raise conflict from None
            if not unlabelled:
                raise
            # Without its label nobody tells us of it; this gives it back, and the next look tells
            # what else it is: a pool's replicas are others' to write.
            body = {"metadata": {"labels": metadata["labels"], "resourceVersion": unlabelled}}
            place = (metadata["namespace"], metadata["name"])
            self._keep(kind, await self._api.patch(kind, *place, body))
            raise
        outcome.applied[kind, metadata["name"]] = mark_of(after, write.hash)
        self._keep(kind, after)

    async def _look_closer(self, look: Look, kind: Kind, name: str, outcome: Outcome) -> str:
        """The name exists, and was not seen among the fleet's own: whose is it?

        Its version, where it is the fleet's and has lost its label; else empty.
        """
        namespace = look.document["metadata"]["namespace"]
        found = await self._api.get(kind, namespace, name)
        labels = cast("dict[str, str]", found["metadata"].get("labels") or {})
        labelled = labels.get(FLEET_LABEL) == look.document["metadata"]["name"]
        if controller_of(found) == look.uid and not labelled:
            return str(found["metadata"]["resourceVersion"])
        if controller_of(found) == look.uid or (controller_of(found) is None and labelled):
            # Ours: the watch was late.
            self._keep(kind, found)
        else:
            outcome.taken[kind, name] = holder_of(found)
        return ""

    async def _make_key(self, look: Look) -> None:
        if look.reading.fleet is None:
            return
        secret = kv_secret(look.reading.fleet, look.site, token_hex(KEY_BYTES))
        try:
            await self._api.create(secret)
        except Conflict:
            # It exists. What is in it is not ours to read.
            logger.debug("%s: the Secret is there", look.document["metadata"]["name"])

    def _keep(self, kind: Kind, obj: Obj) -> None:
        self._cache.put(kind, trim(kind, obj))

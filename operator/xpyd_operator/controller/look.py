"""What a turn of a fleet looks at: its document as understood, its objects, what was learnt before.

Pure values, and questions to them that have one answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from xpyd_core.errors import UserError
from xpyd_operator.controller.kinds import (
    BUDGET,
    DEPLOYMENT,
    LEADER_WORKER_SET,
    NETWORK_POLICY,
    POD,
    POOL,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
    Obj,
)
from xpyd_operator.controller.writes import Effect
from xpyd_operator.document import InferenceFleet, parse_object
from xpyd_operator.manifests import Settings, Site, model_in_pod, template_problems
from xpyd_operator.plan import FleetSeen, FleetWant, fleet_want
from xpyd_operator.status import Children, fleet_seen

Place = tuple[Kind, str]
"""An object of the fleet's namespace."""

SUPPORT = (SERVICE, SERVICE_ACCOUNT, BUDGET, NETWORK_POLICY)
"""Kinds of what stands beside the workloads."""


@dataclass(frozen=True)
class Reading:
    """A document as it was understood. It changes with the object's generation only.

    `complaints`: why it cannot be acted on; then `fleet` may be None.
    """

    fleet: InferenceFleet | None
    want: FleetWant
    complaints: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mark:
    """An object that was compared with what hashes to `digest`, or that this was applied to.

    `contained`: the comparison found all of it. False after an apply, until one was made.
    """

    uid: str
    version: str
    generation: int
    digest: str
    contained: bool = False


@dataclass(frozen=True)
class Look:
    """What a turn sees.

    `taken`: names that another's object was found under. `settled`: what was applied or compared
    before, so that neither is done again in vain. `contested`: what somebody undoes as often as it
    is done; it rests for a while.

    `children` is the cache's own: a Look is good until the next await.
    """

    document: Obj
    reading: Reading
    children: Mapping[Kind, Mapping[str, Obj]]
    settings: Settings
    served: frozenset[Kind]
    now: str
    taken: Mapping[Place, str] = field(default_factory=dict[Place, str])
    settled: Mapping[Place, Mark] = field(default_factory=dict[Place, Mark])
    contested: frozenset[Effect] = frozenset()
    wants_key: bool = False

    @property
    def uid(self) -> str:
        """The document's."""
        return str(self.document["metadata"]["uid"])

    @property
    def site(self) -> Site:
        """For rendering."""
        return Site(self.document["metadata"]["namespace"], self.uid, self.settings)

    @cached_property
    def own(self) -> Children:
        """The children without those that another owner controls, such as a deleted fleet's."""
        return Children(
            deployments=self._own(DEPLOYMENT),
            leader_worker_sets=self._own(LEADER_WORKER_SET),
            pods=tuple(self.children.get(POD, {}).values()),
            pools=self._own(POOL),
            others=tuple(obj for kind in SUPPORT for obj in self._own(kind)),
        )

    @cached_property
    def seen(self) -> FleetSeen:
        """What plan() looks at."""
        return fleet_seen(self.own)

    def _own(self, kind: Kind) -> tuple[Obj, ...]:
        found = self.children.get(kind, {}).values()
        return tuple(obj for obj in found if controller_of(obj) in (None, self.uid))


def read(document: Obj, settings: Settings) -> Reading:
    """Parse the document. Never raises: what cannot be used becomes complaints."""
    name = str(document["metadata"]["name"])
    try:
        fleet = parse_object(document)
    except UserError as error:
        # The first line counts them.
        mistakes = tuple(line.strip() for line in str(error).splitlines()[1:])
        return Reading(None, FleetWant(name, ()), mistakes or (str(error),))
    want = fleet_want(
        fleet,
        model=model_in_pod(fleet),
        routers=fleet.spec.router.replicas,
        router_surge=1,
        image=settings.worker_image,
        router_image=settings.router_image,
    )
    return Reading(fleet, want, template_problems(fleet))


def is_leaving(obj: Obj) -> bool:
    """Whether its deletion has begun."""
    return "deletionTimestamp" in obj["metadata"]


def controller_of(obj: Obj) -> str | None:
    """The uid of the owner that controls the object."""
    owners = cast("list[dict[str, Any]]", obj["metadata"].get("ownerReferences") or [])
    return next((owner["uid"] for owner in owners if owner.get("controller")), None)


def mark_of(obj: Obj, digest: str, *, contained: bool = False) -> Mark:
    """The mark of an object as it is."""
    metadata = obj["metadata"]
    return Mark(
        str(metadata["uid"]),
        str(metadata.get("resourceVersion", "")),
        int(metadata.get("generation") or 0),
        digest,
        contained,
    )


def holder_of(obj: Obj) -> str:
    """Whose an object is, for a message."""
    owners = cast("list[dict[str, Any]]", obj["metadata"].get("ownerReferences") or [])
    for owner in owners:
        if owner.get("controller"):
            return f"{owner.get('kind')} {owner.get('name')} (uid {owner.get('uid')})"
    return "someone else (it has no owner)"

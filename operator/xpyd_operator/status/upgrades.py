"""The operator's defaults that a fleet's pods are made with, and when it takes newer ones. Pure.

A fleet keeps the images, the pull policy and the version with which it was made (status.defaults),
so that another operator or chart changes none of its pods until somebody asks: by a later
spec.rollout.restartedAt, by another spec.engine.image, or by --upgrade-fleets, which lets so many
fleets at a time take the new ones. Where the status is lost, the Deployments say what they are made
with. An undo brings back those of the record that it names; they stay until a later restart
(docs/adr/0119).

An operator of another version may render the same document otherwise. So a pool whose part of the
document did not change keeps its revision, and its workload is only scaled, until the fleet takes
the new defaults. See docs/adr/0100.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from hashlib import sha256
from typing import Any, NamedTuple, TypeVar, cast

from pydantic import BaseModel

from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.manifests.names import (
    ANNOTATION_UNDO,
    BEATS_CONTAINER,
    ENGINE_CONTAINER,
    MODEL_CONTAINER,
    ROUTABLE,
    ROUTER_CONTAINER,
    Settings,
)
from xpyd_operator.plan.values import ROUTER, FleetSeen, FleetWant
from xpyd_operator.status.children import (
    Children,
    Raw,
    at,
    condition,
    fields,
    key_of,
    moment,
    name_of,
    pod_specs,
    replicas_of,
    rows,
    text,
    workloads,
)

FleetName = TypeVar("FleetName")
UP_TO_DATE = "UpToDate"
UPGRADING = "Upgrading"
UNDONE = "Undone"
_NAMES = {
    "version": "version",
    "worker_image": "workerImage",
    "router_image": "routerImage",
    "pull_policy": "imagePullPolicy",
    "pull_secrets": "imagePullSecrets",
    "gated": "readinessGate",
    "engine_image": "engineImage",
    "restarted_at": "restartedAt",
    "undo": "undo",
}
"""Field -> its name in status.defaults."""
_OF_PODS = ("worker_image", "router_image", "pull_policy", "pull_secrets", "gated")
"""What of them is in pods, and so in a record of the history."""
_WORDS = {
    "version": "operator",
    "worker_image": "worker image",
    "router_image": "router image",
    "pull_policy": "pull policy",
    "pull_secrets": "pull secrets",
    "gated": "readiness gate",
}
"""The operator's own ones -> what a condition calls them."""


@dataclass(frozen=True)
class Defaults:
    """What the operator adds to a document to make pods of it.

    `engine_image`, `restarted_at`: what the document said when the fleet took these defaults; a
    change of the one and a later time ask for new ones. `undo`: the undo that was obeyed.
    """

    version: str
    worker_image: str
    router_image: str
    pull_policy: str
    pull_secrets: tuple[str, ...] = ()
    gated: bool = False
    engine_image: str = ""
    restarted_at: str = ""
    undo: str = ""

    @property
    def row(self) -> dict[str, Any]:
        """As status.defaults has them; what is empty is left out."""
        return self._row(_NAMES)

    @property
    def of_pods(self) -> dict[str, Any]:
        """What of them pods are made with, as a record of the history has it."""
        return self._row(_OF_PODS)

    def _row(self, names: Iterable[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in names:
            if value := getattr(self, name):
                found[_NAMES[name]] = [*value] if isinstance(value, tuple) else value
        return found

    def within(self, settings: Settings) -> Settings:
        """The operator's settings with these defaults in place of its own."""
        return replace(
            settings,
            worker_image=self.worker_image,
            router_image=self.router_image,
            image_pull_policy=self.pull_policy,
            image_pull_secrets=self.pull_secrets,
            gated=self.gated,
        )

    def differences(self, ours: Defaults) -> tuple[str, ...]:
        """What of these is not the operator's own, in words."""
        return tuple(
            f"{words} {_shown(getattr(self, name))} (now {_shown(getattr(ours, name))})"
            for name, words in _WORDS.items()
            if getattr(self, name) != getattr(ours, name)
        )

    def with_images(self, differences: str) -> Defaults:
        """These with the operator's own images, from what `differences` says in a condition."""
        found: dict[str, Any] = {}
        for name in ("worker_image", "router_image"):
            said = re.search(rf"{_WORDS[name]} \S+ \(now (\S+)\)", differences)
            if said is not None:
                found[name] = said[1]
        return replace(self, **found)


def _shown(value: str | tuple[str, ...] | bool) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return (", ".join(value) if isinstance(value, tuple) else value) or "none"


def asked_restart(document: Raw) -> str:
    """The document's wish for new pods: a later time asks for the operator's own defaults."""
    return text(document, "spec", "rollout", "restartedAt")


class Undo(NamedTuple):
    """An undo that brought other images back: the record that has them, and the last restart before
    it. It holds until a later restart."""

    record: str
    restarted_at: str

    @property
    def annotation(self) -> str:
        """As the fleet's annotation has it."""
        return "@".join(filter(None, self))

    def holds(self, *restarts: str) -> bool:
        """Whether none of these restarts is later."""
        return not any(_is_later(one, self.restarted_at) for one in restarts)


def asked_undo(document: Raw) -> Undo:
    """The last undo that brought other images back; its record is "" where there was none."""
    said = text(document, "metadata", "annotations", ANNOTATION_UNDO)
    record, _, restarted_at = said.partition("@")
    return Undo(record, restarted_at)


def own_defaults(document: Raw, settings: Settings) -> Defaults:
    """Those that the operator would make the document's pods with, if it were new."""
    return Defaults(
        version=settings.version,
        worker_image=settings.worker_image,
        router_image=settings.router_image,
        pull_policy=settings.image_pull_policy,
        pull_secrets=settings.image_pull_secrets,
        gated=settings.gated,
        engine_image=text(document, "spec", "engine", "image"),
        restarted_at=asked_restart(document),
        undo=asked_undo(document).annotation,
    )


def defaults_of(status: Raw) -> Defaults | None:
    """Those that the fleet's status, or a record's data, says; None: it says none."""
    row = fields(status, "defaults")
    if not all(text(row, name) for name in ("workerImage", "routerImage", "imagePullPolicy")):
        return None
    found: dict[str, Any] = {}
    for field in dataclass_fields(Defaults):
        found[field.name] = text(row, _NAMES[field.name])
    secrets = at(row, "imagePullSecrets")
    names = cast("list[object]", secrets) if isinstance(secrets, list) else []
    found["gated"] = at(row, "readinessGate") is True
    found["pull_secrets"] = tuple(one for one in names if isinstance(one, str))
    return Defaults(**found)


def rebuilt_defaults(document: Raw, children: Children, ours: Defaults) -> Defaults | None:
    """Those that the fleet's workloads were made with; None: it has no workload.

    An image that a template of the document names says nothing of the operator's, so the own one is
    taken where no workload shows another.
    """
    specs, last = pod_specs(children), _last_revisions(document)
    found: dict[str, Any] = {}
    for workload in sorted(workloads(children), key=lambda one: _rank(one, last)):
        pool, revision = key_of(workload) or ("", "")
        template = _template_of(document, pool)
        pod = specs[pool, revision][0]
        field, names = ("router_image", [ROUTER_CONTAINER])
        if pool != ROUTER:
            gates = [text(gate, "conditionType") for gate in rows(pod, "readinessGates")]
            found.setdefault("gated", ROUTABLE in gates)
            # Where the document names the engines' image, others may run beside them.
            own = [] if text(document, "spec", "engine", "image") else [ENGINE_CONTAINER]
            field, names = "worker_image", [*own, BEATS_CONTAINER, MODEL_CONTAINER]
        for container in (*rows(pod, "containers"), *rows(pod, "initContainers")):
            if text(container, "name") in names and not _gives_image(template, container):
                found.setdefault(field, text(container, "image"))
                found.setdefault("pull_policy", text(container, "imagePullPolicy"))
        theirs = {text(one, "name") for one in rows(template, "spec", "imagePullSecrets")}
        secrets = (text(one, "name") for one in rows(pod, "imagePullSecrets"))
        found.setdefault("pull_secrets", tuple(one for one in secrets if one not in theirs))
    if not found:
        return None
    return replace(ours, **{name: value for name, value in found.items() if value != ""})


def _last_revisions(document: Raw) -> frozenset[tuple[str, str]]:
    last = rows(document, "status", "pools")
    return frozenset((text(row, "name"), text(row, "revision")) for row in last)


def _rank(workload: Raw, last: Collection[tuple[str, str]]) -> tuple[bool, int]:
    """The newest revision first, then the largest."""
    return key_of(workload) not in last, -replicas_of(workload)


def _template_of(document: Raw, pool: str) -> Raw:
    if pool == ROUTER:
        return fields(document, "spec", "router", "template")
    pools = rows(document, "spec", "pools")
    given = [fields(row, "template") for row in pools if text(row, "name") == pool]
    return given[0] if given else {}


def _gives_image(template: Raw, container: Raw) -> bool:
    name = text(container, "name")
    given = (*rows(template, "spec", "containers"), *rows(template, "spec", "initContainers"))
    return any(text(one, "name") == name and text(one, "image") for one in given)


def next_defaults(
    before: Defaults | None,
    ours: Defaults,
    *,
    turn: bool,
    undo: Undo | None = None,
    recorded: Defaults | None = None,
) -> Defaults:
    """Those that the fleet has from now on. `before` None: it is new. `turn`: it may take the
    operator's own without being asked. `undo`: one that holds, with what its record has."""
    if before is None:
        return ours
    if undo is not None:
        return _undone(before, ours, recorded)
    is_asked = _is_later(ours.restarted_at, before.restarted_at)
    is_due = ours.engine_image != before.engine_image or (turn and before.differences(ours))
    if is_asked or is_due:
        return ours if is_asked else replace(ours, restarted_at=before.restarted_at)
    return before


def _undone(before: Defaults, ours: Defaults, recorded: Defaults | None) -> Defaults:
    """What an undo that holds leaves or brings: nothing newer comes, whatever else asks for it."""
    is_later = _is_later(ours.restarted_at, before.restarted_at)
    kept = replace(
        before,
        engine_image=ours.engine_image,
        restarted_at=ours.restarted_at if is_later else before.restarted_at,
    )
    if before.undo == ours.undo or recorded is None:
        return kept
    brought = {name: getattr(recorded, name) for name in _OF_PODS}
    # Pods are made by this operator, whoever made them when they had these images before.
    return replace(kept, **brought, version=ours.version, undo=ours.undo)


def _is_later(asked: str, obeyed: str) -> bool:
    """An undo goes back to the time of an earlier restart, which asks for nothing."""
    at, before = moment(asked), moment(obeyed)
    return at is not None and (before is None or at > before)


@dataclass(frozen=True)
class Upgrade:
    """Where a fleet is on its way to the operator's own defaults. `older`: what of its own differs,
    in words; `taken`: it took them in this turn; `undone`: an undo keeps them from it."""

    defaults: Defaults
    older: tuple[str, ...] = ()
    taken: bool = False
    undone: bool = False


def upgrade(document: Raw, children: Children, settings: Settings, *, turn: bool) -> Upgrade:
    """The defaults that a fleet has from now on. `children`: its own; `turn`: it may take the
    operator's without being asked."""
    ours = own_defaults(document, settings)
    before = defaults_of(fields(document, "status"))
    if before is None:
        before = rebuilt_defaults(document, children, ours)
    elif not before.gated and (made := rebuilt_defaults(document, children, ours)) is not None:
        # A CRD that is older than the operator drops the field: workloads keep what they have.
        before = replace(before, gated=made.gated)
    # A rollout that is paused would hold the turn for as long.
    is_paused = at(document, "spec", "rollout", "paused") is True
    undo = asked_undo(document)
    holds = bool(undo.record and before and undo.holds(before.restarted_at, ours.restarted_at))
    recorded = [fields(one, "data") for one in children.records if name_of(one) == undo.record]
    now = next_defaults(
        before,
        ours,
        turn=turn and not is_paused,
        undo=undo if holds else None,
        recorded=defaults_of(recorded[0]) if recorded else None,
    )
    older = now.differences(ours)
    taken = not older and bool(before and before.differences(ours))
    return Upgrade(now, older, taken, undone=holds)


def is_older(status: Raw, settings: Settings) -> bool:
    """Whether a fleet's status says that it has other defaults than the operator."""
    found = defaults_of(status)
    return found is None or bool(found.differences(own_defaults({}, settings)))


def takes_turn(
    fleet: FleetName,
    statuses: Iterable[tuple[FleetName, Raw]],
    claimed: Collection[FleetName],
    most: int,
) -> bool:
    """Whether the fleet may take the operator's defaults now, so that at most `most` fleets are on
    the way. `claimed`: those that took them, and whose status may not say so yet."""
    busy, is_ready = set(claimed), False
    for name, status in statuses:
        # One that was taken back keeps its place, so that what it gave up stops there.
        if text(condition({"status": status}, UP_TO_DATE), "reason") in (UPGRADING, UNDONE):
            busy.add(name)
        if name == fleet:
            # What is broken already would hide what the new defaults break.
            is_ready = text(condition({"status": status}, "Ready"), "status") == "True"
    return fleet in busy or (is_ready and len(busy) < most)


_NOT_OF_PODS = ("pools", "router", "rollout", "networkPolicy")


def document_digests(fleet: InferenceFleet) -> dict[str, str]:
    """8 hex digits over what the document says of the pods of each pool and of the router. Values
    that are the defaults are left out, so that a later version finds the same."""
    shared = _dumped(fleet.spec, without=_NOT_OF_PODS)
    router = _dumped(fleet.spec.router, without=("replicas",))
    found = {ROUTER: _digest([shared, router])}
    shared["discovery"] = fleet.spec.router.discovery_port
    for pool in fleet.spec.pools:
        of_pods = _dumped(pool, without=("replicas", "scaling", "rollout"))
        found[pool.name] = _digest([shared, of_pods])
    return found


def _dumped(part: BaseModel, *, without: tuple[str, ...]) -> dict[str, Any]:
    found = part.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {name: value for name, value in found.items() if name not in without}


def _digest(parts: object) -> str:
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]


def kept_revisions(fleet: InferenceFleet, seen: FleetSeen, status: Raw) -> Mapping[str, str]:
    """Pool -> the revision that it keeps, as another version of the operator made it of the same
    document, and its workload is there."""
    there = {(one.workload.pool, one.workload.revision) for one in seen.workloads}
    last = {text(row, "name"): row for row in rows(status, "pools")}
    found: dict[str, str] = {}
    for pool, digest in document_digests(fleet).items():
        row = last.get(pool, {})
        if text(row, "document") == digest and (pool, text(row, "revision")) in there:
            found[pool] = text(row, "revision")
    return found


def with_revisions(want: FleetWant, kept: Mapping[str, str]) -> FleetWant:
    """What the document wants, its pools with the revisions that they keep."""
    if not kept:
        return want
    pools = (replace(pool, revision=kept.get(pool.name, pool.revision)) for pool in want.pools)
    return replace(want, pools=tuple(pools))

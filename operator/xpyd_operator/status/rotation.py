"""The rotation of a fleet's key while it serves: what is due next, the condition KeyRotated. Pure.

    Adding -> Switching -> Removing -> Done

The key lies in one of two Secrets by turns, which all pods mount, and a ConfigMap beside them says
which are accepted and which one signs. It also keeps how far a rotation is, so that an operator
that starts anew goes on with it. A step is over when each pod says, through the routers, that it
has what the ConfigMap says: all accept the new key, all sign with it, none accepts the old one.
Until then both keys are good, and a pod that does not follow holds up the rotation alone.

See docs/adr/0088 and docs/adr/0089.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast

from xpyd_operator.manifests.names import (
    ANNOTATION_KEY_ID,
    ANNOTATION_KEY_PHASE,
    ANNOTATION_KEY_SINCE,
    ANNOTATION_KEY_SLOT,
    ANNOTATION_ROTATE,
    KEY_SLOTS,
)
from xpyd_operator.plan.values import ROUTER
from xpyd_operator.status.children import (
    WORKER_INDEX,
    Raw,
    at,
    is_finished,
    is_of_workload,
    key_of,
    name_of,
    rows,
    seconds_between,
    short,
    text,
)

Phase = Literal["", "Adding", "Switching", "Removing", "Done"]
_NEXT: Mapping[str, Phase] = {"Adding": "Switching", "Switching": "Removing", "Removing": "Done"}
_GOAL = {
    "Adding": "accept the new key",
    "Switching": "sign with the new key",
    "Removing": "accept the new key alone",
}
OVERDUE_S = 600.0
"""A step takes kubelet's minute; after this time somebody should look."""
HOLD_S = 180.0
"""Pods behind the first one of an instance beat to nobody: each step leaves their kubelets time."""
_MOST_NAMED = 3
_MOST_ID = 64


@dataclass(frozen=True)
class KeyOrder:
    """What the ConfigMap of a fleet's keys says. `slot`: the Secret of the key from before the
    rotation, as its file is called; `request`: the wish that is being fulfilled, or was; `new_id`:
    of the new key; `since`: when the phase began, RFC 3339."""

    slot: str = KEY_SLOTS[0]
    phase: Phase = ""
    request: str = ""
    new_id: str = ""
    since: str = ""

    @property
    def other(self) -> str:
        """The slot of the new key."""
        return next(slot for slot in KEY_SLOTS if slot != self.slot)

    @property
    def is_moving(self) -> bool:
        """Whether a rotation is under way."""
        return self.phase in _NEXT

    @property
    def files(self) -> tuple[str, ...]:
        """The files with keys: the first signs, all are accepted."""
        return {
            "Adding": (self.slot, self.other),
            "Switching": (self.other, self.slot),
            "Removing": (self.other,),
        }.get(self.phase, (self.slot,))

    @property
    def annotations(self) -> dict[str, str]:
        """Of the ConfigMap."""
        found = {
            ANNOTATION_KEY_SLOT: self.slot,
            ANNOTATION_KEY_PHASE: self.phase,
            ANNOTATION_ROTATE: self.request,
            ANNOTATION_KEY_ID: self.new_id,
            ANNOTATION_KEY_SINCE: self.since,
        }
        return {name: value for name, value in found.items() if value}

    def holds(self, ids: tuple[str, ...]) -> bool:
        """Whether a program with these keys has what the phase asks for."""
        match self.phase:
            case "Adding":
                return self.new_id in ids
            case "Switching":
                return ids[:1] == (self.new_id,)
            case _:
                return ids == (self.new_id,)


def read_order(found: Raw | None, *, secret_is_second: bool, asked: str) -> KeyOrder:
    """The order of the ConfigMap; where there is none, that of a fleet whose key is not rotated:
    `secret_is_second` says whether the status names the second Secret, `asked` what its document
    carries already."""
    if found is None:
        return KeyOrder(KEY_SLOTS[secret_is_second], request=asked)
    said = {key: text(found, "metadata", "annotations", key) for key in _ANNOTATIONS}
    slot = said[ANNOTATION_KEY_SLOT]
    return KeyOrder(
        slot if slot in KEY_SLOTS else KEY_SLOTS[secret_is_second],
        phase=_PHASES.get(said[ANNOTATION_KEY_PHASE], ""),
        request=said[ANNOTATION_ROTATE],
        new_id=said[ANNOTATION_KEY_ID],
        since=said[ANNOTATION_KEY_SINCE],
    )


_PHASES: Mapping[str, Phase] = {
    "Adding": "Adding",
    "Switching": "Switching",
    "Removing": "Removing",
    "Done": "Done",
}
_ANNOTATIONS = (
    ANNOTATION_KEY_SLOT,
    ANNOTATION_KEY_PHASE,
    ANNOTATION_ROTATE,
    ANNOTATION_KEY_ID,
    ANNOTATION_KEY_SINCE,
)


@dataclass(frozen=True)
class RouterKeys:
    """What a router says: ids of its own keys, and of the keys of each instance."""

    own: tuple[str, ...]
    instances: Mapping[str, tuple[str, ...]]


def read_keys(body: bytes) -> RouterKeys | None:
    """From the answer to GET /instances; None: it is none."""
    try:
        found: object = json.loads(body)
    except (ValueError, RecursionError):
        return None
    instances = {text(row, "instance"): _ids(row) for row in rows(found, "instances")}
    return RouterKeys(_ids(found), instances)


def _ids(obj: object) -> tuple[str, ...]:
    found = at(obj, "key_ids")
    listed = cast("list[object]", found) if isinstance(found, list) else []
    return tuple(one[:_MOST_ID] for one in listed if isinstance(one, str))


@dataclass(frozen=True)
class Progress:
    """How many programs have what the phase asks for, and who has not."""

    done: int
    missing: tuple[str, ...]
    has_hidden: bool
    """Whether there are pods that beat to nobody."""


def progress(order: KeyOrder, pods: Iterable[Raw], said: Mapping[str, RouterKeys]) -> Progress:
    """How far the phase is. `said`: by the routers' pods. Pods that leave count, as they serve
    until they are gone; so do instances that are no pods of the fleet."""
    done, missing, has_hidden = 0, list[str](), False
    instances = {name for router in said.values() for name in router.instances}
    for pod in pods:
        workload, labels = key_of(pod), ("metadata", "labels")
        if workload is None or not is_of_workload(pod, workload) or is_finished(pod):
            continue
        if text(pod, *labels, WORKER_INDEX) not in ("", "0"):
            has_hidden = True
            continue
        name = name_of(pod)
        if workload[0] == ROUTER:
            holds = name in said and order.holds(said[name].own)
        else:
            holds = name in instances and _holds(order, name, said)
            instances.discard(name)
        done += holds
        missing += [] if holds else [name]
    for name in sorted(instances):
        holds = _holds(order, name, said)
        done += holds
        missing += [] if holds else [name]
    return Progress(done, tuple(missing), has_hidden)


def _holds(order: KeyOrder, name: str, said: Mapping[str, RouterKeys]) -> bool:
    """Whether all routers that know the instance say so."""
    return all(order.holds(one.instances[name]) for one in said.values() if name in one.instances)


@dataclass(frozen=True)
class KeyVerdict:
    """The condition KeyRotated."""

    status: bool
    reason: str
    message: str


@dataclass(frozen=True)
class Rotation:
    """What is due: the order to write, and before that a Secret to make or to delete, by its slot.
    `verdict` None: nobody asked for a rotation."""

    order: KeyOrder
    create: str = ""
    delete: str = ""
    verdict: KeyVerdict | None = None


def rotate(
    order: KeyOrder,
    *,
    asked: str,
    made: Mapping[str, str],
    deleted: str,
    found: Progress,
    now: str,
) -> Rotation:
    """The next step. `asked`: the document's wish; `made`: ids of the keys that this process made,
    by slot; `deleted`: the slot whose Secret it deleted last."""
    if not order.is_moving:
        if not asked or asked == order.request:
            return Rotation(order, verdict=_finished(order))
        new_id = made.get(order.other, "")
        if not new_id:
            return Rotation(order, create=order.other, verdict=_begun(order, now))
        order = replace(order, phase="Adding", request=asked, new_id=new_id, since=now)
        return Rotation(order, verdict=_moving(order, replace(found, done=0), now))
    # A Secret that somebody deleted was made anew.
    order = replace(order, new_id=made.get(order.other, order.new_id))
    elapsed_s = seconds_between(order.since, now) or 0.0
    is_over = found.done > 0 and not found.missing and elapsed_s >= HOLD_S * found.has_hidden
    if not is_over:
        return Rotation(order, verdict=_moving(order, found, now))
    if order.phase == "Removing" and deleted != order.slot:
        return Rotation(order, delete=order.slot, verdict=_moving(order, found, now))
    slot = order.other if order.phase == "Removing" else order.slot
    after = replace(order, phase=_NEXT[order.phase], slot=slot, since=now)
    if not after.is_moving:
        return Rotation(after, verdict=_finished(after))
    return Rotation(after, verdict=_moving(after, replace(found, done=0), now))


def _begun(order: KeyOrder, now: str) -> KeyVerdict:
    return KeyVerdict(False, "Adding", f"a new key is made, {now}")


def _finished(order: KeyOrder) -> KeyVerdict | None:
    if order.phase != "Done":
        return None
    return KeyVerdict(True, "Done", f"all have the key {order.new_id} alone since {order.since}")


def _moving(order: KeyOrder, found: Progress, now: str) -> KeyVerdict:
    named = ", ".join(short(name) for name in found.missing[:_MOST_NAMED])
    more = len(found.missing) - _MOST_NAMED
    waits = f"; waits for {named}" + (f" and {more} more" if more > 0 else "") if named else ""
    total = found.done + len(found.missing)
    message = f"{found.done} of {total} pods {_GOAL[order.phase]}{waits}"
    overdue = (seconds_between(order.since, now) or 0.0) > OVERDUE_S
    if overdue and found.missing:
        message = (
            f"{order.phase} since {order.since}: {message}. All serve with both keys meanwhile; "
            "mend or delete these pods; does the operator reach the routers' admin port?"
        )
        return KeyVerdict(False, "Blocked", message)
    return KeyVerdict(False, order.phase, message)


def not_ours(*, insecure: bool) -> KeyVerdict:
    """The answer to the wish where the operator has no key to rotate."""
    if insecure:
        return KeyVerdict(False, "NoKey", "the fleet has no key: spec.kvTransfer.insecure is set")
    return KeyVerdict(
        False,
        "OwnSecret",
        "the key is in a Secret of yours (spec.kvTransfer.keySecretRef), which the operator does "
        "not change: add the new key as its second line, put it first when all pods have it, and "
        "remove the old one then (docs/kv-transfer.md)",
    )

"""The Events that a change of a fleet's status gives.

They come from statuses and not from single actions: there are few of them, a restarted operator
repeats none, and all that happened between two writes is one Event.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from xpyd_operator.plan.values import ROUTER
from xpyd_operator.status.canary import canary_events
from xpyd_operator.status.children import Raw, count, rows, seconds_between, short, text
from xpyd_operator.status.conditions import (
    FIELDS_IGNORED,
    HAD_ROLES,
    LOST_ROLES,
    condition_of,
)
from xpyd_operator.status.crashes import RECREATED
from xpyd_operator.status.upgrades import UNDONE, UP_TO_DATE, UPGRADING

MOST_MESSAGE = 1000
"""Kubernetes allows 1024 bytes of a message; a few of our characters may be longer."""


@dataclass(frozen=True)
class EventText:
    """An Event (core/v1) about the fleet."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str
    is_decision: bool = False
    """Whether it has to exist though the operator ends: post it before the status."""


def events(before: Raw | None, after: Raw) -> tuple[EventText, ...]:
    """The Events to post when the status `after` replaces `before`.

    Call it once for each status that is written, with the one that it replaces.
    """
    old = before or {}
    if text(condition_of(after, "Ready"), "reason") == "Draining":
        found = _stopping(old, after)
    else:
        found = [*_pools(old, after), *_states(old, after)]
    return tuple(replace(one, message=short(one.message, MOST_MESSAGE)) for one in found)


def _status(status: Raw, kind: str) -> str:
    return text(condition_of(status, kind), "status")


def _message(status: Raw, kind: str) -> str:
    return text(condition_of(status, kind), "message")


def _stopping(before: Raw, after: Raw) -> list[EventText]:
    if text(condition_of(before, "Ready"), "reason") == "Draining":
        return []
    return [EventText("Normal", "Draining", _message(after, "Ready"))]


def _pools(before: Raw, after: Raw) -> list[EventText]:
    """One Event for each kind of change, however many pools changed."""
    old, new = _wanted(before), _wanted(after)
    is_paused = _moves(after) == "Paused"
    lines: dict[str, list[str]] = {"Created": [], "Rollout": [], "Scaled": [], "Draining": []}
    for name, pool in new.items():
        replicas, earlier = count(pool, "replicas"), old.get(name)
        if earlier is None:
            lines["Created"].append(f"pool {name}: {_instances(replicas)}")
            continue
        revisions = text(earlier, "revision"), text(pool, "revision")
        if revisions[0] != revisions[1] and not is_paused:
            change = f"revision {revisions[0]} -> {revisions[1]}"
            lines["Rollout"].append(f"pool {name}: {change}, {_instances(replicas)}")
        if count(earlier, "replicas") != replicas:
            sizes = f"{count(earlier, 'replicas')} -> {_instances(replicas)}"
            lines["Scaled"].append(f"pool {name}: {sizes}")
    leaving = {text(p, "name"): p for p in rows(after, "pools")}
    for name in (name for name in old if name not in new):
        pool = leaving.get(name, {})
        left = count(pool, "readyReplicas") + count(pool, "drainingReplicas")
        lines["Draining"].append(f"pool {name} left the document: {_instances(left)} to leave")
    return [
        EventText("Normal", reason, "; ".join(parts)) for reason, parts in lines.items() if parts
    ]


def _states(before: Raw, after: Raw) -> list[EventText]:
    found: list[EventText] = []
    degraded, earlier = condition_of(after, "Degraded"), condition_of(before, "Degraded")
    again = _status(before, "Degraded") == "True" and (
        text(degraded, "reason") == text(earlier, "reason")
    )
    if text(degraded, "status") == "True" and not again:
        words = f"{text(degraded, 'reason')}: {text(degraded, 'message')}"
        found.append(EventText("Warning", "Degraded", words))
    room = condition_of(after, "CapacityAvailable")
    no_room = text(room, "status") == "False" and _status(before, "CapacityAvailable") != "False"
    if no_room and text(room, "reason") != text(degraded, "reason"):
        found.append(EventText("Warning", "NoCapacity", text(room, "message")))
    kv = "KVTransferVerified"
    if _status(after, kv) == "False" and _status(before, kv) != "False":
        words = f"{text(condition_of(after, kv), 'reason')}: {_message(after, kv)}"
        found.append(EventText("Warning", "KVNotVerified", words))
    if _moves(after) == "Moving" != _moves(before):
        found.append(EventText("Normal", "Moving", _message(after, "Progressing")))
    if (ignored := _message(after, FIELDS_IGNORED)) not in ("", _message(before, FIELDS_IGNORED)):
        found.append(EventText("Warning", FIELDS_IGNORED, ignored))
    found += [*_rotation(before, after), *_pauses(before, after), *_upgrade(before, after)]
    found += [EventText(*event, is_decision=True) for event in canary_events(before, after)]
    had, roles = (text(condition_of(one, "RolesReady"), "reason") for one in (before, after))
    if (roles in LOST_ROLES and had in HAD_ROLES) or (
        roles == HAD_ROLES[1] and had == HAD_ROLES[0]
    ):
        found.append(EventText("Warning", "RoleLost", _message(after, "RolesReady")))
    if _has_lost(before, after):
        found.append(EventText("Warning", "Recovering", _message(after, "Ready")))
    if _status(before, "Available") == "True" and _status(after, "Available") == "False":
        found.append(EventText("Warning", "Unavailable", _message(after, "Available")))
    if _status(after, "Ready") == "True" and _status(before, "Ready") != "True":
        found += _became_ready(before, after)
    return found


def _rotation(before: Raw, after: Raw) -> list[EventText]:
    """The begin and the end of a rotation of the key, and what stops one."""
    found, earlier = condition_of(after, "KeyRotated"), condition_of(before, "KeyRotated")
    reason, message = text(found, "reason"), text(found, "message")
    if reason in ("", "Switching", "Removing", text(earlier, "reason")):
        return []
    if reason in ("Adding", "Done"):
        return [EventText("Normal", f"KeyRotation{reason}", message)]
    return [EventText("Warning", "KeyRotationBlocked", message)]


def _pauses(before: Raw, after: Raw) -> list[EventText]:
    """A rollout that is kept from going on, and one that goes on."""
    was, is_paused = _moves(before) == "Paused", _moves(after) == "Paused"
    if was == is_paused:
        return []
    reason = "RolloutPaused" if is_paused else "RolloutResumed"
    return [EventText("Normal", reason, _message(after, "Progressing"))]


def _moves(status: Raw) -> str:
    return text(condition_of(status, "Progressing"), "reason")


def _upgrade(before: Raw, after: Raw) -> list[EventText]:
    """That the operator has other defaults than the fleet, that the fleet takes them, and that an
    undo took it back."""
    found, earlier = condition_of(after, UP_TO_DATE), condition_of(before, UP_TO_DATE)
    reason = text(found, "reason")
    if reason not in ("OlderDefaults", UPGRADING, UNDONE) or reason == text(earlier, "reason"):
        return []
    return [EventText("Normal", reason, text(found, "message"))]


def _has_lost(before: Raw, after: Raw) -> bool:
    """Whether a healthy fleet lost an instance, or the reason of the loss is known only now."""
    ready, earlier = condition_of(after, "Ready"), condition_of(before, "Ready")
    moves = text(condition_of(after, "Progressing"), "reason")
    if text(ready, "status") != "False" or moves != "Recovering":
        return False
    reasons = text(earlier, "reason"), text(ready, "reason")
    return text(earlier, "status") == "True" or (reasons[1] == RECREATED != reasons[0])


def _became_ready(before: Raw, after: Raw) -> list[EventText]:
    if text(condition_of(before, "Progressing"), "reason") == "Scaling":
        return []  # the Event of the scale is enough
    earlier, now = condition_of(before, "Ready"), condition_of(after, "Ready")
    times = text(earlier, "lastTransitionTime"), text(now, "lastTransitionTime")
    took_s = seconds_between(*times)
    after_s = f" after {took_s:.0f} s" if took_s is not None else ""
    return [EventText("Normal", "Ready", f"{text(now, 'message')}{after_s}")]


def _wanted(status: Raw) -> dict[str, Raw]:
    """The pools that the document has, by name; those that only leave have no revision."""
    found = [p for p in rows(status, "pools") if text(p, "revision")]
    found.sort(key=lambda pool: text(pool, "role") == ROUTER)
    return {text(pool, "name"): pool for pool in found}


def _instances(number: int) -> str:
    return "1 instance" if number == 1 else f"{number} instances"

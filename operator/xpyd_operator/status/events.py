"""What is reported as Events of a fleet: what changed from one written status to the next. Pure.

Events come from statuses and not from single actions, so there are few of them, a restarted
operator repeats none, and what happened within one write is told once, with both ends' numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from xpyd_operator.plan import ROUTER
from xpyd_operator.status.conditions import condition_of
from xpyd_operator.status.crashes import RECREATED
from xpyd_operator.status.raw import Raw, count, rows, seconds_between, short, text

MOST_MESSAGE = 1000
"""Kubernetes allows 1024 bytes of a message; a few of our characters may be longer."""


@dataclass(frozen=True)
class EventText:
    """One Event (core/v1) about the fleet."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def events(before: Raw | None, after: Raw) -> tuple[EventText, ...]:
    """What to report when the status `after` takes the place of `before`.

    To be called once for each status that was written, with the one that it replaced.
    """
    old = before or {}
    if text(condition_of(after, "Ready"), "reason") == "Draining":
        found = _stopping(old, after)
    else:
        found = [*_pools(old, after), *_states(old, after)]
    return tuple(EventText(e.type, e.reason, short(e.message, MOST_MESSAGE)) for e in found)


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
    told: dict[str, list[str]] = {"Created": [], "Rollout": [], "Scaled": [], "Draining": []}
    for name, pool in new.items():
        replicas, earlier = count(pool, "replicas"), old.get(name)
        if earlier is None:
            told["Created"].append(f"pool {name}: {_instances(replicas)}")
            continue
        revisions = text(earlier, "revision"), text(pool, "revision")
        if revisions[0] != revisions[1]:
            change = f"revision {revisions[0]} -> {revisions[1]}"
            told["Rollout"].append(f"pool {name}: {change}, {_instances(replicas)}")
        if count(earlier, "replicas") != replicas:
            sizes = f"{count(earlier, 'replicas')} -> {_instances(replicas)}"
            told["Scaled"].append(f"pool {name}: {sizes}")
    leaving = {text(p, "name"): p for p in rows(after, "pools")}
    for name in (name for name in old if name not in new):
        pool = leaving.get(name, {})
        left = count(pool, "readyReplicas") + count(pool, "drainingReplicas")
        told["Draining"].append(f"pool {name} left the document: {_instances(left)} to leave")
    return [EventText("Normal", reason, "; ".join(said)) for reason, said in told.items() if said]


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
    if _has_lost(before, after):
        found.append(EventText("Warning", "Recovering", _message(after, "Ready")))
    if _status(before, "Available") == "True" and _status(after, "Available") == "False":
        found.append(EventText("Warning", "Unavailable", _message(after, "Available")))
    if _status(after, "Ready") == "True" and _status(before, "Ready") != "True":
        found += _became_ready(before, after)
    return found


def _has_lost(before: Raw, after: Raw) -> bool:
    """Whether a fleet that was well lost an instance, or it is seen only now for what."""
    ready, earlier = condition_of(after, "Ready"), condition_of(before, "Ready")
    moves = text(condition_of(after, "Progressing"), "reason")
    if text(ready, "status") != "False" or moves != "Recovering":
        return False
    reasons = text(earlier, "reason"), text(ready, "reason")
    return text(earlier, "status") == "True" or (reasons[1] == RECREATED != reasons[0])


def _became_ready(before: Raw, after: Raw) -> list[EventText]:
    if text(condition_of(before, "Progressing"), "reason") == "Scaling":
        return []  # the Event of the scale said it all
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

"""The page of `kubectl xpyd status`: how a fleet is, no line of it wider than WIDTH.

What is as it should be takes no line. Objects are as the API server returns them, so no field of
theirs is sure to be there, and no text is sure to be short.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xpyd_operator.rollout.view import outcome_of, table
from xpyd_operator.status.children import (
    Children,
    Counts,
    Raw,
    condition,
    count,
    is_leaving,
    rows,
    seconds_between,
    short,
    text,
)
from xpyd_operator.status.drains import InstanceLoad, load_text
from xpyd_operator.status.verified import NO_PAIRS

Json = dict[str, Any]

WIDTH = 120
_MOST_LINES = 6
"""Of one condition's message; all of it is in `kubectl get fleet -o yaml`."""
_GOOD_IF_FALSE = frozenset({"Degraded", "Drifted", "FieldsIgnored", "OtherRelease"})
_ALWAYS_SHOWN = frozenset({"Ready", "Progressing"})
"""Conditions that the page says in other words."""
_MOST_REVISIONS = 30


@dataclass(frozen=True)
class PoolLine:
    """One pool. `older`: revision -> its ready instances, of those that a rollout replaces.
    `load`: what those that leave still have, where routers have said."""

    name: str
    role: str
    wanted: int
    ready: int
    revision: str
    updated: int
    draining: int
    older: Mapping[str, int] = field(default_factory=dict[str, int])
    load: InstanceLoad | None = None
    since: str = ""


def pool_lines(fleet: Raw, pods: Iterable[Raw]) -> tuple[PoolLine, ...]:
    """The pools of a fleet by its status; `pods`: those with its label."""
    counts = Children(pods=tuple(pods)).counts
    found: list[PoolLine] = []
    for row in rows(fleet, "status", "pools"):
        name, revision = text(row, "name"), text(row, "revision")
        has_load = isinstance(row.get("drainingRequests"), int)
        load = InstanceLoad(count(row, "drainingRequests"), count(row, "drainingKvLeases"))
        found.append(
            PoolLine(
                name=name,
                role=text(row, "role"),
                wanted=count(row, "replicas"),
                ready=count(row, "readyReplicas"),
                revision=revision,
                updated=count(row, "updatedReplicas"),
                draining=count(row, "drainingReplicas"),
                older=_older(name, revision, counts),
                load=load if has_load else None,
                since=text(row, "drainingSince"),
            )
        )
    return tuple(found)


def _older(pool: str, revision: str, counts: Mapping[tuple[str, str], Counts]) -> dict[str, int]:
    mine = {key[1]: have for key, have in counts.items() if key[0] == pool and key[1] != revision}
    return {name: have.ready for name, have in sorted(mine.items()) if have.staying}


@dataclass(frozen=True)
class Concern:
    """A condition that is not as it should be."""

    type: str
    status: str
    reason: str
    message: str
    since: str


def concerns_of(fleet: Raw) -> tuple[Concern, ...]:
    """Lost roles first, then in the status' order."""
    found: list[Concern] = []
    for row in rows(fleet, "status", "conditions"):
        kind, status, reason = text(row, "type"), text(row, "status"), text(row, "reason")
        is_good = status == ("False" if kind in _GOOD_IF_FALSE else "True")
        if is_good or kind in _ALWAYS_SHOWN or (status == "Unknown" and _says_nothing(row)):
            continue
        since = text(row, "lastTransitionTime")
        found.append(Concern(kind, status, reason, text(row, "message"), since))
    return tuple(sorted(found, key=lambda one: one.type != "RolesReady"))


def _says_nothing(row: Raw) -> bool:
    """A fleet without pairs has no KV to verify; one that leaves is not looked at."""
    return text(row, "reason") in (NO_PAIRS.reason, "Draining")


def movement_of(fleet: Raw) -> tuple[str, str]:
    """How far the fleet is, and what it waits for. What is Degraded is said among the concerns."""
    outcome = outcome_of(dict(fleet))
    moves = text(condition(fleet, "Progressing"), "message")
    return outcome.word, moves if outcome.is_degraded and moves else outcome.message


def page_json(fleet: Raw, pods: Sequence[Raw]) -> Json:
    """The page for machines. Names of fields are stable; new ones are only added."""
    ready, (word, waits) = condition(fleet, "Ready"), movement_of(fleet)
    pools: list[Json] = []
    for one in pool_lines(fleet, pods):
        row: Json = {
            "name": one.name,
            "role": one.role,
            "wanted": one.wanted,
            "ready": one.ready,
            "revision": one.revision,
            "updated": one.updated,
            "older": dict(one.older),
            "draining": one.draining,
        }
        if one.load is not None:
            row |= {"drainingRequests": one.load.requests, "drainingKvLeases": one.load.kv_leases}
        if one.since:
            row["drainingSince"] = one.since
        pools.append(row)
    return {
        "fleet": text(fleet, "metadata", "name"),
        "namespace": text(fleet, "metadata", "namespace"),
        "endpoint": text(fleet, "status", "endpoint"),
        "ready": text(ready, "status") or "Unknown",
        "reason": text(ready, "reason"),
        "outcome": word,
        "waits": waits,
        "deleting": is_leaving(fleet),
        "pools": pools,
        "concerns": [
            {
                "type": one.type,
                "status": one.status,
                "reason": one.reason,
                "message": one.message,
                "since": one.since,
            }
            for one in concerns_of(fleet)
        ],
    }


def page_text(fleet: Raw, pods: Sequence[Raw], now: str) -> str:
    """The page for people. `now`: RFC 3339."""
    found = page_json(fleet, pods)
    name = f"{found['namespace']}/{found['fleet']}".removeprefix("/")
    age = ago(text(condition(fleet, "Ready"), "lastTransitionTime"), now)
    state = f"Ready={found['ready']}"
    if found["reason"] and found["reason"] != "Ready":
        state += f" ({found['reason']})"
    state += f" for {age}" if age else ""
    state += ", is being deleted" if found["deleting"] else ""
    parts = [_line(f"fleet {name}  {state}")]
    if found["endpoint"]:
        parts.append(_line(f"  {found['endpoint']}"))
    lines = pool_lines(fleet, pods)
    if lines:
        shown = table(
            ("POOL", "ROLE", "WANTED", "READY", "REVISION", "NEW", "OLDER", "LEAVING"),
            [_cells(one, now) for one in lines],
        )
        parts += ["\n", *(_line(line) for line in shown.splitlines())]
    else:
        parts.append("  the operator has written no status yet\n")
    if found["outcome"] != "Complete":
        parts += ["\n", _words(f"{found['outcome']}: {found['waits']}")]
    concerns = concerns_of(fleet)
    if concerns:
        parts.append("\n")
    for one in concerns:
        for_ = ago(one.since, now)
        head = f"{one.type}={one.status} {one.reason}" + (f" for {for_}" if for_ else "")
        parts.append(_words(f"{head}: {one.message}"))
    return "".join(parts)


def pages_text(fleets: Sequence[Raw], pods: Sequence[Raw], now: str, *, where: str) -> str:
    """The pages of fleets, or that there is none. `where`: in words."""
    if not fleets:
        return f"no fleet {where}\n"
    return "\n".join(page_text(one, pods_of(one, pods), now) for one in fleets)


def pods_of(fleet: Raw, pods: Iterable[Raw]) -> list[Raw]:
    """Those with the fleet's label, in its namespace."""
    name, space = text(fleet, "metadata", "name"), text(fleet, "metadata", "namespace")
    return [
        pod
        for pod in pods
        if text(pod, "metadata", "labels", "xpyd.dev/fleet") == name
        and text(pod, "metadata", "namespace") == space
    ]


def _cells(one: PoolLine, now: str) -> tuple[str, ...]:
    older = ", ".join(f"{name}: {ready}" for name, ready in one.older.items()) or "-"
    new = f"{one.updated}/{one.wanted}" if one.revision else "-"
    return (
        short(one.name, 16),
        short(one.role, 10) or "-",
        str(one.wanted),
        str(one.ready),
        short(one.revision, 16) or "leaves",
        new,
        short(older, _MOST_REVISIONS),
        _leaving(one, now),
    )


def _leaving(one: PoolLine, now: str) -> str:
    """2: 3 requests, 1 KV leases, 42s"""
    if not one.draining:
        return "-"
    parts = [load_text(one.load)] if one.load is not None else []
    parts += [age] if (age := ago(one.since, now)) else []
    return f"{one.draining}: {', '.join(parts)}" if parts else str(one.draining)


def ago(then: str, now: str) -> str:
    """12s, 5m, 3h, 2d; "" where one is not a time."""
    seconds = seconds_between(then, now)
    if seconds is None:
        return ""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def _line(words: str) -> str:
    return f"{short(words, WIDTH) if len(words) > WIDTH else words.rstrip()}\n"


def _words(words: str) -> str:
    """In lines, the first at the margin; a very long text is cut."""
    return wrapped(words, "", "    ")


def wrapped(words: str, first: str, later: str) -> str:
    """`words` in a few lines of at most WIDTH; those after the first begin with `later`."""
    line = "".join(c if c.isprintable() else " " for c in words)
    lines = textwrap.wrap(
        line,
        WIDTH,
        initial_indent=first,
        subsequent_indent=later,
        max_lines=_MOST_LINES,
        placeholder=" ...",
        break_on_hyphens=False,
    )
    return "".join(f"{one}\n" for one in lines)

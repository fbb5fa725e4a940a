"""What the instances of a fleet that leave still have, by pool, for people; and which of them were
cut when their time was over.

Routers say how many requests and KV leases an instance has (`GET /instances`), and how many
requests they have themselves (`RELAYED_QUERY`); since when a pod leaves, its deletion says. Each
router counts its own requests, so that they add up; the engine's own numbers are the same at each.
See docs/adr/0108.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from xpyd_operator.plan.values import ROUTER
from xpyd_operator.status.children import (
    Raw,
    count,
    is_finished,
    is_leaving,
    is_of_workload,
    key_of,
    moment,
    name_of,
    text,
)
from xpyd_operator.status.instances import read_rows

_MOST = 2**31 - 1
DRAIN_FIELDS = frozenset({"drainingRequests", "drainingKvLeases", "drainingSince", "leaving"})
"""Of a status: they are true for the moment at which they were written."""


class InstanceLoad(NamedTuple):
    """Requests that an instance has, and prompts whose KV it holds for, or moves with, others."""

    requests: int
    kv_leases: int


def read_loads(bodies: Iterable[bytes]) -> dict[str, InstanceLoad]:
    """By instance, from what routers answer to GET /instances; what is none is left out."""
    in_flight: dict[str, int] = {}
    own: dict[str, InstanceLoad] = {}
    for body in bodies:
        for row in (one for one in read_rows(body) or () if one.instance):
            in_flight[row.instance] = in_flight.get(row.instance, 0) + max(0, row.in_flight)
            before = own.get(row.instance, InstanceLoad(0, 0))
            running = max(before.requests, row.load.running + row.load.waiting)
            own[row.instance] = InstanceLoad(running, max(before.kv_leases, row.load.kv_leases))
    return {
        name: InstanceLoad(min(_MOST, max(in_flight[name], load.requests)), load.kv_leases)
        for name, load in own.items()
    }


_RELAYED = "xpyd_router_in_flight"
RELAYED_QUERY = f"/metrics?name[]={_RELAYED}"
"""What to GET of a router that leaves."""
_RELAYED_SAMPLE = re.compile(rb"^%s (\d{1,10})(?:\.0)?$" % _RELAYED.encode(), re.M)


def read_relayed(body: bytes | None) -> InstanceLoad | None:
    """The requests that a router has, from its answer to RELAYED_QUERY; None: it does not say."""
    found = _RELAYED_SAMPLE.search(body or b"")
    return None if found is None else InstanceLoad(min(_MOST, int(found[1])), 0)


CUT = "DrainTimedOut"
"""The reason of the Event that says so."""


class CutDrain(NamedTuple):
    """An instance that was ended while it had something, or may have had."""

    pool: str
    pod: str
    message: str


_SLACK_S = 2.0
"""Of a router's grace period: this process may see its deletion later than its kubelet does."""


class _Leaving(NamedTuple):
    pool: str
    since_s: float
    most_s: float
    load: InstanceLoad | None
    succeeded: bool = False
    """Its containers ended by themselves, without an error."""


class DrainWatch:
    """The pods of one fleet that leave, and how each of them ended. Times are of one steady clock:
    since when this process has seen that it leaves, not what the API server wrote.

    An engine cuts its requests itself when `timeout_s` is over. A router goes on until it has none:
    one that its kubelet killed at the end of its grace period had some."""

    def __init__(self) -> None:
        self._leaving: dict[str, _Leaving] = {}
        """By the pod's uid and name."""

    def look(
        self,
        pods: Iterable[Raw],
        loads: Mapping[str, InstanceLoad],
        now_s: float,
        *,
        timeout_s: float,
    ) -> list[CutDrain]:
        """Those that ended since the last look when their time was over. `timeout_s`: the
        document's, `loads`: what routers say that they have."""
        found: dict[str, _Leaving] = {}
        for pod in pods:
            key = key_of(pod)
            if key is None or not is_leaving(pod):
                continue
            named = f"{text(pod, 'metadata', 'uid')} {name_of(pod)}"
            before = self._leaving.get(named)
            load = loads.get(name_of(pod), before.load if before else None)
            grace_s = count(pod, "metadata", "deletionGracePeriodSeconds")
            since_s = before.since_s if before else now_s
            most_s = grace_s if key[0] == ROUTER else min(timeout_s, grace_s)
            succeeded = text(pod, "status", "phase") == "Succeeded"
            found[named] = _Leaving(key[0], since_s, most_s, load, succeeded)
        gone = {named: one for named, one in self._leaving.items() if named not in found}
        self._leaving = found
        cut = ((named, _cut_text(one, now_s)) for named, one in gone.items())
        return [
            CutDrain(gone[named].pool, named.partition(" ")[2], words)
            for named, words in cut
            if words
        ]


_ROUTER_CUT = "{} requests that it still relayed ended there (spec.drain.timeoutSeconds)"


def _cut_text(one: _Leaving, now_s: float) -> str:
    """What was cut; "" where the instance ended by itself, with nothing left."""
    if one.pool == ROUTER:
        slack_s = min(_SLACK_S, one.most_s / 10)
        is_killed = one.most_s and now_s - one.since_s >= one.most_s - slack_s
        if not is_killed or one.succeeded or (one.load is not None and not one.load.requests):
            return ""
        # One that did not say lived so long because it had some.
        return _ROUTER_CUT.format("the" if one.load is None else one.load.requests)
    if now_s - one.since_s < one.most_s:
        return ""
    if one.load is None:
        # Without a time to drain in, or without routers that answer, nobody knows of a loss.
        return "what it still had is not known: no router has said" if one.most_s else ""
    if not any(one.load):
        return ""
    return f"it still had {one.load.requests} requests and {one.load.kv_leases} KV leases"


@dataclass(frozen=True)
class Drain:
    """What the instances of one pool that leave still have; `load` None: no router has said.
    `since`: when the first of them was asked to leave."""

    load: InstanceLoad | None = None
    since: datetime | None = None

    @property
    def row(self) -> dict[str, Any]:
        """The fields of a status; those that are not known are not there."""
        found: dict[str, Any] = {}
        if self.load is not None:
            found["drainingRequests"] = min(_MOST, self.load.requests)
            found["drainingKvLeases"] = min(_MOST, self.load.kv_leases)
        if self.since is not None:
            found["drainingSince"] = f"{self.since:%Y-%m-%dT%H:%M:%SZ}"
        return found


def drains_of(pods: Iterable[Raw], loads: Mapping[str, InstanceLoad]) -> dict[str, Drain]:
    """By pool, for pools of which an instance leaves."""
    found: dict[str, list[tuple[InstanceLoad | None, datetime | None]]] = {}
    for pod in pods:
        key = key_of(pod)
        if key is None or not is_leaving(pod) or is_finished(pod):
            continue
        if is_of_workload(pod, key):
            found.setdefault(key[0], []).append((loads.get(name_of(pod)), _asked(pod)))
    return {pool: _sum(each) for pool, each in sorted(found.items())}


def _sum(each: Sequence[tuple[InstanceLoad | None, datetime | None]]) -> Drain:
    loads = [load for load, _ in each if load is not None]
    first = min((at for _, at in each if at is not None), default=None)
    if not loads:
        return Drain(None, first)
    total = InstanceLoad(sum(x.requests for x in loads), sum(x.kv_leases for x in loads))
    return Drain(total, first)


def drains_text(drains: Mapping[str, Drain]) -> str:
    """The same in words, of the pools of which routers have said; empty where none has."""
    parts: list[str] = []
    for pool, drain in drains.items():
        if drain.load is not None:
            since = f", the oldest since {drain.since:%H:%M:%SZ}" if drain.since else ""
            parts.append(f"{pool}: {load_text(drain.load)}{since}")
    return "; ".join(parts)


def load_text(load: InstanceLoad) -> str:
    """3 requests, 2 KV leases"""
    return f"{load.requests} requests, {load.kv_leases} KV leases"


def leaving_field(instances: int, drains: Iterable[Drain]) -> dict[str, str]:
    """For `kubectl get`: how many instances leave, and what they have; empty: none."""
    if not instances:
        return {}
    loads = [drain.load for drain in drains if drain.load is not None]
    if not loads:
        return {"leaving": str(instances)}
    total = InstanceLoad(sum(x.requests for x in loads), sum(x.kv_leases for x in loads))
    return {"leaving": f"{instances}: {load_text(total)}"}


def _asked(pod: Raw) -> datetime | None:
    """When it was asked to leave: its deletionTimestamp is the deadline."""
    deadline = moment(text(pod, "metadata", "deletionTimestamp"))
    grace_s = count(pod, "metadata", "deletionGracePeriodSeconds")
    return None if deadline is None else deadline - timedelta(seconds=grace_s)

"""What the instances of a fleet that leave still have: counts by pool, for Progressing's message.

Routers say how many requests and KV leases an instance has (`GET /instances`); since when a pod
leaves, its deletion says. Each router counts its own requests, so that they add up; the engine's
own numbers are the same at each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

from xpyd_operator.status.children import (
    Raw,
    count,
    is_leaving,
    key_of,
    moment,
    name_of,
    text,
)

_MOST = 2**31 - 1


class InstanceLoad(NamedTuple):
    """Requests that an instance has, and prompts whose KV it holds for, or moves with, others."""

    requests: int
    kv_leases: int


class _Load(msgspec.Struct, frozen=True):
    running: int = 0
    waiting: int = 0
    kv_leases: int = 0


class _Row(msgspec.Struct, frozen=True):
    instance: str
    load: _Load = _Load()
    in_flight: int = 0


class _Answer(msgspec.Struct, frozen=True):
    instances: list[_Row] = []


_decoder = msgspec.json.Decoder(_Answer)


def read_loads(bodies: Iterable[bytes]) -> dict[str, InstanceLoad]:
    """By instance, from what routers answer to GET /instances; what is none is left out."""
    in_flight: dict[str, int] = {}
    own: dict[str, InstanceLoad] = {}
    for body in bodies:
        try:
            answer = _decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        for row in answer.instances:
            in_flight[row.instance] = in_flight.get(row.instance, 0) + max(0, row.in_flight)
            before = own.get(row.instance, InstanceLoad(0, 0))
            running = max(before.requests, row.load.running + row.load.waiting)
            own[row.instance] = InstanceLoad(running, max(before.kv_leases, row.load.kv_leases))
    return {
        name: InstanceLoad(min(_MOST, max(in_flight[name], load.requests)), load.kv_leases)
        for name, load in own.items()
    }


def drains_text(pods: Iterable[Raw], loads: Mapping[str, InstanceLoad]) -> str:
    """By pool, what the instances that leave still have, and since when the first of them leaves;
    empty where no router has said."""
    found: dict[str, list[tuple[InstanceLoad, datetime | None]]] = {}
    for pod in pods:
        load, key = loads.get(name_of(pod)), key_of(pod)
        if load is not None and key is not None and is_leaving(pod):
            found.setdefault(key[0], []).append((load, _asked(pod)))
    parts: list[str] = []
    for pool in sorted(found):
        requests = sum(load.requests for load, _ in found[pool])
        leases = sum(load.kv_leases for load, _ in found[pool])
        first = min((at for _, at in found[pool] if at is not None), default=None)
        since = f", the oldest since {first:%H:%M:%SZ}" if first else ""
        parts.append(f"{pool}: {requests} requests, {leases} KV leases{since}")
    return "; ".join(parts)


def _asked(pod: Raw) -> datetime | None:
    """When it was asked to leave: its deletionTimestamp is the deadline."""
    deadline = moment(text(pod, "metadata", "deletionTimestamp"))
    grace_s = count(pod, "metadata", "deletionGracePeriodSeconds")
    return None if deadline is None else deadline - timedelta(seconds=grace_s)

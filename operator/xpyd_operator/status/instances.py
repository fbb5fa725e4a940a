"""What a router answers to GET /instances, as far as the operator and its commands read it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, NamedTuple

import msgspec

_Text = Annotated[str, msgspec.Meta(max_length=512)]


class InstanceLoadRow(msgspec.Struct, frozen=True):
    """What an instance says of itself in its heartbeats."""

    running: int = 0
    waiting: int = 0
    kv_leases: int = 0
    free_blocks: int = 0
    total_blocks: int = 0


class InstanceRow(msgspec.Struct, frozen=True):
    """One instance as a router has it. `in_flight`: that router's requests; `unpaired`: why it is
    in no pair though the other side is there, empty also of a router that does not say; `replicas`:
    those that serve and stay, 0: it lists none, or the router does not say; `scaling_problem`: why
    it has not as many as it should."""

    instance: _Text = ""
    type: _Text = ""
    http_address: _Text = ""
    state: _Text = ""
    load: InstanceLoadRow = InstanceLoadRow()
    in_flight: int = 0
    unpaired: _Text = ""
    replicas: int = 0
    scaling_problem: _Text = ""

    @property
    def requests(self) -> int:
        """Its requests, of whichever of the two counts is larger."""
        return max(0, self.in_flight, self.load.running + self.load.waiting)


class ProbeRow(msgspec.Struct, frozen=True):
    """The last probe of a P and a D."""

    prefill: _Text = ""
    decode: _Text = ""
    cause: _Text = ""
    detail: _Text = ""
    seconds: float = 0.0


class InstancesAnswer(msgspec.Struct, frozen=True):
    """The whole answer: the probes that failed, and of those that passed the slowest."""

    instances: tuple[InstanceRow, ...] = ()
    kv_problems: Annotated[tuple[ProbeRow, ...], msgspec.Meta(max_length=64)] = ()
    kv_slowest: ProbeRow | None = None


_decoder = msgspec.json.Decoder(InstancesAnswer)


def read_answer(body: bytes) -> InstancesAnswer | None:
    """None: it is no such answer."""
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def read_rows(body: bytes) -> tuple[InstanceRow, ...] | None:
    """The instances alone; None: it is no such answer."""
    answer = read_answer(body)
    return None if answer is None else answer.instances


class ReplicaCount(NamedTuple):
    """The replicas that an instance has, and why these are not as many as it should have."""

    replicas: int
    problem: str = ""


def replica_counts(found: Iterable[InstanceRow]) -> dict[str, ReplicaCount]:
    """By instance, from what routers answer; those that list no replicas are left out."""
    return {
        row.instance: ReplicaCount(row.replicas, row.scaling_problem)
        for row in found
        if row.instance and row.replicas > 0
    }

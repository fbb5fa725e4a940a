"""Which of several operators works: a Lease of coordination.k8s.io, decided without a clock or I/O.

A candidate takes a Lease that nobody has held since it looked, or that did not change for its
duration by the candidate's own clock. The leader renews it, and stops by itself when two thirds of
its duration are over since it began the last renewal that succeeded. So times of different machines
are never compared; there are never two leaders while their clocks run less than half as fast again
as each other's. See docs/adr/0101.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from xpyd_operator.controller.decision.kinds import LEASE, Obj
from xpyd_operator.manifests.names import ANNOTATION_OPERATOR
from xpyd_operator.status.children import count, fields, short, text

OWNER_GONE_S = 300.0
"""An owner whose Lease is absent or unchanged for so long is gone, and its fleets may be taken."""


@dataclass(frozen=True)
class Terms:
    """How long a Lease lasts, in seconds."""

    lease_s: float = 15.0

    @property
    def give_up_s(self) -> float:
        """So long after the begin of its last renewal a leader stops."""
        return self.lease_s * 2 / 3

    @property
    def retry_s(self) -> float:
        """Between two attempts."""
        return self.lease_s / 7.5


@dataclass(frozen=True)
class _Record:
    """What of a Lease changes with each renewal."""

    holder: str = ""
    renewed: str = ""
    transitions: int = 0


def _record_of(lease: Obj | None) -> _Record:
    spec = fields(lease, "spec")
    renewed, transitions = text(spec, "renewTime"), count(spec, "leaseTransitions")
    return _Record(text(spec, "holderIdentity"), renewed, transitions)


class Election:
    """One candidate. `now`: its own steady clock; `wall`: RFC 3339, only written down."""

    def __init__(self, identity: str, namespace: str, name: str, terms: Terms) -> None:
        self.identity = identity
        self.terms = terms
        self._metadata = {"namespace": namespace, "name": name}
        self._lease: Obj | None = None
        self._record = _Record()
        self._since = float("-inf")
        self._renewed_at = float("-inf")

    @property
    def place(self) -> tuple[str, str]:
        """Namespace and name of the Lease."""
        return self._metadata["namespace"], self._metadata["name"]

    @property
    def holder(self) -> str:
        """Who held the Lease when it was last read; "": nobody."""
        return self._record.holder

    def leads(self, now: float) -> bool:
        """Whether this candidate may begin a write."""
        return now < self._renewed_at + self.terms.give_up_s

    def write_s(self, now: float) -> float:
        """Seconds within which a write that begins now must be over; 0: none may begin."""
        return self._renewed_at + self.terms.lease_s - now if self.leads(now) else 0.0

    def heard(self, lease: Obj | None, now: float) -> None:
        """The Lease as the API server has it, None: there is none."""
        record = _record_of(lease)
        if record != self._record or self._lease is None:
            self._record, self._since = record, now
        self._lease = lease

    def proposal(self, now: float, wall: str) -> tuple[bool, Obj] | None:
        """The Lease to write, and whether it is a new one; None: another candidate holds it."""
        held, spec = self._record.holder, fields(self._lease, "spec")
        duration_s = count(spec, "leaseDurationSeconds") or self.terms.lease_s
        mine = held == self.identity
        if held and not mine and now < self._since + duration_s:
            return None
        fresh: dict[str, Any] = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": ceil(self.terms.lease_s),
            "renewTime": wall,
        }
        if not mine:
            fresh |= {"acquireTime": wall, "leaseTransitions": self._record.transitions + 1}
        return self._lease is None, self._written(fresh)

    def farewell(self) -> Obj | None:
        """The Lease to write so that another candidate begins at once; None: it is not ours."""
        if self._record.holder != self.identity:
            return None
        return self._written({"holderIdentity": ""})

    def _written(self, spec: dict[str, Any]) -> Obj:
        metadata = {**self._metadata}
        if self._lease is not None:
            # An update of a Lease that another candidate took meanwhile is a Conflict.
            metadata["resourceVersion"] = str(self._lease["metadata"]["resourceVersion"])
        whole = {"apiVersion": LEASE.api_version, "kind": LEASE.name}
        return {**whole, "metadata": metadata, "spec": spec}

    def won(self, lease: Obj, *, begun: float, now: float) -> None:
        """The write of a proposal succeeded; `begun`: when it was sent."""
        self.heard(lease, now)
        if self._record.holder == self.identity:
            self._renewed_at = begun

    def left(self) -> None:
        """This candidate stops: it leads no more, whatever it has renewed."""
        self._renewed_at = float("-inf")


class OwnerWatch:
    """For how long the Leases of other releases have not changed."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[_Record | None, float]] = {}

    def is_gone(self, owner: str, lease: Obj | None, now: float) -> bool:
        """Whether the owner has been away for long. `lease`: of now, None: there is none."""
        record = None if lease is None else _record_of(lease)
        before = self._seen.get(owner)
        if before is None or before[0] != record:
            self._seen[owner] = (record, now)
            return False
        return now - before[1] >= OWNER_GONE_S


def operator_of(document: Obj) -> str:
    """The release that reconciles the fleet, by its mark; "": none has marked it."""
    return short(text(document, "metadata", "annotations", ANNOTATION_OPERATOR))

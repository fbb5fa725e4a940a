"""What policies work with: what a request wants, its candidates, what a policy must offer. Pure.

`request.attempt` asks `pairs.PairPolicy` once per attempt: it knows which instances may work
together, and leaves to a SidePolicy which one of a side is taken.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from xpyd_router.fleet.instances import Instance, InstanceKey, Lost
from xpyd_router.fleet.loads import Load, LoadTable

SideKind = Literal["P", "D", "A"]
PrefixMark = tuple[int, bytes]
"""A beginning of a prompt: about how many tokens long, and its digest."""


class Slo(NamedTuple):
    """What a request may take; None: no objective."""

    ttft_s: float | None = None
    """Time from the request to its first token; in a Want what is left of it, maybe below 0."""
    itl_s: float | None = None
    """Between two tokens, in the mean of an answer (its TPOT)."""


NO_SLO = Slo()


class Want(msgspec.Struct, frozen=True, gc=False):
    """What a request needs of its instances. Made for every try: a Struct takes a twelfth of a
    frozen dataclass's time. It holds nothing that could refer to it.
    """

    model: str
    alone: Literal["P", "D"] | None = None
    """The side that serves the request alone, where its instances can (`serves_alone`)."""
    exclude: frozenset[InstanceKey] = frozenset()
    """Places that failed it already."""
    continue_at: str | None = None
    """The client has tokens already: only instances that go on as this may go on."""
    prompt_tokens: int = 0
    """About how long the prompt is; 0 where it is unknown."""
    session: str = ""
    """What the client calls its conversation; only read where a policy needs it."""
    marks: tuple[PrefixMark, ...] = ()
    """Beginnings of the prompt, shortest first; only made where a policy needs them."""
    output_tokens: int = 0
    """About how long the answer will be; 0 where it is unknown."""
    slo: Slo = NO_SLO
    """What it may take; only set where the paces of instances are learned."""
    share: Literal["new", "old", ""] = ""
    """The side of a canary that serves it, where it has one already (see `canary`)."""


@dataclass(slots=True, eq=False)
class Candidate:
    """One instance that may be taken, and its load. Never changed."""

    instance: Instance
    load: Load


@dataclass(slots=True, eq=False)
class Side:
    """The candidates for one place, in the order of their addresses. Never changed.

    `rota` names the competition: equal where the same kinds of instances compete for the same
    place, also when one of them came or went, so that turns may go on.
    """

    kind: SideKind
    candidates: tuple[Candidate, ...]
    rota: tuple[str, ...]


@dataclass(frozen=True)
class PolicyContext:
    """What a policy is made of."""

    kind: SideKind
    """The side that it chooses on."""
    loads: LoadTable
    random: Callable[[], float]
    """Evenly distributed in [0, 1)."""
    first_turn: int = 0
    """Where turns begin: each process of a router at another place."""


class SidePolicy(Protocol):
    """Chooses one instance of a side. One object for each side of a router; inherit from this.

    Every policy gives a candidate whose `load.weight` is below 1 less work than its peers.
    """

    needs_session: bool = False
    """Whether it reads Want.session."""
    needs_marks: bool = False
    """Whether it reads Want.marks."""
    needs_paces: bool = False
    """Whether it reads Load.pace and Want.slo."""

    @abstractmethod
    def choose(self, side: Side, want: Want) -> Candidate:
        """Choose one of `side.candidates`; there is at least one."""

    def placed(self, instance: Instance, want: Want) -> None:
        """The request goes to `instance`, which this policy chose."""

    def cached_tokens(self, key: InstanceKey, want: Want) -> int:
        """About how many tokens of the prompt the instance's cache has, as far as is known."""
        del key, want
        return 0

    def forget(self, key: InstanceKey) -> None:
        """The instance left the fleet for good: drop what is known of it."""


SideFactory = Callable[[PolicyContext], SidePolicy]
"""What an entry point of the group `xpyd.router.policies` names; a SidePolicy class may be one."""


class PairGroup(NamedTuple):
    """Any P of it may send KV to any D of it; neither side is empty."""

    name: str
    """Of the snapshot's group."""
    prefill: Side
    decode: Side


class Sides(NamedTuple):
    """The instances that may serve one model, by the place that they may take."""

    groups: tuple[PairGroup, ...]
    by_decode: Mapping[InstanceKey, PairGroup]
    """The group of each D by its place, where there are several groups."""
    decode: Side
    """The Ds of all groups."""
    alone_on_prefill: Side
    """Ps that can serve a whole request, also those without a D."""
    alone_on_decode: Side
    """Ds that can serve a whole request, also those without a P."""
    aggregated: Side


OnNoPrefill = Literal["Queue", "PrefillOnDecode", "Reject"]
ON_NO_PREFILL: tuple[OnNoPrefill, ...] = ("Queue", "PrefillOnDecode", "Reject")
"""Wait for instances; let D compute the prompt, and wait where there is no D; do not wait."""
OnNoDecode = Literal["Queue", "DecodeOnPrefill", "Reject"]
ON_NO_DECODE: tuple[OnNoDecode, ...] = ("Queue", "DecodeOnPrefill", "Reject")
"""The same, with P that makes the whole answer."""


class WithoutPair(NamedTuple):
    """What a request does that finds no pair (docs/adr/0113)."""

    on_no_prefill: OnNoPrefill = "Queue"
    on_no_decode: OnNoDecode = "Queue"

    def wishes(self, want: Want) -> tuple[Want, ...]:
        """What to ask the policy for where `want` found nothing, one after the other."""
        sides: list[Literal["P", "D"]] = []
        if self.on_no_prefill == "PrefillOnDecode":
            sides.append("D")
        if self.on_no_decode == "DecodeOnPrefill":
            sides.append("P")
        return tuple(replace(want, alone=side) for side in sides if side != want.alone)

    def rejects(self, lost: Lost) -> bool:
        """Whether a request is not to wait where this side is missing."""
        if lost == "decode":
            return self.on_no_decode == "Reject"
        return self.on_no_prefill == "Reject" or (lost == "both" and self.on_no_decode == "Reject")


Pairing = Literal["SameRevision", "Compatible"]
PAIRINGS: tuple[Pairing, ...] = ("SameRevision", "Compatible")
"""Pairs of one fleet revision alone; all whose KV is compatible."""


KvVerify = Literal["strict", "report"]
KV_VERIFY: tuple[KvVerify, ...] = ("strict", "report")
"""Only pairs of which the last probe passed get requests; all do, and what probes find is shown."""


class Forecast(NamedTuple):
    """None where the instance is unknown."""

    ttft_s: float | None
    """Time from the pick to the first token."""
    itl_s: float | None
    """Between two tokens, in the mean."""


def forecast(first: Load, last: Load, prefill_tokens: int) -> Forecast:
    """A forecast for one request more: `first` computes so many tokens of its prompt, `last` makes
    its tokens. Neither counts it yet.
    """
    line, gap = first.pace.first, last.pace.gap
    return Forecast(
        line.at(first.queued_tokens + prefill_tokens) if line.is_known else None,
        gap.at(last.active + 1) if gap.is_known else None,
    )

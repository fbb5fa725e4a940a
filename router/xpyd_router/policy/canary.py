"""Which share of new requests goes to the instances of a revision on trial (docs/adr/0105). Pure.

The operator writes the share and the revisions into a file, `canary.CanaryWatch` reads it, and
`pairs.PairPolicy` asks `Shares` for each request. A request is served by instances of one side
alone, new or old, wherever that side has a pair; no request fails because of the canary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from xpyd_router.fleet.instances import Group, Instance, ModelInstances

Share = Literal["new", "old", ""]
"""The side that serves a request; "": there is no canary, or no side was asked for."""
OTHER: dict[Share, Share] = {"new": "old", "old": "new"}
_GOLDEN = (5**0.5 - 1) / 2
_Revisions = Annotated[tuple[str, ...], msgspec.Meta(max_length=64)]


class Canary(msgspec.Struct, frozen=True, rename="camel"):
    """What the file says. Revisions are named `pool/revision`, as beats name them.

    A role without revisions is the same in both: its instances serve requests of both sides.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    """Of this canary and its step; figures are counted anew under another name."""
    weight_percent: Annotated[int, msgspec.Meta(ge=1, le=99)]
    prefill: _Revisions = ()
    decode: _Revisions = ()
    aggregated: _Revisions = ()

    def is_new(self, instance: Instance) -> bool:
        """Whether the instance is of the revision on trial."""
        beat = instance.beat
        return f"{beat.pool}/{beat.revision}" in self._of(beat.type)

    def side(self, found: ModelInstances, share: Share) -> ModelInstances:
        """The instances that serve requests of a side."""
        if not share:
            return found

        def kept(among: Sequence[Instance]) -> tuple[Instance, ...]:
            if share == "old":
                return tuple(one for one in among if not self.is_new(one))
            return tuple(one for one in among if not self._of(one.beat.type) or self.is_new(one))

        groups = (Group(g.name, kept(g.prefill), kept(g.decode)) for g in found.groups)
        return ModelInstances(tuple(groups), kept(found.aggregated), found.alone)

    def _of(self, kind: str) -> tuple[str, ...]:
        return {"P": self.prefill, "D": self.decode}.get(kind, self.aggregated)


class Shares:
    """Divides requests by turns of the golden ratio: of any thousand a few at most are on the wrong
    side, and no rhythm of clients, such as that each second one streams, falls on one side."""

    def __init__(self) -> None:
        self._turn = 0

    def draw(self, canary: Canary) -> Share:
        """The side of the next new request, where both have a pair."""
        self._turn += 1
        return "new" if self._turn * _GOLDEN % 1.0 < canary.weight_percent / 100 else "old"

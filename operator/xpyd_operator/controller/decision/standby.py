"""The condition by which a release says that it stands by, on a fleet that another one reconciles.

The release that stands by writes the row, seldom, and with the version that it looked at, so that
no word of the owner is lost. The owner carries the row from status to status, and leaves it out
where it is its own, or did not change for GONE_S by the owner's clock: who wrote it is gone, or
does not serve the fleet any more. So neither undoes what the other writes. See docs/adr/0120.
"""

from __future__ import annotations

from math import inf

from xpyd_operator.controller.decision.kinds import Obj
from xpyd_operator.status.children import Raw, condition, count, moment, rows, text

OTHER_RELEASE = "OtherRelease"
"""The type of the condition."""
STANDS_BY = "StandsBy"
"""Its reason, and that of the Event."""
REFRESH_S = 600.0
"""So often a release that stands by says it again."""
GONE_S = 1500.0
"""A row that did not change for so long is nobody's: two times it should have changed."""
_AGAIN_S = 30.0
"""The first pause before a row is written again that the owner's status left out. Each further one
is twice as long: the owner may be a version that knows no such row."""
_NAMELESS = "an operator without --release"


def words(owner: str, own: str, fleet: str) -> str:
    """What the release `own` says of a fleet that `owner` reconciles."""
    mark = f"xpyd.dev/operator={own or 'NAMESPACE/NAME'}"
    return (
        f"{owner} reconciles this fleet; {own or _NAMELESS} stands by. To hand it over: "
        f"kubectl annotate --overwrite fleet {fleet} {mark}"
    )


class Standby:
    """What one process has seen of a fleet's row. `now`: its own steady clock."""

    def __init__(self) -> None:
        self._row: Raw = {}
        self._since = -inf
        self._wrote_at = -inf
        self._losses = 0

    def _seen_s(self, row: Raw, now: float) -> float:
        """For how long the row has been as it is."""
        if row != self._row:
            self._row, self._since = row, now
        return now - self._since

    def kept(self, document: Obj, own: str, now: float) -> tuple[Raw, float]:
        """The row that the owner's next status has, and for how many seconds; empty: none."""
        row = condition(document, OTHER_RELEASE)
        left_s = GONE_S - self._seen_s(row, now)
        if not row or _is_of(row, own) or left_s <= 0:
            return {}, inf
        return row, left_s

    def patch(self, document: Obj, own: str, said: str, now: float, wall: str) -> Obj | None:
        """The merge patch of the status by which the release `own` says `said`; None: it is there,
        another release says so of itself, or it is too early. `wall`: RFC 3339."""
        row = condition(document, OTHER_RELEASE)
        seen_s, is_own = self._seen_s(row, now), _is_of(row, own)
        is_news = not text(row, "message").endswith(said) if is_own else not row
        if not is_news and seen_s < (REFRESH_S if is_own else GONE_S):
            return None
        if now - self._wrote_at < min(REFRESH_S, _AGAIN_S * 2**self._losses):
            return None
        self._losses = self._losses + 1 if self._wrote_at > -inf and not is_own else 0
        self._wrote_at = now
        since = text(row, "lastTransitionTime")
        fresh = {
            "type": OTHER_RELEASE,
            "status": "True",
            "reason": STANDS_BY,
            "message": f"{_start(own)}{wall}: {said}",
            "lastTransitionTime": since if is_own and moment(since) is not None else wall,
            "observedGeneration": count(document, "metadata", "generation"),
        }
        others = (one for one in rows(document, "status", "conditions") if one is not row)
        metadata = {key: document["metadata"][key] for key in ("uid", "resourceVersion")}
        return {"metadata": metadata, "status": {"conditions": [*others, fresh]}}

    def crossed(self) -> None:
        """The owner wrote while this release did: the row is due at the next look."""
        self._wrote_at = -inf


def _start(own: str) -> str:
    return f"{own or _NAMELESS} said at "


def _is_of(row: Raw, own: str) -> bool:
    """Whether this release wrote the row."""
    return text(row, "message").startswith(_start(own))

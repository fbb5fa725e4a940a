"""What `xpyd rollout` says of a fleet: how far it is, and its history.

Objects are as the API server returns them, so no field of theirs is sure to be there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, timedelta
from typing import Any, Literal

from xpyd_core.errors import UserError
from xpyd_operator.document.load import parse_object
from xpyd_operator.manifests.names import ANNOTATION_PROMOTE, revision_name
from xpyd_operator.manifests.volumes import model_in_pod
from xpyd_operator.plan.revisions import record_of, revision_id
from xpyd_operator.status.canary import promoted_by
from xpyd_operator.status.children import (
    at,
    condition,
    count,
    fields,
    is_true,
    moment,
    rows,
    seconds_between,
    short,
    text,
)
from xpyd_operator.status.upgrades import (
    Defaults,
    Undo,
    asked_restart,
    asked_undo,
    defaults_of,
)

Json = dict[str, Any]

MOST_VALUE = 60
"""Characters of a value in a table."""
_HELD = frozenset({"InvalidSpec", "InvalidTemplate"})
_GIVES_UP = _HELD | {"ProgressDeadlineExceeded", "CanaryFailed"}
"""Reasons of Degraded that no more waiting ends; others may, while pods are replaced."""


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their longest text."""
    every = [heads, *lines]
    widths = [max(len(line[i]) for line in every) for i in range(len(heads))]
    texts = (
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) for line in every
    )
    return "".join(f"{line.rstrip()}\n" for line in texts)


@dataclass(frozen=True)
class Outcome:
    """How far a rollout is. `is_degraded`: something is wrong that it may not get over."""

    word: Literal["Complete", "Progressing", "Paused", "Failed"]
    message: str
    is_degraded: bool = False


def outcome_of(fleet: Json) -> Outcome:
    """How far the rollout of the fleet's document is."""
    if count(fleet, "status", "observedGeneration") < count(fleet, "metadata", "generation"):
        return Outcome("Progressing", "the operator has not seen the document yet")
    moves, degraded = condition(fleet, "Progressing"), condition(fleet, "Degraded")
    if _waits_for_undo(fleet) and text(degraded, "reason") not in _HELD:
        return Outcome("Progressing", "the operator has not taken up the undo yet")
    if _waits_for_promotion(fleet):
        return Outcome("Progressing", "the operator has not taken up the promotion yet")
    message, is_degraded = text(moves, "message"), is_true(fleet, "Degraded")
    if is_degraded:
        message = f"{message}; {text(degraded, 'reason')}: {text(degraded, 'message')}"
    if is_degraded and text(degraded, "reason") in _GIVES_UP:
        return Outcome("Failed", message, is_degraded)
    if text(moves, "reason") == "Paused":
        return Outcome("Paused", message, is_degraded)
    word = "Complete" if text(moves, "reason") == "Settled" else "Progressing"
    return Outcome(word, message, is_degraded)


def _waits_for_undo(fleet: Json) -> bool:
    """Whether an undo brings images back that the operator does not say yet: it is no edit, so that
    no generation shows it."""
    undo, kept = asked_undo(fleet), defaults_of(fields(fleet, "status"))
    if not undo.record or kept is None or kept.undo == undo.annotation:
        return False
    return undo.holds(kept.restarted_at, asked_restart(fleet))


def _waits_for_promotion(fleet: Json) -> bool:
    """Whether a canary that failed was promoted: by an annotation, too."""
    canary = fields(fleet, "status", "canary")
    asked = promoted_by(text(fleet, "metadata", "annotations", ANNOTATION_PROMOTE))
    return text(canary, "phase") == "Failed" and asked == text(canary, "revision")


def next_restart(fleet: Json, now: str) -> str:
    """The time of a restart at `now`: later than each before it, by whichever clock those were, for
    only a later one asks for the operator's defaults and ends an undo."""
    obeyed = text(fleet, "status", "defaults", "restartedAt")
    times = map(moment, (asked_restart(fleet), asked_undo(fleet).restarted_at, obeyed))
    last, at = max((one for one in times if one), default=None), moment(now)
    if last is None or (at is not None and at > last):
        return now
    after = last.astimezone(UTC).replace(microsecond=0) + timedelta(seconds=1)
    return after.strftime("%Y-%m-%dT%H:%M:%SZ")


def status_json(fleet: Json) -> Json:
    """The fleet's rollout for machines."""
    outcome = outcome_of(fleet)
    names = ("name", "revision", "replicas", "readyReplicas", "updatedReplicas", "drainingReplicas")
    pools = [{n: row.get(n) for n in names if n in row} for row in rows(fleet, "status", "pools")]
    paused = at(fleet, "spec", "rollout", "paused") is True
    canary = fields(fleet, "status", "canary")
    return {
        "fleet": text(fleet, "metadata", "name"),
        "outcome": outcome.word,
        "message": outcome.message,
        "degraded": outcome.is_degraded,
        "paused": paused,
        "pools": pools,
        **({"canary": dict(canary)} if canary else {}),
    }


def revision_on_trial(fleet: Json) -> str:
    """The revision that a canary of the fleet is about. UserError where there is none."""
    found = on_trial(fleet)
    if not found:
        raise UserError("no canary is under way: see `xpyd rollout status`")
    return found


def on_trial(fleet: Json | None) -> str:
    row = fields(fleet or {}, "status", "canary")
    return text(row, "revision") if text(row, "phase") in ("Running", "Failed") else ""


def _canary_text(row: Json) -> str:
    """A line about a revision on trial, as far as the outcome's message does not have it."""
    parts = [f"{text(row, 'phase')}, step {count(row, 'step')}"]
    if text(row, "phase") == "Running":
        parts.append(f"{count(row, 'weightPercent')} % of new requests")
        parts.append(f"{count(row, 'requests')} requests, {count(row, 'failed')} failed")
        for name, what in (("refused", "refused (4xx)"), ("recomputed", "computed again by D")):
            if name in row:
                parts.append(f"{count(row, name)} {what}")
        for name, what in (("ttftMilliseconds", "TTFT"), ("itlMilliseconds", "ITL")):
            if name in row:
                parts.append(f"{what} p95 {count(row, name)} ms")
    said = f"; {text(row, 'said')}" if text(row, "said") else ""
    return f"Canary {text(row, 'revision')}: {', '.join(parts)}{said}\n"


def status_text(fleet: Json) -> str:
    """The same for people."""
    found = status_json(fleet)
    lines = [
        (
            text(row, "name"),
            text(row, "revision") or "-",
            f"{count(row, 'updatedReplicas')}/{count(row, 'replicas')}",
            str(count(row, "readyReplicas")),
            str(count(row, "drainingReplicas")),
        )
        for row in found["pools"]
    ]
    shown = table(("POOL", "REVISION", "NEW", "READY", "LEAVING"), lines)
    canary = _canary_text(found["canary"]) if "canary" in found else ""
    return f"{shown}{canary}{found['outcome']}: {found['message']}\n"


@dataclass(frozen=True)
class Revision:
    """One entry of a fleet's history. `record`: what of the document makes pods; `defaults`: what
    the operator added, None: an older operator did not record it."""

    number: int
    name: str
    created: str
    record: Json
    current: bool
    defaults: Defaults | None = None

    @property
    def images(self) -> tuple[str, str]:
        """The image of engines and that of routers."""
        return images_of(self.record, self.defaults, "(not recorded)")


def history_of(fleet: Json, found: Iterable[Json]) -> tuple[Revision, ...]:
    """The fleet's revisions by number; `found`: ControllerRevisions with its label."""
    uid = text(fleet, "metadata", "uid")
    mine = [one for one in found if any(o.get("uid") == uid for o in _owners(one))]
    mine.sort(key=lambda one: count(one, "revision"))
    current = _current(fleet, mine)
    revisions: list[Revision] = []
    for one in mine:
        record, name = dict(fields(one, "data", "spec")), text(one, "metadata", "name")
        created, defaults = (
            text(one, "metadata", "creationTimestamp"),
            defaults_of(fields(one, "data")),
        )
        is_current = name == current
        revisions.append(
            Revision(count(one, "revision"), name, created, record, is_current, defaults)
        )
    return tuple(revisions)


def _current(fleet: Json, records: Sequence[Json]) -> str:
    """The name of the record of the document as it is; of one that this version names otherwise the
    last that says the same; "" where there is none."""
    made_with, now = defaults_of(fields(fleet, "status")), record_of(fields(fleet, "spec"))
    known = [text(one, "metadata", "name") for one in records]
    for defaults in (made_with.of_pods if made_with else None, None):
        if (name := _name_of(fleet, defaults)) in known:
            return name
    same = [text(r, "metadata", "name") for r in records if dict(fields(r, "data", "spec")) == now]
    return same[-1] if same else ""


def _owners(obj: Json) -> Sequence[Mapping[str, Any]]:
    return rows(obj, "metadata", "ownerReferences")


def _name_of(fleet: Json, defaults: Json | None) -> str:
    """The name of the record of the document with these defaults; "" where it has mistakes."""
    try:
        parsed = parse_object(fleet)
    except UserError:
        return ""
    return revision_name(parsed.name, revision_id(parsed, model_in_pod(parsed), defaults))


def images_of(spec: Mapping[str, Any], defaults: Defaults | None, unknown: str) -> tuple[str, str]:
    """The images of engines and routers of a document, as far as its templates name no others."""
    worker = defaults.worker_image if defaults else unknown
    return text(spec, "engine", "image") or worker, defaults.router_image if defaults else unknown


def history_text(history: Sequence[Revision], now: str) -> str:
    """A table of the history."""
    lines: list[tuple[str, ...]] = []
    for one in history:
        args = " ".join(str(arg) for arg in one.record.get("engine", {}).get("args") or ())
        mark = "*" if one.current else ""
        age = _age(seconds_between(one.created, now))
        lines.append((str(one.number), mark, age, *one.images, short(args, MOST_VALUE) or "-"))
    return table(("REVISION", "CURRENT", "AGE", "IMAGE", "ROUTER", "ARGS"), lines)


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def target_of(history: Sequence[Revision], to: int | None) -> Revision:
    """The revision to go back to: `to`, else the newest that the document is not at."""
    others = [one for one in history if not one.current]
    known = ", ".join(str(one.number) for one in others) or "none"
    if to is None:
        if not others:
            raise UserError("there is no earlier revision: see `xpyd rollout history`")
        return others[-1]
    found = next((one for one in history if one.number == to), None)
    if found is None:
        raise UserError(f"--to {to}: there is no such revision; there are: {known}")
    if found.current:
        raise UserError(f"--to {to}: the document is at that revision; others: {known}")
    return found


def undo_of(fleet: Json, to: Revision) -> Undo | None:
    """The wish for what the operator added to the revision; None: the fleet has that, or nobody
    knows it."""
    kept = defaults_of(fields(fleet, "status"))
    if kept is None or to.defaults is None:
        return None
    # One that is not taken up yet would still bring its own.
    if kept.of_pods == to.defaults.of_pods and not _waits_for_undo(fleet):
        return None
    asked = (asked_restart(one) for one in (fleet, {"spec": to.record}))
    times = [at for at in (kept.restarted_at, *asked) if moment(at)]
    return Undo(to.name, max(times, key=lambda at: moment(at) or 0.0, default=""))

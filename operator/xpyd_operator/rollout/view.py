"""What `xpyd rollout` says of a fleet: how far it is, its history, and what an edit would do.

Objects are as the API server returns them, so no field of theirs is sure to be there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal

from xpyd_core.errors import UserError
from xpyd_operator.document.load import parse_object
from xpyd_operator.document.rollout import Canary
from xpyd_operator.manifests.names import revision_name
from xpyd_operator.manifests.refusals import document_mistakes
from xpyd_operator.manifests.volumes import model_in_pod
from xpyd_operator.plan.fleet import pool_replicas
from xpyd_operator.plan.revisions import OF_NOW, differences, record_of, revision_id
from xpyd_operator.plan.template import fleet_want
from xpyd_operator.plan.values import ROUTER, PoolSeen, PoolWant
from xpyd_operator.status.children import (
    at,
    condition,
    count,
    fields,
    is_true,
    rows,
    seconds_between,
    short,
    text,
)
from xpyd_operator.status.upgrades import (
    UP_TO_DATE,
    Defaults,
    asked_restart,
    defaults_of,
    next_defaults,
)

Json = dict[str, Any]

_MOST_VALUE = 60
_GIVES_UP = frozenset(
    {"InvalidSpec", "InvalidTemplate", "ProgressDeadlineExceeded", "CanaryFailed"}
)
"""Reasons of Degraded that no more waiting ends; others may, while pods are replaced."""
_OF_OPERATOR = "the operator's defaults"
"""Why a pool has a new revision where no field of the document makes it."""


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
    message, is_degraded = text(moves, "message"), is_true(fleet, "Degraded")
    if is_degraded:
        message = f"{message}; {text(degraded, 'reason')}: {text(degraded, 'message')}"
    if is_degraded and text(degraded, "reason") in _GIVES_UP:
        return Outcome("Failed", message, is_degraded)
    if text(moves, "reason") == "Paused":
        return Outcome("Paused", message, is_degraded)
    word = "Complete" if text(moves, "reason") == "Settled" else "Progressing"
    return Outcome(word, message, is_degraded)


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
    found = _on_trial(fleet)
    if not found:
        raise UserError("no canary is under way: see `xpyd rollout status`")
    return found


def _on_trial(fleet: Json | None) -> str:
    row = fields(fleet or {}, "status", "canary")
    return text(row, "revision") if text(row, "phase") in ("Running", "Failed") else ""


def _canary_text(row: Json) -> str:
    """A line about a revision on trial, as far as the outcome's message does not have it."""
    parts = [f"{text(row, 'phase')}, step {count(row, 'step')}"]
    if text(row, "phase") == "Running":
        parts.append(f"{count(row, 'weightPercent')} % of new requests")
        parts.append(f"{count(row, 'requests')} requests, {count(row, 'failed')} failed")
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
    """One entry of a fleet's history. `record`: what of the document makes pods."""

    number: int
    name: str
    created: str
    record: Json
    current: bool


def history_of(fleet: Json, found: Iterable[Json]) -> tuple[Revision, ...]:
    """The fleet's revisions by number; `found`: ControllerRevisions with its label."""
    uid, spec = text(fleet, "metadata", "uid"), fields(fleet, "spec")
    mine = [one for one in found if any(o.get("uid") == uid for o in _owners(one))]
    mine.sort(key=lambda one: count(one, "revision"))
    now, name = record_of(spec), _name_of(fleet)
    is_known = any(text(one, "metadata", "name") == name for one in mine)
    revisions: list[Revision] = []
    for one in mine:
        record, called = dict(fields(one, "data", "spec")), text(one, "metadata", "name")
        created = text(one, "metadata", "creationTimestamp")
        is_current = called == name if is_known else record == now
        revisions.append(Revision(count(one, "revision"), called, created, record, is_current))
    return tuple(revisions)


def _owners(obj: Json) -> Sequence[Mapping[str, Any]]:
    return rows(obj, "metadata", "ownerReferences")


def _name_of(fleet: Json) -> str:
    """The name of the record of the document as it is; "" where it has mistakes."""
    try:
        parsed = parse_object(fleet)
    except UserError:
        return ""
    return revision_name(parsed.name, revision_id(parsed, model_in_pod(parsed)))


def history_text(history: Sequence[Revision], now: str) -> str:
    """A table of the history."""
    lines: list[tuple[str, ...]] = []
    for one in history:
        args = " ".join(str(arg) for arg in one.record.get("engine", {}).get("args") or ())
        image = text(one.record, "engine", "image") or "(operator's)"
        mark = "*" if one.current else ""
        age = _age(seconds_between(one.created, now))
        lines.append((str(one.number), mark, age, image, short(args, _MOST_VALUE) or "-"))
    return table(("REVISION", "CURRENT", "AGE", "IMAGE", "ARGS"), lines)


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


@dataclass(frozen=True)
class PoolChange:
    """What an edit does to one pool. `before` and `after`: its instances. `why`: changed fields."""

    pool: str
    change: Literal["new revision", "scale", "unchanged", "new pool", "leaves"]
    before: int
    after: int
    surge: int = 0
    unavailable: int = 0
    why: tuple[str, ...] = ()


@dataclass(frozen=True)
class Edit:
    """What an edit does. `fields`: all that differ, with both values; `canary`: how the new
    revision is tried first, None: it is not."""

    fleet: str
    pools: tuple[PoolChange, ...]
    fields: tuple[tuple[str, object, object], ...]
    paused: bool
    canary: Canary | None = None
    on_trial: str = ""
    """The revision whose canary has no end yet, or failed: the edit takes its place."""


def edit_of(before: Json | None, after: Json) -> Edit:
    """What becomes of a fleet when `after` replaces `before`; None: there is no such fleet.
    UserError where the operator would hold it back."""
    kept = defaults_of(fields(before or {}, "status"))
    taken = _next_defaults(before, after, kept)
    old, new = _wants(before, kept), _wants(after, taken)
    same = _wants(after, kept)
    found: tuple[tuple[str, object, object], ...] = ()
    parts: dict[str, frozenset[str]] = {}
    if before is not None:
        found = tuple(differences(before["spec"], after["spec"]))
        parts = _parts_that_count(before, after, old, kept)
    changes: list[PoolChange] = []
    sizes = {text(row, "name"): row for row in rows(before or {}, "status", "pools")}
    for name, pool in new.items():
        seen, earlier = _seen(sizes.get(name), old.get(name)), old.get(name)
        size = pool_replicas(pool, seen)
        before_size = seen.replicas if seen else 0
        if earlier is None:
            changes.append(PoolChange(name, "new pool", 0, size))
            continue
        is_new = earlier.revision != pool.revision
        change = "new revision" if is_new else "unchanged" if size == before_size else "scale"
        paths = [_part(path) or path for path, _, _ in found if _is_of(path, name, parts)]
        why = list(dict.fromkeys(paths)) if is_new else []
        if is_new and same[name].revision != pool.revision:
            why.append(_OF_OPERATOR)
        surge, missing = ceil(size * pool.surge_percent / 100), 0
        if pool.unavailable_percent and size:
            missing = max(1, size * pool.unavailable_percent // 100)
        changes.append(PoolChange(name, change, before_size, size, surge, missing, tuple(why)))
    for name in (name for name in old if name not in new):
        seen = _seen(sizes.get(name), old[name])
        changes.append(PoolChange(name, "leaves", seen.replicas if seen else 0, 0))
    _refuse_mistakes(after, taken, changes)
    paused = at(after, "spec", "rollout", "paused") is True
    rules = parse_object(after).spec.rollout.canary
    tried = any(one.change == "new revision" and one.pool != ROUTER for one in changes)
    canary = rules if tried else None
    return Edit(
        text(after, "metadata", "name"), tuple(changes), found, paused, canary, _on_trial(before)
    )


def _refuse_mistakes(after: Json, taken: Defaults | None, changes: Sequence[PoolChange]) -> None:
    """UserError where the operator would hold the document back: its pods do not run already."""
    if all(one.change in ("scale", "unchanged") for one in changes):
        return
    lines = document_mistakes(parse_object(after), taken.worker_image if taken else "")
    if lines:
        name = text(after, "metadata", "name")
        head = f"{name}: the operator would hold this edit back (InvalidTemplate)"
        raise UserError("\n  ".join([head, *lines]))


def _next_defaults(before: Json | None, after: Json, kept: Defaults | None) -> Defaults | None:
    """The defaults that the operator makes the edit's pods with, as far as the status says its own;
    None: it says none."""
    if before is None or kept is None:
        return kept
    ours = replace(
        kept.with_images(text(condition(before, UP_TO_DATE), "message")),
        engine_image=text(after, "spec", "engine", "image"),
        restarted_at=asked_restart(after),
    )
    return next_defaults(kept, ours, turn=False)


def _wants(obj: Json | None, defaults: Defaults | None) -> dict[str, PoolWant]:
    if obj is None:
        return {}
    fleet = parse_object(obj)
    want = fleet_want(
        fleet,
        model=model_in_pod(fleet),
        in_cluster=True,
        image=defaults.worker_image if defaults else "",
        router_image=defaults.router_image if defaults else "",
    )
    return {pool.name: pool for pool in want.pools}


def _seen(row: Mapping[str, Any] | None, earlier: PoolWant | None) -> PoolSeen | None:
    """What the pool has, by its status, else by the document that it comes from."""
    if earlier is None:
        return None
    if earlier.name == ROUTER or row is None:
        return PoolSeen(earlier.name, pool_replicas(earlier, None), earlier.replicas)
    declared = None if at(row, "declaredReplicas") is None else count(row, "declaredReplicas")
    return PoolSeen(earlier.name, count(row, "replicas"), declared)


def _parts_that_count(
    before: Json, after: Json, old: Mapping[str, PoolWant], kept: Defaults | None
) -> dict[str, frozenset[str]]:
    """Part of the spec, or field of its rollout -> the pools of which it alone makes another
    revision. Where it cannot be alone, it is taken to count for all."""
    was, now = before["spec"], after["spec"]
    ways: tuple[Json, Json] = (was.get("rollout") or {}, now.get("rollout") or {})
    specs = {part: {**was, part: now.get(part)} for part in {*was, *now} - {"pools", "rollout"}}
    for name in {*ways[0], *ways[1]}:
        way = {**ways[0], name: ways[1].get(name)}
        way = {name: value for name, value in way.items() if value is not None}
        specs[f"rollout.{name}"] = {**was, "rollout": way}
    found: dict[str, frozenset[str]] = {}
    for part, spec in specs.items():
        spec = {name: value for name, value in spec.items() if value is not None}
        try:
            new = _wants({**before, "spec": spec}, kept)
        except UserError:
            found[part] = frozenset(old)
            continue
        found[part] = frozenset(n for n, w in new.items() if w.revision != old[n].revision)
    return found


def _is_of(path: str, pool: str, parts: Mapping[str, frozenset[str]]) -> bool:
    """Whether a changed field is a reason of the pool's new revision."""
    part = path.partition(".")[0]
    if part.startswith("pools["):
        last = path.removeprefix(f"pools[{pool}].").partition(".")[0]
        return part == f"pools[{pool}]" and last not in OF_NOW["pools"]
    is_of_now = path.partition(".")[2].partition(".")[0] in OF_NOW.get(part, frozenset())
    return pool in parts.get(_part(path) or part, frozenset()) and not is_of_now


def _part(path: str) -> str:
    """The field of spec.rollout that a path is in, "" for other paths."""
    names = path.split(".")
    return ".".join(names[:2]) if names[0] == "rollout" else ""


def edit_json(edit: Edit) -> Json:
    """The edit for machines."""
    pools = [
        {
            "pool": one.pool,
            "change": one.change,
            "replicas": {"before": one.before, "after": one.after},
            "surge": one.surge,
            "unavailable": one.unavailable,
            "why": list(one.why),
        }
        for one in edit.pools
    ]
    changed = [{"field": f"spec.{p}", "before": b, "after": a} for p, b, a in edit.fields]
    said = {"fleet": edit.fleet, "paused": edit.paused, "pools": pools, "fields": changed}
    if edit.canary is not None:
        rules = edit.canary.model_dump(mode="json", by_alias=True, exclude_none=True)
        return {**said, "canary": rules, "onTrial": edit.on_trial}
    return said


def edit_text(edit: Edit) -> str:
    """The same for people."""
    lines = [
        (
            one.pool,
            one.change,
            str(one.after) if one.before == one.after else f"{one.before} -> {one.after}",
            str(one.surge),
            str(one.unavailable),
            ", ".join(one.why) or "-",
        )
        for one in edit.pools
    ]
    heads = ("POOL", "CHANGE", "INSTANCES", "SURGE", "UNAVAILABLE", "WHY")
    parts = [table(heads, lines)]
    if edit.fields:
        shown = (f"  spec.{p}: {_value(b)} -> {_value(a)}\n" for p, b, a in edit.fields)
        parts += ["changed fields:\n", *shown]
    if edit.canary is not None:
        parts.append(_trial_text(edit.canary))
        if edit.on_trial:
            parts.append(f"  in place of {edit.on_trial}; an edit back to what stays begins none\n")
    if edit.paused and any(one.change == "new revision" for one in edit.pools):
        parts.append("rollouts are paused: it begins with `xpyd rollout resume`\n")
    return "".join([*parts, "nothing was written\n"])


def _trial_text(rules: Canary) -> str:
    """What comes before the rest of the pools of engines, and what that waits for."""
    shares = " %, then ".join(map(str, rules.weights))
    limits = rules.analysis
    holds = [f"at most {limits.error_percent} % of them failed"]
    times = (("TTFT", limits.ttft_milliseconds), ("ITL", limits.itl_milliseconds))
    holds += [f"{what} p95 at most {limit} ms" for what, limit in times if limit is not None]
    return (
        f"it begins a canary, where the old revision runs: {shares} % of new requests, then all\n"
        "  it waits for all routers to know of it, and in each step for "
        f"{limits.min_requests} requests: {', '.join(holds)}\n"
    )


def _value(value: object) -> str:
    if value is None:
        return "(none)"
    return short(json.dumps(value), _MOST_VALUE)

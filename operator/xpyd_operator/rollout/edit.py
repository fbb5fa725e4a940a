"""What an edit of a fleet's document would do, as `xpyd rollout plan` says it.

Objects are as the API server returns them, so no field of theirs is sure to be there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal

from xpyd_core.errors import UserError
from xpyd_operator.document.load import parse_object
from xpyd_operator.document.rollout import Canary
from xpyd_operator.manifests.refusals import document_mistakes
from xpyd_operator.manifests.volumes import model_in_pod
from xpyd_operator.plan.fleet import pool_replicas
from xpyd_operator.plan.revisions import OF_NOW, differences
from xpyd_operator.plan.template import fleet_want
from xpyd_operator.plan.values import ROUTER, PoolSeen, PoolWant
from xpyd_operator.rollout.view import MOST_VALUE, Json, images_of, on_trial, table
from xpyd_operator.status.children import at, condition, count, fields, rows, short, text
from xpyd_operator.status.upgrades import (
    UP_TO_DATE,
    Defaults,
    asked_restart,
    asked_undo,
    defaults_of,
    next_defaults,
)

_OF_OPERATOR = "the operator's defaults"
"""Why a pool has a new revision where no field of the document makes it."""


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
    revision is tried first, None: it is not. `images`: of engines and routers before and after."""

    fleet: str
    pools: tuple[PoolChange, ...]
    fields: tuple[tuple[str, object, object], ...]
    paused: bool
    canary: Canary | None = None
    images: tuple[tuple[str, str, str], ...] = ()
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
    of_old, of_new = (
        images_of(fields(one or {}, "spec"), defaults, "(operator's)")
        for one, defaults in ((before, kept), (after, taken))
    )
    images = tuple(zip(("engines", "routers"), of_old if before else of_new, of_new, strict=True))
    name = text(after, "metadata", "name")
    return Edit(name, tuple(changes), found, paused, canary, images, on_trial(before))


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
    undo = asked_undo(after)
    ours = replace(
        kept.with_images(text(condition(before, UP_TO_DATE), "message")),
        engine_image=text(after, "spec", "engine", "image"),
        restarted_at=asked_restart(after),
        undo=undo.annotation,
    )
    holds = bool(undo.record) and undo.holds(kept.restarted_at, ours.restarted_at)
    return next_defaults(kept, ours, turn=False, undo=undo if holds else None)


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
    images = {who: {"before": before, "after": after} for who, before, after in edit.images}
    said: Json = {"fleet": edit.fleet, "paused": edit.paused, "pools": pools}
    said |= {"images": images, "fields": changed}
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
    parts += [
        f"images of {who}: {before if before == after else f'{before} -> {after}'}\n"
        for who, before, after in edit.images
    ]
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
    return short(json.dumps(value), MOST_VALUE)

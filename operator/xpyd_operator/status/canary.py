"""A canary: how far it is, by what routers count, and what follows from that. Pure.

    Running -> (next step) -> Promoting -> Promoted
            -> Failed

The state is in a ConfigMap of the fleet, beside the file that its routers mount: so an operator
that starts anew goes on with it, and a router that does has its share again. A decision is written
before anything follows from it. Routers count each step anew, by its name; sums are kept over
their restarts as long as this process lives, and what is lost with it only has to come again.

See docs/adr/0105.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from typing import Any, Literal, cast

from xpyd_operator.document.rollout import Canary
from xpyd_operator.manifests.names import CANARY_FILE
from xpyd_operator.plan.canary import CanaryPool, stable_revisions
from xpyd_operator.plan.fleet import canary_pools
from xpyd_operator.plan.values import ROUTER, CanaryStage, FleetSeen, FleetWant
from xpyd_operator.status.canary_figures import (
    Key,
    RouterWord,
    SideFigures,
    broken_limits,
    compared,
    figures_of,
    figures_text,
)
from xpyd_operator.status.children import Raw, condition, count, fields, seconds_between, text

Phase = Literal["Running", "Promoting", "Promoted", "Failed"]
_PHASES: Mapping[str, Phase] = {
    "Running": "Running",
    "Promoting": "Promoting",
    "Promoted": "Promoted",
    "Failed": "Failed",
}
STATE = "state.json"
FORGETS_S = 180.0
"""How long a rollout waits for routers that do not say that they go by a promoted canary no more:
their kubelets bring the file within a minute and a half."""


@dataclass(frozen=True)
class CanaryReport:
    """What the routers of a fleet say. `names`: the canary of each ready one, "": none."""

    name: str = ""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    counts: Mapping[Key, int] = field(default_factory=dict[Key, int])

    def know(self, revision: str) -> int:
        """How many routers divide requests for this canary, in whatever step."""
        return sum(name.rpartition("-")[0] == revision for name in self.names.values())

    def all_know(self, revision: str) -> bool:
        """Whether each does."""
        return bool(self.names) and self.know(revision) == len(self.names)


@dataclass(frozen=True)
class CanaryState:
    """How far the canary of a document's pods is. `revision`: of them all; `step`: the one whose
    instances are wanted, `shown`: the one whose share routers are given; `since`: when that began,
    or the phase; `stable`: pools and the revisions that stay, of one that was promoted those that
    stayed; `said`: the last decision; `ignored`: the promotion by hand that was there before."""

    revision: str
    phase: Phase
    step: int = 0
    shown: int = 0
    since: str = ""
    stable: tuple[tuple[str, str], ...] = ()
    said: str = ""
    ignored: str = ""

    @property
    def name(self) -> str:
        """Of the step, to routers."""
        return f"{self.revision}-{self.shown}"

    @property
    def is_on_trial(self) -> bool:
        """Whether requests are divided, or were until now."""
        return self.phase in ("Running", "Promoting")

    def weight(self, rules: Canary) -> int:
        """The share of the step whose instances are wanted."""
        return rules.weights[min(self.step, len(rules.weights) - 1)]

    def shown_weight(self, rules: Canary) -> int:
        """The share that routers are given."""
        return rules.weights[min(self.shown, len(rules.weights) - 1)]

    def stage(self, rules: Canary, report: CanaryReport) -> CanaryStage | None:
        """What it is to the plan."""
        if self.phase == "Promoted":
            return None
        weight = self.weight(rules) if self.is_on_trial else 0
        return CanaryStage(self.stable, weight, report.all_know(self.revision))

    @property
    def stage_held(self) -> CanaryStage | None:
        """The same where the document, and so its shares, cannot be read: for a plan that is
        paused, in which nothing grows."""
        if self.phase == "Promoted":
            return None
        return CanaryStage(self.stable, 99 if self.is_on_trial else 0, may_begin=False)


def revision_on_trial(want: FleetWant) -> str:
    """10 hex digits over the revisions of all pools of engines."""
    named = sorted((pool.name, pool.revision) for pool in want.pools if pool.name != ROUTER)
    return sha256(json.dumps(named).encode()).hexdigest()[:10]


def read_state(found: Raw | None) -> CanaryState | None:
    """The state in the ConfigMap; None where there is none that can be read."""
    try:
        said: Any = json.loads(text(found or {}, "data", STATE) or "null")
        stable = tuple((str(pool), str(revision)) for pool, revision in said["stable"])
        return CanaryState(
            str(said["revision"]),
            _PHASES[said["phase"]],
            int(said["step"]),
            int(said["shown"]),
            str(said["since"]),
            stable,
            str(said["said"]),
            str(said.get("ignored", "")),
        )
    except (ValueError, KeyError, TypeError):
        return None


def written(state: CanaryState | None, rules: Canary, want: FleetWant) -> dict[str, str]:
    """The data of the ConfigMap."""
    if state is None:
        return {CANARY_FILE: "", STATE: ""}
    found: dict[str, Any] = {}
    if state.phase == "Running":
        found = {"name": state.name, "weightPercent": state.shown_weight(rules)}
        stable = dict(state.stable)
        for pool in want.pools:
            if pool.name != ROUTER and stable.get(pool.name) != pool.revision:
                of_role = found.setdefault(pool.template.role.lower(), [])
                cast("list[str]", of_role).append(f"{pool.name}/{pool.revision}")
    return {CANARY_FILE: json.dumps(found) if found else "", STATE: json.dumps(asdict(state))}


def advance(
    before: CanaryState | None,
    *,
    rules: Canary,
    want: FleetWant,
    seen: FleetSeen,
    report: CanaryReport,
    promote: str,
    now: str,
) -> CanaryState:
    """The state now. `want`: the document's; `promote`: what somebody wants without further
    analysis, REVISION or REVISION@TIME. It stays in the document: what was there when the canary
    began is not about it, though it may name the same pods."""
    revision = revision_on_trial(want)
    if before is None or before.revision != revision:
        return replace(_begun(before, revision, want, seen, now), ignored=promote)
    if want.paused:
        return before
    is_asked = promoted_by(promote) == revision and promote != before.ignored
    if before.phase in ("Running", "Failed") and is_asked:
        return _moved(before, "Promoting", now, "promoted by hand")
    if before.phase in ("Running", "Failed") and not _stays(before, want, seen):
        return _moved(before, "Promoted", now, "nothing of the old revision is left")
    match before.phase:
        case "Running":
            return _judged(before, rules, want, seen, report, now)
        case "Promoting":
            waited_s = seconds_between(before.since, now) or 0.0
            if not report.know(revision) and (report.names or waited_s >= FORGETS_S):
                return _moved(before, "Promoted", now, before.said)
            is_late = waited_s >= FORGETS_S
            return _moved(before, "Promoted", now, before.said) if is_late else before
        case _:
            return before


def promoted_by(annotation: str) -> str:
    """The revision that a promotion by hand names."""
    return annotation.partition("@")[0]


def _moved(state: CanaryState, phase: Phase, now: str, said: str) -> CanaryState:
    return replace(state, phase=phase, since=now, said=said)


def _begun(
    before: CanaryState | None, revision: str, want: FleetWant, seen: FleetSeen, now: str
) -> CanaryState:
    """The state of another document: what stays is what stayed in the canary before, if that was
    not promoted and is there. A document of what stayed is on no trial: the fleet goes back."""
    wanted = {pool.name: pool.revision for pool in want.pools}
    if before is not None and before.stable:
        stayed = dict(before.stable)
        if all(stayed.get(name) == wanted[name] for name in wanted if name != ROUTER):
            return CanaryState(revision, "Promoted", since=now)
    stable: dict[str, str] = {}
    if before is not None and before.phase in ("Running", "Failed") and _stays(before, want, seen):
        stable = dict(before.stable)
    if not stable:
        stable = stable_revisions(want, seen)
    if all(wanted.get(name, revision) == revision for name, revision in stable.items()):
        return CanaryState(revision, "Promoted", since=now)
    return CanaryState(revision, "Running", since=now, stable=tuple(sorted(stable.items())))


def _stays(state: CanaryState, want: FleetWant, seen: FleetSeen) -> bool:
    """Whether the old revision still has instances, in each pool that is to have some."""
    wanted = {(pool.name, pool.revision) for pool in want.pools}
    olds = set(state.stable) - wanted
    sizes = {pool.name: pool.replicas for pool in seen.pools}
    there = {(one.workload.pool, one.workload.revision) for one in seen.workloads}
    if any(sizes.get(pool) for pool, revision in olds if (pool, revision) not in there):
        return False
    runs = {
        (one.workload.pool, one.workload.revision)
        for one in seen.workloads
        if one.alive or one.workload.replicas
    }
    return bool(olds & runs) or (bool(state.stable) and not olds)


def _judged(
    state: CanaryState,
    rules: Canary,
    want: FleetWant,
    seen: FleetSeen,
    report: CanaryReport,
    now: str,
) -> CanaryState:
    figures = figures_of(report.counts) if report.name == state.name else SideFigures()
    limits = rules.analysis
    old = figures_of(report.counts, "old") if report.name == state.name else SideFigures()
    broken, parts = broken_limits(rules, figures), compared(rules, figures, old)
    # So many failed that no further request can make it good.
    is_lost = 100 * figures.failed > limits.error_percent * limits.min_requests
    is_counted = figures.requests >= limits.min_requests
    step = f"step {state.shown + 1} ({state.shown_weight(rules)} %)"
    found = [*(broken if is_counted or is_lost else ()), *parts.broken]
    if found:
        said = f"{step}: {'; '.join(found)}; {figures_text(rules, figures)}"
        return _moved(state, "Failed", now, said)
    if state.shown < state.step:
        if is_complete(replace(want, canary=state.stage(rules, report)), seen):
            return replace(state, shown=state.step, since=now)
        return state
    if not (is_counted and parts.is_known):
        return state
    said = f"{step} held: {figures_text(rules, figures)}"
    if state.step + 1 < len(rules.weights):
        return replace(state, step=state.step + 1, said=said)
    return _moved(state, "Promoting", now, said)


def is_complete(want: FleetWant, seen: FleetSeen) -> bool:
    """Whether all instances on trial serve."""
    return all(
        pool.target and pool.seen and pool.seen.ready >= pool.target
        for pool in canary_pools(want, seen)
    )


@dataclass(frozen=True)
class CanaryView:
    """What the fleet's status says of it. `reason` and `message`: Progressing's; "": it says
    nothing of one that was promoted."""

    reason: Literal["Canary", "CanaryTooFewRequests", "CanaryFailed", ""]
    message: str
    row: Mapping[str, Any]


def view(
    state: CanaryState,
    *,
    fleet: str,
    rules: Canary,
    want: FleetWant,
    seen: FleetSeen,
    report: CanaryReport,
    deadline_s: float,
    now: str,
) -> CanaryView | None:
    """None where the document's revision was on no trial."""
    figures = figures_of(report.counts) if report.name == state.name else SideFigures()
    row: dict[str, Any] = {
        "revision": state.revision,
        "phase": state.phase,
        "step": state.shown + 1,
        "weightPercent": state.shown_weight(rules) if state.phase == "Running" else 0,
    }
    if state.phase == "Running":
        row |= {"requests": figures.requests, "failed": figures.failed}
        parts = {"refused": figures.refused, "recomputed": figures.recomputed}
        row |= {name: number for name, number in parts.items() if number}
        times = {"ttftMilliseconds": figures.ttft_ms, "itlMilliseconds": figures.itl_ms}
        row |= {name: round(value) for name, value in times.items() if value is not None}
    if state.said:
        row["said"] = state.said
    if state.phase == "Promoted":
        return CanaryView("", "", row) if state.said else None
    if state.phase == "Failed":
        how = f"edit the document, or `xpyd rollout undo {fleet}`"
        return CanaryView("CanaryFailed", f"{state.said}: the old revision serves; {how}", row)
    if state.phase == "Promoting":
        left = report.know(state.revision)
        what = f"promoted: waits for {left} routers to divide requests no more"
        return CanaryView("Canary", what, row)
    on_trial = replace(want, canary=state.stage(rules, report))
    weight = state.shown_weight(rules)
    head = f"canary {state.revision}, step {state.shown + 1} of {len(rules.weights)} ({weight} %)"
    known, routers = report.know(state.revision), len(report.names)
    sizes = ", ".join(
        f"{pool.want.name} {pool.seen.ready if pool.seen else 0}/{pool.target}"
        for pool in canary_pools(on_trial, seen)
    )
    if not is_complete(on_trial, seen):
        waits = f"waits for its instances ({sizes} ready)"
        if known < routers or not routers:
            waits = f"waits for routers to know of it ({known} of {routers} do)"
        elif lone := _without_room(canary_pools(on_trial, seen)):
            more = f"set rollout.maxSurgePercent, scale to 2, or `xpyd rollout promote {fleet}`"
            waits = f"{lone}: one instance, and no surge for another one beside it: {more}"
        return CanaryView("Canary", f"{head}: {waits}", row)
    words = f"{head}: {figures_text(rules, figures)}"
    waited_s = seconds_between(state.since, now) or 0.0
    if waited_s >= deadline_s:
        more = f"send more, lower minRequests, or `xpyd rollout promote {fleet}`"
        text_ = f"{words}: too few within {deadline_s:.0f} s; {more}"
        return CanaryView("CanaryTooFewRequests", text_, row)
    return CanaryView("Canary", words, row)


def _without_room(pools: Iterable[CanaryPool]) -> str:
    """The pools whose only instance would have to go before one on trial comes."""
    lone = (one for one in pools if one.stable == 1 and not one.want.surge_percent)
    return ", ".join(one.want.name for one in lone if not one.target)


def routers_known(words: Mapping[str, RouterWord], ready: Iterable[str]) -> dict[str, str]:
    """The canary of each ready router; one that does not answer goes by none."""
    return {router: words[router].name if router in words else "" for router in ready}


Event = tuple[Literal["Normal", "Warning"], str, str]


def canary_events(before: Raw, after: Raw) -> list[Event]:
    """Each decision about a revision on trial, with its numbers: type, reason and message of Events
    when the status `after` replaces `before`."""
    old, new = fields(before, "canary"), fields(after, "canary")
    is_same = text(old, "revision") == text(new, "revision")
    was, phase = text(old, "phase") if is_same else "", text(new, "phase")
    moved = phase != was or count(old, "step") != count(new, "step")
    said, found = text(new, "said"), list[Event]()
    moves = condition({"status": after}, "Progressing")
    if phase == "Running" and moved:
        what = f"{count(new, 'weightPercent')} % of new requests are for {text(new, 'revision')}"
        if was:
            found.append(("Normal", "CanaryStep", f"{said}; {what}"))
        else:
            found.append(("Normal", "CanaryStarted", what))
    elif phase in ("Promoting", "Promoted") and was in ("Running", "Failed"):
        found.append(("Normal", "CanaryPromoted", said))
    elif phase == "Failed" and moved:
        found.append(("Warning", "CanaryFailed", text(moves, "message")))
    reasons = text(condition({"status": before}, "Progressing"), "reason"), text(moves, "reason")
    if reasons[0] != reasons[1] == "CanaryTooFewRequests":
        found.append(("Warning", "CanaryTooFewRequests", text(moves, "message")))
    return found

"""The conditions of a fleet, and the row of counts for each pool that they are made from.

All are always present, but ModelReady, which a fleet has whose model a Job downloads, KeyRotated,
which one has whose key somebody asked to rotate, and FieldsIgnored, which one has whose document
has fields that the operator does not know (docs/adr/0114); all but Degraded, Drifted and
FieldsIgnored are good when they are True.

Ready: every pool has its instances of the newest revision ready, and so has the router.
Available: a request can be answered now. Progressing: something still moves; the reason says why it
moves since the fleet was last settled, and is carried from status to status. Degraded: something is
wrong that waiting does not mend. That an instance of several pods fails again and again is carried
over, too, until all is ready. Drifted: other clients added fields to the fleet's objects that the
operator leaves or cannot get rid of. RouterReady and CapacityAvailable: parts of Ready, each on its
own. RolesReady: no role of the document is lost, nor half of it. A reason is one of Kubernetes' own
words where it has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from xpyd_operator.plan.values import ROUTER
from xpyd_operator.status.canary import CanaryView
from xpyd_operator.status.children import Raw, condition, count, moment, rows, short, text
from xpyd_operator.status.crashes import RECREATED
from xpyd_operator.status.models import ModelState
from xpyd_operator.status.pools import (
    DONE,
    ROLES,
    USUAL_CHOICE,
    PoolRow,
    RoleChoice,
    by_role,
    serves,
)
from xpyd_operator.status.problems import Problem
from xpyd_operator.status.rotation import KeyVerdict
from xpyd_operator.status.routable import NO_PAIR
from xpyd_operator.status.upgrades import UNDONE, UP_TO_DATE, UPGRADING, Upgrade
from xpyd_operator.status.verified import NO_PAIRS, NOT_LOOKED, KvVerdict

FIELDS_IGNORED = "FieldsIgnored"
INVALID = "InvalidSpec"
INVALID_TEMPLATE = "InvalidTemplate"
"""A pod template of the document sets what xpyd sets."""
_MOST_PROBLEMS = 4
_MOST_MISTAKES = 10
_MOST_MISTAKE = 400
_DRAINING = "Draining"
_NOTE = "; note: "
"""Between what is wrong and the notices."""


@dataclass(frozen=True)
class _Fleet:
    """The input of all conditions."""

    pools: Sequence[PoolRow]
    problems: Sequence[Problem]
    stopping: bool
    before: Raw
    notices: Sequence[str] = ()
    choice: RoleChoice = USUAL_CHOICE
    has_pair: bool | None = None
    leaving: str = ""
    paused: bool = False
    canary: CanaryView | None = None

    @property
    def trial(self) -> str:
        """The reason by which a revision on trial, or one that failed it, holds up the rest."""
        return self.canary.reason if self.canary is not None else ""

    @property
    def is_paused(self) -> bool:
        """Whether the document pauses a rollout that is under way, or would begin."""
        return self.paused and any(row.older or not row.revision for row in self.pools)

    @property
    def missing(self) -> list[PoolRow]:
        return [row for row in self.pools if row.missing]

    def of_pools(self, names: Iterable[str]) -> list[Problem]:
        """The problems that keep these pools from being ready."""
        known = {*names, ""}
        found = (p for p in self.problems if p.pool in known and p.reason != _DRAINING)
        return [p for p in found if p.kind != "Drifted"]


@dataclass(frozen=True)
class _Verdict:
    status: bool | None
    reason: str
    message: str


def conditions(
    pools: Sequence[PoolRow],
    problems: Sequence[Problem],
    *,
    stopping: bool,
    before: Raw,
    now: str,
    generation: int,
    notices: Sequence[str] = (),
    choice: RoleChoice = USUAL_CHOICE,
    kv: KvVerdict = NOT_LOOKED,
    has_pair: bool | None = None,
    leaving: str = "",
    model: ModelState | None = None,
    key: KeyVerdict | None = None,
    paused: bool = False,
    upgrade: Upgrade | None = None,
    canary: CanaryView | None = None,
    unknown: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """`before`: the whole status before; a condition keeps its time while its status stays.

    `notices`: what the document asks for that an administrator should know; Degraded's message
    ends with them. `choice`: what requests do where a role is lost. `kv`: what
    the routers' counts say of the KV (see `verified`). `has_pair`: whether a router has instances
    that can serve a request; None: none has said. `leaving`: what instances that leave still have
    (see `drains`). `model`: the download of its model; None: no Job downloads it. `key`: how far
    the rotation of the fleet's key is; None: nobody asked for one. `paused`: no revision takes
    another's place. `upgrade`: what the pods are made with. `canary`: of a revision on trial.
    `unknown`: fields of the document that the operator does not know.
    """
    fleet = _Fleet(
        pools, problems, stopping, before, notices, choice, has_pair, leaving, paused, canary
    )
    verdicts = {
        "Ready": _ready(fleet),
        "Available": _available(fleet),
        "Progressing": _progressing(fleet),
        "Degraded": _degraded(fleet),
        "RouterReady": _router_ready(fleet),
        "CapacityAvailable": _capacity(fleet),
        "Drifted": _drifted(fleet),
        "KVTransferVerified": _verified(fleet, kv),
        "RolesReady": _roles(fleet),
    }
    if upgrade is not None:
        verdicts[UP_TO_DATE] = _up_to_date(fleet, upgrade, is_ready=bool(verdicts["Ready"].status))
    if model is not None:
        verdicts["ModelReady"] = _Verdict(model.is_ready, model.reason, model.message)
    if key is not None:
        verdicts["KeyRotated"] = _Verdict(key.status, key.reason, key.message)
    if unknown:
        verdicts[FIELDS_IGNORED] = _ignored(unknown)
    return _written(verdicts, before, now, generation)


def conditions_of_invalid(
    messages: Sequence[str],
    pools: Sequence[PoolRow],
    *,
    before: Raw,
    now: str,
    generation: int,
    reason: str,
    unknown: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Conditions of a fleet whose document cannot be obeyed. Its `pools` may serve, as the last
    valid document declared."""
    message = _listed(messages)
    unseen = _Verdict(None, reason, "not looked at until the document is mended")
    verdicts = {
        "Ready": _Verdict(False, reason, message),
        "Available": _available(_Fleet(pools, (), stopping=False, before=before)),
        "Progressing": _Verdict(False, reason, "waits for a valid document"),
        "Degraded": _Verdict(True, reason, message),
        "RouterReady": unseen,
        "CapacityAvailable": unseen,
        "Drifted": unseen,
        "KVTransferVerified": unseen,
        "RolesReady": unseen,
    }
    kept = condition_of(before, UP_TO_DATE)
    if kept:
        # Its turn among upgrades is not another fleet's because of a bad edit.
        holds = text(kept, "status") == "True"
        verdicts[UP_TO_DATE] = _Verdict(holds, text(kept, "reason"), text(kept, "message"))
    if unknown:
        verdicts[FIELDS_IGNORED] = _ignored(unknown)
    return _written(verdicts, before, now, generation)


def condition_of(status: Raw, kind: str) -> Raw:
    """One condition of a status; empty where it has none."""
    return condition({"status": status}, kind)


def _written(
    verdicts: dict[str, _Verdict], before: Raw, now: str, generation: int
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for kind, verdict in verdicts.items():
        status = "Unknown" if verdict.status is None else str(verdict.status)
        old = condition_of(before, kind)
        since = text(old, "lastTransitionTime")
        same = text(old, "status") == status and moment(since) is not None
        found.append(
            {
                "type": kind,
                "status": status,
                "reason": verdict.reason,
                "message": verdict.message,
                "lastTransitionTime": since if same else now,
                "observedGeneration": generation,
            }
        )
    return found


def _ready(fleet: _Fleet) -> _Verdict:
    if fleet.stopping:
        left = _alive(fleet.pools)
        left_text = f"{left} to leave" if left else "no instance is left"
        return _Verdict(False, _DRAINING, f"the fleet is being deleted: {left_text}")
    missing = [row.name for row in fleet.missing]
    causes = fleet.of_pools(missing)
    if missing and causes and causes[0].kind != "Waiting":
        return _Verdict(False, causes[0].reason, _summary_of(_waits(fleet), causes))
    wanted, _ = by_role(fleet.pools)
    if not serves(wanted):
        none = [r.name for r in fleet.pools if r.revision and r.name != ROUTER and not r.replicas]
        what = f"no request can be answered with 0 replicas of {', '.join(none)}"
        return _Verdict(False, "ScaledToZero", what)
    if not missing:
        return _Verdict(True, "Ready", f"{_counts(fleet.pools)} ready")
    if causes:
        return _Verdict(False, causes[0].reason, _summary_of(_waits(fleet), causes))
    reason = "Rollout" if any(row.older for row in fleet.pools) else "PodsMissing"
    reason = "Paused" if fleet.is_paused else fleet.trial or reason
    return _Verdict(False, reason, _waits(fleet))


def _up_to_date(fleet: _Fleet, upgrade: Upgrade, *, is_ready: bool) -> _Verdict:
    if upgrade.older and upgrade.undone:
        what = f"an undo brought back {', '.join(upgrade.older)}, until a restart of the rollout"
        return _Verdict(False, UNDONE, what)
    if upgrade.older:
        what = f"pods are made with {', '.join(upgrade.older)}, until a restart of the rollout"
        return _Verdict(False, "OlderDefaults", what)
    before = text(condition_of(fleet.before, UP_TO_DATE), "reason")
    if not is_ready and (upgrade.taken or before == UPGRADING):
        return _Verdict(False, "Upgrading", f"takes the operator's defaults: {_waits(fleet)}")
    return _Verdict(True, "Current", "pods are made with the operator's own defaults")


def _available(fleet: _Fleet) -> _Verdict:
    _, ready = by_role(fleet.pools)
    if not ready[ROUTER]:
        router = next((row.progress for row in fleet.pools if row.name == ROUTER), ROUTER)
        return _Verdict(False, "NoRouter", f"no router is ready ({router})")
    stands_in = fleet.choice.stands_in(ready)
    if fleet.has_pair is False and (serves(ready) or stands_in):
        what = f"{_counts(fleet.pools)} ready, but no router has a pair of them: requests wait"
        return _Verdict(False, NO_PAIR, what)
    if serves(ready):
        parts = [f"{ready[role]} {role}" for role in ROLES if ready[role]]
        return _Verdict(True, "Serving", f"{', '.join(parts)} and {ready[ROUTER]} router ready")
    if stands_in:
        parts = [f"{ready[role] or 'no'} {role}" for role in ("Prefill", "Decode")]
        what = f"{', '.join(parts)} and {ready[ROUTER]} router ready"
        return _Verdict(True, stands_in, f"{what}: {DONE[stands_in]}")
    roles = {row.role for row in fleet.pools}
    none = [role for role in ROLES if role in roles and not ready[role]]
    if apart := _apart(fleet, none):
        return _Verdict(False, NO_PAIR, _summary_of("no router has a pair: requests wait", apart))
    rows_of = ", ".join(row.progress for row in fleet.pools if row.role in none)
    return _Verdict(False, "NoEngines", f"no {' and no '.join(none)} instance is ready ({rows_of})")


def _apart(fleet: _Fleet, missing: Iterable[str]) -> list[Problem]:
    """Why instances of the missing roles, which are there, are in no pair; () where a role has none
    such. A fleet whose P and D never fitted has no instance of one of them that is ready."""
    found: list[Problem] = []
    for role in missing:
        pools = {row.name for row in fleet.pools if row.role == role}
        mine = [p for p in fleet.problems if p.reason == NO_PAIR and p.pool in pools]
        if not mine:
            return []
        found += mine
    return found


def _progressing(fleet: _Fleet) -> _Verdict:
    leaving = [row for row in fleet.pools if row.draining or (not row.revision and row.alive)]
    drains = f"{_alive(leaving, draining=not fleet.stopping)} to leave" if leaving else ""
    drains += f" ({fleet.leaving})" if leaving and fleet.leaving else ""
    if fleet.stopping:
        return _Verdict(True, _DRAINING, drains or "no instance is left")
    if not fleet.missing and not any(row.older for row in fleet.pools):
        if moving := [row.name for row in fleet.pools if row.moves]:
            what = "the only instance is on a cordoned node, another one starts elsewhere"
            return _Verdict(True, "Moving", f"{', '.join(moving)}: {what}")
        if leaving:
            return _Verdict(True, _DRAINING, drains)
        return _Verdict(False, "Settled", "every pool is as wanted")
    if fleet.is_paused:
        return _Verdict(False, "Paused", _paused(fleet))
    if fleet.canary is not None and fleet.trial:
        message = "; ".join(filter(None, [fleet.canary.message, drains]))
        return _Verdict(fleet.trial != "CanaryFailed", fleet.trial, message)
    held = [f"{row.name} waits for {row.waits}" for row in fleet.missing if row.waits]
    message = "; ".join(filter(None, [_waits(fleet) if fleet.missing else "", *held, drains]))
    return _Verdict(True, _movement(fleet), message or "instances of older revisions leave")


def _paused(fleet: _Fleet) -> str:
    """What a pause keeps from going on."""
    parts = [f"{row.progress} of the newest revision" for row in fleet.pools if row.older]
    parts += [f"{row.name} stays" for row in fleet.pools if not row.revision]
    how = "spec.rollout.paused, or `xpyd rollout resume`"
    return f"the rollout is paused ({how}): {', '.join(parts)}"


def _movement(fleet: _Fleet) -> str:
    """Why the fleet moves. The first reason stays until all is ready or another reason appears."""
    earlier = text(condition_of(fleet.before, "Progressing"), "reason")
    pools = [row for row in fleet.pools if row.revision]
    known = {text(p, "name"): p.get("replicas") for p in rows(fleet.before, "pools")}
    if earlier in ("", "Creating") or any(row.name not in known for row in pools):
        return "Creating"
    if any(row.older for row in pools):
        return "Rollout"
    if any(known[row.name] != row.replicas for row in pools):
        return "Scaling"
    troubled = any(p.kind != "Waiting" for p in fleet.of_pools(r.name for r in fleet.missing))
    return "Scaling" if earlier == "Scaling" and not troubled else "Recovering"


def _degraded(fleet: _Fleet) -> _Verdict:
    found = [p for p in fleet.problems if p.kind == "Degraded"]
    if fleet.canary is not None and fleet.trial == "CanaryFailed":
        found.append(Problem("Degraded", "CanaryFailed", "", fleet.canary.message))
    if not found and (earlier := _fails_repeatedly(fleet)):
        return _Verdict(True, RECREATED, _noted(earlier, fleet.notices))
    if not found:
        message = "; ".join(["nothing needs to be done", *fleet.notices])
        return _Verdict(False, "AsExpected", message)
    return _Verdict(True, found[0].reason, _noted(_summary_of("", found), fleet.notices))


def _noted(message: str, notices: Sequence[str]) -> str:
    return f"{message}{_NOTE}{'; '.join(notices)}" if notices else message


def _fails_repeatedly(fleet: _Fleet) -> str:
    """The failure of an instance whose new pods are not ready yet. No counter has its failures, so
    between two of them the fleet would look healthy."""
    old = condition_of(fleet.before, "Degraded")
    if not fleet.missing or text(old, "status") != "True" or text(old, "reason") != RECREATED:
        return ""
    return text(old, "message").partition(_NOTE)[0]


def _router_ready(fleet: _Fleet) -> _Verdict:
    router = next((row for row in fleet.pools if row.name == ROUTER), None)
    if router is None or fleet.stopping:
        ready = router.ready if router else 0
        return _Verdict(ready > 0, _DRAINING, f"router {ready} ready, the fleet is being deleted")
    if not router.missing:
        return _Verdict(True, "RouterReady", f"{router.progress} ready")
    causes = fleet.of_pools([ROUTER])
    moves = "Paused" if fleet.is_paused else "Rollout"
    reason = causes[0].reason if causes else moves if router.older else "PodsMissing"
    return _Verdict(False, reason, _summary_of(f"waits for {router.progress} ready", causes))


def _verified(fleet: _Fleet, kv: KvVerdict) -> _Verdict:
    roles = {row.role for row in fleet.pools if row.revision}
    if fleet.stopping:
        return _Verdict(*NOT_LOOKED)
    return _Verdict(*kv) if {"Prefill", "Decode"} <= roles else _Verdict(*NO_PAIRS)


HAD_ROLES = ("AllRoles", "HalfLost")
LOST_ROLES = ("NoPrefill", "NoDecode", "NoAggregated", "NoEngines")
"""Reasons of RolesReady: instances of every role, and none of one."""


def _roles(fleet: _Fleet) -> _Verdict:
    """Whether each role that the document wants has instances: its loss stops or slows all
    requests, while that of a few instances is only a part of Ready."""
    if fleet.stopping:
        return _Verdict(None, _DRAINING, "the fleet is being deleted")
    wanted, ready = by_role(fleet.pools)
    roles = [role for role in ROLES if wanted[role]]
    lost = [role for role in roles if not ready[role]]
    if len(lost) == len(roles):
        what = f"no {' and no '.join(lost)} instance is ready" if lost else "none is wanted"
        return _Verdict(not lost, "NoEngines" if lost else "ScaledToZero", what)
    for role in lost:
        what = f"no {role} instance is ready (0/{wanted[role]})"
        choice = f"{DONE[fleet.choice.of(role)]} (router.onNo{role})"
        return _Verdict(False, f"No{role}", f"{what}: {choice}")
    if half := [role for role in roles if _is_half_lost(fleet, role, wanted[role], ready[role])]:
        parts = ", ".join(f"{ready[role]}/{wanted[role]} {role}" for role in half)
        what = f"half or more of a role is missing, {parts} ready: the others serve, and"
        return _Verdict(False, "HalfLost", f"{what} what is above router.limits waits in the queue")
    return _Verdict(True, "AllRoles", ", ".join(f"{ready[r]}/{wanted[r]} {r}" for r in roles))


def _is_half_lost(fleet: _Fleet, role: str, wanted: int, ready: int) -> bool:
    """Whether half of what the role wants was ready and is not: by the status before, or since an
    earlier one. What a fleet that is made or grows never had is not lost."""
    least = wanted - sum(row.given_up for row in fleet.pools if row.role == role)
    enough = min(wanted // 2 + 1, least)
    if ready >= enough:
        return False
    pools = rows(fleet.before, "pools")
    had = sum(count(one, "readyReplicas") for one in pools if text(one, "role") == role)
    if had >= enough or ready * 2 <= had:
        return True
    earlier = condition_of(fleet.before, "RolesReady")
    moved = text(condition_of(fleet.before, "Progressing"), "reason")
    was_lost = text(earlier, "reason") in LOST_ROLES and moved not in ("", "Creating", "Scaling")
    is_named = role in text(earlier, "message").partition(":")[0]  # behind it is what requests do
    return is_named and (was_lost or text(earlier, "reason") == "HalfLost")


def _ignored(unknown: Sequence[str]) -> _Verdict:
    what = "the CRDs have them and this operator does not, so it goes by the rest of the document"
    how = "upgrade the operator, or take out what you set of them"
    return _Verdict(True, "OlderOperator", f"{_listed(unknown, ', ')}: {what}; {how}")


def _listed(lines: Sequence[str], separator: str = "; ") -> str:
    shown = [short(line, _MOST_MISTAKE) for line in lines[:_MOST_MISTAKES]]
    return separator.join(shown) + _and_more(len(lines) - len(shown))


def _capacity(fleet: _Fleet) -> _Verdict:
    # A quota limits capacity, too, but only an administrator can raise it.
    found = [p for p in fleet.problems if p.kind == "Capacity" or p.reason == "QuotaExceeded"]
    if not found:
        return _Verdict(True, "Sufficient", "no pod lacks a place")
    return _Verdict(False, found[0].reason, _summary_of("", found))


def _drifted(fleet: _Fleet) -> _Verdict:
    found = [p for p in fleet.problems if p.kind == "Drifted"]
    if not found:
        return _Verdict(False, "AsApplied", "no other client's field is in the fleet's objects")
    return _Verdict(True, found[0].reason, _summary_of("", found))


def _counts(pools: Iterable[PoolRow]) -> str:
    """The router last: readers look for the engines first."""
    wanted = sorted((row for row in pools if row.revision), key=lambda row: row.name == ROUTER)
    return ", ".join(row.progress for row in wanted)


def _waits(fleet: _Fleet) -> str:
    return f"waits for {_counts(fleet.missing)} ready"


def _alive(pools: Iterable[PoolRow], *, draining: bool = False) -> str:
    """Instances that exist; with `draining`, of pools that stay only those that drain."""
    parts: list[str] = []
    for row in pools:
        number = row.draining if draining and row.revision else row.alive
        if number:
            parts.append(f"{row.name} {number}")
    return ", ".join(parts)


def _summary_of(start: str, problems: Sequence[Problem]) -> str:
    parts = [start] if start else []
    parts += [problem.message for problem in problems[:_MOST_PROBLEMS]]
    return "; ".join(parts) + _and_more(len(problems) - _MOST_PROBLEMS)


def _and_more(number: int) -> str:
    return f"; and {number} more" if number > 0 else ""

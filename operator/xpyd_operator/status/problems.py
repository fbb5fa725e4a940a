"""What is wrong with a fleet, or is waited for, as its objects tell it. Pure.

One line for each pool and reason, however many pods share it: conditions and Events stay short with
a thousand pods.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from xpyd_operator.status.children import (
    NOTHING,
    Children,
    Key,
    is_grouped,
    is_leaving,
    key_of,
    name_of,
    pod_specs,
    replicas_of,
    spec_of,
    workloads,
)
from xpyd_operator.status.crashes import RECREATED
from xpyd_operator.status.pods import Finding, Kind, camel, leaving, unready
from xpyd_operator.status.raw import (
    Raw,
    condition,
    count,
    rows,
    seconds_between,
    short,
    text,
)

RECENT_S = 600.0
"""Failed pods are kept by Kubernetes for long; those of before are history."""
MANY_FAILED = 3
"""So many failed pods within RECENT_S, and it is no accident."""

_KINDS: dict[Kind, int] = {"Degraded": 0, "Capacity": 1, "Waiting": 2}
_LAST = ("WaitingForEngines", "Draining")
"""What follows from something else, or is nobody's trouble."""


@dataclass(frozen=True)
class Problem:
    """`kind`: Degraded waits for a person, Capacity for room in the cluster, Waiting for time.

    `reason` is one CamelCase word; `pool` is "router" for the router and "" for the whole fleet;
    `message` names pool, counts and one pod.
    """

    kind: Kind
    reason: str
    pool: str
    message: str


def find_problems(children: Children, now: str) -> tuple[Problem, ...]:
    """All problems, those that matter most first. `now`: RFC 3339."""
    found: list[Problem] = []
    by_pool, specs = _by_pool(children.pods), pod_specs(children)
    for pool in sorted(by_pool):
        found += _of_pods(pool, by_pool[pool], specs, now)
        found += _of_failed(pool, by_pool[pool], children, now)
    for workload in workloads(children):
        found += _of_workload(workload)
    found += _of_deadlines(children, {problem.pool for problem in found if _is_cause(problem)})
    return in_order(found)


def in_order(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Without repetitions, those that matter most first."""
    return tuple(sorted(dict.fromkeys(problems), key=_rank))


def _rank(problem: Problem) -> tuple[int, bool, str, str, str]:
    last = problem.reason in _LAST
    return (_KINDS[problem.kind], last, problem.pool, problem.reason, problem.message)


def _is_cause(problem: Problem) -> bool:
    return problem.kind != "Waiting"


def _by_pool(pods: Iterable[Raw]) -> dict[str, list[Raw]]:
    found: dict[str, list[Raw]] = {}
    for pod in pods:
        if key := key_of(pod):
            found.setdefault(key[0], []).append(pod)
    return found


def _phase(pod: Raw) -> str:
    return text(pod, "status", "phase")


def _of_pods(
    pool: str, pods: Sequence[Raw], specs: Mapping[Key, tuple[Raw, Raw]], now: str
) -> list[Problem]:
    groups: dict[tuple[Kind, str], list[tuple[str, Finding]]] = {}
    alive = [pod for pod in pods if _phase(pod) not in ("Succeeded", "Failed")]
    stay = 0
    for pod in alive:
        leaves = is_leaving(pod)
        stay += not leaves
        if leaves:
            finding = leaving(pod, now, grouped=is_grouped(pod))
        else:
            finding = unready(pod, spec_of(pod, specs), now)
        if finding:
            groups.setdefault((finding.kind, finding.reason), []).append((name_of(pod), finding))
    problems: list[Problem] = []
    for (kind, reason), found in groups.items():
        name, finding = min(found, key=lambda item: item[0])
        if reason == "Draining":
            # The last of them to end is the one to wait for.
            name, finding = max(found, key=lambda item: (item[1].what, item[0]))
        # Of those that leave, none is missed.
        among = "" if reason in ("Draining", "StuckTerminating", RECREATED) else f" of {stay}"
        some = f"{len(found)}{among} {'pod' if f'{len(found)}{among}' == '1' else 'pods'}"
        detail = f": {finding.detail}" if finding.detail else ""
        message = f"{pool}: {finding.what} ({some}, {short(name, 80)}){detail}"
        problems.append(Problem(kind, reason, pool, message))
    return problems


def _of_failed(pool: str, pods: Sequence[Raw], children: Children, now: str) -> list[Problem]:
    """Pods that ended for good: evicted, or refused by a node. Others take their place."""
    failed = [p for p in pods if _phase(p) == "Failed" and not is_leaving(p) and _is_new(p, now)]
    if not failed or not _is_short(pool, children):
        return []
    pod = min(failed, key=name_of)
    reason = camel(text(pod, "status", "reason"), "PodFailed")
    kind: Kind = "Degraded" if len(failed) >= MANY_FAILED else "Waiting"
    some = f"{len(failed)} pods" if len(failed) > 1 else "1 pod"
    said = short(text(pod, "status", "message"))
    message = f"{pool}: failed for good ({some}, {short(name_of(pod), 80)}): {said or reason}"
    return [Problem(kind, reason, pool, message)]


def _is_new(pod: Raw, now: str) -> bool:
    times = [text(row, "lastTransitionTime") for row in rows(pod, "status", "conditions")]
    times.append(text(pod, "metadata", "creationTimestamp"))
    ages = [age for time in times if (age := seconds_between(time, now)) is not None]
    return bool(ages) and min(ages) < RECENT_S


def _is_short(pool: str, children: Children) -> bool:
    counts = children.counts
    mine = [(key, w) for w in workloads(children) if (key := key_of(w)) and key[0] == pool]
    return any(counts.get(key, NOTHING).ready < replicas_of(w) for key, w in mine)


def _of_workload(workload: Raw) -> list[Problem]:
    """Pods that Kubernetes refuses to create."""
    failure = condition(workload, "ReplicaFailure")
    key = key_of(workload)
    if text(failure, "status") != "True" or key is None:
        return []
    words = text(failure, "message")
    have = f"{count(workload, 'status', 'replicas')} of {replicas_of(workload)} pods exist"
    message = f"{key[0]}: {have}: {short(words)}"
    if "exceeded quota" in words:
        return [Problem("Degraded", "QuotaExceeded", key[0], message)]
    if "violates PodSecurity" in words:
        if "hostPath" in words:
            message += " (hostPath needs a namespace of the level privileged)"
        return [Problem("Degraded", "PodSecurity", key[0], message)]
    # The ServiceAccount of a new fleet may be younger than its first pods.
    kind: Kind = "Waiting" if "error looking up service account" in words else "Degraded"
    return [Problem(kind, "FailedCreate", key[0], message)]


def _of_deadlines(children: Children, known: set[str]) -> list[Problem]:
    """Pools that make no progress, where nothing else says why."""
    found: list[Problem] = []
    for workload in workloads(children):
        progress, key = condition(workload, "Progressing"), key_of(workload)
        stopped = text(progress, "reason") == "ProgressDeadlineExceeded"
        if key and stopped and key[0] not in known:
            limit = count(workload, "spec", "progressDeadlineSeconds")
            message = f"{key[0]}: no pod became ready within {limit} s (Deployment"
            message += f" {short(name_of(workload), 80)})"
            found.append(Problem("Degraded", "ProgressDeadlineExceeded", key[0], message))
    return found

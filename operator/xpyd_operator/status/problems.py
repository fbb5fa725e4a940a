"""What is wrong with a fleet, or what it waits for, from the status of its pods and workloads.

There is one line for each pool and reason, however many pods share it, so that conditions and
Events stay short with a thousand pods. Kubernetes' own words are kept where they say what to do and
cut where they only name a layer. No text contains an elapsed time: the status would then have to be
written every second.

How long a state has lasted is what the operator saw of it, by its steady clock (first_seen). The
times in the objects are other machines': they are shown, and not compared with a clock of ours.
See docs/adr/0047.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from xpyd_operator.manifests.names import (
    ENGINE_CONTAINER,
    LABEL_FLEET,
    ROUTABLE,
    ROUTER_CONTAINER,
    service_account_name,
)
from xpyd_operator.status.children import (
    NOTHING,
    Children,
    Key,
    Raw,
    at,
    condition,
    count,
    fields,
    is_grouped,
    is_leaving,
    is_true,
    key_of,
    moment,
    name_of,
    pod_specs,
    replicas_of,
    rows,
    short,
    spec_of,
    tail,
    text,
    workloads,
)
from xpyd_operator.status.crashes import RECREATED, crash, exit_before, group_failure
from xpyd_operator.status.routable import NO_PAIR, gate_of

Kind = Literal["Degraded", "Capacity", "Waiting", "Drifted"]

SLOW_VOLUMES_S = 30.0
"""Volumes that take longer are named; most are mounted within a second."""
LOST_VOLUMES_S = 150.0
"""Kubelet gives up a mount after 2 minutes and 3 s and begins again: a longer wait is an error."""
STUCK_S = 60.0
"""A pod that is seen leaving for so long beyond its grace period is stuck."""

_PULLS = frozenset(
    {"ImagePullBackOff", "ErrImagePull", "RegistryUnavailable", "SignatureValidationFailed"}
)
_CANNOT_START = {
    "InvalidImageName": "the image's name is invalid",
    "ErrImageNeverPull": "the image is not on the node and imagePullPolicy is Never",
    "ImageInspectError": "the image cannot be read",
    "CreateContainerConfigError": "the container cannot be configured",
    "CreateContainerError": "the container cannot be created",
    "RunContainerError": "the container cannot be started",
    "PreCreateHookError": "the container cannot be created",
    "PreStartHookError": "the container cannot be started",
    "PostStartHookError": "the container cannot be started",
}
_LAYERS = re.compile(
    r'Back-off pulling image "[^"]*": |ErrImagePull: |rpc error: code = \w+ desc = '
    r'|failed to pull and unpack image "[^"]*": |failed to resolve reference "[^"]*": '
)
_PREEMPTION = re.compile(r"\.? [^.]*\bpreemption: .*", re.DOTALL)
"""The scheduler's last sentence says what preemption would do; it is left out."""
_REASON = re.compile(r"[A-Za-z]([A-Za-z0-9]{0,61}[A-Za-z0-9])?", re.ASCII)
_NO_ACCOUNT = re.compile(r'error looking up service account .*serviceaccounts? "([^"]+)" not found')
_CREATING = ("", "ContainerCreating", "PodInitializing")


@dataclass(frozen=True)
class Finding:
    """Why one pod is not ready. Pods with the same kind and reason share one line."""

    kind: Kind
    reason: str
    what: str
    detail: str = ""


def camel(reason: str, otherwise: str) -> str:
    """`reason` where it is valid as a condition's reason, else `otherwise`."""
    return reason if _REASON.fullmatch(reason) else otherwise


def is_overdue(pod: Raw, age_s: float) -> bool:
    """Whether a pod that is being deleted should have been gone. `age_s`: as in leaving()."""
    return age_s - STUCK_S > count(pod, "metadata", "deletionGracePeriodSeconds")


def leaving(pod: Raw, age_s: float, *, grouped: bool = False) -> Finding:
    """The state of a pod that is being deleted. deletionTimestamp is the deadline, not the start.

    `age_s`: since it was first seen so. `grouped`: it is one of several pods of an instance, which
    go together.
    """
    deadline = text(pod, "metadata", "deletionTimestamp")
    if is_overdue(pod, age_s):
        what = f"should have been gone by {clock(deadline)}"
        cause = f"its node {_node(pod)} does not answer, or a finalizer holds it"
        return Finding("Degraded", "StuckTerminating", what, cause)
    if grouped and (fell := group_failure(pod)):
        return Finding("Degraded" if fell.loops else "Waiting", fell.reason, fell.what, fell.detail)
    return Finding("Waiting", "Draining", f"draining, gone by {clock(deadline)} at the latest")


def unready(pod: Raw, spec: Raw, age_s: float) -> Finding | None:
    """What a pod that stays still lacks; None: the pod serves.

    `spec`: of the pod, or what its workload has as one. `age_s`: since it was first seen with its
    place, not ready.
    """
    if is_true(pod, "Ready"):
        return None
    scheduled = condition(pod, "PodScheduled")
    if text(scheduled, "status") == "False":
        return _unscheduled(scheduled)
    statuses = [
        *rows(pod, "status", "initContainerStatuses"),
        *rows(pod, "status", "containerStatuses"),
    ]
    if not text(pod, "spec", "nodeName") and not statuses:
        return Finding("Waiting", "Scheduling", "not yet seen by the scheduler")
    broken = [found for status in statuses if (found := _broken(spec, status))]
    if broken:
        return min(broken, key=lambda f: f.kind != "Degraded")
    waiting = [status for status in statuses if _is_waiting(status)]
    first = _initializing(pod, waiting)
    if first or waiting or not statuses:
        return first or _creating(pod, spec, waiting, age_s)
    return _starting(pod, spec, statuses)


def _node(pod: Raw) -> str:
    return short(text(pod, "spec", "nodeName"), 80)


def clock(value: str) -> str:
    """An RFC 3339 time as a clock shows it, in UTC."""
    found = moment(value)
    return found.strftime("%H:%M:%SZ") if found else "an unknown time"


def _unscheduled(scheduled: Raw) -> Finding:
    if text(scheduled, "reason") == "SchedulingGated":
        return Finding("Waiting", "SchedulingGated", "held back by scheduling gates")
    words = _PREEMPTION.sub("", text(scheduled, "message")).strip().removesuffix(".")
    what, detail = "no node fits", short(words)
    if "persistentvolumeclaim" not in words.lower():
        return Finding("Capacity", "Unschedulable", what, detail)
    kind = "Waiting" if "unbound" in words else "Degraded"
    return Finding(kind, "VolumeUnavailable", what, detail)


def _is_waiting(status: Raw) -> bool:
    return at(status, "state", "waiting") is not None or not fields(status, "state")


def _waits(status: Raw) -> str:
    return text(status, "state", "waiting", "reason")


def _broken(spec: Raw, status: Raw) -> Finding | None:
    """A problem of one container that waiting alone may not solve."""
    name, reason = text(status, "name"), _waits(status)
    whose = "" if name in (ENGINE_CONTAINER, ROUTER_CONTAINER) else f"container {short(name, 63)}, "
    message = _LAYERS.sub("", text(status, "state", "waiting", "message"))
    image = short(text(status, "image") or _image(spec, name), 120)
    if reason in _PULLS:
        what = "the image cannot be pulled"
        return Finding("Degraded", "ImagePullBackOff", what, f"{whose}{image}: {tail(message)}")
    if reason in _CANNOT_START:
        detail = image if reason in ("ErrImageNeverPull", "InvalidImageName") else tail(message)
        return Finding("Degraded", reason, _CANNOT_START[reason], whose + detail)
    exited = crash(spec, status)
    if exited:
        kind = "Degraded" if exited.loops else "Waiting"
        return Finding(kind, exited.reason, exited.what, whose + exited.detail)
    if _is_waiting(status) and reason not in _CREATING:
        return Finding("Waiting", camel(reason, "ContainerWaiting"), short(reason), tail(message))
    return None


def _image(spec: Raw, container: str) -> str:
    everyone = [*rows(spec, "initContainers"), *rows(spec, "containers")]
    return next((text(c, "image") for c in everyone if text(c, "name") == container), "")


def _initializing(pod: Raw, waiting: Iterable[Raw]) -> Finding | None:
    """The init container that the other containers wait for."""
    if not any(_waits(status) == "PodInitializing" for status in waiting):
        return None
    for status in rows(pod, "status", "initContainerStatuses"):
        running = fields(status, "state", "running")
        if running and at(status, "started") is not True:
            name = short(text(status, "name"), 63)
            what = f"init container {name} runs since {clock(text(running, 'startedAt'))}"
            return Finding("Waiting", "PodInitializing", what)
    return None


def _creating(pod: Raw, spec: Raw, waiting: Iterable[Raw], age_s: float) -> Finding:
    ready_to_start = condition(pod, "PodReadyToStartContainers")
    if text(ready_to_start, "status") == "True":
        images = sorted({text(s, "image") or _image(spec, text(s, "name")) for s in waiting})
        what = "the image is being pulled or the container is starting"
        return Finding("Waiting", "ContainerCreating", what, short(", ".join(filter(None, images))))
    if age_s <= SLOW_VOLUMES_S:
        return Finding("Waiting", "ContainerCreating", "being created")
    kind: Kind = "Degraded" if age_s > LOST_VOLUMES_S else "Waiting"
    what = f"not created since {clock(_scheduled_at(pod))}"
    detail = f"node {_node(pod)} may lack {' or '.join(_needs(spec))}"
    return Finding(kind, "VolumesNotMounted", what, short(detail))


def _scheduled_at(pod: Raw) -> str:
    return text(condition(pod, "PodScheduled"), "lastTransitionTime")


def _needs(spec: Raw) -> list[str]:
    """What a node needs before it creates the pod's containers."""
    found: list[str] = []
    for volume in rows(spec, "volumes"):
        for kind, key, called in (
            ("secret", "secretName", "Secret"),
            ("persistentVolumeClaim", "claimName", "PersistentVolumeClaim"),
            ("configMap", "name", "ConfigMap"),
            ("hostPath", "path", "hostPath"),
            ("csi", "driver", "CSI volume of"),
        ):
            if name := text(volume, kind, key):
                found.append(f"{called} {name}")
        # Only the fleet's key comes so; its Secrets are optional.
        maps = (text(s, "configMap", "name") for s in rows(volume, "projected", "sources"))
        found += [f"ConfigMap {name}" for name in maps if name]
    found += [f"ResourceClaim {text(c, 'name')}" for c in rows(spec, "resourceClaims")]
    return [*found, "the pod's network"]


def _starting(pod: Raw, spec: Raw, statuses: Iterable[Raw]) -> Finding:
    """Why a pod whose containers run is not ready."""
    lagging = [s for s in statuses if at(s, "ready") is not True and fields(s, "state", "running")]
    if not lagging:
        gates = [text(gate, "conditionType") for gate in rows(spec, "readinessGates")]
        unmet = [gate for gate in gates if not is_true(pod, gate)]
        if unmet == [ROUTABLE] and is_true(pod, "ContainersReady"):
            what = "its containers are ready, no router sends it requests yet"
            word, words = gate_of(pod)
            reason = word if word == NO_PAIR else "NotRoutable"
            return Finding("Waiting", reason, what, words)
        if [gate for gate in unmet if gate != ROUTABLE]:
            return Finding("Waiting", "ReadinessGates", "readiness gates", short(", ".join(unmet)))
        if not is_true(pod, "ContainersReady"):
            return Finding("Waiting", "NotReady", "not ready yet")
        # Kubelet sets both at once; the node controller takes Ready away alone.
        return Finding("Waiting", "NodeNotReady", "was ready, its node does not answer", _node(pod))
    name = text(lagging[0], "name")
    since = f"since {clock(text(lagging[0], 'state', 'running', 'startedAt'))}"
    if name == ROUTER_CONTAINER:
        what = "runs and waits for engines to route to"
        return Finding("Waiting", "WaitingForEngines", what)
    if name == ENGINE_CONTAINER:
        before = exit_before(lagging[0])
        detail = f"after {before}" if before else ""
        return Finding("Waiting", "ModelLoading", f"the model is loading {since}", detail)
    return Finding("Waiting", "NotReady", f"container {short(name, 63)} is not ready {since}")


RECENT_S = 600.0
"""Kubernetes keeps failed pods for long; those that were seen so for longer are ignored."""
MANY_FAILED = 3
"""This number of failed pods within RECENT_S makes the fleet Degraded."""

_KINDS: dict[Kind, int] = {"Degraded": 0, "Capacity": 1, "Waiting": 2, "Drifted": 3}
_LAST = ("WaitingForEngines", "Draining")
"""Reasons that follow from another problem, or that are none."""


@dataclass(frozen=True)
class Problem:
    """`kind`: Degraded needs a person, Capacity needs room in the cluster, Waiting needs time,
    Drifted is what others added to the fleet's objects.

    `reason` is one CamelCase word; `pool` is "router" for the router and "" for the whole fleet;
    `message` names pool, counts and one pod.
    """

    kind: Kind
    reason: str
    pool: str
    message: str


SeenState = tuple[str, float]
"""A state of a pod that should not last, and when it was first seen, in steady seconds."""


def first_seen(
    pods: Iterable[Raw], before: Mapping[str, SeenState] | None, now: float
) -> dict[str, SeenState]:
    """The states of the pods that leave, have failed or are not ready, by the pod's uid.

    `before`: the result of the last look, None: this is the first. `now`: steady seconds. A state
    begins when it is first seen, in a new process at its start; a pod had failed long before that.
    """
    found: dict[str, SeenState] = {}
    for pod in pods:
        since = now
        if is_leaving(pod):
            state = f"leaving by {text(pod, 'metadata', 'deletionTimestamp')}"
        elif _phase(pod) == "Failed":
            state = "failed"
            since = now if before is not None else float("-inf")
        elif is_true(pod, "Ready"):
            continue
        else:
            state = f"scheduled at {_scheduled_at(pod)}"
        uid = text(pod, "metadata", "uid")
        known = before.get(uid) if before else None
        found[uid] = known if known and known[0] == state else (state, since)
    return found


def find_problems(
    children: Children,
    ages: Mapping[str, float],
    deadline_s: float = math.inf,
    wanted: Container[Key] | None = None,
) -> tuple[Problem, ...]:
    """All problems, those that matter most first.

    `ages`: for how many seconds each pod's state has been seen (first_seen), by the pod's uid, 0
    where it is missing. `deadline_s`: how long a group of pods may take to be ready, Deployments
    have it in them. `wanted`: what can be late, since others are to go; None: all.
    """
    found: list[Problem] = []
    by_pool, specs = _by_pool(children.pods), pod_specs(children)
    for pool in sorted(by_pool):
        found += _of_pods(pool, by_pool[pool], specs, ages)
        found += _of_failed(pool, by_pool[pool], children, ages)
    for workload in workloads(children):
        found += _of_workload(workload)
    told = {problem.pool for problem in found if problem.kind == "Degraded"}
    at_gate = (p for p in found if p.reason in (NO_PAIR, "NotRoutable"))
    causes = {p.pool: p.message.removeprefix(p.pool) for p in at_gate}
    causes |= {p.pool: _NO_ROOM for p in found if p.kind == "Capacity"}
    for (pool, revision), words in _late(children, ages, deadline_s):
        if pool not in told and (wanted is None or (pool, revision) in wanted):
            message = f"{pool}: {words}{causes.get(pool, '')}"
            found.append(Problem("Degraded", "ProgressDeadlineExceeded", pool, message))
    return in_order(found)


def in_order(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """The problems without repetitions, those that matter most first."""
    return tuple(sorted(dict.fromkeys(problems), key=_rank))


def _rank(problem: Problem) -> tuple[int, bool, str, str, str]:
    last = problem.reason in _LAST
    return (_KINDS[problem.kind], last, problem.pool, problem.reason, problem.message)


def _by_pool(pods: Iterable[Raw]) -> dict[str, list[Raw]]:
    found: dict[str, list[Raw]] = {}
    for pod in pods:
        if key := key_of(pod):
            found.setdefault(key[0], []).append(pod)
    return found


def _phase(pod: Raw) -> str:
    return text(pod, "status", "phase")


def _of_pods(
    pool: str,
    pods: Sequence[Raw],
    specs: Mapping[Key, tuple[Raw, Raw]],
    ages: Mapping[str, float],
) -> list[Problem]:
    groups: dict[tuple[Kind, str], list[tuple[str, Finding]]] = {}
    alive = [pod for pod in pods if _phase(pod) not in ("Succeeded", "Failed")]
    stay = 0
    for pod in alive:
        leaves = is_leaving(pod)
        stay += not leaves
        if leaves:
            finding = leaving(pod, _age(pod, ages), grouped=is_grouped(pod))
        else:
            finding = unready(pod, spec_of(pod, specs), _age(pod, ages))
        if finding:
            groups.setdefault((finding.kind, finding.reason), []).append((name_of(pod), finding))
    problems: list[Problem] = []
    for (kind, reason), found in groups.items():
        name, finding = min(found, key=lambda item: item[0])
        if reason == "Draining":
            # The last pod to end is named: the fleet waits for it.
            name, finding = max(found, key=lambda item: (item[1].what, item[0]))
        # Pods that leave are not counted against those that stay.
        among = "" if reason in ("Draining", "StuckTerminating", RECREATED) else f" of {stay}"
        some = f"{len(found)}{among} {'pod' if f'{len(found)}{among}' == '1' else 'pods'}"
        detail = f": {finding.detail}" if finding.detail else ""
        message = f"{pool}: {finding.what} ({some}, {short(name, 80)}){detail}"
        problems.append(Problem(kind, reason, pool, message))
    return problems


def _of_failed(
    pool: str, pods: Sequence[Raw], children: Children, ages: Mapping[str, float]
) -> list[Problem]:
    """Pods that ended for good: evicted, or refused by a node. Other pods replace them."""
    failed = [p for p in pods if _phase(p) == "Failed" and not is_leaving(p)]
    failed = [p for p in failed if _age(p, ages) < RECENT_S]
    if not failed or not _is_short(pool, children):
        return []
    pod = min(failed, key=name_of)
    reason = camel(text(pod, "status", "reason"), "PodFailed")
    kind: Kind = "Degraded" if len(failed) >= MANY_FAILED else "Waiting"
    some = f"{len(failed)} pods" if len(failed) > 1 else "1 pod"
    words = short(text(pod, "status", "message"))
    message = f"{pool}: failed for good ({some}, {short(name_of(pod), 80)}): {words or reason}"
    return [Problem(kind, reason, pool, message)]


def _age(pod: Raw, ages: Mapping[str, float]) -> float:
    return ages.get(text(pod, "metadata", "uid"), 0.0)


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
    account = _NO_ACCOUNT.search(words)
    if account is None:
        return [Problem("Degraded", "FailedCreate", key[0], message)]
    if account[1] == service_account_name(text(workload, "metadata", "labels", LABEL_FLEET)):
        # That of a new fleet may be younger than its first pods.
        return [Problem("Waiting", "FailedCreate", key[0], message)]
    message = (
        f"{key[0]}: {have}: the namespace has no ServiceAccount {short(account[1], 80)}, which the "
        "pool's template names: create it, or leave serviceAccountName out of the template"
    )
    return [Problem("Degraded", "ServiceAccountMissing", key[0], message)]


_NO_ROOM = (
    ": no node fits; add nodes, or let old instances make room (spec.rollout.maxUnavailablePercent)"
)


def _late(
    children: Children, ages: Mapping[str, float], deadline_s: float
) -> Iterator[tuple[Key, str]]:
    """Where nothing became ready for too long, with the words for it."""
    for workload in workloads(children):
        progress, key = condition(workload, "Progressing"), key_of(workload)
        if key and text(progress, "reason") == "ProgressDeadlineExceeded":
            limit, name = count(workload, "spec", "progressDeadlineSeconds"), name_of(workload)
            yield key, f"no pod became ready within {limit} s (Deployment {short(name, 80)})"
    for pod in children.pods:
        is_late = _age(pod, ages) > deadline_s and not is_leaving(pod) and _phase(pod) != "Failed"
        if (key := key_of(pod)) and is_grouped(pod) and is_late:
            words = f"no pod became ready within {deadline_s:.0f} s"
            yield key, f"{words} (its group's pod {short(name_of(pod), 80)})"

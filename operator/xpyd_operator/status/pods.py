"""Why one pod is not ready, from its status as kubelet and scheduler write it. Pure.

Kubernetes' own words are kept where they tell what to do, and cut where they only tell which layer
spoke. A text never holds a time that passes, or the status would have to be written each second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from xpyd_operator.manifests.names import ENGINE_CONTAINER, ROUTER_CONTAINER
from xpyd_operator.status.crashes import crash, exit_before, fall
from xpyd_operator.status.raw import (
    Raw,
    at,
    condition,
    fields,
    is_true,
    moment,
    rows,
    seconds_between,
    short,
    tail,
    text,
)

Kind = Literal["Degraded", "Capacity", "Waiting"]

SLOW_VOLUMES_S = 30.0
"""Volumes that take so long are named; most are there within a second."""
LOST_VOLUMES_S = 150.0
"""Kubelet gives a mount up after 2 minutes and 3 s and begins again: then it is no hiccup."""
STUCK_S = 60.0
"""A pod that is still there so long after its grace period has ended is held by something."""

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
"""What preemption would do is the scheduler's last sentence, and never news."""
_REASON = re.compile(r"[A-Za-z]([A-Za-z0-9]{0,61}[A-Za-z0-9])?", re.ASCII)
_CREATING = ("", "ContainerCreating", "PodInitializing")


@dataclass(frozen=True)
class Finding:
    """What keeps one pod. Pods with the same kind and reason are told of together."""

    kind: Kind
    reason: str
    what: str
    detail: str = ""


def camel(reason: str, otherwise: str) -> str:
    """`reason` where it is fit to be a condition's reason."""
    return reason if _REASON.fullmatch(reason) else otherwise


def leaving(pod: Raw, now: str, *, grouped: bool = False) -> Finding:
    """How a pod that is being deleted does. The API server's time is that of its end, not start.

    `grouped`: it is one of several pods of an instance, which go together.
    """
    deadline = text(pod, "metadata", "deletionTimestamp")
    late_s = seconds_between(deadline, now)
    if late_s is not None and late_s > STUCK_S:
        what = f"should have been gone by {clock(deadline)}"
        cause = f"its node {_node(pod)} does not answer, or a finalizer holds it"
        return Finding("Degraded", "StuckTerminating", what, cause)
    if grouped and (fell := fall(pod)):
        return Finding("Degraded" if fell.loops else "Waiting", fell.reason, fell.what, fell.detail)
    return Finding("Waiting", "Draining", f"draining, gone by {clock(deadline)} at the latest")


def unready(pod: Raw, spec: Raw, now: str) -> Finding | None:
    """What a pod that stays still lacks; None: nothing, it serves.

    `spec`: of the pod, or what its workload has as one.
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
        return first or _creating(pod, spec, waiting, now)
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
    """What waiting alone may not mend in one container."""
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
    """An init container that the others wait for."""
    if not any(_waits(status) == "PodInitializing" for status in waiting):
        return None
    for status in rows(pod, "status", "initContainerStatuses"):
        running = fields(status, "state", "running")
        if running and at(status, "started") is not True:
            name = short(text(status, "name"), 63)
            what = f"init container {name} runs since {clock(text(running, 'startedAt'))}"
            return Finding("Waiting", "PodInitializing", what)
    return None


def _creating(pod: Raw, spec: Raw, waiting: Iterable[Raw], now: str) -> Finding:
    ready_to_start = condition(pod, "PodReadyToStartContainers")
    if text(ready_to_start, "status") == "True":
        images = sorted({text(s, "image") or _image(spec, text(s, "name")) for s in waiting})
        what = "the image is being pulled or the container is starting"
        return Finding("Waiting", "ContainerCreating", what, short(", ".join(filter(None, images))))
    since = text(condition(pod, "PodScheduled"), "lastTransitionTime")
    waited_s = seconds_between(since, now) or 0.0
    if waited_s <= SLOW_VOLUMES_S:
        return Finding("Waiting", "ContainerCreating", "being created")
    kind: Kind = "Degraded" if waited_s > LOST_VOLUMES_S else "Waiting"
    what = f"not created since {clock(since)}"
    detail = f"node {_node(pod)} may lack {' or '.join(_needs(spec))}"
    return Finding(kind, "VolumesNotMounted", what, short(detail))


def _needs(spec: Raw) -> list[str]:
    """What a node must have at hand before it creates the pod's containers."""
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
    found += [f"ResourceClaim {text(c, 'name')}" for c in rows(spec, "resourceClaims")]
    return [*found, "the pod's network"]


def _starting(pod: Raw, spec: Raw, statuses: Iterable[Raw]) -> Finding:
    """Why a pod whose containers run is not ready."""
    lagging = [s for s in statuses if at(s, "ready") is not True and fields(s, "state", "running")]
    if not lagging:
        gates = [text(gate, "conditionType") for gate in rows(spec, "readinessGates")]
        unmet = [gate for gate in gates if not is_true(pod, gate)]
        if unmet:
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

"""Explains a container's exit: exit code, signal, memory limit, the last line of its log.

Engines and routers have `terminationMessagePolicy: FallbackToLogsOnError`, so kubelet puts the end
of a failed container's log into its termination message. An engine whose rank died ends its log
with the rank and the reason.

A container that ended is started again in its pod. Of an instance of several pods, LeaderWorkerSet
then deletes all pods and creates new ones: restarts are not counted, and an exit is visible only
until the pod is gone.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from xpyd_operator.status.children import (
    Raw,
    at,
    count,
    fields,
    moment,
    rows,
    seconds_between,
    short,
    tail,
    text,
)

LOOPS_AFTER = 2
"""After so many restarts, a container that runs but is not ready counts as crashing: between two
crashes it runs for a moment, and a condition should not follow that."""
STABLE_S = 600.0
"""An exit after so long is a new crash: kubelet resets its back-off then, too."""

_TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.,]+(Z|[+-]\d\d:?\d\d)?\s+", re.ASCII)
_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
_SIGNALLED = 128
RECREATED = "InstanceRecreated"
"""All pods of an instance are created again because one of them failed."""
_LOOP = "CrashLoopBackOff"
_CRASHES = "the container crashes"
_OUT_OF_MEMORY = "OOMKilled"


@dataclass(frozen=True)
class Crash:
    """One container's exit. `loops`: it exits repeatedly."""

    loops: bool
    reason: str
    what: str
    detail: str


def crash(spec: Raw, status: Raw) -> Crash | None:
    """The exit that keeps the container from serving; None where it runs well or never ran.

    `spec`: of its pod. `status`: of the container.
    """
    state = fields(status, "state")
    exited = fields(state, "terminated") or fields(status, "lastState", "terminated")
    restarts = count(status, "restartCount")
    waits = text(state, "waiting", "reason") == "CrashLoopBackOff"
    runs = at(state, "running") is not None
    if not exited:
        return Crash(True, _LOOP, _CRASHES, _times(restarts)) if waits else None
    if at(status, "ready") is True or (at(state, "terminated") and _is_done(spec, status, exited)):
        return None
    ran_s = seconds_between(text(exited, "startedAt"), text(exited, "finishedAt")) or 0.0
    loops = waits or (restarts >= LOOPS_AFTER and ran_s < STABLE_S)
    if runs and not loops:
        return None
    if text(exited, "reason") == _OUT_OF_MEMORY:
        name = text(status, "name")
        limit = _memory_limit(spec, name)
        what = "out of memory"
        if limit:
            what += f" at the limit of {limit}; its template sets resources.limits.memory of {name}"
        return Crash(loops, _OUT_OF_MEMORY, what, _with_line(_times(restarts), exited))
    detail = _with_line(f"{exit_text(exited)}, {_times(restarts)}", exited)
    if loops:
        return Crash(True, _LOOP, _CRASHES, detail)
    return Crash(False, "ContainerExited", "the container ended and is started again", detail)


def exit_before(status: Raw) -> str:
    """How the container's run before this one ended; "": it did not fail."""
    exited = fields(status, "lastState", "terminated")
    if not count(exited, "exitCode"):
        return ""
    return _with_line(f"{exit_text(exited)}, {_times(count(status, 'restartCount'))}", exited)


def group_failure(pod: Raw) -> Crash | None:
    """The exit for which a pod and its whole instance are being deleted.

    None where all its containers ran well until the deletion was requested.
    """
    end = moment(text(pod, "metadata", "deletionTimestamp"))
    grace_s = count(pod, "metadata", "deletionGracePeriodSeconds")
    for status in rows(pod, "status", "containerStatuses"):
        exited = fields(status, "state", "terminated") or fields(status, "lastState", "terminated")
        ended = moment(text(exited, "finishedAt"))
        if not count(exited, "exitCode") or end is None or ended is None:
            continue
        if (end - ended).total_seconds() >= grace_s:
            ran_s = seconds_between(text(exited, "startedAt"), text(exited, "finishedAt")) or 0.0
            what = "a pod of the instance ended, and all of its pods are made again"
            return Crash(ran_s < STABLE_S, RECREATED, what, _with_line(exit_text(exited), exited))
    return None


def exit_text(exited: Raw) -> str:
    """The exit code and, where it means a signal, the signal's name."""
    code = count(exited, "exitCode")
    signal = _SIGNALS.get(code - _SIGNALLED)
    return f"exit code {code} ({signal})" if signal else f"exit code {code}"


def last_line(message: str) -> str:
    """The last line of a log that is not blank, without its time; of a JSON line its message."""
    line = next((s for s in reversed(message.splitlines()) if s.strip()), "").strip()
    if line.startswith("{"):
        try:
            message_text = text(json.loads(line), "message")
        except (ValueError, RecursionError):
            message_text = ""
        line = message_text or line
    return short(_TIME.sub("", line, count=1))


def _with_line(start: str, exited: Raw) -> str:
    message = text(exited, "message")
    # A runtime's error is one line that names the layers first and the cause last.
    started = text(exited, "reason") not in ("StartError", "ContainerCannotRun")
    line = last_line(message) if started else tail(message)
    return f"{start}: {line}" if line else start


def _times(restarts: int) -> str:
    return "1 restart" if restarts == 1 else f"{restarts} restarts"


def _is_done(spec: Raw, status: Raw, exited: Raw) -> bool:
    """Whether an init container has ended as it should."""
    names = {text(c, "name") for c in rows(spec, "initContainers")}
    return text(status, "name") in names and count(exited, "exitCode") == 0


def _memory_limit(spec: Raw, container: str) -> str:
    for row in rows(spec, "containers"):
        if text(row, "name") == container:
            return short(text(row, "resources", "limits", "memory"), 20)
    return ""

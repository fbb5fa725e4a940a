"""The download of a fleet's model into its claim: from a Job, its pod and what that says.

The Job says when it is done. Before that its pod says how far it is, over HTTP (DownloadProgress),
and, when it ends without the model, why: the last line of its log is its termination message. A
try that follows a failure shows the failure until bytes come again. See docs/adr/0082.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from xpyd_operator.manifests.names import LABEL_ROLE, MODEL_CONTAINER, MODEL_ROLE
from xpyd_operator.status.children import (
    Raw,
    at,
    count,
    fields,
    is_leaving,
    is_true,
    name_of,
    rows,
    short,
    text,
)
from xpyd_operator.status.problems import Problem, camel, unready

_MOST_MESSAGE = 1000
_NOTHING_SAID: Raw = {}


@dataclass(frozen=True)
class DownloadProgress:
    """What the pod of a Job says of its download."""

    phase: str
    done_bytes: int = 0
    total_bytes: int = 0
    message: str = ""


def read_progress(body: bytes) -> DownloadProgress | None:
    """The progress from an answer; None: it is none."""
    try:
        found: object = json.loads(body)
    except (ValueError, RecursionError):
        return None
    phase = text(found, "phase")
    if not phase:
        return None
    numbers = count(found, "doneBytes"), count(found, "totalBytes")
    return DownloadProgress(phase, *numbers, short(text(found, "message"), _MOST_MESSAGE))


@dataclass(frozen=True)
class ModelState:
    """The condition ModelReady, and what lies behind it."""

    is_ready: bool
    reason: str
    message: str
    kind: Literal["", "Waiting", "Degraded", "Capacity"] = ""
    """Of the fleet's problem; "" where it has none."""
    done_bytes: int = 0
    total_bytes: int = 0

    @property
    def problem(self) -> Problem | None:
        """Why the fleet's engines do not start; None: they do."""
        if not self.kind:
            return None
        reason = self.reason if self.kind != "Waiting" else "ModelDownloading"
        return Problem(self.kind, reason, "", f"model: {self.message}")

    def row(self, folder: str, before: Raw) -> dict[str, Any]:
        """The status' `model`. `before`: as it is; its numbers stay while no new ones are known."""
        total = self.total_bytes
        done = self.done_bytes
        if not total and text(before, "folder") == folder:
            total = count(before, "totalBytes")
            done = total if self.is_ready else count(before, "downloadedBytes")
        numbers = {"downloadedBytes": done, "totalBytes": total} if total else {}
        return {"folder": folder, **numbers}


def model_state(
    job: Raw | None,
    pods: Iterable[Raw],
    progress: DownloadProgress | None,
    ages: Mapping[str, float],
) -> ModelState:
    """What is known of the download by `job`; None: it is not created yet. `pods`: the fleet's."""
    if job is None:
        return ModelState(False, "Pending", "the download's Job is being created", "Waiting")
    if is_true(job, "Complete"):
        return ModelState(True, "Downloaded", "the model is in its claim")
    mine = [pod for pod in pods if _is_of(pod, name_of(job)) and not is_leaving(pod)]
    if not mine:
        return ModelState(False, "Pending", "the download's pod is being created", "Waiting")
    pod = max(mine, key=name_of) if len(mine) > 1 else mine[0]
    if progress is not None and progress.phase == "Downloading" and progress.total_bytes:
        return _downloading(progress)
    statuses = rows(pod, "status", "containerStatuses")
    status = statuses[0] if statuses else _NOTHING_SAID
    if (failed := _failure(status)) is not None:
        return failed
    if progress is not None and progress.phase == "Waiting":
        words = f"another download of the same model is waited for ({progress.message})"
        return ModelState(False, "WaitingForLock", words, "Waiting")
    finding = unready(pod, fields(pod, "spec"), ages.get(text(pod, "metadata", "uid"), 0.0))
    if finding is None or fields(status, "state", "running"):
        return ModelState(False, "Downloading", "the download begins", "Waiting")
    words = f"{finding.what}: {finding.detail}" if finding.detail else finding.what
    kind = "Waiting" if finding.kind == "Drifted" else finding.kind
    return ModelState(False, finding.reason, f"the download's pod: {words}", kind)


def _is_of(pod: Raw, job: str) -> bool:
    return text(pod, "metadata", "labels", LABEL_ROLE) == MODEL_ROLE and any(
        text(owner, "kind") == "Job" and text(owner, "name") == job
        for owner in rows(pod, "metadata", "ownerReferences")
    )


def is_of_job(pod: Raw, jobs: Iterable[str]) -> bool:
    """Whether one of these Jobs made the pod."""
    return any(_is_of(pod, job) for job in jobs)


def _downloading(progress: DownloadProgress) -> ModelState:
    done, total = min(progress.done_bytes, progress.total_bytes), progress.total_bytes
    words = f"{100 * done // total} % of {_gib(total)} downloaded"
    return ModelState(False, "Downloading", words, "Waiting", done, total)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 1 << 30 else f"{size / 2**20:.0f} MiB"


def _record(line: str) -> Raw:
    try:
        found: object = json.loads(line)
    except (ValueError, RecursionError):
        return _NOTHING_SAID
    return cast("Raw", found) if isinstance(found, dict) else _NOTHING_SAID


def _failure(status: Raw) -> ModelState | None:
    """Why the container's last try ended without the model."""
    if text(status, "name") != MODEL_CONTAINER:
        return None
    for state in ("state", "lastState"):
        ended = fields(status, state, "terminated")
        if ended and at(ended, "exitCode") != 0:
            break
    else:
        return None
    said = text(ended, "message").strip().rpartition("\n")[2]
    record = _record(said)
    reason = camel(text(record, "reason"), "DownloadFailed")
    if words := short(text(record, "message"), _MOST_MESSAGE):
        return ModelState(False, reason, words, "Degraded")
    if text(ended, "reason") == "OOMKilled":
        words = "the download was ended for its memory"
    else:
        words = f"the download ended with status {count(ended, 'exitCode')}: {short(said)}"
    return ModelState(False, "DownloadFailed", words, "Degraded")

"""Words for a failed test: what a person would ask the cluster first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cluster.harness.cluster import Cluster

_QUESTIONS = (
    ("get", "pods,deployments,services", "-o", "wide"),
    ("get", "inferencefleets,inferencefleetpools", "-o", "yaml"),
    ("get", "events", "--sort-by=.lastTimestamp"),
    ("describe", "pods"),
)
_MAX_LINES = 150
_MAX_PODS = 12


def namespace_text(cluster: Cluster, namespace: str) -> str:
    """The namespace's objects, events and logs; never raises for what cannot be had."""
    parts = [_ask(cluster, namespace, *question) for question in _QUESTIONS]
    pods = cluster.kubectl("-n", namespace, "get", "pods", "-o", "name", check=False).split()
    for pod in pods[:_MAX_PODS]:
        if pod.startswith("pod/"):
            argv = ("logs", pod, "--all-containers", "--prefix", "--tail=40")
            parts.append(_ask(cluster, namespace, *argv))
    return "\n".join(parts)


def _ask(cluster: Cluster, namespace: str, *question: str) -> str:
    text = cluster.kubectl("-n", namespace, *question, check=False, timeout_s=30)
    lines = text.splitlines()
    if len(lines) > _MAX_LINES:
        lines = [*lines[: _MAX_LINES // 2], "...", *lines[-_MAX_LINES // 2 :]]
    return "\n".join([f"--- kubectl -n {namespace} {' '.join(question)}", *lines])

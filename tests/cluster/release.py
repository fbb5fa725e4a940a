"""The chart on a control plane that has no node to run its pods: they run on this machine.

The operator, and the pods of hooks, are started here with the arguments of their manifests and
a token of their ServiceAccounts, so that what the chart lets them do is what they can do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.fleetkit import free_fleets
from tests.cluster.harness import Cluster, wait_for
from tests.cluster.operator_process import OperatorProcess, ready_operator

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "xpyd"
SYSTEM = "xpyd-system"
HOOK = "xpyd-uninstall"
ACCOUNT = f"system:serviceaccount:{SYSTEM}:xpyd-operator"
HOOK_ACCOUNT = f"system:serviceaccount:{SYSTEM}:{HOOK}"
OBJECTS = (
    "all,serviceaccounts,roles,rolebindings,configmaps,secrets,poddisruptionbudgets,networkpolicies"
)
GLOBALS = "customresourcedefinitions,clusterroles,clusterrolebindings"


def install(cluster: Cluster, *values: str, chart: Path = CHART) -> str:
    """`helm install xpyd`, images by their plain names; what it prints."""
    place = ("-n", SYSTEM, "--create-namespace")
    return cluster.helm("install", "xpyd", str(chart), *place, *_sets(values))


def upgrade(cluster: Cluster, *values: str, chart: Path = CHART) -> str:
    """`helm upgrade xpyd` with these values alone."""
    return cluster.helm("upgrade", "xpyd", str(chart), "-n", SYSTEM, *_sets(values))


def _sets(values: tuple[str, ...]) -> list[str]:
    return [part for value in ("images.local=true", *values) for part in ("--set", value)]


def everything(cluster: Cluster) -> set[str]:
    """Kind, namespace and name of all that xpyd could leave behind."""
    found: set[str] = set()
    for kinds, place in ((OBJECTS, ("-A",)), (GLOBALS, ())):
        listed = json.loads(cluster.kubectl("get", kinds, *place, "-o", "json"))["items"]
        for item in listed:
            meta = item["metadata"]
            found.add(f"{item['kind']} {meta.get('namespace', '')}/{meta['name']}")
    # Each namespace gets these from the cluster itself.
    return {name for name in found if not name.endswith(("/default", "/kube-root-ca.crt"))}


def clean(cluster: Cluster) -> None:
    """Take away what a test that failed left, so that the next one is not in its way."""
    if "xpyd" not in cluster.helm("list", "-n", SYSTEM, "--short"):
        return
    cluster.helm("uninstall", "xpyd", "-n", SYSTEM, "--no-hooks", check=False)
    free_fleets(cluster)


def kubeconfig_of(cluster: Cluster, namespace: str, account: str, folder: Path) -> Path:
    """A kubeconfig that signs in as a ServiceAccount."""
    token = cluster.kubectl("-n", namespace, "create", "token", account).strip()
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    for user in config["users"]:
        user["user"] = {"token": token}
    file = folder / f"{namespace}-{account}.kubeconfig"
    file.touch(mode=0o600)
    file.write_text(yaml.safe_dump(config))
    return file


def _environment(kubeconfig: Path) -> dict[str, str]:
    return {**os.environ, "KUBECONFIG": str(kubeconfig)}


@contextmanager
def running_operator(cluster: Cluster, folder: Path) -> Iterator[OperatorProcess]:
    """The operator as its Deployment starts it, with its account's rights."""
    deployment = json.loads(
        cluster.kubectl("-n", SYSTEM, "get", "deployment", "xpyd-operator", "-o", "json")
    )
    spec = deployment["spec"]["template"]["spec"]
    kubeconfig = kubeconfig_of(cluster, SYSTEM, spec["serviceAccountName"], folder)
    args: list[str] = spec["containers"][0]["args"]
    with ready_operator(args, _environment(kubeconfig)) as operator:
        yield operator
        operator.stop()


def run_hook(cluster: Cluster, folder: Path) -> str:
    """Stand in for the node of the hook's Job: run its pod's command here; what it printed.

    The pod is marked as succeeded or failed, so that the Job, and helm, go on.
    """
    pod = wait_for(lambda: _pod_of(cluster, HOOK), 30, "the hook has a pod")
    spec = pod["spec"]
    kubeconfig = kubeconfig_of(cluster, SYSTEM, spec["serviceAccountName"], folder)
    container = spec["containers"][0]
    argv = [sys.executable, *container["command"][1:], *container["args"]]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=120, env=_environment(kubeconfig)
    )
    phase = "Failed" if done.returncode else "Succeeded"
    name = pod["metadata"]["name"]
    patch = json.dumps({"status": {"phase": phase}})
    cluster.kubectl("-n", SYSTEM, "patch", "pod", name, "--subresource=status", "-p", patch)
    return done.stdout + done.stderr


def _pod_of(cluster: Cluster, job: str) -> dict[str, Any] | None:
    selector = f"batch.kubernetes.io/job-name={job}"
    pods = json.loads(cluster.kubectl("-n", SYSTEM, "get", "pods", "-l", selector, "-o", "json"))
    waiting = [pod for pod in pods["items"] if pod["status"]["phase"] == "Pending"]
    return waiting[0] if waiting else None

"""The shell of `kubectl xpyd drain`: has a pod evicted, and looks at it until it is gone.

What a look means, and what proves that nothing was lost, is in `leaving`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager

from xpyd_core.errors import UserError
from xpyd_core.pod_env import ROUTER_ADMIN_PORT
from xpyd_operator.cluster.leaving import (
    EXITS,
    Look,
    Outcome,
    Target,
    eviction,
    is_refused_by_budget,
    look_of,
    look_text,
    outcome_of,
    pool_is_whole,
    target_of,
)
from xpyd_operator.rollout import view
from xpyd_operator.rollout.command import Kubectl

LOOK_S = 2.0
"""Between two looks."""
_POOL = "inferencefleetpool.xpyd.dev"
_KEPT_LINES = 200
_SCALED_S = 30.0
"""A ReplicaSet chooses within a second or two who leaves."""
_FIRST_VICTIM = "-2147483648"


def say(args: argparse.Namespace, words: str, found: object) -> None:
    """Print it, for people or for machines."""
    sys.stdout.write(json.dumps(found) + "\n" if args.output == "json" else words)
    sys.stdout.flush()


def run_drain(args: argparse.Namespace) -> int:
    """Take the instance out; the exit status says how it went."""
    kubectl, until = Kubectl(args), time.monotonic() + args.timeout
    target = target_of(kubectl.read("get", f"pod/{args.pod}"))
    outcome: Outcome = "Begun"
    words = f"it drains; `kubectl xpyd status {target.fleet}` shows what it still has"
    last = Look()
    with _log_of(kubectl, target.name, target.container) as log:
        refused = _begin(kubectl, args, target, until)
        if refused:
            outcome, words = "Refused", refused
        elif args.wait:
            last, is_gone = _until_gone(kubectl, target, until)
            outcome, words = "Draining", look_text(last)
            if is_gone:
                time.sleep(min(LOOK_S, 1.0))  # the log's last lines are on their way
                outcome, words = outcome_of(list(log), last)
    if args.wait and outcome in ("Drained", "Cut", "Unproven"):
        is_whole, state = _until_whole(kubectl, target.fleet, target.pool, until)
        words = f"{words}; {state}"
        if not is_whole and outcome == "Drained":
            outcome = "Draining"
    found = {
        "pod": target.name,
        "outcome": outcome,
        "message": words,
        "routers": last.routers,
        "acknowledged": last.acknowledged,
    }
    if last.load is not None:
        found |= {"requests": last.load.requests, "kvLeases": last.load.kv_leases}
    say(args, f"{target.name}: {outcome}: {words}\n", found)
    return EXITS[outcome]


def _begin(kubectl: Kubectl, args: argparse.Namespace, target: Target, until: float) -> str:
    """Have the pod leave; with --wait again and again while a budget refuses. Why not, or ""."""
    if args.no_replace:
        return _shrink(kubectl, target)
    if args.force:
        kubectl.run("delete", f"pod/{target.name}", "--wait=false")
        return ""
    path = f"/api/v1/namespaces/{target.namespace}/pods/{target.name}/eviction"
    while True:
        try:
            kubectl.run("create", f"--raw={path}", "-f", "-", stdin=json.dumps(eviction(target)))
        except UserError as error:
            if not is_refused_by_budget(str(error)):
                raise
            if args.wait and time.monotonic() < until:
                sys.stderr.write("a PodDisruptionBudget refuses it now; tried again\n")
                time.sleep(LOOK_S)
                continue
            return (
                f"a PodDisruptionBudget lets no more instance of pool {target.pool} go now: try"
                " again when all are ready (--wait does), or --force"
            )
        return ""


def _shrink(kubectl: Kubectl, target: Target) -> str:
    """Scale the pool down by this pod: the ReplicaSet takes the one with the lowest cost."""
    outcome = view.outcome_of(kubectl.fleet(target.fleet))
    if outcome.word != "Complete":
        raise UserError(
            f"--no-replace: the fleet is {outcome.word} ({outcome.message}), and the scale might"
            " take another instance: wait for it, or drain without --no-replace"
        )
    pool = f"{target.fleet}-{target.pool}"
    replicas = int(kubectl.read("get", f"{_POOL}/{pool}")["spec"]["replicas"])
    cost = f"controller.kubernetes.io/pod-deletion-cost={_FIRST_VICTIM}"
    kubectl.run("annotate", f"pod/{target.name}", cost, "--overwrite")
    sizes = (f"--current-replicas={replicas}", f"--replicas={replicas - 1}")
    kubectl.run("scale", f"{_POOL}/{pool}", *sizes)
    end = time.monotonic() + _SCALED_S
    while True:
        pod = kubectl.read("get", f"pod/{target.name}", "--ignore-not-found")
        if not pod or pod["metadata"].get("deletionTimestamp"):
            return ""
        if time.monotonic() >= end:
            return (
                f"pool {target.pool} has {replicas - 1} replicas now, and another instance leaves"
            )
        time.sleep(min(LOOK_S, 0.5))


def _until_gone(kubectl: Kubectl, target: Target, until: float) -> tuple[Look, bool]:
    """The last look at a pod that leaves, and whether it is gone."""
    last, said = Look(is_begun=True), ""
    while True:
        pod = kubectl.read("get", f"pod/{target.name}", "--ignore-not-found")
        if not pod or pod["metadata"]["uid"] != target.uid:
            return last, True
        bodies = list(_routers(kubectl, target.fleet, target.namespace))
        last = look_of(target, bodies, kubectl.fleet(target.fleet)).behind(last)
        if (words := look_text(last)) != said:
            said = words
            sys.stderr.write(f"{target.name}: {words}\n")
        if time.monotonic() >= until:
            return last, False
        time.sleep(LOOK_S)


def _routers(kubectl: Kubectl, fleet: str, namespace: str) -> Iterator[bytes | None]:
    """What each router says at GET /instances, through the API server; None: it cannot be asked,
    for want of the right pods/proxy or by a NetworkPolicy."""
    selector = f"--selector=xpyd.dev/fleet={fleet},xpyd.dev/role=router"
    for pod in kubectl.items("get", "pods", selector):
        name = f"{pod['metadata']['name']}:{ROUTER_ADMIN_PORT}"
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/proxy/instances"
        try:
            yield kubectl.run("get", f"--raw={path}", "--request-timeout=5s").encode()
        except UserError:
            yield None


def _until_whole(kubectl: Kubectl, fleet: str, pool: str, until: float) -> tuple[bool, str]:
    while True:
        is_whole, words = pool_is_whole(kubectl.fleet(fleet), pool)
        if is_whole or time.monotonic() >= until:
            return is_whole, words
        time.sleep(LOOK_S)


@contextmanager
def _log_of(kubectl: Kubectl, pod: str, container: str) -> Generator[deque[str]]:
    """The last lines that the pod logs from now on, also those of its end."""
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    argv = kubectl.argv("logs", f"pod/{pod}", f"--container={container}", "--follow", "--since=1s")
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    reader = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        yield lines
    finally:
        process.terminate()
        process.wait()
        reader.join(timeout=5.0)
        process.stdout.close()

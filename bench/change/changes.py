"""The changes, in the order of a round: what is done to the fleet, and until when that lasts.

A change returns when the fleet is as it is wanted, and raises when something of it is not as it
must be. A new one is a function here and a line in CHANGES.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from typing import Any

from bench.change.site import WANTED, Site, is_ready
from tests.cluster.fleetkit import Obj
from tests.cluster.harness import wait_for
from tests.cluster.harness.tools import kubectl_binary

Change = Callable[[Site], None]
HEARTBEATS_S = 12.0
"""Longer than a router keeps an instance that it does not hear of."""


def image(site: Site) -> None:
    """The engines' image."""
    other = site.other_image()
    site.apply(lambda spec: spec["engine"].update(image=other))
    site.settle("the engines have another image")


def argument(site: Site) -> None:
    """An argument of the engines."""
    flag = f"--max-num-seqs={64 if site.toggle('argument') else 96}"

    def change(spec: Obj) -> None:
        kept = [arg for arg in spec["engine"]["args"] if not arg.startswith("--max-num-seqs")]
        spec["engine"]["args"] = [*kept, flag]

    site.apply(change)
    site.settle(f"the engines have {flag}")


def undo(site: Site) -> None:
    """Another image, and back when the first instances of it serve."""
    other = site.other_image()
    before = _engines(site)
    site.apply_once(lambda spec: spec["engine"].update(image=other))

    def is_in_the_middle() -> bool:
        pods = [pod for name in ("prefill", "decode") for pod in site.fleet.pods(name)]
        return any(is_ready(pod) and pod["metadata"]["uid"] not in before for pod in pods)

    wait_for(is_in_the_middle, 90, "an instance of the new image", explain=site.explain)
    site.fleet.rollout("undo", site.fleet.name)
    assert site.fleet.document()["spec"]["engine"]["image"] != other, "the undo changed nothing"
    site.settle("the engines have the image that they had")


def canary_promoted(site: Site) -> None:
    """Another variable of the engines, first for two fifths of the requests, then for all."""
    _try_canary(site)
    _wait_canary(site, "Promoted")
    site.settle("the engines of the canary are all there are")
    site.apply(lambda spec: spec.pop("rollout"))
    site.settle("the routers follow no canary any more")


def canary_taken_back(site: Site) -> None:
    """The same, with a limit that no engine holds: the operator ends what it began."""
    before, document = _engines(site), copy.deepcopy(site.document)
    _try_canary(site, ttftMilliseconds=1)
    _wait_canary(site, "Failed")
    wait_for(lambda: _engines(site) == before, 120, "the canary is gone", explain=site.explain)
    site.document = document
    site.fleet.apply(document)
    site.settle("the engines are those that were")
    assert _engines(site) == before, "an engine was replaced"


def _try_canary(site: Site, **limits: int) -> None:
    """The routers come first, by a document of their own: they are no part of a canary."""
    canary = {"weightPercent": 40, "analysis": {"minRequests": 50, **limits}}
    mark = {"name": "MARK", "value": str(time.time_ns())}
    site.apply(lambda spec: spec.update(rollout={"canary": canary}))
    site.apply(lambda spec: spec["engine"].update(env=[mark]))
    _wait_canary(site, "Running")


def _wait_canary(site: Site, phase: str) -> None:
    """Until it has come so far. The kubelet brings the routers' file within 90 s."""

    def there() -> bool:
        canary: Obj = site.fleet.document()["status"].get("canary") or {}
        return canary.get("phase") == phase

    wait_for(there, 400, f"the canary is {phase}", interval_s=0.5, explain=site.explain)


def _engines(site: Site) -> set[str]:
    """Their uids."""
    pods = [pod for name in ("prefill", "decode") for pod in site.fleet.pods(name)]
    return {pod["metadata"]["uid"] for pod in pods}


def scale_up(site: Site) -> None:
    """One more P, one more D."""
    _scale(site, 1)


def scale_down(site: Site) -> None:
    """Back."""
    _scale(site, 0)


def _scale(site: Site, more: int) -> None:
    for pool in ("prefill", "decode"):
        site.wanted[pool] = WANTED[pool] + more
        site.fleet.scale(pool, site.wanted[pool])
    site.settle(f"the pools are at {site.wanted}")


def autoscaler(site: Site) -> None:
    """An HPA finds the D busy, then idle."""
    site.fleet.cluster.install_metrics_server()
    try:
        for target, wanted in (("1m", WANTED["decode"] + 1), ("8", WANTED["decode"])):
            site.fleet.kubectl("apply", "-f", "-", input=json.dumps(_scaler(site, target)))
            site.wanted["decode"] = wanted
            site.settle(f"the autoscaler has made {wanted} D")
    finally:
        site.fleet.kubectl("delete", "hpa", "chat-decode")


def _scaler(site: Site, target: str) -> Obj:
    cpu: Obj = {"name": "cpu", "target": {"type": "AverageValue", "averageValue": target}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "chat-decode"},
        "spec": {
            "scaleTargetRef": {
                "apiVersion": "xpyd.dev/v1alpha1",
                "kind": "InferenceFleetPool",
                "name": f"{site.fleet.name}-decode",
            },
            "minReplicas": WANTED["decode"],
            "maxReplicas": WANTED["decode"] + 1,
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
            "metrics": [{"type": "Resource", "resource": cpu}],
        },
    }


def drain(site: Site) -> None:
    """`kubectl drain`: all pods of the fleet are evicted, as its budgets allow. The cluster has one
    node: it takes pods again as soon as the first is evicted, as another node would."""
    fleet = site.fleet
    before = {pod["metadata"]["uid"]: pod for n in site.wanted for pod in fleet.pods(n)}
    (node,) = {pod["spec"]["nodeName"] for pod in before.values()}
    only = f"--pod-selector=xpyd.dev/fleet={fleet.name}"
    argv = [kubectl_binary(), "drain", node, only, "--ignore-daemonsets", "--delete-emptydir-data"]
    process = fleet.cluster.popen([*argv, "--timeout=240s"], stdout=-1, stderr=-2, text=True)
    try:

        def one_is_evicted() -> bool:
            left = {pod["metadata"]["uid"] for n in site.wanted for pod in fleet.pods(n)}
            return len(before.keys() & left) < len(before)

        wait_for(one_is_evicted, 60, "a pod is evicted", explain=site.explain)
        fleet.cluster.kubectl("uncordon", node)
        said, _ = process.communicate(timeout=250)
        assert process.returncode == 0, said
    finally:
        process.kill()
        fleet.cluster.kubectl("uncordon", node)
    site.settle("all pods are others")
    after = {pod["metadata"]["uid"] for n in site.wanted for pod in fleet.pods(n)}
    assert not before.keys() & after, "a pod was not evicted"


def routers(site: Site) -> None:
    """A flag of the routers."""
    seconds = 59 if site.toggle("routers") else 61
    site.apply(lambda spec: spec["router"].update(queue={"timeoutSeconds": seconds}))
    site.settle("the routers are others")


def operator_killed(site: Site) -> None:
    """SIGKILL; the Deployment makes another one."""
    with_same_objects(site, site.kill_operator)


def operator_upgraded(site: Site) -> None:
    """`helm upgrade` with another image of the operator."""
    tag = "next" if site.toggle("operator") else "test"
    with_same_objects(site, lambda: site.upgrade(operator=tag))


def chart_upgraded(site: Site) -> None:
    """`helm upgrade` to another version of the chart: other CRDs, other default images."""
    is_next = site.toggle("chart")
    tag, version = ("next", "0.1.1") if is_next else ("test", "0.1.0")
    upgrade = {"version": version, "worker": tag, "router": tag}
    with_same_objects(site, lambda: site.upgrade(**upgrade))


def with_same_objects(site: Site, act: Callable[[], Any]) -> None:
    """Do it, wait for another operator, and see that all objects and pods are what they were."""
    before, leader = site.fleet.identities(), site.leader()
    act()
    site.wait_leader(leader)
    site.settle("the fleet is as it was")
    # What an operator does to a fleet that it has not seen yet, it does soon.
    time.sleep(3.0)
    after = site.fleet.identities()
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    assert not changed, f"these are others now: {sorted(changed)}"


def discovery(site: Site) -> None:
    """The Service by which engines find the routers is deleted, and made again."""
    name = f"{site.fleet.name}-discovery"
    uid = site.fleet.read("services", name)["metadata"]["uid"]
    site.fleet.kubectl("delete", "service", name)

    def is_new() -> bool:
        found = site.fleet.find("services", fields=f"metadata.name={name}")
        return bool(found) and found[0]["metadata"]["uid"] != uid

    wait_for(is_new, 60, "the Service is there again", explain=site.explain)
    time.sleep(HEARTBEATS_S)
    site.settle("the fleet is ready")


CHANGES: dict[str, Change] = {
    "image": image,
    "argument": argument,
    "undo in the middle": undo,
    "canary promoted": canary_promoted,
    "canary taken back": canary_taken_back,
    "P and D scaled up": scale_up,
    "P and D scaled down": scale_down,
    "HPA, up and down": autoscaler,
    "node drain": drain,
    "router rollout": routers,
    "operator killed": operator_killed,
    "operator upgraded": operator_upgraded,
    "chart upgraded": chart_upgraded,
    "discovery Service recreated": discovery,
}
"""In the table's words."""
SMALL = (
    "undo in the middle",
    "argument",
    "P and D scaled up",
    "P and D scaled down",
    "router rollout",
    "operator killed",
    "chart upgraded",
    "discovery Service recreated",
)
"""Those of the small form, which is a test of CI."""

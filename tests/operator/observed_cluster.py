"""A stand-in for what surrounds the operator: controllers that make pods, and a clock that stands.

Pods begin as Kubernetes' own components write them; a test then puts a status into them, with the
functions below. Texts in them are those of Kubernetes 1.34.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tests.operator.object_samples import SETTINGS, placement_of
from xpyd_operator.controller.decision.history import FleetHistory
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.document.load import load_fleet
from xpyd_operator.manifests.names import LABEL_POOL, LABEL_REVISION, ROUTABLE
from xpyd_operator.manifests.objects import pool_object, workload_objects
from xpyd_operator.manifests.volumes import model_in_pod
from xpyd_operator.plan.fleet import plan, pools_wanted
from xpyd_operator.plan.template import fleet_want
from xpyd_operator.plan.values import DeleteWorkload, DrainPool, FleetWant, PutWorkload, Workload
from xpyd_operator.status.children import MOST_TEXT, Children, fleet_seen
from xpyd_operator.status.drains import InstanceLoad
from xpyd_operator.status.events import EventText, events
from xpyd_operator.status.fleet import fleet_status
from xpyd_operator.status.problems import Problem, find_problems

Obj = dict[str, Any]
BEGIN = datetime(2026, 11, 21, 10, 0, 0, tzinfo=UTC)
EXAMPLE = Path(__file__).parents[2] / "examples" / "fleet.yaml"
NODE = "node-1"
GRACE_S = 90


def rfc3339(moment: datetime) -> str:
    """As the API server writes times."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


class Cluster:
    """One fleet's objects. `turn()` does what the operator and Kubernetes' controllers do."""

    def __init__(self, fleet: InferenceFleet) -> None:
        self.fleet = fleet
        self.now = BEGIN
        self.workloads: dict[tuple[str, str], Obj] = {}
        self.pods: dict[str, Obj] = {}
        self.pools: dict[str, Obj] = {}
        self.status: Obj | None = None
        self.has_pair: bool | None = None
        self.loads: dict[str, InstanceLoad] = {}
        """What routers say that pods have."""
        self.generation = 1
        self.stopping = False
        self.others: tuple[Problem, ...] = ()
        self._made: dict[str, int] = {}
        self._history = FleetHistory(0.0)

    @property
    def time(self) -> str:
        return rfc3339(self.now)

    @property
    def want(self) -> FleetWant:
        return fleet_want(
            self.fleet,
            model=model_in_pod(self.fleet),
            in_cluster=True,
            image=SETTINGS.worker_image,
            router_image=SETTINGS.router_image,
            gated=SETTINGS.gated,
            stopping=self.stopping,
        )

    @property
    def children(self) -> Children:
        found = sorted(self.workloads.values(), key=lambda w: w["metadata"]["name"], reverse=True)
        return Children(
            deployments=tuple(w for w in found if w["kind"] == "Deployment"),
            leader_worker_sets=tuple(w for w in found if w["kind"] == "LeaderWorkerSet"),
            pods=tuple(self.pods.values()),
            pools=tuple(self.pools.values()),
        )

    def look(self) -> Mapping[str, float]:
        """The ages of the pods' states, as the operator sees them."""
        return self._history.ages(self.pods.values(), (self.now - BEGIN).total_seconds())

    def problems(self) -> tuple[Problem, ...]:
        return find_problems(self.children, self.look())

    def wait(self, seconds: float) -> None:
        # The operator has heard of each change by now.
        self.look()
        self.now += timedelta(seconds=seconds)

    def edit(self, fleet: InferenceFleet) -> None:
        self.fleet = fleet
        self.generation += 1

    def scale(self, pool: str, replicas: int) -> None:
        self.pools[pool]["spec"]["replicas"] = replicas

    def pods_of(self, pool: str) -> list[Obj]:
        return [p for p in self.pods.values() if p["metadata"]["labels"][LABEL_POOL] == pool]

    def living(self, pool: str) -> list[Obj]:
        return [p for p in self.pods_of(pool) if "deletionTimestamp" not in p["metadata"]]

    def end_leaving(self) -> None:
        for name, pod in list(self.pods.items()):
            if "deletionTimestamp" in pod["metadata"]:
                del self.pods[name]

    def turn(self) -> tuple[EventText, ...]:
        """Plan and apply until nothing changes; then the status and its Events."""
        for _ in range(20):
            changed = self._apply()
            self._controllers()
            if not changed:
                break
        children = self.children
        before, seen = self.status, fleet_seen(children)
        self.status = fleet_status(
            self.fleet,
            want=self.want,
            seen=seen,
            children=children,
            problems=(*self.problems(), *self.others),
            before=before,
            now=self.time,
            generation=self.generation,
            key_secret="chat-kv-5bd2bd5e",
            namespace="team",
            has_pair=self.has_pair,
            loads=self.loads,
        )
        return events(before, self.status)

    def _apply(self) -> bool:
        seen, placement = fleet_seen(self.children), placement_of(self.fleet)
        if not self.stopping:
            sizes = {size.name: size for size in pools_wanted(self.want, seen.pools)}
            for pool in self.fleet.spec.pools:
                size = sizes[pool.name]
                obj = pool_object(self.fleet, pool, size.replicas, size.declared, placement)
                self.pools[pool.name] = {**obj, "metadata": {**obj["metadata"], "generation": 3}}
        changed = False
        for action in plan(self.want, seen, 0.0).actions:
            match action:
                case PutWorkload(workload):
                    self._put(workload)
                case DrainPool(pool):
                    for (name, _), obj in self.workloads.items():
                        obj["spec"]["replicas"] *= name != pool
                case DeleteWorkload(pool, revision):
                    del self.workloads[pool, revision]
                case _:
                    continue
            changed = True
        return changed

    def _put(self, workload: Workload) -> None:
        key = workload.pool, workload.revision
        if key in self.workloads:
            self.workloads[key]["spec"]["replicas"] = workload.replicas
            return
        *_, obj = workload_objects(self.fleet, workload, placement_of(self.fleet))
        self.workloads[key] = copy.deepcopy(obj)

    def _controllers(self) -> None:
        for (pool, revision), workload in sorted(self.workloads.items()):
            mine = [
                p
                for p in self.living(pool)
                if p["metadata"]["labels"][LABEL_REVISION] == revision
                and p["status"]["phase"] != "Failed"
            ]
            replicas = workload["spec"]["replicas"]
            for _ in range(replicas - len(mine)):
                self._make(pool, workload)
            # A ReplicaSet gives up pods that are not ready first.
            for pod in sorted(mine, key=is_ready)[: max(0, len(mine) - replicas)]:
                self.delete(pod)
            workload["status"] = {"replicas": replicas, "observedGeneration": 1}

    def _make(self, pool: str, workload: Obj) -> None:
        number = self._made[pool] = self._made.get(pool, 0) + 1
        template = copy.deepcopy(workload["spec"]["template"])
        owner = f"{workload['metadata']['name']}-5d9c7b8f4d"
        name = f"{owner}-{pool}{number}"
        self.pods[name] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                **template["metadata"],
                "name": name,
                "namespace": "team",
                "uid": f"00000000-0000-4000-8000-{number:012}",
                "creationTimestamp": self.time,
                "ownerReferences": [
                    {
                        "apiVersion": "apps/v1",
                        "kind": "ReplicaSet",
                        "name": owner,
                        "uid": "00000000-0000-4000-8000-0000000000ff",
                        "controller": True,
                        "blockOwnerDeletion": True,
                    }
                ],
            },
            "spec": {**template["spec"], "restartPolicy": "Always"},
            "status": {"phase": "Pending", "qosClass": "BestEffort"},
        }

    def delete(self, pod: Obj) -> None:
        """As `kubectl delete pod`: the pod stays until its containers have ended."""
        if is_ready(pod) or "nodeName" in pod["spec"]:
            end = rfc3339(self.now + timedelta(seconds=GRACE_S))
            pod["metadata"]["deletionTimestamp"] = end
            pod["metadata"]["deletionGracePeriodSeconds"] = GRACE_S
        else:
            del self.pods[pod["metadata"]["name"]]

    # What scheduler and kubelet write

    def unschedulable(self, pods: Iterable[Obj], message: str) -> None:
        for pod in pods:
            pod["status"]["conditions"] = [
                self._condition("PodScheduled", "False", "Unschedulable", message)
            ]

    def bind(self, pods: Iterable[Obj], *, sandbox: bool = False) -> None:
        """Scheduled; with `sandbox` volumes and network are there, and images come."""
        for pod in pods:
            pod["spec"]["nodeName"] = NODE
            unready = f"containers with unready status: [{containers(pod)[0]['name']}]"
            pod["status"] = {
                "phase": "Pending",
                "conditions": [
                    self._condition("PodReadyToStartContainers", str(sandbox)),
                    self._condition("Initialized", "True"),
                    self._condition("Ready", "False", "ContainersNotReady", unready),
                    self._condition("ContainersReady", "False", "ContainersNotReady", unready),
                    self._condition("PodScheduled", "True"),
                ],
                "hostIP": "192.0.2.10",
                "hostIPs": [{"ip": "192.0.2.10"}],
                "startTime": self.time,
                "containerStatuses": [
                    {
                        "name": container["name"],
                        "state": {"waiting": {"reason": "ContainerCreating"}},
                        "lastState": {},
                        "ready": False,
                        "restartCount": 0,
                        "image": container["image"],
                        "imageID": "",
                        "started": False,
                    }
                    for container in containers(pod)
                ],
                "qosClass": "BestEffort",
            }

    def waiting(self, pods: Iterable[Obj], reason: str, message: str = "") -> None:
        """The first container cannot start, for kubelet's `reason`."""
        for pod in pods:
            self._on_node(pod)
            state: Obj = {"reason": reason}
            first(pod)["state"] = {"waiting": {**state, "message": message} if message else state}

    def running(self, pods: Iterable[Obj], *, ready: bool) -> None:
        for pod in pods:
            self._on_node(pod)
            pod["status"]["phase"] = "Running"
            for status in pod["status"]["containerStatuses"]:
                status["state"] = {"running": {"startedAt": self.time}}
                status["started"], status["ready"] = True, ready
            for kind in ("Ready", "ContainersReady", ROUTABLE):
                self._set(pod, kind, str(ready))

    def gate(self, pod: Obj, message: str, *, is_open: bool, reason: str = "NotAdmitted") -> None:
        """The operator's gate of a pod whose containers are ready."""
        self._set(pod, ROUTABLE, str(is_open), reason, message)
        self._set(pod, "Ready", str(is_open))

    def crashed(
        self,
        pods: Iterable[Obj],
        *,
        log: str,
        code: int = 1,
        reason: str = "Error",
        restarts: int = 3,
        ran_s: int = 2,
    ) -> None:
        """The first container exited and waits for its next start."""
        for pod in pods:
            self._on_node(pod)
            name = first(pod)["name"]
            exited: Obj = {
                "exitCode": code,
                "reason": reason,
                "startedAt": rfc3339(self.now - timedelta(seconds=ran_s)),
                "finishedAt": self.time,
                "containerID": "containerd://0123456789abcdef",
            }
            if log:
                exited["message"] = log
            message = (
                f"back-off 40s restarting failed container={name} "
                f"pod={pod['metadata']['name']}_team({pod['metadata']['uid']})"
            )
            first(pod).update(
                state={"waiting": {"reason": "CrashLoopBackOff", "message": message}},
                lastState={"terminated": exited},
                ready=False,
                started=False,
                restartCount=restarts,
            )
            pod["status"]["phase"] = "Running"
            for kind in ("Ready", "ContainersReady"):
                self._set(pod, kind, "False")

    def failed(self, pods: Iterable[Obj], reason: str, message: str) -> None:
        """Evicted by kubelet, or refused by it."""
        for pod in pods:
            self._on_node(pod)
            pod["status"] |= {"phase": "Failed", "reason": reason, "message": message}

    def _on_node(self, pod: Obj) -> None:
        if "nodeName" not in pod["spec"]:
            self.bind([pod], sandbox=True)

    def _condition(self, kind: str, status: str, reason: str = "", message: str = "") -> Obj:
        found: Obj = {
            "type": kind,
            "status": status,
            "lastProbeTime": None,
            "lastTransitionTime": self.time,
        }
        return found | ({"reason": reason, "message": message} if reason else {})

    def _set(self, pod: Obj, kind: str, status: str, reason: str = "", message: str = "") -> None:
        rest = [c for c in pod["status"]["conditions"] if c["type"] != kind]
        made = self._condition(kind, status, reason, message)
        pod["status"]["conditions"] = [*rest, made]


def containers(pod: Obj) -> list[Obj]:
    return pod["spec"]["containers"]


def first(pod: Obj) -> Obj:
    """The status of the pod's first container."""
    return pod["status"]["containerStatuses"][0]


def is_ready(pod: Obj) -> bool:
    found = pod["status"].get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in found)


def settled(fleet: InferenceFleet) -> Cluster:
    """A fleet of which everything is ready."""
    cluster = Cluster(fleet)
    cluster.turn()
    cluster.wait(5)
    cluster.running(cluster.pods.values(), ready=True)
    cluster.turn()
    return cluster


def new_cluster() -> Cluster:
    cluster = Cluster(load_fleet(EXAMPLE))
    cluster.turn()
    return cluster


def told(cluster: Cluster, pool: str = "decode") -> list[tuple[str, str, str]]:
    """The pool's problems, without the hash in its pods' names."""
    found = cluster.problems()
    for problem in found:
        assert len(problem.message) < 4 * MOST_TEXT
        assert problem.message.isprintable()
    return [(p.kind, p.reason, _plain(p)) for p in found if p.pool == pool]


def _plain(problem: Problem) -> str:
    return re.sub(r"chat-decode-[0-9a-f]{8}-5d9c7b8f4d-decode(\d+)", r"POD\1", problem.message)


def decodes(cluster: Cluster) -> list[dict[str, Any]]:
    return cluster.living("decode")

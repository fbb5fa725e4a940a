"""The operator against a real API server, controllers and scheduler; pods run on fake nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.harness import Cluster, ClusterError, wait_for
from tests.cluster.harness.kwok import NODE_SELECTOR, TOLERATIONS
from tests.cluster.operator_process import OperatorProcess, running_operator

CRDS = Path(__file__).parents[2] / "crds"
READY_S = 90.0
GONE_S = 60.0
KINDS = (
    "inferencefleets,inferencefleetpools,deployments,services,serviceaccounts,secrets,"
    "poddisruptionbudgets,networkpolicies,pods"
)
_FAKE_NODES = {"spec": {"nodeSelector": NODE_SELECTOR, "tolerations": TOLERATIONS}}


@pytest.fixture(scope="module")
def plane(control_plane: Cluster) -> Iterator[Cluster]:
    """The cluster with our CRDs and nodes, and no operator."""
    control_plane.kubectl("apply", "-f", str(CRDS))
    control_plane.kubectl("wait", "--for=condition=Established", "-f", str(CRDS))
    control_plane.add_kwok_nodes(2)
    yield control_plane
    control_plane.kubectl("delete", "-f", str(CRDS), "--timeout=60s")


class Operators:
    """The one operator that most tests share, for all namespaces. It stops for those that bring
    their own: two would work on the same fleets.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._stack = ExitStack()
        self._shared: OperatorProcess | None = None

    def shared(self) -> OperatorProcess:
        if self._shared is None:
            self._shared = self._stack.enter_context(running_operator(self._cluster))
        return self._shared

    def stop(self) -> None:
        self._stack.close()
        self._shared = None


@pytest.fixture(scope="module")
def operators(plane: Cluster) -> Iterator[Operators]:
    found = Operators(plane)
    yield found
    found.stop()


@pytest.fixture
def operator(plane: Cluster, namespace: str, operators: Operators) -> Iterator[OperatorProcess]:
    """An operator at work; the test's fleets are deleted while it still is."""
    yield operators.shared()
    delete_fleets(plane, namespace)


@pytest.fixture
def no_operator(operators: Operators) -> None:
    """The test starts its own."""
    operators.stop()


def fleet(name: str, *, prefill: int = 1, decode: int = 1, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "xpyd.dev/v1alpha1",
        "kind": "InferenceFleet",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": "file://./demo-model"},
            "pools": [
                pool("prefill", "Prefill", prefill),
                pool("decode", "Decode", decode, scaling={"maxReplicas": 8}),
            ],
            "router": {"template": _FAKE_NODES},
            **spec,
        },
    }


def pool(name: str, role: str, replicas: int, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "role": role,
        "replicas": replicas,
        "resources": {"gpus": 0},
        "template": _FAKE_NODES,
        **more,
    }


def apply(cluster: Cluster, namespace: str, document: dict[str, Any]) -> None:
    cluster.kubectl("-n", namespace, "apply", "-f", "-", input=yaml.safe_dump(document))


def get(cluster: Cluster, namespace: str, *what: str) -> Any:
    return json.loads(cluster.kubectl("-n", namespace, "get", *what, "-o", "json"))


def items(cluster: Cluster, namespace: str, kinds: str = KINDS) -> list[dict[str, Any]]:
    """Objects of the fleets of a namespace."""
    found = get(cluster, namespace, kinds, "-l", "xpyd.dev/fleet")["items"]
    return [item for item in found if item["kind"] != "Pod" or "deletion" not in str(item)]


def wait_ready(cluster: Cluster, namespace: str, name: str) -> None:
    cluster.kubectl(
        "-n", namespace, "wait", "--for=condition=Ready", f"fleet/{name}", f"--timeout={READY_S}s",
        timeout_s=READY_S + 10,
    )  # fmt: skip


def condition(cluster: Cluster, namespace: str, name: str, kind: str) -> dict[str, Any]:
    status = get(cluster, namespace, f"fleet/{name}").get("status", {})
    return next((c for c in status.get("conditions", []) if c["type"] == kind), {})


def delete_fleets(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl(
        "-n",
        namespace,
        "delete",
        "inferencefleets",
        "--all",
        f"--timeout={GONE_S}s",
        timeout_s=GONE_S + 10,
    )


def deployments(cluster: Cluster, namespace: str, pool_name: str) -> list[dict[str, Any]]:
    found = get(cluster, namespace, "deployments", "-l", f"xpyd.dev/pool={pool_name}")
    return list(found["items"])


def replicas(cluster: Cluster, namespace: str, pool_name: str) -> list[int]:
    return [d["spec"]["replicas"] for d in deployments(cluster, namespace, pool_name)]


def quiet(operator: OperatorProcess, check: Callable[[], Any], what: str) -> None:
    """Wait until `check` holds and no turn has followed for a moment."""
    wait_for(check, READY_S, what, explain=operator.log)


def settle(operator: OperatorProcess) -> None:
    """Wait until the operator has had nothing to write for two seconds."""
    seen: list[int] = []

    def is_still() -> bool:
        seen.append(operator.writes())
        return len(seen) > 20 and len(set(seen[-20:])) == 1

    wait_for(is_still, READY_S, "no more writes", explain=operator.log)


def versions(cluster: Cluster, namespace: str) -> dict[str, str]:
    return {
        f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["resourceVersion"]
        for item in [
            *items(cluster, namespace),
            *get(cluster, namespace, "inferencefleets")["items"],
        ]
    }


def test_a_fleet_gets_all_its_objects_owned_by_it_within_25_calls(
    plane: Cluster, namespace: str, operator: OperatorProcess
) -> None:
    before = sum(operator.calls().values())
    apply(plane, namespace, fleet("chat"))
    wait_ready(plane, namespace, "chat")
    # The last statuses and events follow the condition.
    wait_for(lambda: get(plane, namespace, "events")["items"], 10, "events are there")
    calls = sum(operator.calls().values()) - before
    owner = get(plane, namespace, "fleet/chat")["metadata"]["uid"]
    found = [item for item in items(plane, namespace) if item["kind"] not in ("Pod",)]
    assert sorted((item["kind"], item["metadata"]["name"].rsplit("-", 1)[0]) for item in found) == [
        ("Deployment", "chat-decode"),
        ("Deployment", "chat-prefill"),
        ("Deployment", "chat-router"),
        ("InferenceFleetPool", "chat"),
        ("InferenceFleetPool", "chat"),
        ("NetworkPolicy", "chat"),
        ("NetworkPolicy", "chat"),
        ("PodDisruptionBudget", "chat"),
        ("PodDisruptionBudget", "chat"),
        ("PodDisruptionBudget", "chat"),
        ("Secret", "chat-kv"),
        ("Service", "chat"),
        ("Service", "chat"),
        ("ServiceAccount", "chat"),
    ]
    for item in found:
        owners = item["metadata"]["ownerReferences"]
        assert [(o["uid"], o["controller"]) for o in owners] == [(owner, True)], item["kind"]
    assert not any("kopf" in json.dumps(item["metadata"]) for item in found)
    assert calls <= 25, operator.log()
    assert get(plane, namespace, "fleet/chat")["status"]["summary"]["decode"] == "1/1"


def test_kubectl_scale_changes_the_pool_and_the_same_document_does_not_undo_it(
    plane: Cluster, namespace: str, operator: OperatorProcess
) -> None:
    apply(plane, namespace, fleet("chat"))
    wait_ready(plane, namespace, "chat")
    plane.kubectl("-n", namespace, "scale", "fleetpool/chat-decode", "--replicas=3")
    quiet(operator, lambda: replicas(plane, namespace, "decode") == [3], "three decoders")
    wait_for(
        lambda: get(plane, namespace, "fleet/chat")["status"]["summary"]["decode"] == "3/3",
        READY_S,
        "three are ready",
    )
    apply(plane, namespace, fleet("chat"))
    labels = {"metadata": {"labels": {"touched": "yes"}}}
    turns = operator.turns()  # before: the operator may have looked when kubectl is back
    plane.kubectl(
        "-n", namespace, "patch", "fleet/chat", "--type=merge", f"-p={json.dumps(labels)}"
    )
    wait_for(lambda: operator.turns() > turns, 20, "the operator looked again")
    assert replicas(plane, namespace, "decode") == [3]
    with pytest.raises(ClusterError, match="maxReplicas"):
        plane.kubectl("-n", namespace, "scale", "fleetpool/chat-decode", "--replicas=9")
    apply(plane, namespace, fleet("chat", decode=2))
    quiet(operator, lambda: replicas(plane, namespace, "decode") == [2], "a new declaration wins")


def test_an_edit_rolls_to_a_new_revision(
    plane: Cluster, namespace: str, operator: OperatorProcess
) -> None:
    apply(plane, namespace, fleet("chat", decode=2))
    wait_ready(plane, namespace, "chat")
    (before,) = deployments(plane, namespace, "decode")
    (router,) = deployments(plane, namespace, "router")
    apply(plane, namespace, fleet("chat", decode=2, engine={"args": ["--dtype=float32"]}))

    def rolled() -> bool:
        names = [d["metadata"]["name"] for d in deployments(plane, namespace, "decode")]
        return len(names) == 1 and names != [before["metadata"]["name"]]

    quiet(operator, rolled, "only the new revision is left")
    wait_ready(plane, namespace, "chat")
    assert replicas(plane, namespace, "decode") == [2]
    (router_after,) = deployments(plane, namespace, "router")
    assert router_after["metadata"]["uid"] == router["metadata"]["uid"]
    assert router_after["metadata"]["generation"] == router["metadata"]["generation"]


def test_a_pool_that_left_the_document_is_drained_and_its_objects_go(
    plane: Cluster, namespace: str, operator: OperatorProcess
) -> None:
    more = fleet("chat")
    more["spec"]["pools"].append(pool("spare", "Decode", 1))
    apply(plane, namespace, more)
    wait_ready(plane, namespace, "chat")
    assert len(deployments(plane, namespace, "spare")) == 1
    apply(plane, namespace, fleet("chat"))

    def gone() -> bool:
        names = {item["metadata"]["name"] for item in items(plane, namespace)}
        return not any("spare" in name for name in names)

    quiet(operator, gone, "nothing of the pool is left")
    wait_ready(plane, namespace, "chat")


def test_every_deleted_child_comes_back(
    plane: Cluster, namespace: str, operator: OperatorProcess
) -> None:
    apply(plane, namespace, fleet("chat"))
    wait_ready(plane, namespace, "chat")
    names = {
        f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["uid"]
        for item in items(plane, namespace)
        if item["kind"] not in ("Pod", "Secret")
    }
    assert len(names) == 13
    for name in names:
        plane.kubectl("-n", namespace, "delete", name, "--wait=false")

    def back() -> bool:
        found = {
            f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["uid"]
            for item in items(plane, namespace)
        }
        return all(found.get(name, uid) != uid for name, uid in names.items())

    quiet(operator, back, "all of them are back, as others")
    wait_ready(plane, namespace, "chat")


def test_a_document_that_cannot_be_obeyed_changes_nothing_but_the_status(
    plane: Cluster, namespace: str, operator: OperatorProcess
) -> None:
    apply(plane, namespace, fleet("chat"))
    wait_ready(plane, namespace, "chat")
    settle(operator)
    before = {k: v for k, v in versions(plane, namespace).items() if "InferenceFleet" not in k}
    wrong = fleet("chat", decode=2)
    wrong["spec"]["router"]["template"] = {"spec": {"restartPolicy": "Never"}}
    apply(plane, namespace, wrong)

    def says_so() -> bool:
        found = condition(plane, namespace, "chat", "Degraded")
        return found.get("status") == "True" and "spec.router.template" in found["message"]

    quiet(operator, says_so, "the condition names the field")
    after = {k: v for k, v in versions(plane, namespace).items() if "InferenceFleet" not in k}
    assert after == before
    apply(plane, namespace, fleet("chat"))
    wait_ready(plane, namespace, "chat")
    plane.kubectl("-n", namespace, "delete", "fleet/chat", "--timeout=60s", timeout_s=70)


def test_a_child_that_was_changed_by_hand_is_changed_back(
    plane: Cluster, namespace: str, operator: OperatorProcess
) -> None:
    apply(plane, namespace, fleet("chat"))
    wait_ready(plane, namespace, "chat")
    patch = {"spec": {"selector": {"xpyd.dev/pool": "decode"}}, "metadata": {"labels": {"a": "b"}}}
    plane.kubectl(
        "-n", namespace, "patch", "service/chat-router", "--type=merge", f"-p={json.dumps(patch)}"
    )

    def selects_routers() -> bool:
        found = get(plane, namespace, "service/chat-router")
        return found["spec"]["selector"]["xpyd.dev/pool"] == "router"

    quiet(operator, selects_routers, "the selector is as it was")
    # What is nobody's business of ours stays.
    assert get(plane, namespace, "service/chat-router")["metadata"]["labels"]["a"] == "b"


def test_a_restarted_operator_writes_nothing(
    plane: Cluster, namespace: str, no_operator: None
) -> None:
    with running_operator(plane, namespace) as first:
        apply(plane, namespace, fleet("chat", decode=2))
        apply(plane, namespace, fleet("code"))
        wait_ready(plane, namespace, "chat")
        wait_ready(plane, namespace, "code")
        plane.kubectl("-n", namespace, "scale", "fleetpool/chat-decode", "--replicas=3")
        quiet(first, lambda: replicas(plane, namespace, "decode") == [3, 1], "scaled")
        wait_ready(plane, namespace, "chat")
        settle(first)
        assert first.stop() == 0
    before = versions(plane, namespace)
    with running_operator(plane, namespace) as second:
        wait_for(lambda: second.turns() >= 2, 20, "both fleets were looked at")
        assert second.writes() == 0, second.log()
        assert versions(plane, namespace) == before
        delete_fleets(plane, namespace)


def test_an_operator_of_one_namespace_leaves_others_alone(
    plane: Cluster, namespace: str, new_namespace: Callable[[Cluster], str], no_operator: None
) -> None:
    other = new_namespace(plane)
    with running_operator(plane, namespace):
        apply(plane, other, fleet("chat"))
        apply(plane, namespace, fleet("chat"))
        wait_ready(plane, namespace, "chat")
        assert not items(plane, other, "deployments")
        assert "status" not in get(plane, other, "fleet/chat")
        plane.kubectl("-n", other, "delete", "fleet/chat")
        delete_fleets(plane, namespace)


def test_a_name_that_somebody_else_has_is_left_alone(
    plane: Cluster, namespace: str, operator: OperatorProcess
) -> None:
    plane.kubectl("-n", namespace, "create", "service", "clusterip", "chat-router", "--tcp=80")
    before = get(plane, namespace, "service/chat-router")
    apply(plane, namespace, fleet("chat"))

    def says_so() -> bool:
        found = condition(plane, namespace, "chat", "Degraded")
        return found.get("reason") == "NameConflict" and "Service chat-router" in found["message"]

    quiet(operator, says_so, "the condition names the Service")
    assert get(plane, namespace, "service/chat-router") == before
    assert len(deployments(plane, namespace, "router")) == 1
    plane.kubectl("-n", namespace, "delete", "service/chat-router")
    wait_for(
        lambda: condition(plane, namespace, "chat", "Degraded").get("status") == "False",
        60,
        "it is made when the name is free",
        explain=operator.log,
    )


def test_a_deleted_fleet_leaves_nothing(
    plane: Cluster, namespace: str, operator: OperatorProcess
) -> None:
    apply(plane, namespace, fleet("chat", decode=2))
    wait_ready(plane, namespace, "chat")
    delete_fleets(plane, namespace)
    wait_for(lambda: not items(plane, namespace), 30, "nothing is left")


def test_sigterm_ends_the_operator_in_seconds(plane: Cluster, no_operator: None) -> None:
    with running_operator(plane) as found:
        assert found.http("/healthz") == 200
        assert found.stop() == 0
        assert "Traceback" not in found.log()

"""The operator against a real API server, controllers and scheduler; pods run on fake nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fleetkit import (
    FAKE_NODES,
    READY_S,
    FleetClient,
    Obj,
    delete_fleets,
    fake_fleet,
)
from tests.cluster.harness import Cluster, ClusterError, wait_for
from tests.cluster.harness.kwok import NODE_SELECTOR
from tests.cluster.operator_process import OperatorProcess, running_operator
from tests.operator.fleets import cpu_pool

KINDS = (
    "inferencefleetpools,deployments,services,serviceaccounts,secrets,"
    "poddisruptionbudgets,networkpolicies,pods"
)


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


@pytest.fixture
def chat(plane: Cluster, namespace: str) -> FleetClient:
    """The fleet that most tests apply."""
    return FleetClient(plane, namespace)


def items(chat: FleetClient, kinds: str = KINDS) -> list[Obj]:
    """Objects of the fleets of the namespace."""
    found = chat.find(kinds, labels="xpyd.dev/fleet")
    return [item for item in found if item["kind"] != "Pod" or "deletion" not in str(item)]


def deployments(chat: FleetClient, pool: str) -> list[Obj]:
    return chat.find("deployments", labels=f"xpyd.dev/pool={pool}")


def replicas(chat: FleetClient, pool: str) -> list[int]:
    return [d["spec"]["replicas"] for d in deployments(chat, pool)]


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


def calls_for_fleets(operator: OperatorProcess) -> int:
    """Without lists: cordoned nodes are asked for all the time, whatever fleets there are."""
    return sum(count for verb, count in operator.calls().items() if verb != "list")


def versions(chat: FleetClient) -> dict[str, str]:
    return {
        f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["resourceVersion"]
        for item in [*items(chat), *chat.find("inferencefleets")]
    }


def test_a_fleet_gets_all_its_objects_owned_by_it_within_26_calls(
    chat: FleetClient, operator: OperatorProcess
) -> None:
    before = calls_for_fleets(operator)
    chat.apply(fake_fleet())
    chat.wait_ready()
    # The last statuses and events follow the condition.
    wait_for(lambda: chat.find("events"), 10, "events are there")
    calls = calls_for_fleets(operator) - before
    owner = chat.document()["metadata"]["uid"]
    found = [item for item in items(chat) if item["kind"] not in ("Pod",)]
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
    assert calls <= 26, operator.log()
    assert chat.document()["status"]["summary"]["decode"] == "1/1"


def test_kubectl_scale_changes_the_pool_and_the_same_document_does_not_undo_it(
    chat: FleetClient, operator: OperatorProcess
) -> None:
    chat.apply(fake_fleet())
    chat.wait_ready()
    chat.kubectl("scale", "fleetpool/chat-decode", "--replicas=3")
    quiet(operator, lambda: replicas(chat, "decode") == [3], "three decoders")
    wait_for(
        lambda: chat.document()["status"]["summary"]["decode"] == "3/3",
        READY_S,
        "three are ready",
    )
    chat.apply(fake_fleet())
    labels = {"metadata": {"labels": {"touched": "yes"}}}
    turns = operator.turns()  # before: the operator may have looked when kubectl is back
    chat.kubectl("patch", "fleet/chat", "--type=merge", f"-p={json.dumps(labels)}")
    wait_for(lambda: operator.turns() > turns, 20, "the operator looked again")
    assert replicas(chat, "decode") == [3]
    with pytest.raises(ClusterError, match="maxReplicas"):
        chat.kubectl("scale", "fleetpool/chat-decode", "--replicas=9")
    chat.apply(fake_fleet(decode=2))
    quiet(operator, lambda: replicas(chat, "decode") == [2], "a new declaration wins")


def test_an_edit_rolls_to_a_new_revision(chat: FleetClient, operator: OperatorProcess) -> None:
    chat.apply(fake_fleet(decode=2))
    chat.wait_ready()
    (before,) = deployments(chat, "decode")
    (router,) = deployments(chat, "router")
    chat.apply(fake_fleet(decode=2, engine={"args": ["--dtype=float32"]}))

    def rolled() -> bool:
        names = [d["metadata"]["name"] for d in deployments(chat, "decode")]
        return len(names) == 1 and names != [before["metadata"]["name"]]

    quiet(operator, rolled, "only the new revision is left")
    chat.wait_ready()
    assert replicas(chat, "decode") == [2]
    (router_after,) = deployments(chat, "router")
    assert router_after["metadata"]["uid"] == router["metadata"]["uid"]
    assert router_after["metadata"]["generation"] == router["metadata"]["generation"]


def test_a_pool_that_left_the_document_is_drained_and_its_objects_go(
    chat: FleetClient, operator: OperatorProcess
) -> None:
    more = fake_fleet()
    more["spec"]["pools"].append(cpu_pool("spare", "Decode", replicas=1, template=FAKE_NODES))
    chat.apply(more)
    chat.wait_ready()
    assert len(deployments(chat, "spare")) == 1
    chat.apply(fake_fleet())

    def gone() -> bool:
        names = {item["metadata"]["name"] for item in items(chat)}
        return not any("spare" in name for name in names)

    quiet(operator, gone, "nothing of the pool is left")
    chat.wait_ready()


def test_every_deleted_child_comes_back(chat: FleetClient, operator: OperatorProcess) -> None:
    chat.apply(fake_fleet())
    chat.wait_ready()
    names = {
        f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["uid"]
        for item in items(chat)
        if item["kind"] not in ("Pod", "Secret")
    }
    assert len(names) == 13
    for name in names:
        chat.kubectl("delete", name, "--wait=false")

    def back() -> bool:
        found = {
            f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["uid"]
            for item in items(chat)
        }
        return all(found.get(name, uid) != uid for name, uid in names.items())

    quiet(operator, back, "all of them are back, as others")
    chat.wait_ready()


def test_a_document_that_cannot_be_obeyed_changes_nothing_but_the_status(
    chat: FleetClient, operator: OperatorProcess
) -> None:
    chat.apply(fake_fleet())
    chat.wait_ready()
    settle(operator)
    before = {k: v for k, v in versions(chat).items() if "InferenceFleet" not in k}
    wrong = fake_fleet(decode=2)
    wrong["spec"]["router"]["template"] = {"spec": {"restartPolicy": "Never"}}
    chat.apply(wrong)

    def says_so() -> bool:
        found = chat.condition("Degraded")
        return found.get("status") == "True" and "spec.router.template" in found["message"]

    quiet(operator, says_so, "the condition names the field")
    after = {k: v for k, v in versions(chat).items() if "InferenceFleet" not in k}
    assert after == before
    chat.apply(fake_fleet())
    chat.wait_ready()
    chat.kubectl("delete", "fleet/chat", "--timeout=60s", timeout_s=70)


def test_a_child_that_was_changed_by_hand_is_changed_back(
    chat: FleetClient, operator: OperatorProcess
) -> None:
    chat.apply(fake_fleet())
    chat.wait_ready()
    patch = {"spec": {"selector": {"xpyd.dev/pool": "decode"}}, "metadata": {"labels": {"a": "b"}}}
    chat.kubectl("patch", "service/chat-router", "--type=merge", f"-p={json.dumps(patch)}")

    def selects_routers() -> bool:
        found = chat.read("services", "chat-router")
        return found["spec"]["selector"]["xpyd.dev/pool"] == "router"

    quiet(operator, selects_routers, "the selector is as it was")
    # What is nobody's business of ours stays.
    assert chat.read("services", "chat-router")["metadata"]["labels"]["a"] == "b"


def test_a_namespace_with_a_compute_quota_takes_a_fleet(
    chat: FleetClient, operator: OperatorProcess
) -> None:
    hard = "requests.cpu=2,requests.memory=8Gi,limits.cpu=500,limits.memory=800Gi"
    chat.kubectl("create", "quota", "compute", f"--hard={hard}")
    chat.apply(fake_fleet())
    chat.wait_ready()


def test_what_somebody_adds_to_an_object_is_removed_or_reported(
    chat: FleetClient, operator: OperatorProcess
) -> None:
    chat.apply(fake_fleet())
    chat.wait_ready()
    (decode,) = [d["metadata"]["name"] for d in deployments(chat, "decode")]
    sidecar = {"name": "spy", "image": "spy:1"}
    pod = {"hostNetwork": True, "containers": [sidecar]}
    router = {"selector": {"version": "2"}, "externalIPs": ["192.0.2.1"]}
    added = {
        "service/chat-router": router | {"ports": [{"name": "other", "port": 81}]},
        f"deployment/{decode}": {"template": {"metadata": {"labels": {"a": "b"}}, "spec": pod}},
        "pdb/chat-decode": {"selector": {"matchLabels": {"a": "b"}}},
        "networkpolicy/chat-router": {"podSelector": {"matchLabels": {"a": "b"}}},
    }
    for name, spec in added.items():
        chat.kubectl("patch", name, f"-p={json.dumps({'spec': spec})}")

    def is_clean() -> bool:
        service = chat.read("services", "chat-router")["spec"]
        template = chat.read("deployments", decode)["spec"]["template"]
        budget = chat.read("poddisruptionbudgets", "chat-decode")["spec"]["selector"]
        policy = chat.read("networkpolicies", "chat-router")["spec"]["podSelector"]
        found = [service["selector"], budget["matchLabels"], policy["matchLabels"]]
        return (
            not any({"a", "version"} & labels.keys() for labels in found)
            and len(service["ports"]) == 1
            and not template["spec"].get("hostNetwork")
            and [c["name"] for c in template["spec"]["containers"]] == ["engine"]
            and not any("hostPort" in p for p in template["spec"]["containers"][0]["ports"])
        )

    quiet(operator, is_clean, "what was added is gone")
    # An administrator's settings stay.
    assert chat.read("services", "chat-router")["spec"]["externalIPs"] == ["192.0.2.1"]
    assert chat.read("deployments", decode)["spec"]["template"]["metadata"]["labels"]["a"] == "b"

    def is_reported() -> bool:
        found = chat.condition("Drifted")
        return found["status"] == "True" and "spec.externalIPs" in found["message"]

    quiet(operator, is_reported, "the condition names what stayed")
    assert "kubectl-patch" in chat.condition("Drifted")["message"]
    settle(operator)
    before = versions(chat)
    settle(operator)
    assert versions(chat) == before


def says(chat: FleetClient, decode: str) -> bool:
    """Whether the fleet's status has so many Decode instances, and waits for nothing."""
    found = chat.document()["status"]["summary"]["decode"]
    return found == decode and chat.condition("Progressing")["reason"] == "Settled"


def test_a_restarted_operator_writes_nothing(chat: FleetClient, no_operator: None) -> None:
    with running_operator(chat.cluster, chat.namespace) as first:
        chat.apply(fake_fleet(decode=2))
        chat.apply(fake_fleet("code"))
        chat.wait_ready()
        FleetClient(chat.cluster, chat.namespace, "code").wait_ready()
        chat.kubectl("scale", "fleetpool/chat-decode", "--replicas=3")
        quiet(first, lambda: replicas(chat, "decode") == [3, 1], "scaled")
        # A status that is due waits for its pace, up to 12 s: the next operator would write it.
        chat.wait_pool("decode", 3)
        quiet(first, lambda: says(chat, "3/3"), "the status says so")
        settle(first)
        assert first.stop() == 0
    before = versions(chat)
    with running_operator(chat.cluster, chat.namespace) as second:
        wait_for(lambda: second.turns() >= 2, 20, "both fleets were looked at")
        assert second.writes() == 0, second.log()
        assert versions(chat) == before
        delete_fleets(chat.cluster, chat.namespace)


def test_an_operator_of_one_namespace_leaves_others_alone(
    chat: FleetClient, new_namespace: Callable[[Cluster], str], no_operator: None
) -> None:
    other = FleetClient(chat.cluster, new_namespace(chat.cluster))
    with running_operator(chat.cluster, chat.namespace):
        other.apply(fake_fleet())
        chat.apply(fake_fleet())
        chat.wait_ready()
        assert not items(other, "deployments")
        assert "status" not in other.document()
        other.kubectl("delete", "fleet/chat")
        delete_fleets(chat.cluster, chat.namespace)


def test_a_name_that_somebody_else_has_is_left_alone(
    chat: FleetClient, operator: OperatorProcess
) -> None:
    chat.kubectl("create", "service", "clusterip", "chat-router", "--tcp=80")
    before = chat.read("services", "chat-router")
    chat.apply(fake_fleet())

    def says_so() -> bool:
        found = chat.condition("Degraded")
        return found.get("reason") == "NameConflict" and "Service chat-router" in found["message"]

    quiet(operator, says_so, "the condition names the Service")
    assert chat.read("services", "chat-router") == before
    assert len(deployments(chat, "router")) == 1
    chat.kubectl("delete", "service/chat-router")
    wait_for(
        lambda: chat.condition("Degraded").get("status") == "False",
        60,
        "it is made when the name is free",
        explain=operator.log,
    )


def test_a_crd_that_is_deleted_and_made_again_is_watched_and_pools_keep_their_size(
    chat: FleetClient, operator: OperatorProcess
) -> None:
    chat.apply(fake_fleet())
    chat.wait_ready()
    chat.kubectl("scale", "fleetpool/chat-decode", "--replicas=3")
    quiet(operator, lambda: replicas(chat, "decode") == [3], "scaled")
    chat.kubectl("delete", "crd", "inferencefleetpools.xpyd.dev")
    crd = Path(__file__).parents[2] / "crds" / "xpyd.dev_inferencefleetpools.yaml"
    chat.kubectl("apply", "-f", str(crd))

    def is_back() -> bool:
        try:
            found = chat.find("inferencefleetpools", labels="xpyd.dev/pool=decode")
        except OSError:
            # 429: the API server makes room for the kind.
            return False
        return [pool["spec"]["replicas"] for pool in found] == [3]

    quiet(operator, is_back, "the pool's object is back")
    assert replicas(chat, "decode") == [3]
    chat.kubectl("scale", "fleetpool/chat-decode", "--replicas=2")
    quiet(operator, lambda: replicas(chat, "decode") == [2], "its watch is open")


def test_a_deleted_fleet_leaves_nothing(chat: FleetClient, operator: OperatorProcess) -> None:
    chat.apply(fake_fleet(decode=2))
    chat.wait_ready()
    delete_fleets(chat.cluster, chat.namespace)
    wait_for(lambda: not items(chat), 30, "nothing is left")


def test_sigterm_ends_the_operator_in_seconds(plane: Cluster, no_operator: None) -> None:
    with running_operator(plane) as found:
        assert found.http("/healthz") == 200
        assert found.stop() == 0
        assert "Traceback" not in found.log()


@pytest.mark.parametrize("connector", ["Xpyd", pytest.param("Nixl", marks=pytest.mark.soak)])
def test_p_and_d_of_vllm_become_ready_scale_and_take_another_image_together(
    operator: OperatorProcess, chat: FleetClient, connector: str
) -> None:
    """A new P that is ready sends no old one away before the new D is there: they may not fit."""
    engine = {"type": "VLLM", "connector": connector, "image": "vllm:1"}
    chat.apply(fake_fleet(engine=engine))
    chat.wait_ready()
    chat.scale("decode", 2)
    chat.wait_pool("decode", 2)
    changed = fake_fleet(engine=engine | {"image": "vllm:2"})
    # No node takes the new D yet.
    chosen = {**FAKE_NODES["spec"], "nodeSelector": {**NODE_SELECTOR, "vllm": connector}}
    changed["spec"]["pools"][1]["template"] = {"spec": chosen}
    chat.apply(changed)

    def sizes(pool: str) -> dict[str, tuple[int, int]]:
        """Wanted and ready instances by image."""
        return {
            one["spec"]["template"]["spec"]["containers"][0]["image"]: (
                one["spec"]["replicas"],
                one.get("status", {}).get("readyReplicas", 0),
            )
            for one in deployments(chat, pool)
        }

    quiet(operator, lambda: sizes("prefill").get("vllm:2") == (1, 1), "the new P is ready")
    settle(operator)
    assert sizes("prefill") == {"vllm:1": (1, 1), "vllm:2": (1, 1)}
    assert sizes("decode") == {"vllm:1": (2, 2), "vllm:2": (1, 0)}
    chat.kubectl("label", "node", "kwok-0", f"vllm={connector}", "--overwrite")
    quiet(operator, lambda: sizes("prefill") == {"vllm:2": (1, 1)}, "the old P is gone")
    quiet(operator, lambda: sizes("decode") == {"vllm:2": (2, 2)}, "the old D is gone")
    chat.wait_ready()

"""A whole fleet on a real node, from `helm install` to `helm uninstall`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.fleetkit import (
    SYSTEM,
    FleetClient,
    Timeline,
    finish_load,
    fleet_document,
    install_chart,
    load_images,
    small_cases,
    start_client,
)
from tests.cluster.harness import Cluster, wait_for
from tests.cluster.harness.tools import kubectl_binary

pytestmark = pytest.mark.cluster

NAMESPACE = "serving"
KINDS = (
    "inferencefleets,inferencefleetpools,deployments,replicasets,pods,services,serviceaccounts,"
    "poddisruptionbudgets,networkpolicies,secrets"
)


@pytest.fixture(scope="module")
def timeline(request: pytest.FixtureRequest) -> Iterator[Timeline]:
    """Printed when all is over, whatever pytest captures."""
    timeline = Timeline()
    yield timeline
    plugins = request.config.pluginmanager
    with plugins.getplugin("capturemanager").global_and_fixture_disabled():
        for line in ["", "A fleet's life on one node:", *timeline.lines()]:
            plugins.getplugin("terminalreporter").write_line(line)


@pytest.fixture(scope="module")
def cases() -> list[Any]:
    return small_cases()


def served_document() -> dict[str, Any]:
    """examples/fleet.yaml, which also serves without its Prefill instances."""
    document = fleet_document()
    document["spec"]["router"] = {"onNoPrefill": "PrefillOnDecode"}
    return document


@pytest.fixture(scope="module")
def fleet(node_cluster: Cluster, timeline: Timeline) -> Iterator[FleetClient]:
    """The chart, and examples/fleet.yaml applied and ready."""
    load_images(node_cluster)
    node_cluster.kubectl("create", "namespace", NAMESPACE)
    start_client(node_cluster, NAMESPACE)
    fleet = FleetClient(node_cluster, NAMESPACE)
    fleet.kubectl("wait", "--for=condition=Ready", "pod/client", "--timeout=30s")
    timeline.started, timeline.rows = Timeline().started, []
    install_chart(node_cluster)
    timeline.mark("helm install --wait")
    fleet.apply(served_document())
    fleet.wait_ready()
    timeline.mark("fleet/chat is Ready (1P2D)")
    yield fleet
    node_cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false", check=False)


def uids(fleet: FleetClient) -> dict[str, tuple[str, str]]:
    """uid and generation of every object of the fleet, by kind and name."""
    items = fleet.find(KINDS, labels=f"xpyd.dev/fleet={fleet.name}")
    return {
        f"{item['kind']}/{item['metadata']['name']}": (
            item["metadata"]["uid"],
            str(item["metadata"].get("generation")),
        )
        for item in items
    }


def test_the_first_answers_are_right_and_decode_computes_no_prompt(
    fleet: FleetClient, cases: list[Any], timeline: Timeline
) -> None:
    report = fleet.load(cases[:1], requests=1)
    assert report["failed"] == 0, report
    first_s = timeline.mark("first answer through the Service, with transformers' tokens")
    assert first_s > 0
    before = fleet.prompt_tokens_computed("decode")
    report = fleet.load(cases, requests=24)
    assert report["failed"] == 0, report
    after = fleet.prompt_tokens_computed("decode")
    assert sum(after.values()) - sum(before.values()) <= 24, (before, after)
    prompts = sum(len(case.prompt) for case in cases)
    assert sum(fleet.prompt_tokens_computed("prefill").values()) > prompts / 2


def verified(
    fleet: FleetClient, cases: list[Any], status: str, reason: str, *, within_s: float = 60
) -> dict[str, Any]:
    """The condition, when it has this status and reason; requests are served all the time."""

    def holds() -> bool:
        assert fleet.load(cases, requests=4)["failed"] == 0
        found = fleet.condition("KVTransferVerified")
        return (found["status"], found["reason"]) == (status, reason)

    what = f"KVTransferVerified={status}, {reason}"
    # Each look starts a client, which costs a second of CPU.
    wait_for(holds, within_s, what, interval_s=2.0, explain=fleet.explain)
    return fleet.condition("KVTransferVerified")


def test_an_engine_with_another_key_is_a_condition_of_a_fleet_that_serves(
    fleet: FleetClient, cases: list[Any], timeline: Timeline
) -> None:
    """It is Ready, and no router has it."""
    verified(fleet, cases, "True", "KVMoved")
    with fleet.copied_pod("decode", key="0" * 64):
        found = verified(fleet, cases, "False", "KeyMismatch")
        timeline.mark("an engine with another key is a condition")
        assert "heartbeats are signed with another key" in found["message"]
        assert fleet.condition("Available")["status"] == "True"
    verified(fleet, cases, "True", "KVMoved")


def test_a_fleet_whose_prefill_instances_get_no_requests_says_so(
    fleet: FleetClient, cases: list[Any], timeline: Timeline
) -> None:
    verified(fleet, cases, "True", "KVMoved")
    fleet.scale("prefill", 0)
    found = verified(fleet, cases, "False", "PrefillIdle", within_s=90)
    timeline.mark("a fleet without Prefill instances is a condition")
    assert "no Prefill instance was there" in found["message"]
    fleet.scale("prefill", 1)
    verified(fleet, cases, "True", "KVMoved")


def test_a_firewall_on_the_kv_port_is_a_condition_of_a_fleet_that_serves(
    fleet: FleetClient, cases: list[Any], timeline: Timeline
) -> None:
    verified(fleet, cases, "True", "KVMoved")
    rules = "table ip wall { chain pods { type filter hook forward priority -50; "
    rules += "tcp dport 21001 reject with tcp reset; }; }"
    fleet.cluster.run(["nft", rules], check=True)
    try:
        found = verified(fleet, cases, "False", "Unreachable")
    finally:
        fleet.cluster.run(["nft", "delete table ip wall"], check=True)
    timeline.mark("a rejected KV port is a condition")
    (prefill,) = fleet.pods("prefill")
    assert f"{prefill['metadata']['name']} to chat-decode-" in found["message"]
    assert fleet.condition("Available")["status"] == "True"
    # That holds for a minute; a later test sees its end.


def test_a_fleet_elsewhere_is_another_fleet(
    fleet: FleetClient, node_cluster: Cluster, cases: list[Any]
) -> None:
    """Of the same name, in another namespace, with one aggregated engine of two replicas."""
    namespace = "elsewhere"
    node_cluster.kubectl("create", "namespace", namespace)
    other = FleetClient(node_cluster, namespace)
    document = fleet_document()
    pool = document["spec"]["pools"][0]
    pool |= {"name": "all", "role": "Aggregated", "replicas": 1, "parallelism": {"data": 2}}
    document["spec"]["pools"] = [pool]
    document["spec"]["router"] = {"replicas": 1}
    document["spec"]["drain"] = {"timeoutSeconds": 1}
    other.apply(document)
    other.wait_ready()

    def instances(one: FleetClient) -> set[str]:
        router = one.pods("router")[0]
        url = f"http://{router['status']['podIP']}:10002/instances"
        code = f"import urllib.request as u; print(u.urlopen({url!r}, timeout=10).read().decode())"
        text = fleet.kubectl("exec", "client", "--", "python3", "-c", code)
        return {instance["instance"] for instance in json.loads(text)["instances"]}

    assert instances(other) == {pod["metadata"]["name"] for pod in other.pods("all")}
    assert other.pool("all")["status"]["layout"] == "TP1xPP1xDP2"
    (engine,) = other.pods("all")
    url = f"http://{engine['status']['podIP']}:20001/metrics"
    code = f"import urllib.request as u; print(u.urlopen({url!r}, timeout=10).read().decode())"
    metrics = fleet.kubectl("exec", "client", "--", "python3", "-c", code)
    assert [f'xpyd_engine_replica_up{{engine="{i}"}} 1.0' in metrics for i in range(3)] == [
        True,
        True,
        False,
    ]
    engines = {pod["metadata"]["name"] for p in ("prefill", "decode") for pod in fleet.pods(p)}
    assert instances(fleet) == engines
    node_cluster.kubectl("delete", "namespace", namespace, "--wait=false")


def test_the_condition_says_when_kv_moves_again_behind_the_firewall(
    fleet: FleetClient, cases: list[Any], timeline: Timeline
) -> None:
    verified(fleet, cases, "True", "KVMoved", within_s=150)
    timeline.mark("KV moves again")


def test_the_table_that_people_see_says_what_runs(fleet: FleetClient) -> None:
    table = fleet.kubectl("get", "fleets")
    header, row = (line.split() for line in table.splitlines()[:2])
    shown = dict(zip(header, row, strict=False))
    assert shown["PREFILL"] == "1/1", table
    assert shown["DECODE"] == "2/2", table
    assert shown["READY"] == "True", table


def test_port_forward_reaches_the_router(fleet: FleetClient) -> None:
    with_port = ("port-forward", "service/chat-router", "18080:10001")
    argv = [kubectl_binary(), "-n", fleet.namespace, *with_port]
    process = fleet.cluster.popen(argv, stdout=-1, stderr=-1, text=True)
    try:

        def answers() -> bool:
            code = (
                "import json, urllib.request as u;"
                "print(json.load(u.urlopen('http://127.0.0.1:18080/v1/models', timeout=5)))"
            )
            done = fleet.cluster.run(["python3", "-c", code], capture_output=True, text=True)
            return "'id': 'demo'" in done.stdout

        wait_for(answers, 20, "the router answers through port-forward", interval_s=0.5)
    finally:
        process.terminate()
        process.communicate(timeout=10)


def test_both_pools_scale_up_and_down(
    fleet: FleetClient, cases: list[Any], timeline: Timeline
) -> None:
    fleet.scale("decode", 3)
    fleet.scale("prefill", 2)
    fleet.wait_pool("decode", 3)
    fleet.wait_pool("prefill", 2)
    timeline.mark("scaled to 2P3D")
    assert fleet.load(cases, requests=12)["failed"] == 0
    # Applying the same document again is no scale.
    fleet.apply(served_document())
    fleet.scale("decode", 1)
    fleet.scale("prefill", 1)
    fleet.wait_pool("decode", 1)
    fleet.wait_pool("prefill", 1)
    timeline.mark("scaled to 1P1D")
    assert fleet.load(cases, requests=12)["failed"] == 0
    assert len(fleet.pods("decode")) == 1
    assert len(fleet.pods("prefill")) == 1


def test_a_scale_over_the_pools_bounds_is_refused(fleet: FleetClient) -> None:
    said = fleet.kubectl("scale", "fleetpool/chat-decode", "--replicas=9", check=False)
    assert "maxReplicas" in said


def test_a_deleted_pod_comes_back_and_serves(
    fleet: FleetClient, cases: list[Any], timeline: Timeline
) -> None:
    (pod,) = fleet.pods("decode")
    fleet.kubectl("delete", "pod", pod["metadata"]["name"], "--wait=false")

    def replaced() -> bool:
        return pod["metadata"]["uid"] not in {p["metadata"]["uid"] for p in fleet.pods("decode")}

    wait_for(replaced, 30, "the deleted pod is on its way", explain=fleet.explain)
    fleet.wait_pool("decode", 1)
    fleet.wait_ready()
    timeline.mark("a deleted decode pod is back")
    assert fleet.load(cases, requests=12)["failed"] == 0


def test_a_request_is_traced_and_an_instance_is_drained_with_proof_under_load(
    fleet: FleetClient, cases: list[Any], timeline: Timeline
) -> None:
    fleet.scale("decode", 2)
    fleet.wait_pool("decode", 2)
    assert fleet.load(cases, requests=8)["failed"] == 0
    said = fleet.kubectl("logs", "-l", "xpyd.dev/fleet=chat,xpyd.dev/role=router", "--tail=-1")
    wanted = re.findall(r"response=(\S+)", said)[-1]
    found = json.loads(fleet.xpyd("trace", wanted, "-o", "json"))
    names = [phase["name"] for phase in found["phases"]]
    assert {"queue", "prefill call", "decode call", "KV from P", "last byte"} <= set(names)
    assert found["notFoundAt"] == []
    load = fleet.start_load(cases)
    leaving = fleet.pods("decode")[0]["metadata"]["name"]
    drained = json.loads(fleet.xpyd("drain", leaving, "--wait", "--timeout", "120", "-o", "json"))
    timeline.mark("a decode instance is drained with proof, and replaced")
    report = finish_load(load)
    assert drained["outcome"] == "Drained", drained
    assert report["failed"] == 0, report
    assert leaving not in [pod["metadata"]["name"] for pod in fleet.pods("decode")]
    assert "Ready=True" in fleet.xpyd("status", "chat")
    assert "Scaled: pool decode: 1 -> 2" in fleet.xpyd("why", "chat")
    fleet.scale("decode", 1)
    fleet.wait_pool("decode", 1)


def test_an_operator_that_dies_and_comes_back_changes_nothing(
    fleet: FleetClient, timeline: Timeline
) -> None:
    before = uids(fleet)
    cluster = fleet.cluster
    selector = "app.kubernetes.io/component=operator"
    argv = ("-n", SYSTEM, "delete", "pod", "-l", selector, "--grace-period=0", "--force")
    assert "deleted" in cluster.kubectl(*argv)
    rollout = ("rollout", "status", "deployment", "-l", selector, "--timeout=60s")
    cluster.kubectl("-n", SYSTEM, *rollout, timeout_s=70)
    timeline.mark("the killed operator is back")
    fleet.scale("decode", 2)
    fleet.wait_pool("decode", 2)
    fleet.scale("decode", 1)
    fleet.wait_pool("decode", 1)
    after = uids(fleet)
    lasting = {key for key in before if not key.startswith(("Pod/", "ReplicaSet/"))}
    assert {key: after[key][0] for key in lasting} == {key: before[key][0] for key in lasting}
    scaled = {key for key in lasting if "decode" in key}
    assert {key: after[key] for key in lasting - scaled} == {
        key: before[key] for key in lasting - scaled
    }


def test_no_request_fails_while_both_pools_scale(
    fleet: FleetClient, cases: list[Any], timeline: Timeline
) -> None:
    fleet.scale("decode", 3)
    fleet.scale("prefill", 2)
    fleet.wait_pool("decode", 3)
    fleet.wait_pool("prefill", 2)
    timeline.mark("2P3D for the load")
    load = fleet.start_load(cases)
    fleet.scale("decode", 1)
    fleet.wait_pool("decode", 1)
    fleet.scale("decode", 3)
    fleet.wait_pool("decode", 3)
    fleet.scale("prefill", 1)
    fleet.wait_pool("prefill", 1)
    fleet.scale("prefill", 2)
    fleet.wait_pool("prefill", 2)
    report = finish_load(load)
    timeline.mark(f"requests while both pools scaled: {report}")
    assert report["failed"] == 0, report


def test_a_deleted_fleet_leaves_nothing(fleet: FleetClient, timeline: Timeline) -> None:
    fleet.kubectl("delete", "fleet", fleet.name, "--timeout=120s", timeout_s=130)
    timeline.mark("kubectl delete fleet")

    def gone() -> bool:
        return not fleet.find(KINDS, labels=f"xpyd.dev/fleet={fleet.name}")

    wait_for(gone, 60, "nothing of the fleet is left", explain=fleet.explain)
    timeline.mark("nothing of it is left")


def test_uninstall_with_a_live_fleet_leaves_nothing(fleet: FleetClient, timeline: Timeline) -> None:
    cluster = fleet.cluster
    fleet.apply(fleet_document(decode=1))
    fleet.wait_ready()
    timeline.mark("a new fleet is Ready")
    cluster.helm("uninstall", "xpyd", "-n", SYSTEM, "--wait", "--timeout=4m", timeout_s=250)
    timeline.mark("helm uninstall")
    labelled = ("get", KINDS.partition(",")[2].partition(",")[2], "-A", "-o", "name", "-l")

    def gone() -> bool:
        left = cluster.kubectl(*labelled, "app.kubernetes.io/managed-by=xpyd")
        left += cluster.kubectl("get", "crds", "-o", "name")
        left += cluster.kubectl("-n", SYSTEM, "get", "all,secrets,configmaps", "-o", "name")
        left += cluster.kubectl("get", "clusterroles,clusterrolebindings", "-o", "name")
        mine = [line for line in left.splitlines() if "xpyd" in line]
        assert not mine, mine
        return True

    wait_for(gone, 30, "nothing of xpyd is left", explain=fleet.explain)
    timeline.mark("nothing of xpyd is left")

"""The test cluster's real node: pods run, Services and DNS answer, images load, all of it ends."""

from __future__ import annotations

import json
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.harness import Cluster, build, up, wait_for
from tests.cluster.harness.images import write_image
from tests.cluster.harness.node import NODE_NAME, TEST_IMAGE
from tests.cluster.harness.runs import Run, base_folder
from tests.cluster.harness.survey import processes_of, survey

READY_S = 60.0


def pod(name: str, *argv: str, image: str = TEST_IMAGE, **container: Any) -> dict[str, Any]:
    """A pod that runs `testpod ARGV`."""
    main = {"name": "main", "image": image, "imagePullPolicy": "Never", "args": list(argv)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "restartPolicy": "Never",
            "containers": [main | container],
        },
    }


def web(replicas: int) -> str:
    """A Deployment of web servers and its Service."""
    made = pod("web", "serve", readinessProbe={"httpGet": {"path": "/", "port": 8080}})
    made["spec"]["restartPolicy"] = "Always"
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}}, "spec": made["spec"]},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [deployment, service]})


def apply(cluster: Cluster, namespace: str, document: dict[str, Any] | str) -> None:
    """kubectl apply."""
    text = document if isinstance(document, str) else json.dumps(document)
    cluster.kubectl("-n", namespace, "apply", "-f", "-", input=text)


def phase(cluster: Cluster, namespace: str, name: str) -> str:
    """The pod's phase."""
    path = "jsonpath={.status.phase}"
    return cluster.kubectl("-n", namespace, "get", "pod", name, "-o", path)


def fetch(cluster: Cluster, url: str) -> str:
    """What a program of this machine gets that runs in the cluster's network."""
    argv = [build.binary(build.TESTPOD), "get", url]
    return cluster.run(argv, capture_output=True, text=True, check=True).stdout


def test_a_pod_reaches_a_deployments_pods_through_their_service(
    node_cluster: Cluster, namespace: str
) -> None:
    kubectl = partial(node_cluster.kubectl, "-n", namespace)
    apply(node_cluster, namespace, web(2))
    kubectl("rollout", "status", "deployment/web", "--timeout=60s")
    apply(node_cluster, namespace, pod("client", "serve"))
    kubectl("wait", "--for=condition=Ready", "pod/client", "--timeout=60s")

    def answers() -> set[str]:
        ask = ("exec", "client", "--", "/testpod", "get")
        short = kubectl(*ask, "http://web", check=False)
        full = kubectl(*ask, f"http://web.{namespace}.svc.cluster.local", check=False)
        return {line for line in (short + full).splitlines() if line.startswith("web-")}

    seen: set[str] = set()
    # Which of the two answers is random; a Service may lag its pods' readiness.
    wait_for(lambda: seen.update(answers()) or len(seen) == 2, 30, "both pods answered")
    # A program of this machine reaches Services too, in the cluster's network.
    address = kubectl("get", "service", "web", "-o", "jsonpath={.spec.clusterIP}")
    assert fetch(node_cluster, f"http://{address}").startswith("web-")


def test_names_outside_of_the_cluster_do_not_exist(node_cluster: Cluster, namespace: str) -> None:
    apply(node_cluster, namespace, pod("client", "get", "http://outside.example"))
    wait_for(
        lambda: phase(node_cluster, namespace, "client") == "Failed", READY_S, "the pod has failed"
    )
    logs = node_cluster.kubectl("-n", namespace, "logs", "client")
    assert "no such host" in logs


def test_logs_exec_and_port_forward_work(node_cluster: Cluster, namespace: str) -> None:
    kubectl = partial(node_cluster.kubectl, "-n", namespace)
    apply(node_cluster, namespace, pod("server", "serve"))
    kubectl("wait", "--for=condition=Ready", "pod/server", "--timeout=60s")
    url = "http://localhost:8080/seen-in-the-log"
    assert kubectl("exec", "server", "--", "/testpod", "get", url) == "server\n"
    assert "GET /seen-in-the-log" in kubectl("logs", "server")
    forward = node_cluster.popen(
        ["kubectl", "-n", namespace, "port-forward", "pod/server", "18080:8080"],
        stdout=subprocess.PIPE,
        text=True,
    )
    with forward:
        assert forward.stdout is not None
        assert "Forwarding from" in forward.stdout.readline()
        assert fetch(node_cluster, "http://127.0.0.1:18080") == "server\n"
        forward.terminate()


def test_a_pod_that_fails_tells_its_last_words(node_cluster: Cluster, namespace: str) -> None:
    apply(node_cluster, namespace, pod("failing", "fail", "no such model"))
    wait_for(
        lambda: phase(node_cluster, namespace, "failing") == "Failed", READY_S, "it has failed"
    )
    assert node_cluster.kubectl("-n", namespace, "logs", "failing") == "no such model\n"
    assert "no such model" in node_cluster.explain(namespace)


def test_an_image_made_here_is_loaded_and_runs(
    node_cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    reference = f"localhost/{namespace}:1"
    write_image(
        tmp_path / "image.tar",
        reference,
        {"/bin/testpod": build.binary(build.TESTPOD)},
        entrypoint=["/bin/testpod"],
        env={"GREETING": "hello"},
        user="10001",
    )
    node_cluster.load_image(tmp_path / "image.tar")
    assert reference in node_cluster.images()
    apply(node_cluster, namespace, pod("mine", "serve", image=reference))
    node_cluster.kubectl("-n", namespace, "wait", "--for=condition=Ready", "pod/mine")
    argv = ("exec", "mine", "--", "/bin/testpod", "get", "http://localhost:8080/env")
    assert "GREETING=hello" in node_cluster.kubectl("-n", namespace, *argv)


def test_an_image_that_is_nowhere_is_told_by_the_pod(node_cluster: Cluster, namespace: str) -> None:
    absent = pod("absent", image="registry.invalid/absent:1", imagePullPolicy="IfNotPresent")
    apply(node_cluster, namespace, absent)
    path = "jsonpath={.status.containerStatuses[0].state.waiting.reason}"
    kubectl = partial(node_cluster.kubectl, "-n", namespace)
    wait_for(
        lambda: kubectl("get", "pod", "absent", "-o", path) in ("ErrImagePull", "ImagePullBackOff"),
        30,
        "the image is not found",
    )


def test_extended_resources_are_offered_and_counted(node_cluster: Cluster, namespace: str) -> None:
    node_cluster.set_node_capacity({"example.com/gpu": 2})
    try:
        limits = {"limits": {"example.com/gpu": "2"}}
        apply(node_cluster, namespace, pod("first", "serve", resources=limits))
        apply(node_cluster, namespace, pod("second", "serve", resources=limits))
        kubectl = partial(node_cluster.kubectl, "-n", namespace)

        def one_runs_one_waits() -> bool:
            phases = sorted(phase(node_cluster, namespace, name) for name in ("first", "second"))
            return phases == ["Pending", "Running"]

        wait_for(one_runs_one_waits, READY_S, "one pod has the GPUs")
        wait_for(
            lambda: "Insufficient example.com/gpu" in kubectl("get", "events"), 30, "it is told"
        )
    finally:
        node_cluster.set_node_capacity({"example.com/gpu": None})


def test_fake_nodes_stand_beside_the_real_one(node_cluster: Cluster) -> None:
    node_cluster.add_kwok_nodes(2)
    names = node_cluster.kubectl("get", "nodes", "-o", "name").split()
    assert {f"node/{NODE_NAME}", "node/kwok-0", "node/kwok-1"} <= set(names)


@pytest.mark.usefixtures("node_cluster")
@pytest.mark.parametrize("how", ["down", "killed"])
def test_a_node_with_running_pods_goes_without_a_trace(how: str) -> None:
    name = f"trace-{how}-{os.getpid()}"
    before = survey(name)
    cluster = up(name, node=True)
    try:
        apply(cluster, "default", web(3))
        cluster.kubectl("rollout", "status", "deployment/web", "--timeout=60s")
        state = Run(base_folder() / name).state()
        assert state is not None
        inside = processes_of(state.init)
        # Of each of the three pods: the one that holds its namespaces, the server, the shim.
        assert len(inside) >= 9 + 3 * 3
        assert any(line.startswith("cgroup ") for line in survey(name) - before)
        if how == "killed":
            state.init.kill()
            wait_for(lambda: not state.keeper.alive, 30, "the keeper has cleaned up")
    finally:
        cluster.down()
    assert survey(name) == before
    assert not any(process.alive for process in inside)

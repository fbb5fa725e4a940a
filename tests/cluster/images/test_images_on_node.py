"""The images as pods: admitted at the level "restricted", run on a read-only root."""

import json
from typing import Any

import pytest

from tests.cluster.fleetkit import load_images
from tests.cluster.harness import Cluster, wait_for
from tests.cluster.images.build import IMAGES, TARGETS, worker_test_template

_RESTRICTED = {
    "runAsNonRoot": True,
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def _pod(name: str, image: str, **container: Any) -> dict[str, Any]:
    engine = {
        "name": "engine",
        "image": image,
        "imagePullPolicy": "Never",
        "securityContext": _RESTRICTED,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        **container,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "containers": [engine],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        },
    }


def _output(cluster: Cluster, namespace: str, pod: dict[str, Any]) -> str:
    """What the pod's container printed; it must end with success."""
    name = pod["metadata"]["name"]
    cluster.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(pod))

    def phase() -> str | None:
        found = cluster.kubectl("-n", namespace, "get", "pod", name, "-o=jsonpath={.status.phase}")
        return found if found in ("Succeeded", "Failed") else None

    ended = wait_for(phase, 90, f"pod {name} ended")
    said = cluster.kubectl("-n", namespace, "logs", name)
    assert ended == "Succeeded", said
    return said


@pytest.fixture(scope="module")
def node(node_cluster: Cluster) -> Cluster:
    """The node with the images."""
    load_images(node_cluster)
    return node_cluster


def test_the_images_run_as_restricted_pods(node: Cluster, namespace: str) -> None:
    level = "pod-security.kubernetes.io/enforce=restricted"
    node.kubectl("label", "namespace", namespace, level)
    for name in TARGETS:
        pod = _pod(name, IMAGES[name], args=["version"])
        assert _output(node, namespace, pod).startswith("xpyd ")


def test_the_template_gives_the_worker_the_machines_libraries(
    node: Cluster, namespace: str
) -> None:
    template = worker_test_template()["spec"]
    code = "import torch; print(int(torch.ones(3, 3).sum()))"
    pod = _pod("worker", IMAGES["worker"], command=["/opt/xpyd/bin/python", "-c", code])
    pod["spec"]["containers"][0]["volumeMounts"] += template["containers"][0]["volumeMounts"]
    pod["spec"]["volumes"] += template["volumes"]
    assert _output(node, namespace, pod).split() == ["9"]

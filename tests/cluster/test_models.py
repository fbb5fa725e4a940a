"""Models of a bucket on a real node: a Job downloads one into a claim, for all pods of two fleets.

The store is moto's server in the cluster's network; the claim is a folder of this machine. A pod of
a Job mounts its claim alone, so the libraries that the worker's test image lacks lie in there.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fleetkit import DEMO_MODEL, ROOT, FleetClient, Obj, fleet_of_images
from tests.cluster.harness import Cluster, wait_for
from tests.cluster.harness.node import NODE_NAME
from tests.cluster.images.build import worker_test_template
from tests.worker.s3_kit import files_in

pytestmark = [pytest.mark.cluster, pytest.mark.long]
NAMESPACE = "models"
LIBRARIES = ("botocore", "dateutil", "jmespath", "msgspec", "six", "urllib3")
_STORE = """
import pathlib, sys
root, host, folder = sys.argv[1:]
sys.path.insert(0, root)
from tests.worker.s3_kit import Road, running_store
with running_store(host) as store:
    files = {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()}
    for name in ("demo", "other"):
        store.put("models", {f"{name}/{key}": content for key, content in files.items()})
    road = Road(store)
    road.slow_s = 0.2
    print(store.url, road.url, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def fleet(node_cluster: Cluster) -> Iterator[FleetClient]:
    with fleet_of_images(node_cluster, NAMESPACE) as found:
        yield found


@pytest.fixture(scope="module")
def store(node_cluster: Cluster) -> Iterator[tuple[str, str]]:
    """The URL of a store with the demo model, as pods reach it, and one at which it is slow."""
    node = node_cluster.get(f"/api/v1/nodes/{NODE_NAME}") or {}
    addresses = {a["type"]: a["address"] for a in node["status"]["addresses"]}
    words = [str(ROOT), addresses["InternalIP"], str(DEMO_MODEL)]
    argv = [sys.executable, "-W", "ignore", "-c", _STORE, *words]
    process = node_cluster.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        quick, slow = process.stdout.readline().split()
        yield quick, slow
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def claim(fleet: FleetClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder behind the claim `models`."""
    folder = tmp_path_factory.mktemp("claim")
    for above in (folder, *folder.parents[:2]):
        above.chmod(0o777)
    libraries = folder / ".libraries"
    libraries.mkdir()
    for name in LIBRARIES:
        found = Path(importlib.import_module(name).__file__ or "")
        source = found.parent if found.name == "__init__.py" else found
        subprocess.run(["cp", "-r", source, libraries], check=True)
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "xpyd-test-models"},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "",
            "hostPath": {"path": str(folder)},
            "claimRef": {"namespace": NAMESPACE, "name": "models"},
        },
    }
    asked = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "models"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "",
            "volumeName": "xpyd-test-models",
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    # The store shows lists to everyone, and objects to those with a key.
    keys = {"AWS_ACCESS_KEY_ID": "reader", "AWS_SECRET_ACCESS_KEY": "secret"}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "reader"},
        "stringData": keys,
    }
    for obj in (volume, asked, secret):
        fleet.kubectl("apply", "-f", "-", input=json.dumps(obj))
    yield folder
    fleet.cluster.kubectl("delete", "pv", "xpyd-test-models", "--wait=false")


def document(name: str, uri: str, store: str) -> Obj:
    pool = {"name": "all", "role": "Aggregated", "resources": {"gpus": 0}, "replicas": 1}
    cache = {"type": "PersistentVolumeClaim", "claimName": "models"}
    return {
        "apiVersion": "xpyd.dev/v1alpha1",
        "kind": "InferenceFleet",
        "metadata": {"name": name},
        "spec": {
            "model": {
                "uri": uri,
                "endpointUrl": store,
                "cache": cache,
                "secretRef": {"name": "reader"},
            },
            "pools": [pool | {"template": worker_test_template()}],
        },
    }


def model_ready(fleet: FleetClient) -> dict[str, Any]:
    [found] = [f for f in fleet.find("inferencefleets") if f["metadata"]["name"] == fleet.name]
    rows = found.get("status", {}).get("conditions", [])
    return next((row for row in rows if row["type"] == "ModelReady"), {})


def engines_of(fleet: FleetClient) -> set[str]:
    found = fleet.find("pods", labels=f"xpyd.dev/fleet={fleet.name},xpyd.dev/pool=all")
    return {pod["metadata"]["uid"] for pod in found}


def assert_is_the_demo(folder: Path) -> None:
    found = files_in(folder)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= found.keys()
    assert found.items() <= files_in(DEMO_MODEL).items()


def test_a_wrong_path_is_a_condition_and_the_right_one_comes_once_for_two_fleets(
    fleet: FleetClient, store: tuple[str, str], claim: Path
) -> None:
    fleet.apply(document("chat", "s3://models/none", store[0]))
    what = "the condition names the wrong path"
    wait_for(lambda: model_ready(fleet).get("reason") == "NotFound", 120, what)
    assert "no object below it: correct the path" in model_ready(fleet)["message"]
    assert not fleet.find("deployments")  # no engine, and no router yet
    other = FleetClient(fleet.cluster, fleet.namespace, "other")
    for one in (fleet, other):
        one.apply(document(one.name, "s3://models/demo", store[0]))
    for one in (fleet, other):
        one.wait_ready()
        assert model_ready(one)["reason"] == "Downloaded"
    [folder] = [path for path in claim.iterdir() if not path.name.startswith(".")]
    assert_is_the_demo(folder)
    # The Job of the wrong path is gone.
    assert len(fleet.find("jobs")) == 2


def test_a_killed_download_is_taken_over_while_the_fleet_serves_its_old_model(
    fleet: FleetClient, store: tuple[str, str], claim: Path
) -> None:
    before = {path.name for path in claim.iterdir()}
    engines = engines_of(fleet)
    fleet.apply(document("chat", "s3://models/other", store[1]))
    what = "a file of the model grows in the claim, and the fleet says so"
    wait_for(lambda: model_ready(fleet).get("reason") == "Downloading", 60, what)
    wait_for(lambda: any(claim.glob(".other-*.download/*.part")), 60, what)
    found = fleet.find("pods", labels="xpyd.dev/fleet=chat,xpyd.dev/role=model")
    [pod] = [pod for pod in found if pod["status"]["phase"] == "Running"]
    fleet.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force")
    assert engines_of(fleet) == engines, "the old model's engines were not touched"
    wait_for(lambda: model_ready(fleet).get("reason") == "Downloaded", 120, "another pod ends it")
    fleet.wait_ready()
    [folder] = [path for path in claim.iterdir() if path.name not in before and path.name[0] != "."]
    assert_is_the_demo(folder)

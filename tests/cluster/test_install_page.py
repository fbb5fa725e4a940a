"""The commands of docs/install.md, run in their order on a real node."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.fleetkit import (
    IMAGE_VALUES,
    ROOT,
    SYSTEM,
    Timeline,
    fleet_document,
    load_images,
    wait_for_crds,
)
from tests.cluster.harness import Cluster, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.long]

INSTALL = ROOT / "docs" / "install.md"
REGISTRY = "--set images.registry=registry.example.com/llm"
FLEET = "examples/fleet.yaml"


def _blocks(page: Path, note: str) -> list[str]:
    """The page's commands that say that this module runs them."""
    fence = (
        rf"^```sh not-run: {re.escape(note)}; tests/cluster/test_install_page.py[^\n]*\n(.*?)^```$"
    )
    return re.findall(fence, page.read_text(), re.M | re.S)


@pytest.fixture(scope="module")
def cluster(node_cluster: Cluster) -> Iterator[Cluster]:
    """With the images that the page tells to load."""
    load_images(node_cluster)
    yield node_cluster
    # Also where a test failed: CRDs that are still being deleted would take another test's along.
    argv = ("uninstall", "xpyd", "-n", SYSTEM, "--no-hooks", "--wait", "--timeout=50s")
    node_cluster.helm(*argv, check=False)
    node_cluster.kubectl("delete", "namespace", SYSTEM, "--ignore-not-found")


def test_the_page_installs_upgrades_and_uninstalls(cluster: Cluster, tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(json.dumps(fleet_document()))
    images = " ".join(f"--set {value}" for value in IMAGE_VALUES)
    timeline = Timeline()

    def run(commands: str) -> str:
        script = commands.replace(REGISTRY, images).replace(FLEET, str(fleet))
        done = cluster.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=360,
        )
        first = commands.partition("\n")[0]
        told = cluster.explain("default") + cluster.explain(SYSTEM) if done.returncode else ""
        assert not done.returncode, f"{script}\n{done.stdout}\n{done.stderr}\n{told}"
        timeline.mark(first)
        return done.stdout

    install, use, upgrade, uninstall = _blocks(INSTALL, "needs a cluster")
    assert REGISTRY in install
    assert FLEET in use
    out = run(install)
    assert re.search(r"^Phase: +Succeeded$", out, re.M), out
    assert "fleet.xpyd.dev/chat" in run(use)
    asks = ("--set", "test.fleet=chat", "--set", "test.namespace=default")
    chart = str(ROOT / "helm/xpyd")
    cluster.helm("upgrade", "xpyd", chart, "-n", SYSTEM, "--reset-then-reuse-values", *asks)
    tested = cluster.helm("test", "xpyd", "-n", SYSTEM, "--timeout=90s")
    assert re.search(r"^Phase: +Succeeded$", tested, re.M), tested
    pods = ("get", "pods", "-l", "xpyd.dev/fleet=chat", "-o", "name")
    before = cluster.kubectl(*pods)
    run(upgrade)
    assert cluster.kubectl(*pods) == before
    run(uninstall)
    wait_for(lambda: not _left(cluster), 30, "nothing is left", explain=lambda: _left(cluster))


def test_a_hook_that_fails_shows_its_log(cluster: Cluster) -> None:
    """helm prints what the hook wrote: without it nobody would know what is left."""
    values = [part for value in IMAGE_VALUES for part in ("--set", value)]
    chart = str(ROOT / "helm/xpyd")
    argv = ("install", "xpyd", chart, "-n", SYSTEM, "--create-namespace", *values)
    cluster.helm(*argv, "--set", "uninstall.timeoutSeconds=10")
    wait_for_crds(cluster)
    held = {
        "apiVersion": "xpyd.dev/v1alpha1",
        "kind": "InferenceFleet",
        "metadata": {"name": "held", "namespace": "default", "finalizers": ["example.com/held"]},
        "spec": {
            **fleet_document()["spec"],
            "pools": [{"name": "all", "role": "Aggregated", "replicas": 0}],
        },
    }
    cluster.kubectl("apply", "-f", "-", input=json.dumps(held))
    said = cluster.helm("uninstall", "xpyd", "-n", SYSTEM, check=False)
    assert "after 10 s there are still 1 fleets (default/held)" in said
    cluster.kubectl("patch", "fleet/held", "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    # Its routers take a moment to end; as the message says, again is enough.
    again = (cluster.helm("uninstall", "xpyd", "-n", SYSTEM, check=False) for _ in range(6))
    assert any("uninstalled" in said for said in again)


def _left(cluster: Cluster) -> str:
    kinds = "crds,clusterroles,clusterrolebindings"
    found = cluster.kubectl("get", kinds, "-o", "name")
    found += cluster.kubectl("-n", SYSTEM, "get", "all,roles,rolebindings,secrets", "-o", "name")
    found += cluster.kubectl(
        "get", "all,secrets,networkpolicies", "-l", "xpyd.dev/fleet", "-o", "name"
    )
    return "\n".join(line for line in found.splitlines() if "xpyd" in line or "chat" in line)

"""The clusters that the tests share, one of each size, and a namespace for each test.

Every test that takes one of them is marked `cluster`; a machine that cannot have a cluster
skips them, with the reason. When such a test fails, its report has what the cluster says
about its namespace.

Kubernetes first looks at a namespace five seconds after its deletion. So a test waits only for the
end of its pods, and the run waits for the end of all namespaces, once, before the cluster goes.
"""

import json
import os
import secrets
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from tests.cluster.fleetkit import find, installed_crds
from tests.cluster.harness import Cluster, availability, up, wait_for
from tests.cluster.needs import skip_for

_FIXTURES = {"control_plane", "node_cluster"}
_GONE_S = 90.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a cluster, and what needs the one with a node: `.ci/run` runs these beside
    the others."""
    for item in items:
        if isinstance(item, pytest.Function) and (used := _FIXTURES & set(item.fixturenames)):
            item.add_marker(pytest.mark.cluster)
            if "node_cluster" in used:
                item.add_marker(pytest.mark.node)


@pytest.fixture(scope="session")
def control_plane() -> Iterator[Cluster]:
    """A cluster without a node that runs anything: API, controllers, scheduler; fake nodes."""
    skip_for(availability.why_no_control_plane())
    cluster = up(f"plane-{os.getpid()}")
    try:
        yield cluster
        _wait_until_gone(cluster)
    finally:
        cluster.down()


@pytest.fixture(scope="session")
def node_cluster() -> Iterator[Cluster]:
    """A cluster with a real node, where pods run; fake nodes besides on demand."""
    skip_for(availability.why_no_node())
    cluster = up(f"node-{os.getpid()}", node=True)
    try:
        yield cluster
        _wait_until_gone(cluster)
    finally:
        cluster.down()


@pytest.fixture(scope="module")
def plane(control_plane: Cluster) -> Iterator[Cluster]:
    """The control plane with our CRDs and fake nodes, and no operator."""
    with installed_crds(control_plane):
        control_plane.add_kwok_nodes(2)
        yield control_plane


@pytest.fixture
def new_namespace() -> Iterator[Callable[[Cluster], str]]:
    """Makes namespaces; each is deleted, with all that is in it, when the test ends."""
    made: list[tuple[Cluster, str]] = []

    def create(cluster: Cluster) -> str:
        name = f"test-{secrets.token_hex(4)}"
        cluster.kubectl("create", "namespace", name)
        made.append((cluster, name))
        # Pods are refused before the namespace has its service account.
        wait_for(
            lambda: cluster.get(f"/api/v1/namespaces/{name}/serviceaccounts/default"),
            30,
            f"the namespace {name} has a service account",
        )
        return name

    yield create
    for cluster, name in made:
        if cluster.has_node:
            _end_pods(cluster, name)
        cluster.kubectl("delete", "namespace", name, "--wait=false")


def _end_pods(cluster: Cluster, namespace: str) -> None:
    """Delete what makes pods, and the pods. On a real node they would be in the next test's way."""
    kubectl = cluster.kubectl
    if "xpyd.dev" in kubectl("api-versions"):
        kubectl("-n", namespace, "delete", "fleets", "--all", "--timeout=60s", timeout_s=70)
    both = ("deployments,pods", "--all", "--cascade=foreground", "--now", "--timeout=60s")
    kubectl("-n", namespace, "delete", *both, timeout_s=70)
    what = f"the pods of {namespace} are gone"
    wait_for(lambda: not find(cluster, namespace, "pods"), _GONE_S, what)


@pytest.fixture
def namespace(request: pytest.FixtureRequest, new_namespace: Callable[[Cluster], str]) -> str:
    """A fresh namespace in the cluster that the test uses."""
    used = sorted(_FIXTURES & set(request.fixturenames))
    assert len(used) == 1, "the fixture `namespace` needs control_plane or node_cluster beside it"
    return new_namespace(request.getfixturevalue(used[0]))


def _wait_until_gone(cluster: Cluster) -> None:
    """Wait for the end of all namespaces that tests have left to be deleted."""

    def left() -> list[Any]:
        found = cluster.get("/api/v1/namespaces") or {"items": []}
        return [one for one in found["items"] if "deletionTimestamp" in one["metadata"]]

    def conditions() -> str:
        # Their conditions name what is left in them, and the finalizers that hold it.
        return json.dumps([(one["metadata"]["name"], one["status"]) for one in left()], indent=1)

    wait_for(lambda: not left(), _GONE_S, "the namespaces are gone", explain=conditions)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test's report has what the cluster says about its namespace."""
    report = yield
    if report.failed and call.when == "call" and isinstance(item, pytest.Function):
        for fixture in sorted(_FIXTURES & set(item.funcargs)):
            cluster = item.funcargs[fixture]
            name = item.funcargs.get("namespace")
            if isinstance(cluster, Cluster) and isinstance(name, str):
                report.sections.append((f"namespace {name}", cluster.explain(name)))
    return report

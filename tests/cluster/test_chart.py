"""The chart on a real API server: rights that suffice, CRDs that upgrade, nothing left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.harness import Cluster, ClusterError, availability, up, wait_for
from tests.cluster.release import (
    ACCOUNT,
    CHART,
    SYSTEM,
    everything,
    fake_fleet,
    install,
    run_hook,
    running_operator,
    upgrade,
)

pytestmark = pytest.mark.cluster
HOOK = "xpyd-uninstall"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One of its own: the chart's CRDs come and go, which other tests would notice."""
    reason = availability.why_no_control_plane()
    if reason is not None:
        pytest.skip(reason)
    made = up("chart")
    try:
        made.add_kwok_nodes(1)
        yield made
    finally:
        made.down()


@pytest.fixture
def empty(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, in which the test leaves nothing of xpyd."""
    cluster.kubectl("create", "namespace", SYSTEM, check=False)
    before = everything(cluster)
    yield cluster
    wait_for(
        lambda: everything(cluster) <= before,
        30,
        "nothing is left",
        explain=lambda: f"left: {sorted(everything(cluster) - before)}",
    )


def apply(cluster: Cluster, document: dict[str, Any]) -> None:
    cluster.kubectl("apply", "-f", "-", input=json.dumps(document))


def wait_ready(cluster: Cluster, log: Path, name: str = "chat", namespace: str = "default") -> None:
    argv = ("-n", namespace, "wait", "--for=condition=Ready", f"fleet/{name}", "--timeout=60s")
    said = cluster.kubectl(*argv, check=False, timeout_s=70)
    assert "condition met" in said, f"{said}\n{cluster.explain(namespace)}\n{log.read_text()}"


def uninstall(cluster: Cluster, folder: Path) -> tuple[str, str]:
    """`helm uninstall` and its hook, run at the same time; what each printed."""
    with ThreadPoolExecutor(1) as thread:
        helm = thread.submit(
            cluster.helm, "uninstall", "xpyd", "-n", SYSTEM, "--timeout=60s", check=False
        )
        hook = run_hook(cluster, HOOK, folder)
        return helm.result(90), hook


def remove_without_fleets(cluster: Cluster) -> None:
    cluster.helm("uninstall", "xpyd", "-n", SYSTEM, "--no-hooks")


def test_a_fleet_lives_and_ends_with_the_rights_of_the_chart(
    empty: Cluster, tmp_path: Path
) -> None:
    install(empty)
    mark = empty.audit_mark()
    with running_operator(empty, tmp_path) as log:
        apply(empty, fake_fleet())
        wait_ready(empty, log)
        empty.kubectl("scale", "fleetpool/chat-decode", "--replicas=3")
        ready = "jsonpath={.status.pools[?(@.name=='decode')].readyReplicas}"
        wait_for(
            lambda: empty.kubectl("get", "fleet/chat", "-o", ready) == "3",
            30,
            "the scaled pool is ready",
            explain=log.read_text,
        )
        said, hook = uninstall(empty, tmp_path)
    assert 'release "xpyd" uninstalled' in said
    assert "deleting fleet default/chat" in hook
    assert hook.endswith("no fleet is left\n")
    calls = empty.audit_calls(user=ACCOUNT, after=mark)
    assert len(calls) > 20
    refused = {(call.verb, call.resource, call.url) for call in calls if call.code == 403}
    assert not refused


def test_an_uninstall_that_takes_too_long_fails_and_can_be_repeated(
    empty: Cluster, tmp_path: Path
) -> None:
    install(empty, "uninstall.timeoutSeconds=10")
    with running_operator(empty, tmp_path) as log:
        apply(empty, fake_fleet())
        wait_ready(empty, log)
    # Nobody is there to let go of the fleet.
    said, hook = uninstall(empty, tmp_path)
    assert "uninstalled" not in said
    assert "after 10 s there are still 1 fleets (default/chat); " in hook
    assert "run `helm uninstall` again" in hook
    assert "chat" in empty.kubectl("get", "fleet")
    with running_operator(empty, tmp_path):
        said, hook = uninstall(empty, tmp_path)
    assert 'release "xpyd" uninstalled' in said
    assert hook.endswith("no fleet is left\n")


def test_an_upgrade_brings_new_crds_and_leaves_fleets_alone(empty: Cluster, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(CHART, old)
    for file in (old / "files/crds").glob("*.yaml"):
        crd = yaml.safe_load(file.read_text())
        crd["spec"]["names"].pop("categories", None)
        crd["spec"]["versions"][0]["additionalPrinterColumns"].pop()
        file.write_text(yaml.safe_dump(crd))
    install(empty, chart=old)
    apply(empty, fake_fleet())
    uid = ("get", "fleet/chat", "-o", "jsonpath={.metadata.uid}")
    before = empty.kubectl(*uid)
    upgrade(empty)
    for file in (CHART / "files/crds").glob("*.yaml"):
        new = yaml.safe_load(file.read_text())
        live = json.loads(empty.kubectl("get", "crd", new["metadata"]["name"], "-o", "json"))
        columns = [v["additionalPrinterColumns"] for v in new["spec"]["versions"]]
        assert [v["additionalPrinterColumns"] for v in live["spec"]["versions"]] == columns
        assert live["spec"]["names"].get("categories") == new["spec"]["names"].get("categories")
    assert empty.kubectl(*uid) == before
    empty.kubectl("delete", "fleet/chat")
    remove_without_fleets(empty)


def test_fleets_outlive_a_release_that_keeps_them(empty: Cluster, tmp_path: Path) -> None:
    keep = ("crds.keep=true", "uninstall.deleteFleets=false")
    install(empty, *keep)
    with running_operator(empty, tmp_path) as log:
        apply(empty, fake_fleet())
        wait_ready(empty, log)
    pods = ("get", "pods", "-l", "xpyd.dev/fleet=chat", "-o", "name")
    before = empty.kubectl(*pods)
    empty.helm("uninstall", "xpyd", "-n", SYSTEM)
    assert empty.kubectl(*pods) == before
    # The same release finds its CRDs again.
    install(empty)
    with running_operator(empty, tmp_path) as log:
        wait_ready(empty, log)
        assert empty.kubectl(*pods) == before
        uninstall(empty, tmp_path)


def test_an_operator_of_named_namespaces_serves_them_alone(empty: Cluster, tmp_path: Path) -> None:
    for name in ("inside", "outside"):
        empty.kubectl("create", "namespace", name, check=False)
    install(empty, "watchNamespaces={inside}")
    mark = empty.audit_mark()
    with running_operator(empty, tmp_path) as log:
        for name in ("inside", "outside"):
            apply(empty, fake_fleet(namespace=name))
        wait_ready(empty, log, namespace="inside")
        seen = empty.audit_calls(user=ACCOUNT, after=mark)
        assert {call.namespace for call in seen if call.resource} == {"inside"}
        assert not [call for call in seen if call.code == 403]
        assert "No resources" in empty.kubectl("-n", "outside", "get", "pods", check=False)
        _, hook = uninstall(empty, tmp_path)
    assert hook.endswith("no fleet is left\n")
    assert "outside" not in hook
    for name in ("inside", "outside"):
        empty.kubectl("delete", "namespace", name)


@pytest.mark.parametrize(
    ("role", "verb", "resource", "allowed"),
    [
        ("view", "list", "inferencefleets", "yes"),
        ("view", "create", "inferencefleets", "no"),
        ("view", "patch", "inferencefleetpools/scale", "no"),
        ("edit", "create", "inferencefleets", "yes"),
        ("edit", "delete", "inferencefleets", "yes"),
        ("edit", "patch", "inferencefleetpools/scale", "yes"),
        ("edit", "create", "inferencefleetpools", "no"),
        ("edit", "patch", "inferencefleets/status", "no"),
        ("admin", "create", "inferencefleets", "yes"),
    ],
)
def test_the_built_in_roles_hold_for_fleets(
    installed: Cluster, role: str, verb: str, resource: str, allowed: str
) -> None:
    who = f"user-with-{role}"
    binding = ("create", "rolebinding", who, f"--clusterrole={role}", f"--user={who}")
    installed.kubectl("-n", "default", *binding, check=False)
    resource, _, sub = resource.partition("/")
    ask = ("auth", "can-i", verb, f"{resource}.xpyd.dev", f"--subresource={sub}", f"--as={who}")
    # Roles are aggregated by a controller, a moment after they were made.
    wait_for(lambda: installed.kubectl(*ask, check=False).strip() == allowed, 15, f"{ask}")
    installed.kubectl("-n", "default", "delete", "rolebinding", who)


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with the chart."""
    install(cluster)
    yield cluster
    remove_without_fleets(cluster)


def test_a_second_release_does_not_take_the_crds_of_the_first(installed: Cluster) -> None:
    chart = str(CHART)
    values = ("--set=images.local=true", "-n", "default")
    with pytest.raises(ClusterError, match="cannot be imported into the current release"):
        installed.helm("install", "second", chart, *values)
    without = ("--set=crds.install=false", "--set=rbac.userRoles=false")
    installed.helm("install", "third", chart, *values, *without, "--set=watchNamespaces={default}")
    installed.helm("uninstall", "third", "-n", "default", "--no-hooks")
    assert "inferencefleets.xpyd.dev" in installed.kubectl("get", "crd", "-o", "name")

"""The chart on a real API server: rights that suffice, CRDs that upgrade, nothing left behind.

The tests share the CRDs, which they keep but for the last ones: Kubernetes looks for new CRDs every
30 s, and until then it does not collect what their objects owned.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from tests.cluster.fleetkit import fake_fleet
from tests.cluster.harness import Cluster, ClusterError, availability, up, wait_for
from tests.cluster.harness.audit import Call
from tests.cluster.needs import skip_for
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.release import (
    ACCOUNT,
    CHART,
    HOOK_ACCOUNT,
    SYSTEM,
    clean,
    everything,
    install,
    run_hook,
    running_operator,
    upgrade,
)
from tests.docs.test_docs import blocks_of

pytestmark = pytest.mark.cluster
KEEP = "crds.keep=true"
BINDING = "xpyd-operator"
"""The operator's ClusterRoleBinding, and its other roles' and bindings' name."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One of its own: the chart's CRDs come and go, which other tests would notice."""
    skip_for(availability.why_no_control_plane())
    made = up("chart")
    try:
        made.add_kwok_nodes(1)
        for name in (SYSTEM, "inside", "lab", "outside"):
            made.kubectl("create", "namespace", name)
        yield made
    finally:
        made.down()


@pytest.fixture
def empty(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, in which the test leaves nothing of xpyd, but perhaps the CRDs."""
    before = everything(cluster)
    yield cluster

    def left() -> list[str]:
        found = everything(cluster) - before
        return sorted(name for name in found if not name.startswith("CustomResourceDefinition"))

    try:
        wait_for(lambda: not left(), 30, "nothing is left", explain=lambda: f"left: {left()}")
    finally:
        clean(cluster)


def apply_fleet(cluster: Cluster, namespace: str = "default") -> None:
    """The fleet `chat` on fake nodes."""
    cluster.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(fake_fleet(decode=2)))


def wait_ready(cluster: Cluster, operator: OperatorProcess, namespace: str = "default") -> None:
    argv = ("-n", namespace, "wait", "--for=condition=Ready", "fleet/chat", "--timeout=60s")
    said = cluster.kubectl(*argv, check=False, timeout_s=70)
    assert "condition met" in said, f"{said}\n{cluster.explain(namespace)}\n{operator.log()}"


def uninstall(cluster: Cluster, folder: Path) -> tuple[str, str]:
    """`helm uninstall` and its hook, run at the same time; what each printed."""
    argv = ("uninstall", "xpyd", "-n", SYSTEM, "--timeout=90s")
    with ThreadPoolExecutor(1) as thread:
        helm = thread.submit(cluster.helm, *argv, check=False)
        hook = run_hook(cluster, folder)
        return helm.result(100), hook


def test_an_upgrade_brings_new_crds_and_leaves_fleets_alone(empty: Cluster, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(CHART, old)
    for file in (old / "files/crds").glob("*.yaml"):
        crd = yaml.safe_load(file.read_text())
        crd["spec"]["names"].pop("categories", None)
        crd["spec"]["versions"][0]["additionalPrinterColumns"].pop()
        file.write_text(yaml.safe_dump(crd))
    install(empty, KEEP, chart=old)
    apply_fleet(empty)
    uid = ("get", "fleet/chat", "-o", "jsonpath={.metadata.uid}")
    before = empty.kubectl(*uid)
    upgrade(empty, KEEP)
    for file in (CHART / "files/crds").glob("*.yaml"):
        new = yaml.safe_load(file.read_text())
        live = json.loads(empty.kubectl("get", "crd", new["metadata"]["name"], "-o", "json"))
        columns = [v["additionalPrinterColumns"] for v in new["spec"]["versions"]]
        assert [v["additionalPrinterColumns"] for v in live["spec"]["versions"]] == columns
        assert live["spec"]["names"].get("categories") == new["spec"]["names"].get("categories")
    assert empty.kubectl(*uid) == before
    empty.kubectl("delete", "fleet/chat")
    empty.helm("uninstall", "xpyd", "-n", SYSTEM, "--no-hooks")


RIGHTS = [
    ("view", "list", "inferencefleets", "yes"),
    ("view", "create", "inferencefleets", "no"),
    ("view", "patch", "inferencefleetpools/scale", "no"),
    ("edit", "create", "inferencefleets", "yes"),
    ("edit", "delete", "inferencefleets", "yes"),
    ("edit", "patch", "inferencefleetpools/scale", "yes"),
    ("edit", "create", "inferencefleetpools", "no"),
    ("edit", "patch", "inferencefleets/status", "no"),
    ("admin", "create", "inferencefleets", "yes"),
]


def test_the_built_in_roles_hold_for_fleets(empty: Cluster) -> None:
    install(empty, KEEP)
    for role in ("view", "edit", "admin"):
        binding = ("create", "rolebinding", f"user-with-{role}", f"--clusterrole={role}")
        empty.kubectl("-n", "default", *binding, f"--user=user-with-{role}")

    def wrong() -> list[tuple[str, str, str, str]]:
        return [right for right in RIGHTS if _answer(empty, *right[:3]) != right[3]]

    # Roles are aggregated by a controller, a moment after they were made.
    wait_for(lambda: not wrong(), 15, "every right is as it should", explain=lambda: f"{wrong()}")
    for role in ("view", "edit", "admin"):
        empty.kubectl("-n", "default", "delete", "rolebinding", f"user-with-{role}")
    empty.helm("uninstall", "xpyd", "-n", SYSTEM, "--no-hooks")


def _answer(cluster: Cluster, role: str, verb: str, resource: str) -> str:
    resource, _, sub = resource.partition("/")
    ask = ("auth", "can-i", verb, f"{resource}.xpyd.dev", f"--subresource={sub}")
    return cluster.kubectl(*ask, f"--as=user-with-{role}", check=False).strip()


def test_an_upgrade_that_would_take_the_crds_away_is_refused(empty: Cluster) -> None:
    install(empty)
    with pytest.raises(ClusterError, match="would delete this release's CRDs"):
        upgrade(empty, "crds.install=false")
    upgrade(empty, KEEP)
    upgrade(empty, "crds.install=false")
    assert empty.kubectl("get", "crd", "-o", "name").count("xpyd.dev") == 2
    empty.helm("uninstall", "xpyd", "-n", SYSTEM, "--no-hooks")


def test_a_second_release_does_not_take_the_crds_of_the_first(empty: Cluster) -> None:
    install(empty, KEEP)
    chart = str(CHART)
    values = ("--set=images.local=true", "-n", "default")
    with pytest.raises(ClusterError, match="cannot be imported into the current release"):
        empty.helm("install", "second", chart, *values)
    without = ("--set=crds.install=false", "--set=rbac.userRoles=false")
    empty.helm("install", "third", chart, *values, *without, "--set=watchNamespaces={default}")
    empty.helm("uninstall", "third", "-n", "default", "--no-hooks")
    empty.helm("uninstall", "xpyd", "-n", SYSTEM, "--no-hooks")
    assert "inferencefleets.xpyd.dev" in empty.kubectl("get", "crd", "-o", "name")


@pytest.mark.long
def test_fleets_outlive_a_release_that_keeps_them(empty: Cluster, tmp_path: Path) -> None:
    install(empty, KEEP, "uninstall.deleteFleets=false")
    with running_operator(empty, tmp_path) as operator:
        apply_fleet(empty)
        wait_ready(empty, operator)
    pods = ("get", "pods", "-l", "xpyd.dev/fleet=chat", "-o", "name")
    before = empty.kubectl(*pods)
    empty.helm("uninstall", "xpyd", "-n", SYSTEM)
    assert empty.kubectl(*pods) == before
    # The same release finds its CRDs again.
    install(empty, KEEP)
    with running_operator(empty, tmp_path) as operator:
        wait_ready(empty, operator)
        assert empty.kubectl(*pods) == before
        said, hook = uninstall(empty, tmp_path)
    assert "These resources were kept due to the resource policy" in said
    assert hook.endswith("no fleet is left\n")


@pytest.mark.long
def test_crds_that_were_applied_by_hand_are_given_to_the_release_as_the_page_says(
    empty: Cluster,
) -> None:
    """By an older version, whose CRDs differ."""
    for file in sorted((CHART / "files/crds").glob("*.yaml")):
        crd = yaml.safe_load(file.read_text())
        empty.kubectl("delete", "crd", crd["metadata"]["name"], "--ignore-not-found")
        crd["spec"]["names"].pop("categories", None)
        crd["spec"]["versions"][0]["additionalPrinterColumns"].pop()
        empty.kubectl("apply", "-f", "-", input=json.dumps(crd))
    with pytest.raises(ClusterError, match="invalid ownership metadata"):
        install(empty, KEEP)
    mark = "tests/cluster/test_chart.py runs these"
    (commands,) = [
        b.code for b in blocks_of(CHART.parents[1] / "docs/install.md") if mark in b.note
    ]
    argv = ["bash", "-euo", "pipefail", "-c", commands]
    done = empty.run(argv, cwd=CHART.parents[1], capture_output=True, text=True, timeout=60)
    assert not done.returncode, done.stdout + done.stderr
    argv = ("install", "xpyd", str(CHART), "-n", SYSTEM, "--force-conflicts")
    empty.helm(*argv, "--set", "images.local=true", "--set", KEEP)
    names = ("get", "crd", "inferencefleets.xpyd.dev", "-o", "jsonpath={.spec.names.categories}")
    assert empty.kubectl(*names) == '["xpyd"]'
    empty.helm("uninstall", "xpyd", "-n", SYSTEM, "--no-hooks")


def _install_as_the_page_says(cluster: Cluster) -> None:
    """The command of docs/install.md, with namespaces and images that there are here."""
    mark = "tests/cluster/test_chart.py runs it"
    (command,) = [b.code for b in blocks_of(CHART.parents[1] / "docs/install.md") if mark in b.note]
    given = ("--set images.registry=registry.example.com/llm", "'watchNamespaces={serving,lab}'")
    for part in given:
        assert part in command
    script = command.replace(given[0], "--set images.local=true")
    script = script.replace("{serving,", "{inside,")
    argv = ["bash", "-euo", "pipefail", "-c", script]
    done = cluster.run(argv, cwd=CHART.parents[1], capture_output=True, text=True, timeout=60)
    assert not done.returncode, done.stdout + done.stderr


@pytest.mark.long
def test_an_operator_of_named_namespaces_serves_them_alone(empty: Cluster, tmp_path: Path) -> None:
    _install_as_the_page_says(empty)
    mark = empty.audit_mark()
    with running_operator(empty, tmp_path) as operator:
        for name in ("inside", "outside"):
            apply_fleet(empty, name)
        wait_ready(empty, operator, namespace="inside")
        seen = empty.audit_calls(user=ACCOUNT, after=mark)
        fleets = {call.namespace for call in seen if call.resource not in ("", "leases")}
        assert fleets == {"inside", "lab"}
        assert {call.namespace for call in seen if call.resource == "leases"} == {SYSTEM}
        assert not [call for call in seen if call.code == 403]
        assert not empty.kubectl("-n", "outside", "get", "pods")
        said, hook = uninstall(empty, tmp_path)
        assert "Job Failed" in said
        assert "1 fleets (outside/chat) are not in the namespaces that this release serves" in hook
        assert "deletionTimestamp" not in empty.kubectl(
            "-n", "inside", "get", "fleet", "-o", "json"
        )
        # What that message recommends, both of it.
        empty.helm("rollback", "xpyd", "1", "-n", SYSTEM)
        upgrade(empty, "watchNamespaces={inside,lab}", KEEP)
        empty.kubectl("-n", "outside", "delete", "fleet/chat")
        said, hook = uninstall(empty, tmp_path)
    assert "deleting fleet inside/chat" in hook
    assert hook.endswith("no fleet is left\n")


def with_rights(calls: list[Call], account: str) -> list[Call]:
    """The account's, before helm takes its rights away."""
    ends = [n for n, one in enumerate(calls) if one.verb == "delete" and one.name == BINDING]
    assert ends, f"{BINDING} was not taken away"
    return [one for one in calls[: ends[0]] if one.user == account]


def test_a_fleet_lives_and_ends_with_the_rights_of_the_chart(
    empty: Cluster, tmp_path: Path
) -> None:
    empty.kubectl("delete", "crd", "-l", "app.kubernetes.io/instance=xpyd")
    install(empty, "uninstall.timeoutSeconds=10")
    mark = empty.audit_mark()
    with running_operator(empty, tmp_path) as operator:
        apply_fleet(empty)
        wait_ready(empty, operator)
        empty.kubectl("scale", "fleetpool/chat-decode", "--replicas=3")
        ready = "jsonpath={.status.pools[?(@.name=='decode')].readyReplicas}"
        wait_for(
            lambda: empty.kubectl("get", "fleet/chat", "-o", ready) == "3",
            30,
            "the scaled pool is ready",
            explain=operator.log,
        )
    # Nobody is there to let go of the fleet.
    said, hook = uninstall(empty, tmp_path)
    assert "Job Failed" in said
    assert "after 10 s there are still 1 fleets (default/chat)\n" in hook
    assert "run `helm uninstall` again" in hook
    assert "chat" in empty.kubectl("get", "fleet")
    with running_operator(empty, tmp_path):
        assert uninstall_again(empty, tmp_path).endswith("no fleet is left\n")
    wait_for(lambda: not empty.kubectl("get", "crd", "-o", "name"), 10, "the CRDs are gone")
    for account, least in ((ACCOUNT, 20), (HOOK_ACCOUNT, 10)):
        # Until its process ends, too, an operator asks for what it has no right to any more.
        calls = with_rights(empty.audit_calls(after=mark), account)
        assert len(calls) > least
        refused = {(call.verb, call.resource, call.url) for call in calls if call.code == 403}
        # The right to its Lease goes before.
        assert not {one for one in refused if one[1] != "leases"}, account
    leases = [
        call for call in empty.audit_calls(user=ACCOUNT, after=mark) if call.resource == "leases"
    ]
    assert {call.verb for call in leases if call.code < 300} >= {"get", "patch"}


def uninstall_again(cluster: Cluster, folder: Path) -> str:
    """Once more until it succeeds; what the last hook printed."""
    for _ in range(5):
        said, hook = uninstall(cluster, folder)
        if 'release "xpyd" uninstalled' in said:
            return hook
        assert "Job Failed" in said
    raise AssertionError(hook)

"""The test cluster itself, without a node: the API, fake nodes, the log of calls, its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.harness import Cluster, ClusterError, attach, up, wait_for
from tests.cluster.harness.inside import HOST_SETTINGS
from tests.cluster.harness.kwok import NODE_SELECTOR, TOLERATIONS
from tests.cluster.harness.runs import Run, base_folder, sweep
from tests.cluster.harness.survey import processes_of, survey

ROOT = Path(__file__).parents[2]


def _deployment(name: str, replicas: int) -> str:
    labels = {"app": name}
    pod = {
        "nodeSelector": NODE_SELECTOR,
        "tolerations": TOLERATIONS,
        "containers": [{"name": "main", "image": "none.invalid/none:1"}],
    }
    return json.dumps(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name},
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        }
    )


def test_the_api_answers_in_the_clusters_network_and_outside_of_it(control_plane: Cluster) -> None:
    assert json.loads(control_plane.kubectl("version", "-o", "json"))["serverVersion"][
        "gitVersion"
    ] == ("v1.34.3")
    inside = control_plane.run(["kubectl", "get", "--raw", "/readyz"], capture_output=True)
    assert inside.stdout == b"ok"


def test_helm_lists_the_releases(control_plane: Cluster) -> None:
    assert json.loads(control_plane.helm("list", "-A", "-o", "json")) == []


def test_what_kubectl_complains_about_is_told(control_plane: Cluster) -> None:
    with pytest.raises(ClusterError, match='pods "missing" not found'):
        control_plane.kubectl("get", "pod", "missing")
    assert "not found" in control_plane.kubectl("get", "pod", "missing", check=False)


def test_fifty_pods_on_fake_nodes_become_ready_and_go(
    control_plane: Cluster, namespace: str
) -> None:
    control_plane.add_kwok_nodes(2)
    control_plane.kubectl("-n", namespace, "apply", "-f", "-", input=_deployment("many", 50))
    control_plane.kubectl("-n", namespace, "rollout", "status", "deployment/many", "--timeout=60s")
    control_plane.kubectl("-n", namespace, "scale", "deployment/many", "--replicas=0")
    wait_for(
        lambda: not control_plane.kubectl("-n", namespace, "get", "pods", "-o", "name").split(),
        60,
        "all pods are gone",
    )


def test_calls_are_counted_by_who_made_them(control_plane: Cluster, namespace: str) -> None:
    mark = control_plane.audit_mark()
    control_plane.kubectl("-n", namespace, "create", "configmap", "counted")
    writes = [
        call
        for call in control_plane.audit_calls(user="admin", user_agent="kubectl/", after=mark)
        if call.writes
    ]
    assert [(call.verb, call.resource, call.namespace, call.code) for call in writes] == [
        ("create", "configmaps", namespace, 201)
    ]
    assert not control_plane.audit_calls(user="somebody", after=mark)


@pytest.mark.usefixtures("control_plane")
def test_a_second_cluster_runs_beside_the_first_and_goes_without_a_trace() -> None:
    name = f"second-{os.getpid()}"
    before = survey(name)
    second = up(name)
    try:
        assert "default" in second.kubectl("get", "namespaces")
        assert survey(name) > before
    finally:
        second.down()
    assert survey(name) == before


@pytest.mark.usefixtures("control_plane")
@pytest.mark.parametrize("victim", ["owner", "keeper"])
def test_a_cluster_goes_when_what_holds_it_is_killed(victim: str) -> None:
    name = f"crash-{victim}-{os.getpid()}"
    before = survey(name)
    code = f"""if True:
        import sys
        from tests.cluster.harness import up
        up({name!r})
        print("up", flush=True)
        sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        state = Run(base_folder() / name).state()
        assert state is not None
        inside = processes_of(state.init)
        assert len(inside) >= 6
        if victim == "keeper":
            state.keeper.kill()
        owner.kill()
    wait_for(lambda: not any(one.alive for one in inside), 20, "all processes are gone")
    if victim == "keeper":
        # What a killed keeper could not remove, the next start removes: this one, or that of a
        # cluster which another process of this run has just started.
        assert sweep() in ([name], [])
    wait_for(lambda: survey(name) == before, 20, "nothing is left")


def test_a_program_that_dies_at_its_start_is_told_with_its_log(control_plane: Cluster) -> None:
    components = control_plane.components
    components.start("dying", ["sh", "-c", "echo it has no such flag; exit 3"])
    with pytest.raises(ClusterError, match=r"(?s)dying ended with status 3.*it has no such flag"):
        components.wait(["dying"], lambda: False, 20)
    components.forget("dying")


def test_a_running_cluster_is_found_by_its_name(control_plane: Cluster) -> None:
    found = attach(control_plane.name)
    assert found.api_url == control_plane.api_url
    assert "default" in found.kubectl("get", "namespaces")
    with pytest.raises(ClusterError, match="no cluster missing is running"):
        attach("missing")


def test_what_a_cluster_sets_does_not_reach_the_machine(control_plane: Cluster) -> None:
    names = [*HOST_SETTINGS, "net/ipv4/ip_forward"]
    before = {name: Path("/proc/sys", name).read_text() for name in names}
    # Each gets a value that it has neither here nor there; kubelet writes most of them.
    changes = "; ".join(f"echo 2 > /proc/sys/{name}" for name in names)
    try:
        subprocess.run(
            control_plane.components.inside_argv(["sh", "-ec", changes]), check=True, timeout=20
        )
        assert {name: Path("/proc/sys", name).read_text() for name in names} == before
    finally:
        for name, value in before.items():
            Path("/proc/sys", name).write_text(value)
    subprocess.run(
        control_plane.components.inside_argv(
            ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]
        ),
        check=True,
        timeout=20,
    )

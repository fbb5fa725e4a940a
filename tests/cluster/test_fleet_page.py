"""docs/kubernetes.md, run as written on a real node: its commands, and what they print. Those of
docs/troubleshooting.md about a fleet that serves run here, too; the others in test_status.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster.fleetkit import ROOT, FleetClient, fleet_document, installed_chart
from tests.cluster.harness import Cluster
from tests.docs.test_docs import Block, blocks_of, not_printed

pytestmark = [pytest.mark.cluster, pytest.mark.long]

PAGE = ROOT / "docs/kubernetes.md"
TROUBLESHOOTING = ROOT / "docs/troubleshooting.md"
PAGE_TIMEOUT_S = 420.0
_MARK = "needs a cluster; tests/cluster/test_fleet_page.py runs it"


@pytest.fixture(scope="module")
def installed(node_cluster: Cluster) -> Iterator[Cluster]:
    """The operator."""
    with installed_chart(node_cluster):
        yield node_cluster


def commands_of(page: Path) -> list[str]:
    """The page's commands that run here."""
    return [b.code for b in blocks_of(page) if b.language == "sh" and _MARK in b.note]


def folder_of_a_clone(folder: Path) -> Path:
    """A folder in which the page's paths lead to what this node can run."""
    (folder / "examples").mkdir()
    document = fleet_document()
    (folder / "examples/fleet.yaml").write_text(yaml.safe_dump(document))
    return folder


def run(
    cluster: Cluster, namespace: str, folder: Path, commands: list[str]
) -> subprocess.CompletedProcess[str]:
    """Run the commands in one shell, in `folder`; the namespace is the current one."""
    config = folder / "kubeconfig"
    config.write_text(cluster.kubeconfig.read_text())
    environment = {**cluster.client_environment(dict(os.environ)), "KUBECONFIG": str(config)}
    use = ["kubectl", "config", "set-context", "--current", f"--namespace={namespace}"]
    subprocess.run(use, env=environment, check=True, capture_output=True, timeout=30)
    # What commands print to standard error is part of what a page shows.
    script = "\n".join(["set -euo pipefail", "exec 2>&1", *commands])
    return subprocess.run(
        cluster.client_argv(["bash", "-c", script]),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PAGE_TIMEOUT_S,
    )


def test_the_pages_commands_run_and_print_what_it_shows(
    installed: Cluster, namespace: str, tmp_path: Path
) -> None:
    commands = commands_of(PAGE)
    assert len(commands) > 5, "the page has lost its commands"
    done = run(installed, namespace, folder_of_a_clone(tmp_path), commands)
    fleet = FleetClient(installed, namespace)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{fleet.explain()}"
    # The page has the addresses and answers of a new user's cluster.
    shown = [Block("console", "", b.code) for b in blocks_of(PAGE) if b.language == "console"]
    assert not not_printed(shown, done.stdout), done.stdout
    assert re.search(r"pods?/chat-decode|chat-decode", done.stdout)


def test_the_pages_autoscaler_is_accepted(installed: Cluster, namespace: str) -> None:
    (block,) = [b for b in blocks_of(PAGE) if "HorizontalPodAutoscaler" in b.code and b.language]
    argv = ("-n", namespace, "create", "--dry-run=server", "-f", "-", "-o", "json")
    made = json.loads(installed.kubectl(*argv, input=block.code))
    assert made["spec"]["scaleTargetRef"]["kind"] == "InferenceFleetPool"


def test_operator_and_routers_are_asked_as_the_page_about_troubles_says(
    installed: Cluster, namespace: str, tmp_path: Path
) -> None:
    commands = commands_of(TROUBLESHOOTING)
    assert len(commands) == 2
    fleet = FleetClient(installed, namespace)
    fleet.apply(fleet_document(prefill=1, decode=1))
    fleet.wait_ready()
    # `head -n 1` may end before kubectl has written the rest.
    done = run(installed, namespace, tmp_path, ["set +o pipefail", *commands])
    assert done.returncode == 0, f"{done.stdout}\n{fleet.explain()}"
    for told in ("xpyd-operator-", '"P"', '"D"', "chat-router-"):
        assert told in done.stdout, done.stdout

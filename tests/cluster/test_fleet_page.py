"""docs/kubernetes.md, run as written on a real node: its commands, and what they print."""

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

pytestmark = pytest.mark.cluster

PAGE = ROOT / "docs/kubernetes.md"
PAGE_TIMEOUT_S = 420.0
_MARK = "needs a cluster; tests/cluster/test_fleet_page.py runs it"


@pytest.fixture
def installed(node_cluster: Cluster) -> Iterator[Cluster]:
    """The operator."""
    with installed_chart(node_cluster):
        yield node_cluster


def script_of(blocks: list[Block]) -> str:
    """The page's commands, each block with what it prints to standard error too."""
    commands = [block.code for block in blocks if block.language == "sh" and _MARK in block.note]
    assert len(commands) > 5, "the page has lost its commands"
    return "\n".join(["set -euo pipefail", "exec 2>&1", *commands])


def folder_of_a_clone(folder: Path) -> Path:
    """A folder in which the page's paths lead to what this node can run."""
    (folder / "examples").mkdir()
    document = fleet_document()
    (folder / "examples/fleet.yaml").write_text(yaml.safe_dump(document))
    return folder


def test_the_pages_commands_run_and_print_what_it_shows(
    installed: Cluster, namespace: str, tmp_path: Path
) -> None:
    blocks = blocks_of(PAGE)
    environment = installed.client_environment(dict(os.environ))
    config = tmp_path / "kubeconfig"
    config.write_text(installed.kubeconfig.read_text())
    environment["KUBECONFIG"] = str(config)
    use = ["kubectl", "config", "set-context", "--current", f"--namespace={namespace}"]
    subprocess.run(use, env=environment, check=True, capture_output=True, timeout=30)
    argv = installed.client_argv(["bash", "-c", script_of(blocks)])
    done = subprocess.run(
        argv,
        cwd=folder_of_a_clone(tmp_path),
        env=environment,
        capture_output=True,
        text=True,
        timeout=PAGE_TIMEOUT_S,
    )
    fleet = FleetClient(installed, namespace)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{fleet.explain()}"
    # The page has the addresses and answers of a new user's cluster.
    shown = [Block("console", "", b.code) for b in blocks if b.language == "console"]
    assert not not_printed(shown, done.stdout), done.stdout
    assert re.search(r"pods?/chat-decode|chat-decode", done.stdout)


def test_the_pages_autoscaler_is_accepted(installed: Cluster, namespace: str) -> None:
    (block,) = [b for b in blocks_of(PAGE) if "HorizontalPodAutoscaler" in b.code and b.language]
    argv = ("-n", namespace, "create", "--dry-run=server", "-f", "-", "-o", "json")
    made = json.loads(installed.kubectl(*argv, input=block.code))
    assert made["spec"]["scaleTargetRef"]["kind"] == "InferenceFleetPool"

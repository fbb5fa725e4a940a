"""docs/troubleshooting.md: the commands that need the chart and a fleet that serves.

Those about a fleet in trouble run in test_status.py.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.fleetkit import ROOT, FleetClient, fleet_document, installed_chart
from tests.cluster.harness import Cluster
from tests.docs.test_docs import blocks_of

PAGE = ROOT / "docs/troubleshooting.md"
_MARK = "needs a cluster; tests/cluster/test_troubleshooting_page.py runs it"


@pytest.fixture
def installed(node_cluster: Cluster) -> Iterator[Cluster]:
    """The operator."""
    with installed_chart(node_cluster):
        yield node_cluster


def test_operator_and_routers_are_asked_as_the_page_says(
    installed: Cluster, namespace: str, tmp_path: Path
) -> None:
    commands = [block.code for block in blocks_of(PAGE) if _MARK in block.note]
    assert len(commands) == 2
    fleet = FleetClient(installed, namespace)
    fleet.apply(fleet_document(prefill=1, decode=1))
    fleet.wait_ready()
    config = tmp_path / "kubeconfig"
    config.write_text(installed.kubeconfig.read_text())
    environment = {**installed.client_environment(), "KUBECONFIG": str(config)}
    use = ["kubectl", "config", "set-context", "--current", f"--namespace={namespace}"]
    subprocess.run(use, env=environment, check=True, capture_output=True, timeout=30)
    done = subprocess.run(
        installed.client_argv(["bash", "-c", "\n".join(["set -eu", *commands])]),
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{fleet.explain()}"
    for told in ("xpyd-operator-", '"P"', '"D"', "chat-router-"):
        assert told in done.stdout, done.stdout

"""The commands of docs/test-cluster.md, run in order."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.cluster.harness import build
from tests.cluster.harness.runs import base_folder

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "test-cluster.md"


# The fixture skips where there can be no node.
@pytest.mark.usefixtures("node_cluster")
@pytest.mark.long
def test_the_pages_commands_bring_up_a_cluster_use_it_and_end_it() -> None:
    blocks = re.findall(r"^```sh [^\n]*\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    name = f"page-{os.getpid()}"
    for program in build.PROGRAMS:
        build.binary(program)
    try:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", "".join(blocks)],
            cwd=ROOT,
            env={**os.environ, "XPYD_CLUSTER": name},
            capture_output=True,
            text=True,
            timeout=420,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        folder_left = (base_folder() / name).exists()
        subprocess.run(["make", "cluster-down"], cwd=ROOT, env={**os.environ, "XPYD_CLUSTER": name})
    assert not folder_left
    status = json.loads(done.stdout[done.stdout.index("\n{\n") :].partition("\n}\n")[0] + "\n}")
    assert status["name"] == name
    assert {"kubelet", "containerd", "coredns", "kube-apiserver"} <= set(status["processes"])
    assert "fleet.xpyd.dev/chat condition met" in done.stdout
    assert re.search(r'"object": ?"text_completion"', done.stdout), done.stdout
    assert "inferencefleetpool.xpyd.dev/chat-decode scaled" in done.stdout
    assert re.search(r"^web-\w+-\w+$", done.stdout, re.M), done.stdout

"""A fleet in a cluster is changed under load, and nobody notices: the small form of bench/change.

The whole one, with 10,000 requests, is `make bench-change` (docs/benchmarks/change.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from bench.change import changes
from bench.change.changes import SMALL
from bench.change.report import broken, report
from bench.change.run import run
from bench.change.site import Site, site
from tests.cluster.fleetkit import DEMO_MODEL, finish_load
from tests.cluster.harness import Cluster, wait_for
from tests.e2e.oracle import long_case, mixed_cases

pytestmark = [pytest.mark.cluster, pytest.mark.changes]
REQUESTS = 500
RATE = 4.0
"""Requests a second: what the changes take on a busy machine, times this, is about REQUESTS."""
SLOW = "50m"
"""Of a CPU: an engine of the demo model puts out some ten tokens a second."""
LONG_TOKENS = 900


@pytest.fixture(scope="module")
def changed(node_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(node_cluster, tmp_path_factory.mktemp("charts")) as made:
        yield made


def limit_cpu(made: Site, cpu: str) -> None:
    """Give the engines of all D so much of a CPU, as they run."""
    resources = {"requests": {"cpu": "10m"}, "limits": {"cpu": cpu}}
    patch = json.dumps({"spec": {"containers": [{"name": "engine", "resources": resources}]}})
    for pod in made.fleet.pods("decode"):
        name = pod["metadata"]["name"]
        made.fleet.kubectl("patch", "pod", name, "--subresource=resize", "-p", patch)


def cpu_limits(made: Site) -> set[str]:
    """What the node has given them."""
    return {
        one.get("resources", {}).get("limits", {}).get("cpu", "")
        for pod in made.fleet.pods("decode")
        for one in pod["status"]["containerStatuses"]
        if one["name"] == "engine"
    }


def is_streaming(made: Site) -> bool:
    """Whether a D has a request in its batch."""
    decodes = made.fleet.pods("decode")
    return any(made.fleet.metric(pod, "xpyd_engine_requests_running") for pod in decodes)


def test_a_stream_runs_on_while_operators_are_killed_and_operator_and_chart_are_upgraded(
    changed: Site,
) -> None:
    """One stream over all three, and no object of the fleet is another one or has been written."""
    fleet, case = changed.fleet, long_case(DEMO_MODEL, LONG_TOKENS)
    (usual,) = cpu_limits(changed)
    before = fleet.identities()
    limit_cpu(changed, SLOW)
    wait_for(lambda: cpu_limits(changed) == {SLOW}, 30, "D is slow", explain=fleet.explain)
    load = fleet.start_load([case], requests=1)
    try:
        wait_for(lambda: is_streaming(changed), 30, "a D generates", explain=fleet.explain)
        for change in (changes.operator_killed, changes.operator_upgraded, changes.chart_upgraded):
            change(changed)
            assert load.poll() is None, f"the stream ended before {change.__name__} did"
        limit_cpu(changed, usual)
        ended: dict[str, Any] = finish_load(load)
    finally:
        load.kill()
        load.communicate()
    assert (ended["requests"], ended["failures"]) == (1, {}), ended
    after = fleet.identities()
    pods = {key for key in before if key.startswith("Pod/") and "decode" in key}
    # The test itself has written the D.
    assert {key: after[key] for key in before.keys() - pods} == {
        key: before[key] for key in before.keys() - pods
    }
    assert {key: after[key][0] for key in pods} == {key: before[key][0] for key in pods}
    assert after.keys() == before.keys()


@pytest.mark.long
def test_changes_under_load_lose_hang_and_change_no_answer_and_mix_no_revisions(
    changed: Site,
) -> None:
    found = run(changed, mixed_cases(DEMO_MODEL), requests=REQUESTS, rate=RATE, names=SMALL)
    made = report(found, rate=RATE, kubernetes="")
    assert not broken(made), json.dumps(made, indent=1)
    assert made["total"]["requests"] >= REQUESTS
    lowest = {row["change"]: row["lowest"] for row in made["rows"]}
    assert all(one["prefill"] and one["decode"] for one in lowest.values()), lowest

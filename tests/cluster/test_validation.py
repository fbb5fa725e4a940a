"""A real API server takes and refuses the fleets of tests/testdata/fleets, in the words there.

crdcheck (tests/crds) says the same without a server. Here a server says it, and kubectl shows of
some what a person sees; and here is what only a server has: /scale, `kubectl explain`, columns,
typed server-side apply.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.harness import Cluster
from tests.crds.fleets import FLEET, POOL, BadFleet, bad_fleets, good_fleets
from tests.operator.fleets import Document, changed
from xpyd_operator.controller.decision import kinds

PATHS = {kind.name: kind for kind in (kinds.FLEET, kinds.POOL)}

AT_ONCE = 4
"""Clients; each is a process that mostly waits."""
EACH = 20
"""Of so many refusals one is seen by kubectl, too: its start costs far more than the request."""


def apply(plane: Cluster, namespace: str, document: Document, *flags: str) -> str:
    """What `kubectl apply` says, also when it refuses."""
    argv = ("-n", namespace, "apply", "-f", "-", *flags)
    return plane.kubectl(*argv, input=json.dumps(document), check=False)


def test_every_bad_fleet_is_refused_with_its_line(plane: Cluster, namespace: str) -> None:
    def shown(case: BadFleet) -> str:
        return apply(plane, namespace, case.object, "--dry-run=server")

    def refusal(case: BadFleet) -> str:
        return plane.refusal(PATHS[case.kind].path(namespace), case.object)

    for kept in (FLEET, POOL):
        apply(plane, namespace, kept)
    # The others are new: they have names of their own, unless the name is what is wrong.
    updates = [case for case in bad_fleets() if case.old]
    cases = [_renamed(case, i) for i, case in enumerate(bad_fleets()) if not case.old]
    asked = [*cases, *updates, *cases[::EACH]]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        said = list(threads.map(refusal, cases))
        said += threads.map(shown, asked[len(cases) :])
    unlike = [
        (case.name, case.says, words)
        for case, words in zip(asked, said, strict=True)
        if case.says not in words
    ]
    assert unlike == []


def _renamed(case: BadFleet, index: int) -> BadFleet:
    kept = {"InferenceFleet": "chat", "InferenceFleetPool": "chat-prefill"}[case.kind]
    if case.object["metadata"]["name"] == kept:
        case.object["metadata"]["name"] = f"case-{index}"
    return case


@pytest.mark.parametrize("how", ["--server-side=false", "--server-side=true"])
def test_every_good_fleet_is_taken(plane: Cluster, namespace: str, how: str) -> None:
    def answer(path: Path) -> str:
        text = path.read_text().replace("  namespace: serving\n", "")
        argv = ("-n", namespace, "apply", "-f", "-", "--dry-run=server", how)
        return plane.kubectl(*argv, input=text, check=False)

    good = good_fleets()
    if how == "--server-side=true":
        assert "in body must be of type" in answer(good.pop("nulls"))
    with ThreadPoolExecutor(AT_ONCE) as threads:
        said = dict(zip(good, threads.map(answer, good.values()), strict=True))
    assert {n: w for n, w in said.items() if not w.startswith("inferencefleet.xpyd.dev/")} == {}


def test_a_pool_is_scaled_within_its_bounds_only(plane: Cluster, namespace: str) -> None:
    bounds = {"spec.minReplicas": 1, "spec.maxReplicas": 3}
    apply(plane, namespace, changed(POOL, bounds))
    scale = ("-n", namespace, "scale", "fleetpool/chat-prefill")
    plane.kubectl(*scale, "--replicas=3")
    for replicas, words in (
        (4, "spec.replicas: Forbidden: replicas exceeds the pool's maxReplicas"),
        (0, "spec.replicas: Forbidden: replicas is below the pool's minReplicas"),
        (5000, "spec.replicas: Invalid value: 5000"),
    ):
        assert words in plane.kubectl(*scale, f"--replicas={replicas}", check=False)
    got = ("-n", namespace, "get", "fleetpool", "chat-prefill", "-o", "jsonpath={.spec.replicas}")
    assert plane.kubectl(*got) == "3"


def test_fields_and_columns_are_explained(plane: Cluster, namespace: str) -> None:
    said = plane.kubectl("explain", "fleet.spec.pools.scaling.maxReplicas")
    assert "Most instances; none: 1024." in said
    said = plane.kubectl("explain", "fleetpool.status.drainingReplicas")
    assert "Instances that leave and finish their requests." in said
    apply(plane, namespace, FLEET)
    apply(plane, namespace, POOL)
    head = {"fleet": "NAME PREFILL DECODE GPUS READY REASON AGE",
            "fleetpool": "NAME FLEET ROLE LAYOUT DESIRED READY DRAINING AGE"}  # fmt: skip
    for kind, columns in head.items():
        lines = plane.kubectl("-n", namespace, "get", kind).splitlines()
        assert lines[0].split() == columns.split()
    both = plane.kubectl("-n", namespace, "get", "xpyd", "-o", "name").split()
    assert both == ["inferencefleetpool.xpyd.dev/chat-prefill", "inferencefleet.xpyd.dev/chat"]


def test_defaults_are_in_what_is_stored(plane: Cluster, namespace: str) -> None:
    apply(plane, namespace, FLEET)
    stored = json.loads(plane.kubectl("-n", namespace, "get", "fleet", "chat", "-o", "json"))
    spec = stored["spec"]
    assert spec["router"]["service"] == {
        "type": "ClusterIP",
        "port": 10001,
        "sessionAffinity": "None",
        "externalTrafficPolicy": "Cluster",
    }
    assert spec["pools"][0]["resources"] == {"gpus": 1, "sharedMemory": "8Gi"}
    assert "replicas" not in spec["pools"][0]
    assert "hostPoolSize" not in spec["kvTransfer"]

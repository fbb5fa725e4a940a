"""One document for both places: what local mode refuses, and what it names and leaves out."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.crds.fleets import FLEET, changed, good_fleets
from xpyd_core.errors import UserError
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.document.fleetpool import refused_scale
from xpyd_operator.document.load import load_fleet, parse_fleet
from xpyd_operator.up.checks import check_local, cluster_only

CPU = changed(FLEET, {f"spec.pools.{i}.resources": {"gpus": 0} for i in (0, 1)})


def fleet(changes: dict[str, Any], base: dict[str, Any] = CPU) -> InferenceFleet:
    return parse_fleet(yaml.safe_dump(changed(base, changes)).encode(), source="f")


def refusals(wanted: InferenceFleet) -> list[str]:
    with pytest.raises(UserError) as caught:
        check_local(wanted, source="f.yaml")
    head, *lines = str(caught.value).split("\n  ")
    assert head == f"f.yaml: {len(lines)} mistake{'s' if len(lines) > 1 else ''}"
    return lines


def test_a_fleet_on_cpus_is_taken_and_nothing_is_said() -> None:
    check_local(fleet({}), source="f")
    assert cluster_only(fleet({})) == ""


def test_gpus_are_refused_also_where_they_are_the_default() -> None:
    wanted = fleet(
        {
            "spec.pools.0.resources": {"gpus": 2},
            "spec.pools.0.parallelism": {"tensor": 2},
            "spec.pools.1.resources": {},
        }
    )
    fix = "local mode runs CPU instances only; write `resources: {gpus: 0}`"
    assert refusals(wanted) == [
        f"spec.pools[0].resources.gpus: 2: {fix}",
        f"spec.pools[1].resources.gpus: 1 (the default): {fix}",
    ]


def test_a_template_that_the_operator_refuses_is_refused_here() -> None:
    wanted = fleet({"spec.pools.0.template.spec": {"restartPolicy": "Never"}})
    (line,) = refusals(wanted)
    assert line.startswith("spec.pools[0].template.spec.restartPolicy: ")


def test_fields_for_a_cluster_are_named_in_one_line() -> None:
    assert cluster_only(load_fleet(good_fleets()["gpus"])) == (
        "only in a cluster: spec.model.secretRef, spec.model.cache, spec.engine.image, "
        "spec.engine.env[0].valueFrom, spec.pools[0].template, "
        "spec.pools[1].resources.sharedMemory, spec.kvTransfer.keySecretRef, spec.router.replicas, "
        "spec.router.service"
    )


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.kvTransfer.sameHostPath", "/run/kv"),
        ("spec.router.replicas", 2),
        ("spec.router.discoveryPort", 30001),
        ("spec.router.template", {}),
        ("spec.networkPolicy.enabled", True),
    ],
)
def test_a_field_for_a_cluster_is_named_also_with_its_default(path: str, value: Any) -> None:
    assert cluster_only(fleet({path: value})).startswith("only in a cluster: spec.")


@pytest.mark.parametrize(
    ("replicas", "refusal"),
    [
        (0, "spec.replicas: Forbidden: replicas is below the pool's minReplicas"),
        (1, ""),
        (4, ""),
        (5, "spec.replicas: Forbidden: replicas exceeds the pool's maxReplicas"),
    ],
)
def test_a_scale_out_of_the_pools_bounds_is_refused_in_the_api_servers_words(
    replicas: int, refusal: str
) -> None:
    wanted = fleet({"spec.pools.1.scaling": {"minReplicas": 1, "maxReplicas": 4}})
    said = refused_scale(wanted, "decode", replicas)
    assert said.startswith(refusal)
    assert bool(said) == bool(refusal)

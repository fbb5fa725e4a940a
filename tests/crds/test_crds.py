"""The CRDs: generated, bounded, explained, and broken in every rule by some case of the table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from scripts.generate import stale
from tests.crds.constraints import constraints, unbounded
from tests.crds.fleets import bad_fleets
from xpyd_operator.document.crd import crds, fleet_crd, pool_crd

Schema = dict[str, Any]
ROOTS = {crd["spec"]["names"]["kind"]: crd["spec"]["versions"][0] for crd in crds()}


def schema(kind: str) -> Schema:
    return ROOTS[kind]["schema"]["openAPIV3Schema"]


def test_the_generated_files_are_those_of_the_models() -> None:
    assert stale() == [], "run `make generate`"


@pytest.mark.parametrize("kind", ROOTS)
def test_every_rule_and_bound_is_broken_by_a_case_of_the_table(kind: str) -> None:
    lines = [case.says for case in bad_fleets() if case.kind == kind]
    unbroken = [
        str(constraint)
        for constraint in constraints(schema(kind))
        if not any(constraint.is_broken_by(line) for line in lines)
    ]
    assert unbroken == []


def test_there_are_far_more_than_sixty_cases_and_no_two_of_one_name() -> None:
    names = [case.name for case in bad_fleets()]
    assert len(set(names)) == len(names) > 180


@pytest.mark.parametrize("kind", ROOTS)
def test_everything_has_a_type_and_a_bound(kind: str) -> None:
    spec, status = (schema(kind)["properties"][part] for part in ("spec", "status"))
    assert [*unbounded(spec, "spec"), *unbounded(status, "status")] == []


@pytest.mark.parametrize("kind", ROOTS)
def test_every_field_is_explained(kind: str) -> None:
    def unexplained(node: Schema, path: str) -> Iterator[str]:
        if not node.get("description", "").endswith("."):
            yield path
        if path.endswith("template.spec"):
            return  # a pod's own fields, which Kubernetes explains
        item = node.get("items", node)
        for name, child in item.get("properties", {}).items():
            yield from unexplained(child, f"{path}.{name}")

    found = [schema(kind)["properties"][part] for part in ("spec", "status")]
    assert [path for node in found for path in unexplained(node, "")] == []


def test_people_find_both_kinds_by_short_names_and_in_one_category() -> None:
    names = [crd["spec"]["names"] for crd in crds()]
    short = [["fleet", "fleets"], ["fleetpool", "fleetpools"]]
    assert [name["shortNames"] for name in names] == short
    assert {tuple(name["categories"]) for name in names} == {("xpyd",)}


def test_only_the_pool_can_be_scaled_and_both_have_a_status_of_their_own() -> None:
    fleet, pool = (crd["spec"]["versions"][0]["subresources"] for crd in (fleet_crd(), pool_crd()))
    assert fleet == {"status": {}}
    assert pool["scale"] == {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }


def test_columns_show_fields_that_the_schema_has() -> None:
    for version in ROOTS.values():
        root = version["schema"]["openAPIV3Schema"]
        for column in version["additionalPrinterColumns"]:
            path = re.sub(r'\[\?\(@\.type=="\w+"\)\]', ".items", column["jsonPath"])
            if path.startswith(".metadata."):
                continue
            node = root
            for part in path.removeprefix(".").split("."):
                node = node["items"] if part == "items" else node["properties"][part]
            assert column["type"] == node["type"], column


def test_the_host_pool_has_no_default_so_that_local_mode_may_size_it() -> None:
    spec = schema("InferenceFleet")["properties"]["spec"]["properties"]
    assert "default" not in spec["kvTransfer"]["properties"]["hostPoolSize"]


def test_the_crds_are_small_enough_for_kubectl_apply() -> None:
    """It writes the whole object into an annotation, and annotations end at 256 KiB."""
    sizes = [len(json.dumps(crd, separators=(",", ":"))) for crd in crds()]
    assert max(sizes) < 200 << 10

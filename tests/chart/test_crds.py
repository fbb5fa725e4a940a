"""The CRDs come with the chart's templates, so an upgrade brings the new ones."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.chart.render import CHART, Helm, Obj, of_kind

FILES = sorted((CHART / "files" / "crds").glob("*.yaml"))
KEEP = {"helm.sh/resource-policy": "keep"}


def _generated() -> list[Obj]:
    return [yaml.safe_load(file.read_text()) for file in FILES]


@pytest.mark.parametrize("keep", [False, True])
def test_the_crds_are_the_generated_ones(helm: Helm, keep: bool) -> None:
    rendered = of_kind(helm.render({"crds": {"keep": keep}}), "CustomResourceDefinition")
    by_name = {crd["metadata"]["name"]: crd for crd in rendered}
    assert set(by_name) == {"inferencefleets.xpyd.dev", "inferencefleetpools.xpyd.dev"}
    for crd in _generated():
        found = by_name[crd["metadata"]["name"]]
        assert found["spec"] == crd["spec"]
        annotations = {**crd["metadata"].get("annotations", {}), **(KEEP if keep else {})}
        assert found["metadata"].get("annotations", {}) == annotations


def test_another_release_may_bring_the_crds(helm: Helm) -> None:
    values: dict[str, Any] = {"crds": {"install": False}}
    assert not of_kind(helm.render(values), "CustomResourceDefinition")


def test_no_crd_lies_where_helm_would_never_upgrade_it() -> None:
    assert not (CHART / "crds").exists()

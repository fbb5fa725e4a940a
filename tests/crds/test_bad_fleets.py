"""What the API server refuses, `xpyd up` refuses in the same words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.crds.fleets import BadFleet, bad_fleets, good_fleets
from xpyd_core.errors import UserError
from xpyd_operator.document.fleetpool import InferenceFleetPool, PoolSpec, refused_changes
from xpyd_operator.document.load import as_sent, load_fleet, parse_fleet
from xpyd_operator.document.mistakes import describe_mistakes


def complaints(case: BadFleet) -> Sequence[str]:
    """Our own lines about the case."""
    if case.kind == "InferenceFleetPool":
        return _about_pool(case)
    try:
        fleet = parse_fleet(json.dumps(case.object).encode(), source="f.yaml")
    except UserError as error:
        head, *lines = str(error).split("\n  ")
        assert head == f"f.yaml: {len(lines)} mistake{'s' if len(lines) > 1 else ''}"
        return lines
    if case.old is None:
        return []
    return refused_changes(parse_fleet(json.dumps(case.old).encode(), source="old"), fleet)


def _about_pool(case: BadFleet) -> Sequence[str]:
    try:
        pool = InferenceFleetPool.model_validate(as_sent(case.object))
    except ValidationError as error:
        return describe_mistakes(error, InferenceFleetPool)
    assert case.old is not None
    old = InferenceFleetPool.model_validate(as_sent(case.old))
    return [
        f"spec.{rule.field}: {rule.text}"
        for rule in PoolSpec.transitions
        if not rule.holds(pool.spec, old.spec)
    ]


@pytest.mark.parametrize("case", bad_fleets(), ids=lambda case: case.name)
def test_a_bad_fleet_is_refused_in_the_api_servers_words(case: BadFleet) -> None:
    (line,) = complaints(case)
    assert line == case.says or line.startswith(f"{case.says}; ")


@pytest.mark.parametrize("path", good_fleets().values(), ids=good_fleets())
def test_a_good_fleet_is_taken(path: Path) -> None:
    assert load_fleet(path).spec.pools

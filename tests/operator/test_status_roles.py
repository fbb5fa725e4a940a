"""RolesReady: a role of the document is lost, or half of it, and what requests do then."""

from __future__ import annotations

import pytest

from tests.operator.observed_cluster import Cluster, settled
from tests.operator.test_status_conditions import Obj, fleet_of, found, status_of
from xpyd_operator.controller.main import OperatorMetrics


@pytest.mark.parametrize(
    ("router", "lost", "available", "words"),
    [
        ({}, "prefill", ("False", "NoEngines"), "requests wait (router.onNoPrefill)"),
        ({}, "decode", ("False", "NoEngines"), "requests wait (router.onNoDecode)"),
        ({"onNoPrefill": "Reject"}, "prefill", ("False", "NoEngines"), "status 503"),
        ({"onNoPrefill": "Reject"}, "decode", ("False", "NoEngines"), "status 503"),
        (
            {"onNoPrefill": "Reject", "onNoDecode": "Queue"},
            *("decode", ("False", "NoEngines"), "requests wait"),
        ),
        (
            {"onNoPrefill": "PrefillOnDecode"},
            *("prefill", ("True", "PrefillOnDecode"), "Decode instances compute the prompts"),
        ),
        (
            {"onNoDecode": "DecodeOnPrefill"},
            *("decode", ("True", "DecodeOnPrefill"), "Prefill instances make the whole answers"),
        ),
    ],
)
def test_a_lost_role_is_named_with_what_the_document_wants_of_requests_then(
    router: Obj, lost: str, available: tuple[str, str], words: str
) -> None:
    cluster = settled(fleet_of(lambda spec: spec.update(router=router)))
    assert found(cluster, "RolesReady") == ("True", "AllRoles")
    cluster.running(cluster.pods_of(lost), ready=False)
    seen = cluster.turn()
    assert found(cluster, "RolesReady") == ("False", f"No{lost.title()}")
    assert words in message_of(cluster, "RolesReady")
    assert found(cluster, "Available") == available
    assert [e.type for e in seen if e.reason == "RoleLost"] == ["Warning"]
    cluster.running(cluster.pods_of(lost), ready=True)
    cluster.turn()
    assert found(cluster, "RolesReady") == ("True", "AllRoles")


def test_a_fleet_that_lost_half_of_a_role_says_so_and_serves() -> None:
    cluster = settled(fleet_of())
    cluster.running(cluster.pods_of("decode")[:1], ready=False)
    cluster.turn()
    assert found(cluster, "RolesReady") == ("False", "HalfLost")
    assert "1/2 Decode" in message_of(cluster, "RolesReady")
    assert found(cluster, "Available") == ("True", "Serving")


def message_of(cluster: Cluster, kind: str) -> str:
    (one,) = [c for c in status_of(cluster)["conditions"] if c["type"] == kind]
    return one["message"]


def test_a_fleet_that_grows_or_that_is_made_has_lost_nothing() -> None:
    cluster = Cluster(fleet_of())
    seen = cluster.turn()
    assert found(cluster, "RolesReady") == ("False", "NoEngines")
    assert "RoleLost" not in [e.reason for e in seen]
    cluster = settled(fleet_of())
    cluster.scale("decode", 6)
    cluster.turn()
    assert found(cluster, "RolesReady") == ("True", "AllRoles")


def test_a_fleet_without_any_engine_names_all_roles() -> None:
    cluster = settled(fleet_of())
    for pool in ("prefill", "decode"):
        cluster.running(cluster.pods_of(pool), ready=False)
    assert [e.type for e in cluster.turn() if e.reason == "RoleLost"] == ["Warning"]
    assert message_of(cluster, "RolesReady") == "no Prefill and no Decode instance is ready"


def test_fleets_that_lack_a_role_have_a_series_until_they_have_it_again() -> None:
    metrics = OperatorMetrics()
    lost = [("team", "chat", "NoPrefill")]
    said = metrics.render(queue_depth=0, fleets=2, lost=lost).decode()
    series = 'xpyd_operator_lost_roles{fleet="chat",fleet_namespace="team",reason="NoPrefill"} 1.0'
    assert series in said
    assert "lost_roles{" not in metrics.render(queue_depth=0, fleets=2).decode()

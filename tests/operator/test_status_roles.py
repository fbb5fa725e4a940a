"""RolesReady: a role of the document is lost, or half of it, and what requests do then."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.operator.observed_cluster import Cluster, settled
from tests.operator.test_status_conditions import Obj, fleet_of, found, status_of
from xpyd_operator.controller.main import OperatorMetrics
from xpyd_operator.status.canary import CanaryView
from xpyd_operator.status.conditions import conditions
from xpyd_operator.status.events import events
from xpyd_operator.status.pools import PoolRow

Rows = tuple[PoolRow, ...]


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


def rows(ready: int, *, wanted: int = 8, is_older: bool = False, given_up: int = 0) -> Rows:
    """A router, 4 P and so many of 8 D, of a revision that `is_older` or of the newest."""
    kept: Obj = {"older": is_older, "revision": "new"}
    return (
        PoolRow("router", "Router", 1, ready=1, updated=1, revision="new"),
        PoolRow("prefill", "Prefill", 4, ready=4, updated=0 if is_older else 4, **kept),
        PoolRow(
            *("decode", "Decode", wanted),
            ready=ready,
            updated=0 if is_older else ready,
            given_up=given_up,
            **kept,
        ),
    )


def after(before: Obj, pools: Rows, **more: Any) -> Obj:
    """The status that follows on `before` with these pools."""
    made = conditions(
        pools, (), stopping=False, before=before, now="2026-11-21T10:00:00Z", generation=1, **more
    )
    kept = [
        {"name": r.name, "role": r.role, "replicas": r.replicas, "readyReplicas": r.ready}
        for r in pools
    ]
    return {"conditions": made, "pools": kept}


def roles_of(status: Obj) -> str:
    (one,) = [c for c in status["conditions"] if c["type"] == "RolesReady"]
    return one["reason"]


FAILED = CanaryView("CanaryFailed", "it broke a limit", {})


@pytest.mark.parametrize(
    ("shape", "more", "reason"),
    [
        ({"is_older": True}, {"canary": FAILED}, "CanaryFailed"),
        ({"is_older": True}, {"paused": True}, "Paused"),
        ({"is_older": True}, {}, "Rollout"),
        ({}, {}, "Recovering"),
    ],
)
def test_half_of_a_role_is_lost_whatever_moves_the_fleet(
    shape: Obj, more: Obj, reason: str
) -> None:
    seen = [after(after({}, rows(8)), rows(8, **shape), **more)]
    for ready in (5, 4, 3, 1, 0, 1, 4, 5):
        seen.append(after(seen[-1], rows(ready, **shape), **more))
    assert [roles_of(one) for one in seen] == [
        *("AllRoles", "AllRoles", "HalfLost", "HalfLost", "HalfLost"),
        *("NoDecode", "HalfLost", "HalfLost", "AllRoles"),
    ]
    (progressing,) = [c for c in seen[4]["conditions"] if c["type"] == "Progressing"]
    assert progressing["reason"] == reason
    told = [
        [e.message for e in events(before, now) if e.reason == "RoleLost"]
        for before, now in itertools.pairwise(seen)
    ]
    assert [len(one) for one in told] == [0, 1, 0, 0, 1, 0, 0, 0], (
        "once, and once of the whole role"
    )
    assert "4/8 Decode ready" in told[1][0]


def test_what_a_fleet_never_had_and_what_a_rollout_may_give_up_is_not_lost() -> None:
    new = after({}, rows(0))
    for ready in (1, 3):
        new = after(new, rows(ready))
        assert roles_of(new) == "AllRoles"
    grows = after(after({}, rows(4, wanted=4)), rows(4))
    assert roles_of(grows) == "AllRoles"
    assert roles_of(after(grows, rows(2))) == "HalfLost", "of what it had, while it grows"
    whole = after({}, rows(8))
    rolls = after(whole, rows(4, is_older=True, given_up=4))
    assert roles_of(rolls) == "AllRoles"
    assert roles_of(after(rolls, rows(3, is_older=True, given_up=4))) == "HalfLost"


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

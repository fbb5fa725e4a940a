"""What the operator remembers of a fleet, and its pace."""

from __future__ import annotations

from math import inf
from typing import Any, cast

import pytest

from tests.operator.test_controller_turn import SETTINGS, document, stored
from xpyd_operator.controller.decision.history import (
    CONTESTED_S,
    CONTESTED_WRITES,
    TAKEN_S,
    FleetHistory,
    RecentEvents,
    StatusPace,
    is_urgent,
)
from xpyd_operator.controller.decision.kinds import (
    DEPLOYMENT,
    SERVICE,
    Obj,
)
from xpyd_operator.controller.decision.state import AppliedVersion, ObjectRef, read
from xpyd_operator.controller.decision.writes import (
    Apply,
    CreateKey,
    DeleteObject,
    Scale,
    Write,
    effect_of,
)
from xpyd_operator.status.events import EventText


def test_the_first_status_is_written_at_once_and_the_others_at_growing_distances() -> None:
    pace, now, gaps = StatusPace(0.0), 0.0, []
    for _ in range(6):
        gaps.append(pace.wait_s(now, urgent=False))
        now += gaps[-1]
        pace.wrote(now)
    assert gaps == [0.0, 2.0, 6.0, 12.0, 12.0, 12.0]


def test_news_that_somebody_waits_for_comes_soon() -> None:
    pace = StatusPace(0.0)
    pace.wrote(10.0)
    assert pace.wait_s(10.0, urgent=True) == 0.25
    assert pace.wait_s(10.5, urgent=True) == 0.0


def test_after_a_calm_time_the_distances_are_small_again() -> None:
    pace = StatusPace(0.0)
    for moment in (0.0, 2.0, 8.0, 20.0):
        pace.wrote(moment)
    pace.wrote(100.0)
    assert pace.wait_s(100.0, urgent=False) == 2.0


def test_pools_of_a_new_fleet_are_told_of_when_it_is_ready_or_after_half_a_minute() -> None:
    pace = StatusPace(100.0)
    assert pace.wait_of_pools_s(110.0, ready=False) == 20.0
    assert pace.wait_of_pools_s(110.0, ready=True) == 0.0
    pace.wrote_pools(110.0)
    assert pace.wait_of_pools_s(110.0, ready=False) == 5.0
    assert pace.wait_of_pools_s(110.0, ready=True) == 1.0


@pytest.mark.parametrize(
    ("before", "after", "urgent"),
    [
        (None, {}, True),
        ({"observedGeneration": 1}, {"observedGeneration": 2}, True),
        ({"a": 1}, {"a": 2}, False),
        (("Ready", "False"), ("Ready", "True"), True),
        (("Degraded", "False"), ("Degraded", "True"), True),
        (("Progressing", "False"), ("Progressing", "True"), False),
    ],
)
def test_what_is_urgent(before: Any, after: Any, urgent: bool) -> None:
    def status(value: Any) -> Any:
        if isinstance(value, tuple):
            return {"conditions": [{"type": value[0], "status": value[1]}]}
        return value

    assert is_urgent(status(before), status(after)) is urgent


def test_each_decision_about_a_canary_is_urgent_and_its_figures_are_not() -> None:
    """So that each is an Event."""
    row = {"revision": "a", "phase": "Running", "step": 1, "requests": 3}
    before: dict[str, Any] = {"observedGeneration": 1, "canary": row}
    assert not is_urgent(before, {**before, "canary": {**row, "requests": 9}})
    for news in ({"step": 2}, {"phase": "Failed"}, {"revision": "b"}):
        assert is_urgent(before, {**before, "canary": {**row, **news}})
    assert is_urgent(before, {"observedGeneration": 1})


def test_an_event_is_told_once_a_minute_and_a_flood_is_cut() -> None:
    recent, text = RecentEvents(), EventText("Normal", "Scaled", "1 -> 2")
    assert recent.is_new(text, 0.0)
    assert not recent.is_new(text, 59.0)
    assert recent.is_new(text, 61.0)
    told = [recent.is_new(EventText("Normal", "X", str(n)), 62.0) for n in range(50)]
    assert sum(told) == 19


def test_what_is_remembered_ends_with_the_objects_and_with_the_fleet() -> None:
    history, place = FleetHistory(0.0), cast("ObjectRef", (SERVICE, "chat-router"))
    history.read(document(), SETTINGS)
    mark = AppliedVersion("u", "1", 0, "digest")
    history.settled[place] = mark
    history.changed_key(CreateKey(), 0.0, {})
    history.read(document(generation=2), SETTINGS)
    assert history.settled == {place: mark}
    history.read(document(uid="another"), SETTINGS)
    assert history.settled == {}
    assert not history.has_key({}, "own")
    history.settled[place] = mark
    history.forget_old(frozenset(), 0.0)
    assert history.settled == {}


def pod(uid: str, *, scheduled: str = "", leaves: str = "", phase: str = "Pending") -> Obj:
    found: Obj = {"metadata": {"uid": uid}, "status": {"phase": phase, "conditions": []}}
    if scheduled:
        placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": scheduled}
        found["status"]["conditions"] = [placed]
    if leaves:
        found["metadata"]["deletionTimestamp"] = leaves
    return found


def test_a_pods_state_is_as_old_as_the_time_since_it_was_first_seen() -> None:
    history = FleetHistory(0.0)
    assert history.ages([pod("a"), pod("b", leaves="11:00")], 100.0) == {"a": 0.0, "b": 0.0}
    placed = pod("a", scheduled="10:00")
    assert history.ages([placed, pod("b", leaves="11:00")], 110.0) == {"a": 0.0, "b": 10.0}
    # With another grace period it may take as long again.
    assert history.ages([placed, pod("b", leaves="10:30")], 115.0) == {"a": 5.0, "b": 0.0}
    ready = pod("a", scheduled="10:00")
    ready["status"]["conditions"] += [{"type": "Ready", "status": "True"}]
    assert history.ages([ready], 120.0) == {}
    assert history.ages([placed], 130.0) == {"a": 0.0}, "it waits anew"


def test_pods_that_had_failed_before_the_first_look_did_so_long_ago() -> None:
    history, old, new = FleetHistory(0.0), pod("a", phase="Failed"), pod("b", phase="Failed")
    history.read(document(), SETTINGS)
    assert history.ages([old], 100.0) == {"a": inf}
    assert history.ages([old, new], 110.0) == {"a": inf, "b": 0.0}
    assert history.ages([old, new], 120.0) == {"a": inf, "b": 10.0}
    history.read(document(uid="another"), SETTINGS)
    assert history.ages([new], 130.0) == {"b": inf}, "another fleet's first look"


def test_a_document_is_read_once_for_each_generation() -> None:
    history = FleetHistory(0.0)
    first = history.read(document(), SETTINGS)
    assert history.read(document(), SETTINGS) is first
    assert history.read(document(generation=2), SETTINGS) is not first


@pytest.mark.parametrize(
    "write",
    [
        Apply(stored(document()), "digest"),
        Scale(DEPLOYMENT, "chat-decode-1", 0, "1"),
        DeleteObject(SERVICE, "chat-router", "uid"),
    ],
)
def test_what_was_done_too_often_is_contested_for_a_while(write: Write) -> None:
    history = FleetHistory(0.0)
    for _ in range(CONTESTED_WRITES):
        assert history.contested(0.0) == frozenset()
        history.wrote(write, 0.0)
    assert history.contested(0.0) == {effect_of(write)}
    history.forget_old(frozenset(), CONTESTED_S - 1)
    assert history.contested(CONTESTED_S - 1) == {effect_of(write)}
    assert history.contested(CONTESTED_S) == frozenset()


def test_a_taken_name_is_tried_again_after_a_while() -> None:
    history, place = FleetHistory(0.0), cast("ObjectRef", (SERVICE, "chat-router"))
    history.found_taken(place, "someone", 0.0)
    assert history.taken(TAKEN_S - 1) == {place: "someone"}
    assert history.taken(TAKEN_S) == {}


def test_the_key_is_wanted_once_and_again_when_pods_cannot_mount_it() -> None:
    history, reading = FleetHistory(0.0), read(document(), SETTINGS)
    stuck = {
        "kvKeySecret": "chat-kv-u",
        "conditions": [{"type": "Degraded", "reason": "VolumesNotMounted"}],
    }
    hidden = {
        "kvKeySecret": "chat-kv-u",
        "conditions": [
            {"reason": "ImagePullBackOff", "message": "...; node n may lack ConfigMap chat-kv-u or"}
        ],
    }
    crashed = {
        "kvKeySecret": "chat-kv-u",
        "conditions": [{"message": "...: KV key file /run/xpyd/kv/key: No such file or directory"}],
    }
    assert history.wants_key(reading, "chat-kv-u", {}, 0.0)
    assert history.wants_key(reading, "chat-kv-u", hidden, 0.0)
    assert history.wants_key(reading, "chat-kv-u", crashed, 0.0)
    assert not history.wants_key(reading, "chat-kv-u", {"kvKeySecret": "chat-kv-u"}, 0.0)
    assert history.wants_key(reading, "chat-kv-u", stuck, 0.0)
    history.changed_key(CreateKey(), 0.0, {})
    assert not history.wants_key(reading, "chat-kv-u", stuck, 59.0)
    assert history.wants_key(reading, "chat-kv-u", stuck, 61.0)
    own = document()
    for kv in ({"keySecretRef": {"name": "mine", "key": "k"}}, {"insecure": True}):
        own["spec"]["kvTransfer"] = kv
        assert not history.wants_key(read(own, SETTINGS), "chat-kv-u", {}, 0.0)

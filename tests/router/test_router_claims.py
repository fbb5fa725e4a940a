"""What beats may claim of each other: duplicates, replays, signatures, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.beats import beat
from xpyd_core.errors import ProtocolError
from xpyd_core.messages import Heartbeat
from xpyd_router.fleet.registry import MAX_MODELS, MAX_SKEW_S, Registry

SIGNED = 0.0
"""The age of a beat that was signed just now."""


def registry() -> Registry:
    return Registry(period_s=3.0, missed_beats=3)


def said(found: Registry, one: Heartbeat, now: float = 0.0, age_s: float | None = None) -> str:
    return found.apply(one, now, age_s)[0]


def names(found: Registry) -> list[str]:
    return [f"{i.key.http}/{i.key.incarnation}" for i in found.instances]


def test_of_two_engines_at_one_http_address_the_later_stays_and_nothing_flaps() -> None:
    found = registry()
    assert said(found, beat("P", incarnation="a", sent_us=10)) == "new"
    assert said(found, beat("P", incarnation="b", sent_us=20)) == "replaced"
    for turn in range(3):
        assert said(found, beat("P", incarnation="a", sent_us=30 + turn)) == "stale"
        assert said(found, beat("P", incarnation="b", sent_us=30 + turn)) == "refreshed"
    assert names(found) == ["10.0.0.1:20001/b"]


def test_one_engine_over_two_sockets_is_one_instance_and_a_beat_counts_once() -> None:
    found = registry()
    one = beat("P", incarnation="a", sent_us=10)
    assert said(found, one) == "new"
    assert said(found, one, now=8.0) == "repeated"
    assert len(found.expire(now=9.0)) == 1, "a beat that is said again lengthens no life"


@pytest.mark.parametrize("late", [{"state": "Ready"}, {"state": "Gone"}, {"zmq_address": "x:1"}])
def test_a_beat_that_comes_after_a_newer_one_changes_nothing(late: dict[str, Any]) -> None:
    found = registry()
    found.apply(beat("P", incarnation="a", sent_us=20, state="Draining"), now=0.0)
    assert said(found, beat("P", incarnation="a", sent_us=19, **late)) == "stale"
    assert found.instances[0].beat.state == "Draining"


def test_the_older_of_two_incarnations_does_not_replace_the_newer() -> None:
    """A router that restarted knows nothing of the past; what somebody kept of it comes back."""
    found = registry()
    found.apply(beat("P", incarnation="new", sent_us=20), 0.0, SIGNED)
    assert said(found, beat("P", incarnation="old", sent_us=10), 0.0, SIGNED) == "stale"
    assert said(found, beat("P", incarnation="new", sent_us=21), 1.0, SIGNED) == "refreshed"


def test_a_goodbye_that_is_said_again_later_hits_nobody() -> None:
    found = registry()
    goodbye = beat("P", incarnation="a", sent_us=11, state="Gone")
    found.apply(beat("P", incarnation="a", sent_us=10), 0.0, SIGNED)
    assert said(found, goodbye, 1.0, SIGNED) == "gone"
    found.apply(beat("P", incarnation="b", sent_us=12), 2.0, SIGNED)
    assert said(found, goodbye, 3.0, SIGNED) == "stale"
    assert names(found) == ["10.0.0.1:20001/b"]


def test_the_last_beat_of_one_that_fell_silent_does_not_bring_it_back_but_a_newer_one_does() -> (
    None
):
    found = registry()
    last = beat("P", incarnation="a", sent_us=10)
    found.apply(last, 0.0, SIGNED)
    found.expire(now=9.0)
    assert said(found, last, 10.0, 10.0) == "stale"
    assert said(found, beat("P", incarnation="a", sent_us=11), 11.0, SIGNED) == "new"


@pytest.mark.parametrize("age_s", [MAX_SKEW_S + 1, -MAX_SKEW_S - 1])
def test_the_first_signed_beat_must_be_of_now_and_later_ones_only_in_order(age_s: float) -> None:
    found = registry()
    assert said(found, beat("P", incarnation="a", sent_us=10), 0.0, age_s) == "skewed"
    assert said(found, beat("P", incarnation="a", sent_us=11), 0.0, SIGNED) == "new"
    # The clock of either side is set; the instance stays.
    assert said(found, beat("P", incarnation="a", sent_us=12), 1.0, age_s) == "refreshed"
    assert said(found, beat("P", incarnation="b", sent_us=13), 2.0, age_s) == "skewed"


@pytest.mark.parametrize("fields", [{}, {"state": "Gone"}, {"incarnation": "b"}])
def test_what_came_signed_is_touched_by_signed_beats_only(fields: dict[str, Any]) -> None:
    found = registry()
    found.apply(beat("P", incarnation="a", sent_us=10), 0.0, SIGNED)
    fields = {"incarnation": "a", "sent_us": 20, **fields}
    assert said(found, beat("P", **fields)) == "unsigned"
    assert names(found) == ["10.0.0.1:20001/a"]
    assert found.instances[0].beat.sent_us == 10


def test_an_engine_that_begins_to_sign_goes_on_as_the_same() -> None:
    found = registry()
    found.apply(beat("P", incarnation="a", sent_us=10), 0.0)
    assert said(found, beat("P", incarnation="a", sent_us=11), 1.0, SIGNED) == "refreshed"
    assert said(found, beat("P", incarnation="a", sent_us=12), 2.0) == "unsigned"


def test_a_kv_address_belongs_to_who_came_first_for_as_long_as_it_beats() -> None:
    found = registry()
    shared = {"zmq_address": "10.0.0.9:21001"}
    assert said(found, beat("D", host=1, **shared)) == "new"
    assert said(found, beat("D", host=2, **shared), now=5.0) == "conflict"
    assert said(found, beat("P", host=3, **shared), now=5.0) == "conflict"
    assert names(found) == ["10.0.0.1:20001/"]
    found.expire(now=9.0)
    assert said(found, beat("D", host=2, **shared), now=9.0) == "new"
    # A known instance cannot take it either, and one that changes its own leaves the old.
    assert said(found, beat("D", host=1), now=9.0) == "new"
    assert said(found, beat("D", host=1, **shared), now=9.0) == "conflict"
    assert said(found, beat("D", host=2, zmq_address="10.0.0.8:1"), now=9.0) == "replaced"
    assert said(found, beat("D", host=1, **shared), now=9.0) == "replaced"


def test_a_goodbye_and_a_restart_free_the_kv_address() -> None:
    found = registry()
    shared = {"zmq_address": "10.0.0.9:21001"}
    found.apply(beat("D", host=1, incarnation="a", **shared), now=0.0)
    found.apply(beat("D", host=1, incarnation="a", state="Gone", **shared), now=0.0)
    assert said(found, beat("D", host=2, incarnation="b", **shared)) == "new"
    assert said(found, beat("D", host=2, incarnation="c")) == "replaced"
    assert said(found, beat("D", host=3, **shared)) == "new"


def test_aggregated_engines_have_no_kv_address_to_fight_for() -> None:
    found = registry()
    shared = {"zmq_address": "10.0.0.9:21001"}
    for host in (1, 2):
        assert said(found, beat("A", host=host, **shared)) == "new"
    assert said(found, beat("D", host=3, **shared)) == "new"
    assert said(found, beat("A", host=1, state="Gone", incarnation="", **shared)) == "gone"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("[::1]:20001", "[0:0:0:0:0:0:0:1]:20001"),
        ("[fd00::AB]:20001", "[fd00::ab]:20001"),
        ("Engine-1.ns.svc:20001", "engine-1.ns.svc:20001"),
    ],
)
def test_an_address_is_the_same_in_every_spelling(one: str, other: str) -> None:
    found = registry()
    found.apply(beat("A", http_address=one), now=0.0)
    assert said(found, beat("A", http_address=other)) == "refreshed"
    assert len(found.instances) == 1


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"http_address": "0.0.0.0:20001"}, "no address of an instance"),
        ({"http_address": "[::]:20001"}, "no address of an instance"),
        ({"zmq_address": "224.0.0.1:21001"}, "no address of an instance"),
        ({"http_address": "[1:2]:20001"}, "no IPv6 address"),
        ({"zmq_address": "engine-1:21001", "continuation": 1}, "--kv-advertise"),
        ({"zmq_address": "10.0.0.1:80", "continuation": 1}, "from 1024 on"),
    ],
)
def test_an_address_that_nobody_could_reach_is_refused_with_its_field(
    fields: dict[str, Any], what: str
) -> None:
    with pytest.raises(ProtocolError, match=what) as error:
        registry().apply(beat("P", **fields), now=0.0)
    assert set(fields) - {"continuation"} <= set(str(error.value).replace(":", " ").split())


@pytest.mark.parametrize(
    ("kind", "continuation"), [("P", 0), ("D", 0), ("A", 1)], ids=["vllm-p", "vllm-d", "ours-a"]
)
def test_a_name_as_kv_address_is_taken_where_no_engine_of_ours_dials_it(
    kind: str, continuation: int
) -> None:
    found = registry()
    one = beat(kind, zmq_address="Engine-1:80", continuation=continuation)
    assert said(found, one) == "new"
    assert str(found.instances[0].kv) == "engine-1:80"


def test_names_of_models_are_bounded_and_those_who_are_there_stay() -> None:
    found = registry()
    size = 64
    for host in range(MAX_MODELS // size):
        models = tuple(f"m{host}-{n}" for n in range(size))
        assert said(found, beat("A", host=host, models=models, incarnation="a")) == "new"
    assert said(found, beat("A", host=200, models=("one-more",))) == "full"
    assert said(found, beat("A", host=200, models=("m0-0",))) == "new"
    assert said(found, beat("A", host=0, models=("m0-0", "x"), incarnation="a")) == "full"
    assert said(found, beat("A", host=0, models=("m0-0",), incarnation="a")) == "refreshed"
    assert said(found, beat("A", host=200, models=("m0-0", "one-more"))) == "refreshed"
    assert said(found, beat("A", host=200, state="Gone", incarnation="")) == "gone"
    assert not found.snapshot.knows("one-more")

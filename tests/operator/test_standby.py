"""The condition of a release that stands by: two releases and a fleet, with a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from xpyd_operator.controller.decision.kinds import Obj
from xpyd_operator.controller.decision.standby import (
    GONE_S,
    OTHER_RELEASE,
    REFRESH_S,
    Standby,
    words,
)
from xpyd_operator.status.children import Raw, condition, text

OWNER, OTHER, THIRD = "a/owner", "b/other", "c/third"
DAY_S = 86400
START = datetime(2026, 1, 1, tzinfo=UTC)
READY: Obj = {"type": "Ready", "status": "True", "reason": "Ready", "message": ""}


class Fleet:
    """The fleet at an API server: `other` looks each `step_s`, and the owner writes a status of its
    own where that differs."""

    def __init__(self, *, owner_knows: bool = True) -> None:
        metadata = {"name": "chat", "uid": "u", "resourceVersion": "1", "generation": 3}
        self.document: Obj = {"metadata": metadata, "status": {"conditions": [READY]}}
        self.owner = Standby()
        self.owner_knows = owner_knows
        self.writes = {OWNER: 0, OTHER: 0, THIRD: 0, "": 0}
        self.now = 0.0

    @property
    def row(self) -> Any:
        return condition(self.document, OTHER_RELEASE)

    def store(self, who: str, conditions: Sequence[Raw]) -> None:
        version = str(int(self.document["metadata"]["resourceVersion"]) + 1)
        metadata = {**self.document["metadata"], "resourceVersion": version}
        self.document = {"metadata": metadata, "status": {"conditions": [*conditions]}}
        self.writes[who] += 1

    def owner_turns(self, own: str = OWNER) -> None:
        row, _ = self.owner.kept(self.document, own, self.now)
        wanted = [READY, row] if row and self.owner_knows else [READY]
        if wanted != self.document["status"]["conditions"]:
            self.store(OWNER, wanted)

    def looks(self, release: Standby, own: str = OTHER, owner: str = OWNER) -> None:
        wall = (START + timedelta(seconds=self.now)).isoformat()
        said = words(owner, own, "chat")
        patch = release.patch(self.document, own, said, self.now, wall)
        if patch is not None:
            assert patch["metadata"] == {
                "uid": "u",
                "resourceVersion": self.document["metadata"]["resourceVersion"],
            }
            self.store(own, patch["status"]["conditions"])


def test_it_is_written_once_kept_by_the_owner_and_refreshed_seldom() -> None:
    fleet, other = Fleet(), Standby()
    for _ in range(DAY_S // 30):
        fleet.looks(other)
        fleet.owner_turns()
        assert text(fleet.row, "status") == "True"
        assert text(fleet.row, "reason") == "StandsBy"
        fleet.now += 30
    assert fleet.writes[OWNER] == 0
    assert 100 < fleet.writes[OTHER] <= DAY_S / REFRESH_S
    message = text(fleet.row, "message")
    assert message.startswith(f"{OTHER} said at 2026-01-01")
    assert f"{OWNER} reconciles this fleet; {OTHER} stands by. To hand it over: " in message
    assert message.endswith(f"kubectl annotate --overwrite fleet chat xpyd.dev/operator={OTHER}")
    assert condition(fleet.document, "Ready") == READY


def test_it_goes_when_the_release_says_it_no_more() -> None:
    fleet = Fleet()
    fleet.looks(Standby())
    _, left_s = fleet.owner.kept(fleet.document, OWNER, fleet.now)
    assert left_s == GONE_S
    fleet.now += GONE_S - 1
    fleet.owner_turns()
    assert fleet.row
    fleet.now += 1
    fleet.owner_turns()
    assert not fleet.row
    assert fleet.writes == {OWNER: 1, OTHER: 1, THIRD: 0, "": 0}


def test_a_release_that_takes_the_fleet_over_takes_its_own_row_away() -> None:
    fleet = Fleet()
    fleet.looks(Standby())
    fleet.owner_turns(own=OTHER)
    assert not fleet.row


def test_an_owner_that_knows_no_such_row_is_written_over_ever_more_seldom() -> None:
    fleet, other = Fleet(owner_knows=False), Standby()
    for _ in range(DAY_S // 30):
        fleet.looks(other)
        fleet.owner_turns()
        fleet.now += 30
    # 30, 60, 120, 240, 480 s, then as often as it would be refreshed.
    assert fleet.writes[OTHER] <= DAY_S / REFRESH_S + 6
    assert fleet.writes[OTHER] == fleet.writes[OWNER]


def test_a_row_that_the_owner_left_out_once_is_there_again_at_the_next_look() -> None:
    fleet, other = Fleet(), Standby()
    fleet.looks(other)
    fleet.store(OWNER, [READY])  # the owner's write crossed it
    fleet.looks(other)
    assert not fleet.row
    fleet.now += 30
    fleet.looks(other)
    assert fleet.row


def test_a_write_that_the_owners_crossed_is_made_again_at_the_next_look() -> None:
    fleet, other = Fleet(), Standby()
    said = words(OWNER, OTHER, "chat")
    assert other.patch(fleet.document, OTHER, said, 0.0, "") is not None
    fleet.looks(other)
    assert not fleet.row
    other.crossed()
    fleet.looks(other)
    assert fleet.row


def test_the_first_of_two_releases_that_stand_by_says_it_until_it_is_gone() -> None:
    fleet, other, third = Fleet(), Standby(), Standby()
    for _ in range(100):
        fleet.looks(other)
        fleet.looks(third, THIRD)
        fleet.now += 30
    assert text(fleet.row, "message").startswith(OTHER)
    assert fleet.writes[THIRD] == 0
    fleet.now += GONE_S
    fleet.looks(third, THIRD)
    assert text(fleet.row, "message").startswith(THIRD)
    assert [one["type"] for one in fleet.document["status"]["conditions"]] == [
        "Ready",
        OTHER_RELEASE,
    ]


def test_another_owner_is_news_and_its_time_stays() -> None:
    fleet, other = Fleet(), Standby()
    fleet.looks(other)
    since = fleet.row["lastTransitionTime"]
    fleet.now += 60
    fleet.looks(other, owner=THIRD)
    assert f"{THIRD} reconciles this fleet" in text(fleet.row, "message")
    assert fleet.row["lastTransitionTime"] == since


def test_an_operator_without_a_release_says_so_too() -> None:
    fleet, other = Fleet(), Standby()
    fleet.looks(other, own="")
    assert text(fleet.row, "message").startswith("an operator without --release said at ")
    assert text(fleet.row, "message").endswith("xpyd.dev/operator=NAMESPACE/NAME")

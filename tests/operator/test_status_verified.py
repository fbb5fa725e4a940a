"""KVTransferVerified: what follows from the counts of routers over time."""

from __future__ import annotations

import random

import pytest

from xpyd_operator.status.verified import (
    HOLD_S,
    LATELY_S,
    Counts,
    KvVerdict,
    KvWatch,
    Row,
    read_counts,
)

PERIOD_S = 15.0
P, D = "demo-prefill-0", "demo-decode-0"


class Fleet:
    """A fleet with one router, whose counts are looked at every 15 s."""

    def __init__(self) -> None:
        self.watch = KvWatch()
        self.counts: dict[Row, int] = {}
        self.now_s = 1000.0

    def look(self, *, after_s: float = PERIOD_S, has_stranger: bool | None = False) -> KvVerdict:
        self.now_s += after_s
        counts = {"router-0": dict(self.counts)}
        return self.watch.look(counts, self.now_s, has_stranger=has_stranger)

    def forge(self) -> None:
        """A heartbeat that another key has signed comes to the router."""
        self.count("forged", p="", d="")

    def count(self, outcome: str, cause: str = "", n: int = 1, *, p: str = P, d: str = D) -> None:
        row = (p, d, outcome, cause)
        self.counts[row] = self.counts.get(row, 0) + n


@pytest.fixture
def fleet() -> Fleet:
    """One that was looked at once."""
    found = Fleet()
    assert found.look().status is None
    return found


def test_without_traffic_it_is_unknown(fleet: Fleet) -> None:
    for _ in range(100):
        assert fleet.look() == KvVerdict(
            None, "NoTraffic", "no request showed lately whether KV arrives"
        )


def test_kv_that_moved_lately_makes_it_true_and_later_unknown(fleet: Fleet) -> None:
    fleet.count("moved")
    assert fleet.look()[:2] == (True, "KVMoved")
    looks = int(LATELY_S / PERIOD_S)
    assert {fleet.look().status for _ in range(looks)} == {True}
    assert fleet.look()[:2] == (None, "NoTraffic")


@pytest.mark.parametrize(
    ("outcome", "cause", "reason"),
    [
        ("recomputed", "unreachable", "Unreachable"),
        ("recomputed", "key", "KeyMismatch"),
        ("recomputed", "incompatible", "Incompatible"),
        ("recomputed", "no_offer", "NoOffer"),
        ("recomputed", "timeout", "Timeout"),
        ("recomputed", "lost", "ConnectionLost"),
        ("recomputed", "broken", "DataBroken"),
        ("recomputed", "not_sent", "NotReceived"),
        ("failed", "unreachable", "Unreachable"),
        ("failed", "not_sent", "NotReceived"),
    ],
)
def test_lost_kv_makes_it_false_at_the_next_look_with_pair_and_cause(
    outcome: str, cause: str, reason: str, fleet: Fleet
) -> None:
    fleet.count(outcome, cause, 2)
    found = fleet.look()
    assert found[:2] == (False, reason)
    assert f"{P} to {D}: {cause}" in found.message
    assert "xpyd kv-probe" in found.message


@pytest.mark.parametrize("outcome", ["recomputed", "failed"])
@pytest.mark.parametrize(
    "cause", ["no_room", "cancelled", "restarted", "prompt_logprobs", "unverified", "other"]
)
def test_what_one_request_or_a_short_engine_lost_is_no_evidence(
    outcome: str, cause: str, fleet: Fleet
) -> None:
    fleet.count(outcome, cause, 50)
    assert fleet.look().status is None


def test_one_lost_transfer_is_no_verdict(fleet: Fleet) -> None:
    fleet.count("moved", n=5)
    fleet.look()
    fleet.count("recomputed", "lost")
    assert fleet.look().status is True
    fleet.count("recomputed", "lost")
    assert fleet.look().status is False


def test_a_broken_pair_makes_it_false_though_others_move(fleet: Fleet) -> None:
    for _ in range(4):
        fleet.count("moved", n=100)
        fleet.count("recomputed", "unreachable", n=1, d="demo-decode-1")
        found = fleet.look()
    assert found[:2] == (False, "Unreachable")
    assert f"{P} to demo-decode-1" in found.message
    assert f"{P} to {D}" not in found.message


def test_the_message_names_three_pairs_and_does_not_change_with_the_counts(fleet: Fleet) -> None:
    messages: set[str] = set()
    for _ in range(5):
        for number in range(9):
            fleet.count("recomputed", "key", n=number + 1, d=f"d-{number}")
        messages.add(fleet.look().message)
    [message] = messages
    assert "p" in message
    assert message.count(" to d-") == 3
    assert "and 6 more pairs" in message


def test_a_mended_path_is_true_a_minute_after_the_last_loss(fleet: Fleet) -> None:
    fleet.count("recomputed", "unreachable", 2)
    assert fleet.look().status is False
    found: list[bool | None] = []
    for _ in range(6):
        fleet.count("moved")
        found.append(fleet.look().status)
    assert found == [False, False, False, False, True, True]


def test_a_path_that_works_now_and_then_does_not_flap() -> None:
    for seed in range(20):
        rng, fleet = random.Random(seed), Fleet()
        fleet.look()
        changes, last = 0, None
        for _ in range(400):
            for _ in range(rng.randrange(1, 4)):
                fleet.count(*(("moved", "") if rng.random() < 0.5 else ("recomputed", "lost")))
            status = fleet.look().status
            changes += status != last
            last = status
        assert changes <= 8, seed


def test_false_ends_unknown_without_further_traffic(fleet: Fleet) -> None:
    fleet.count("recomputed", "unreachable", 2)
    statuses = [fleet.look().status for _ in range(30)]
    assert statuses[0] is False
    assert statuses[-1] is None
    assert True not in statuses


def test_probes_show_without_traffic_whether_kv_arrives(fleet: Fleet) -> None:
    fleet.count("probed moved")
    assert fleet.look()[:2] == (True, "Probed")
    fleet.count("probed failed", "unreachable")
    assert fleet.look()[:2] == (True, "Probed"), "one probe may meet a restart"
    fleet.count("probed failed", "unreachable")
    verdict = fleet.look()
    assert verdict[:2] == (False, "Unreachable")
    assert f"{P} to {D}: unreachable" in verdict.message
    fleet.count("probed moved")
    assert fleet.look(after_s=HOLD_S + 1)[:2] == (True, "Probed")


def test_probes_that_work_do_not_hide_a_p_without_requests(fleet: Fleet) -> None:
    found: list[KvVerdict] = []
    for _ in range(20):
        fleet.count("alone", "no_prefill", p="")
        fleet.count("probed moved")
        found.append(fleet.look())
    assert found[-1][:2] == (False, "PrefillIdle")


def test_probes_are_read_from_a_routers_metrics() -> None:
    text = (
        'xpyd_router_kv_probes_total{cause="",decode="d0",outcome="moved",prefill="p0"} 3\n'
        'xpyd_router_kv_probes_total{cause="key",decode="d1",outcome="failed",prefill="p0"} 2.0\n'
    )
    assert read_counts(text) == {
        ("p0", "d0", "probed moved", ""): 3,
        ("p0", "d1", "probed failed", "key"): 2,
    }


def test_a_p_that_gets_no_requests_makes_it_false(fleet: Fleet) -> None:
    fleet.count("alone", "no_prefill", 3, p="")
    found = fleet.look()
    assert found[:2] == (False, "PrefillIdle")
    assert "no Prefill instance was there" in found.message
    fleet.count("moved")
    assert fleet.look().status is True


def test_a_p_that_left_is_told_within_a_minute_though_kv_moved_before(fleet: Fleet) -> None:
    fleet.count("moved", n=9)
    assert fleet.look().status is True
    found: list[bool | None] = []
    for _ in range(4):
        fleet.count("alone", "no_prefill", 3, p="")
        found.append(fleet.look().status)
    assert found[-1] is False


def test_prompts_that_are_all_short_are_as_the_fleet_wants_it(fleet: Fleet) -> None:
    fleet.count("moved")
    found: list[KvVerdict] = []
    for _ in range(30):
        fleet.count("alone", "short_prompt", 9, p="")
        found.append(fleet.look())
    assert [one.status for one in found[:20]] == [True] * 20
    assert found[-1][:2] == (None, "ShortPrompts")
    assert "router.localPrefillTokens" in found[-1].message


@pytest.mark.parametrize("cause", ["short_prompt", "no_prefill"])
@pytest.mark.parametrize(
    ("outcome", "why"),
    [("unreported", ""), ("recomputed", "no_room"), ("failed", "other"), ("alone", "first_token")],
)
def test_requests_that_pairs_served_too_were_not_all_alone(
    cause: str, outcome: str, why: str, fleet: Fleet
) -> None:
    fleet.count("alone", cause, 2, p="")
    fleet.look()
    for _ in range(20):
        fleet.count("alone", cause, 2, p="")
        fleet.count(outcome, why, 100)
        assert fleet.look()[:2] == (None, "NoTraffic")


def test_a_p_that_was_away_long_ago_does_not_count_beside_short_prompts(fleet: Fleet) -> None:
    fleet.count("alone", "no_prefill", 2, p="")
    statuses: list[bool | None] = []
    for _ in range(30):
        fleet.count("alone", "short_prompt", p="")
        statuses.append(fleet.look().status)
    assert statuses[0] is False
    assert statuses[-1] is None


@pytest.mark.parametrize("cause", ["one_token", "echo", "first_token", "aggregated"])
def test_requests_that_need_no_kv_say_nothing(cause: str, fleet: Fleet) -> None:
    fleet.count("alone", cause, 50)
    assert fleet.look().status is None


@pytest.mark.parametrize("moved", [0, 1])
def test_an_engine_with_another_key_makes_it_false_within_a_minute(
    moved: int, fleet: Fleet
) -> None:
    """Also where KV moved before, or others move it: a ready engine gets no requests."""
    found: list[KvVerdict] = []
    for _ in range(4):
        fleet.forge()
        fleet.count("moved", n=moved)
        found.append(fleet.look(has_stranger=True))
    assert found[0].status is (True if moved else None)
    assert found[-1][:2] == (False, "KeyMismatch")
    assert fleet.look(has_stranger=None).status is False, "the router did not answer"
    assert fleet.look(has_stranger=False).status is (True if moved else None)


def test_heartbeats_that_a_stranger_forges_say_nothing_of_the_fleet(fleet: Fleet) -> None:
    for _ in range(20):
        fleet.forge()
        assert fleet.look(has_stranger=False).status is None


def test_two_stray_heartbeats_while_an_engine_joins_say_nothing(fleet: Fleet) -> None:
    for _ in range(2):
        fleet.forge()
        assert fleet.look(after_s=3.0, has_stranger=True).status is None
    for _ in range(10):
        assert fleet.look(has_stranger=True).status is None


def test_what_was_counted_before_the_first_look_is_of_the_past() -> None:
    fleet = Fleet()
    fleet.count("recomputed", "unreachable", 10**6)
    assert fleet.look().status is None
    assert fleet.look().status is None


def test_a_restarted_router_begins_anew_and_a_new_one_counts_from_its_start(fleet: Fleet) -> None:
    fleet.count("moved", n=100)
    assert fleet.look().status is True
    fleet.counts = {(P, D, "recomputed", "key"): 3}
    assert fleet.look()[:2] == (False, "KeyMismatch")
    other: Counts = {(P, "d-9", "recomputed", "key"): 2}
    found = fleet.watch.look({"router-0": fleet.counts, "router-1": other}, fleet.now_s + 1)
    assert "d-9" in found.message


def test_counts_are_read_from_a_routers_metrics() -> None:
    lost = 'cause="key",decode="d",outcome="recomputed",prefill="p"'
    text = "\n".join(
        [
            "# HELP xpyd_router_kv_outcomes_total Tries",
            "# TYPE xpyd_router_kv_outcomes_total counter",
            'xpyd_router_kv_outcomes_total{cause="",decode="d\\"1",outcome="moved",prefill="p"} 7',
            f"xpyd_router_kv_outcomes_total{{{lost}}} 2.0",
            f"xpyd_router_kv_outcomes_total{{{lost}}} x",
            'xpyd_router_heartbeats_total{result="forged"} 3.0',
            'xpyd_router_heartbeats_total{result="new"} 4.0',
        ]
    )
    assert read_counts(text) == {
        ("p", 'd"1', "moved", ""): 7,
        ("p", "d", "recomputed", "key"): 2,
        ("", "", "forged", ""): 3,
    }
    assert read_counts("<html>") == {}


def test_what_a_pod_answers_is_read_in_one_pass() -> None:
    """With a search that goes back, a label of a megabyte took days: the operator stood still."""
    long = "a" * (1 << 20)
    text = f"xpyd_router_kv_outcomes_total{{{long}}} 1\n"
    text += f'xpyd_router_kv_outcomes_total{{prefill="{long}",outcome="moved"}} 2\n'
    assert read_counts(text) == {("", "", "", ""): 1, ("a" * 253, "", "moved", ""): 2}


def test_a_router_that_was_there_before_tells_of_the_past_whenever_it_answers_first() -> None:
    watch = KvWatch()
    watch.keep(["router-0", "router-1", P, D])
    watch.look({"router-0": {}}, 0.0)
    old: Counts = {(P, D, "recomputed", "timeout"): 40}
    assert watch.look({"router-0": {}, "router-1": old}, 15.0).status is None
    more: Counts = {(P, D, "recomputed", "timeout"): 42}
    assert watch.look({"router-0": {}, "router-1": more}, 30.0).status is False


def test_kv_that_a_killed_engine_did_not_send_is_no_fault_of_the_path() -> None:
    watch = KvWatch()
    watch.keep(["router-0", "p-0", "p-1", D])
    watch.look({"router-0": {}}, 0.0)
    counts: Counts = {("p-0", D, "recomputed", "lost"): 2, ("p-1", D, "moved", ""): 9}
    assert watch.look({"router-0": counts}, 15.0).status is False
    watch.keep(["router-0", "p-1", D])
    later: Counts = {**counts, ("p-1", D, "moved", ""): 20}
    assert watch.look({"router-0": later}, 90.0).status is True

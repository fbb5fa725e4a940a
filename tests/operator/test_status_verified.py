"""KVTransferVerified: what follows from the counts of routers over time."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from xpyd_operator.status import verified
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

    def look(
        self,
        *,
        after_s: float = PERIOD_S,
        has_stranger: bool | None = False,
        said: dict[str, Any] | None = None,
        roles: dict[str, str] | None = None,
    ) -> KvVerdict:
        """`said`: what the router answers to GET /instances."""
        self.now_s += after_s
        counts = {"router-0": dict(self.counts)}
        seen = None if said is None else verified.read_seen([json.dumps(said).encode()])
        return self.watch.look(
            counts, self.now_s, has_stranger=has_stranger, seen=seen, roles=roles
        )

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


def problem(cause: str, detail: str) -> dict[str, Any]:
    return {"kv_problems": [{"prefill": P, "decode": D, "cause": cause, "detail": detail}]}


@pytest.mark.parametrize(
    ("cause", "detail", "reason", "fix"),
    [
        ("no_answer", "no_answer at 10.0.0.2:21001", "NoAnswer", "a firewall or NetworkPolicy"),
        ("unreachable", "unreachable at 10.0.0.2:21001", "Unreachable", "kvTransfer.port"),
        ("no_socket", "no_socket at 10.0.0.2:21001", "NoSharedMemory", "kvTransfer.sameHostPath"),
        ("key", "auth at 10.0.0.2:21001", "KeyMismatch", "kvTransfer.keySecretRef"),
        (
            "incompatible",
            "incompatible:tokenizer at 10.0.0.2:21001: tokenizer: P has a, D has b",
            "Incompatible",
            "give both pools the tokenizer files of one checkpoint",
        ),
        (
            "incompatible",
            "incompatible:revision at 10.0.0.2:21001: revision: P has a, D has b",
            "Incompatible",
            "give both pools one revision of the model",
        ),
        (
            "incompatible",
            "incompatible:kv_layout at 10.0.0.2:21001: kv_layout: P has a, D has b",
            "Incompatible",
            "give both pools one KV layout",
        ),
    ],
)
def test_the_message_of_a_failed_probe_has_cause_pair_detail_and_fix(
    cause: str, detail: str, reason: str, fix: str, fleet: Fleet
) -> None:
    fleet.count("probed failed", cause, 2)
    found = fleet.look(said=problem(cause, detail))
    assert found[:2] == (False, reason)
    assert f"{P} to {D}: {cause} ({detail})" in found.message
    assert fix in found.message.partition(" Fix: ")[2]


def test_requests_that_time_out_while_probes_pass_wait_too_short(fleet: Fleet) -> None:
    """A probe that passes says nothing against them, and the message keeps its first number."""
    messages: set[str] = set()
    for number in range(5):
        fleet.count("recomputed", "timeout", 2)
        fleet.count("probed moved")
        slowest = {"prefill": P, "decode": D, "seconds": 3.25 + number}
        found = fleet.look(said={"kv_slowest": slowest})
        assert found[:2] == (False, "WaitTooShort")
        messages.add(found.message)
    [message] = messages
    assert "64 KiB took up to 3.25 s" in message
    assert "raise kvTransfer.waitSeconds" in message
    late = [fleet.look(said={"kv_slowest": slowest}).status for _ in range(3)]
    assert late == [False] * 3
    for _ in range(5):
        fleet.count("probed moved")
        last = fleet.look(said={"kv_slowest": slowest})
    assert last[:2] == (True, "Probed"), "none was late for a minute"


def test_a_probe_that_times_out_is_no_short_wait(fleet: Fleet) -> None:
    fleet.count("probed failed", "timeout", 2)
    said = {**problem("timeout", "timeout"), "kv_slowest": {"seconds": 9.0}}
    assert fleet.look(said=said)[:2] == (False, "Timeout")


def instance(name: str, kind: str, **load: int) -> dict[str, Any]:
    return {"instances": [{"instance": name, "type": kind, "load": load}]}


def test_a_ready_engine_that_no_router_knows_is_named(fleet: Fleet) -> None:
    def look() -> KvVerdict:
        return fleet.look(said=instance(D, "D"), roles={P: "Prefill", D: "Decode"})

    assert look().status is None, "as many as pods, by other names"
    said, roles = instance(D, "D"), {P: "Prefill", D: "Decode"}
    assert fleet.look(has_stranger=True, said=said, roles=roles).status is None
    found = fleet.look(has_stranger=True, said=said, roles=roles)
    assert found[:2] == (False, "NoHeartbeats")
    assert P in found.message
    assert "let its heartbeats reach them" in found.message
    fleet.count("alone", "no_prefill", 2, p="")
    found = fleet.look(has_stranger=True, said=said, roles=roles)
    assert found[:2] == (False, "PrefillIdle")
    assert P in found.message
    fleet.forge()
    fleet.look(has_stranger=True, said=said, roles=roles)
    fleet.forge()
    found = fleet.look(has_stranger=True, said=said, roles=roles)
    assert found[:2] == (False, "KeyMismatch")
    assert P in found.message


def test_an_instance_of_another_role_than_its_pools_is_named(fleet: Fleet) -> None:
    roles = {P: "Prefill"}
    assert fleet.look(said=instance(P, "P"), roles=roles).status is None
    found = fleet.look(said=instance(P, "D"), roles=roles)
    assert found[:2] == (False, "WrongRole")
    assert f"{P} of a Prefill pool says to routers that it is Decode" in found.message
    assert "XPYD_ROLE" in found.message


def test_a_d_without_room_where_no_kv_comes_is_named_with_its_first_numbers(fleet: Fleet) -> None:
    def full(waiting: int) -> dict[str, Any]:
        return instance(D, "D", free_blocks=1, total_blocks=64, running=3, waiting=waiting)

    for _ in range(4):
        fleet.count("moved")
        assert fleet.look(said=full(5)).status is True, "it is busy, and KV comes"
    found = [fleet.look(said=full(5 + number)) for number in range(4)]
    assert found[-1][:2] == (False, "NoRoom")
    assert len({one.message for one in found if one.reason == "NoRoom"}) == 1
    assert f"{D} has 1 of 64 blocks free, runs 3 requests and lets 5 wait" in found[-1].message
    assert "kvTransfer.bufferSize" in found[-1].message
    assert fleet.look(said=full(0)).status is True


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"instances": 3}', b"\xff" * 9])
def test_what_is_no_answer_of_a_router_says_nothing(body: bytes) -> None:
    assert verified.read_seen([body]) is None

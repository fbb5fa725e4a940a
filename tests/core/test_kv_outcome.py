"""The words by which engines and routers say what became of a request's KV."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from xpyd_core.kv_outcome import (
    LOST_CAUSES,
    MAX_PEERS,
    PATH_CAUSES,
    PeerCounts,
    Said,
    cause_of,
    header_of,
    read_header,
)
from xpyd_core.messages import Heartbeat, decode_heartbeat, encode_heartbeat

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("unreachable", "unreachable"),
        ("auth", "key"),
        ("unsigned", "key"),
        ("incompatible:dtype", "incompatible"),
        ("refused:transport", "incompatible"),
        ("refused:quarantine", "broken"),
        ("no_offer", "no_offer"),
        ("peer_lost", "lost"),
        ("digest", "broken"),
        ("pressure", "no_room"),
        ("draining", "cancelled"),
        ("restarted", "restarted"),
        ("unverified", "unverified"),
        ("incompatible:kv_values", "incompatible"),
        ("prompt_logprobs", "prompt_logprobs"),
        ("a word of a newer version", "other"),
        ("", "other"),
    ],
)
def test_a_word_of_an_engine_means_one_of_the_causes(reason: str, cause: str) -> None:
    assert cause_of(reason) == cause
    assert cause in LOST_CAUSES


def test_every_reason_of_the_page_about_faults_has_a_cause_of_its_own() -> None:
    text = (DOCS / "kv-transfer.md").read_text()
    faults = text[text.index("\n## Faults") :]
    table = faults[: faults.index("\nWhere P knows")]
    reasons = re.findall(r"^\| `(\w+)` \|", table, re.M)
    assert len(reasons) > 10
    assert [reason for reason in reasons if cause_of(reason) == "other"] == []


def test_the_causes_are_those_of_the_page_and_path_causes_are_some_of_them() -> None:
    text = (DOCS / "kv-transfer.md").read_text()
    section = text[text.index("\n## What became of the KV") :]
    section = section[: section.index("\n## ", 5)]
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| (yes|no) \|", section, re.M)
    assert [name for name, _ in rows] == list(LOST_CAUSES)
    assert {name for name, is_path in rows if is_path == "yes"} == PATH_CAUSES


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (header_of(""), Said("moved")),
        (header_of("no_offer"), Said("recomputed", "no_offer")),
        (header_of("no_offer", fails=True), Said("failed", "no_offer")),
        ("failed", Said("unreported")),
        ("moved; reason=x", Said("unreported")),
        ("", Said("unreported")),
        ("moved to another town", Said("unreported")),
    ],
)
def test_a_header_is_read_as_it_was_written(value: str, said: Said) -> None:
    assert read_header(value) == said


def test_counts_of_the_latest_peers_are_in_a_heartbeat() -> None:
    counts = PeerCounts()
    for number in range(300):
        counts.count(f"10.0.0.1:{number}", "auth")
    counts.count("10.0.0.1:299", "")
    counts.count("10.0.0.1:295", "unreachable")
    counts.count("10.0.0.1:298", "stopped")  # its request ended as requests do
    beat = Heartbeat(type="P", http_address="h:1", zmq_address="h:2", kv_peers=counts.latest())
    peers = decode_heartbeat(encode_heartbeat(beat)).kv_peers
    assert len(peers) == MAX_PEERS
    assert [peer.peer for peer in peers[:3]] == [f"10.0.0.1:{n}" for n in (295, 299, 298)]
    assert (peers[0].failed, peers[0].last) == ({"key": 1, "unreachable": 1}, "unreachable")
    assert (peers[1].moved, peers[1].failed, peers[1].last) == (1, {"key": 1}, "")
    assert peers[2].failed == {"key": 1}

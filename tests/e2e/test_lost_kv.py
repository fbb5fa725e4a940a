"""Answers stay right where KV does not arrive, so it must show: in the router's access log, in its
metrics and in heartbeats, with the pair and the cause."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.harness import Fleet, Process, empty_fleet, wait_for
from tests.e2e.oracle import Case

pytestmark = pytest.mark.slow
METRIC = "xpyd_router_kv_outcomes_total"


@dataclass
class Lossy:
    """A P, and three Ds: one that P reaches, one behind a firewall, one with another key."""

    fleet: Fleet
    p: Process
    good: Process
    walled: Process
    stranger: Process

    def counted(self, decode: Process) -> dict[tuple[str, str, str], int]:
        """The router's counts of a D, by P, outcome and cause."""
        found: dict[tuple[str, str, str], int] = {}
        for name, value in self.fleet.router.metrics().items():
            if name.startswith(METRIC) and f"decode={decode.name}," in name:
                labels = dict(one.split("=") for one in name[len(METRIC) + 1 : -1].split(","))
                found[labels["prefill"], labels["outcome"], labels["cause"]] = int(value)
        return found

    def lines(self, decode: Process) -> list[dict[str, str]]:
        """The lines of the access log of requests that this D served."""
        lines = [json.loads(line) for line in self.fleet.router.log.splitlines() if line]
        return [line for line in lines if line.get("decode") == decode.name]


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lossy]:
    folder = tmp_path_factory.mktemp("lost-kv")
    ours, other = secrets.token_hex(32), secrets.token_hex(32)
    # Half of a rotation went wrong: the router takes both keys, a D has only the second.
    for name, keys in (("both", (ours, other)), ("ours", (ours,)), ("other", (other,))):
        (folder / name).write_text("\n".join(keys))
        (folder / name).chmod(0o600)

    def env(name: str) -> dict[str, str]:
        return {"XPYD_KV_KEY_FILE": str(folder / name)}

    with empty_fleet(folder) as running:
        flags = ("--on-no-prefill", "PrefillOnDecode", "--log-format", "json")
        running.start_router(*flags, env=env("both"))
        p = running.start_engine("Prefill", env=env("ours"))
        good = running.start_engine("Decode", env=env("ours"))
        # Nothing listens there: what P sees of a firewall that rejects.
        advertised = ("--kv-advertise", f"{running.subnet}.250:21001")
        walled = running.start_engine("Decode", *advertised, env=env("ours"))
        stranger = running.start_engine("Decode", env=env("other"))
        running.wait_ready(p, good, walled, stranger)
        yield Lossy(running, p, good, walled, stranger)


def test_lost_kv_shows_with_pair_and_cause(lossy: Lossy, cases: list[Case]) -> None:
    fleet, p = lossy.fleet, lossy.p
    for case in cases[:6]:
        assert fleet.answer(case) == case.ids
    assert lossy.counted(lossy.good) == {(p.name, "moved", ""): 2}
    assert lossy.counted(lossy.walled) == {(p.name, "recomputed", "unreachable"): 2}
    assert lossy.counted(lossy.stranger) == {(p.name, "recomputed", "key"): 2}
    wait_for("lines of the access log", lambda: len(lossy.lines(lossy.stranger)) == 2)
    shown = {
        (line["decode"], line["kv"], line.get("kv_cause"))
        for decode in (lossy.good, lossy.walled, lossy.stranger)
        for line in lossy.lines(decode)
    }
    assert shown == {
        (lossy.good.name, "moved", None),
        (lossy.walled.name, "recomputed", "unreachable"),
        (lossy.stranger.name, "recomputed", "key"),
    }


def test_heartbeats_carry_what_engines_count_with_each_peer(lossy: Lossy) -> None:
    ip = lossy.fleet.subnet
    peers = {
        f"{lossy.good.ip}:21001": (2, {}),
        f"{ip}.250:21001": (0, {"unreachable": 2}),
        f"{lossy.stranger.ip}:21001": (0, {"key": 2}),
    }

    def said(process: Process) -> dict[str, tuple[int, dict[str, int]]]:
        [row] = [i for i in lossy.fleet.instances() if i["instance"] == process.name]
        return {one["peer"]: (one["moved"], one["failed"]) for one in row["kv"]}

    wait_for("P's word on its peers", lambda: said(lossy.p) == peers)
    p = f"{lossy.p.ip}:21001"
    wait_for("D's word", lambda: said(lossy.good) == {p: (2, {})})
    wait_for("D's word", lambda: said(lossy.walled) == {p: (0, {"not_sent": 2})})


def test_a_request_without_a_p_shows_that_it_was_alone(lossy: Lossy, cases: list[Case]) -> None:
    lossy.p.stop()
    wait_for("a fleet without P", lambda: lossy.p.name not in lossy.fleet.states())
    before = lossy.counted(lossy.good)
    for case in cases[:3]:
        assert lossy.fleet.answer(case) == case.ids
    assert lossy.counted(lossy.good) == {**before, ("", "alone", "no_prefill"): 1}


def test_a_p_makes_the_whole_answers_while_no_d_is_there(tmp_path: Path, cases: list[Case]) -> None:
    """As before the first D, and behind the last one."""
    with empty_fleet(tmp_path) as running:
        running.start_router("--on-no-decode", "DecodeOnPrefill")
        p = running.start_engine("Prefill")
        running.wait_ready(p)
        for case in cases[:4]:
            assert running.answer(case) == case.ids
        d = running.start_engine("Decode")
        running.wait_ready(p, d)
        assert d.metric("xpyd_kv_received_bytes_total") == 0
        for case in cases[:4]:
            assert running.answer(case) == case.ids
        assert d.metric("xpyd_kv_received_bytes_total") > 0
        d.kill()
        for case in cases[:4]:
            assert running.answer(case) == case.ids
        alone = running.router.metric("xpyd_router_no_pair_total{lost=decode,then=alone}")
        assert alone >= 8

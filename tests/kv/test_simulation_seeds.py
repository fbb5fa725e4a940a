"""Thousands of fleets out of seeds: tests/kv/simulation. A failing seed is named and replays."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from tests.kv.simulation.faults import FAULTS, TRICKS
from tests.kv.simulation.plan import Plan, Strike, plan_of, prompt
from tests.kv.simulation.run import SimulationError, lines, run
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.session.settings import KvLimits, KvSettings
from xpyd_kv.wire.messages import MODES, Mode

BATCH = 100


@pytest.fixture(autouse=True)
def no_log(caplog: pytest.LogCaptureFixture) -> None:
    """Lost transfers are the subject here: keeping their log lines would take most of the time."""
    caplog.set_level(logging.ERROR, logger="xpyd_kv")


@cache
def play(first: int) -> tuple[Counter[str], Counter[str]]:
    """What a batch of seeds came to, and what was seen of it."""
    outcomes: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for seed in range(first, first + BATCH):
        outcome = run(plan_of(seed))
        outcomes += outcome.outcomes
        seen += outcome.seen
    return outcomes, seen


@pytest.mark.parametrize("first", range(0, 500, BATCH))
def test_nothing_that_befalls_a_fleet_breaks_an_invariant(first: int) -> None:
    play(first)


def test_who_may_not_be_pulled_yet_waits_as_long_as_those_before_it() -> None:
    """Two that are pulled take all seats while their P is cut off. The third would wait half a
    second for its own KV, which nobody sends before a seat is free."""
    assert run(plan_of(3408)).outcomes["strike:partition"] == 1


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 42_000, 1000))
def test_nothing_that_befalls_many_more_fleets_breaks_an_invariant(first: int) -> None:
    for seed in range(first, first + 1000):
        run(plan_of(seed))


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", range(0, 8000, 2000))
def test_nothing_that_befalls_a_fleet_of_one_mode_breaks_an_invariant(
    first: int, mode: Mode
) -> None:
    for seed in range(first, first + 2000):
        run(plan_of(seed, mode))


def test_the_seeds_strike_with_every_fault_and_land_kv_all_the_same() -> None:
    outcomes: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for first in range(0, 500, BATCH):
        of_batch = play(first)
        outcomes += of_batch[0]
        seen += of_batch[1]
    struck = {name.removeprefix("strike:") for name in outcomes if name.startswith("strike:")}
    assert struck == {*FAULTS, *TRICKS}
    assert outcomes["landed"] > 400
    # Steps that waited for D, to the end or not; KV that P moved out of its blocks.
    assert seen["held"] > 200
    assert seen["held out"] > 10
    assert seen["spilled"] > 10
    assert {"peer_lost", "cancelled", "timeout", "released", "lease_expired"} <= set(outcomes)


def test_a_seed_plays_the_same_run_again_in_another_process() -> None:
    here = lines(run(plan_of(7), keep_all=True).trace)
    assert len(here) > 20
    command = [sys.executable, "-m", "tests.kv.simulation", "7"]
    # Another order of sets and dicts by hash, were there one.
    env = {**os.environ, "PYTHONHASHSEED": "12345"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[: len(here)] == here


def test_a_run_that_fails_names_its_seed_its_strikes_and_its_last_steps() -> None:
    # The transport calls a broken frame intact: the bytes that land are wrong.
    sound = Plan(42, (prompt(0, tuple(range(10))),), (Strike("corrupt", boundary=1),))
    run(sound)
    with pytest.raises(SimulationError) as caught:
        run(replace(sound, vouches=True))
    text = str(caught.value)
    assert "seed 42: AssertionError: DONE over wrong bytes" in text
    assert "replay: .venv/bin/python -m tests.kv.simulation 42" in text
    assert "Strike(fault='corrupt'" in text
    assert "D0.1   reads P0-D0#1 COMMIT" in text


def test_a_cancel_behind_much_queued_data_costs_no_other_transfer() -> None:
    """What the first run of the seeds found: P answered CANCEL when all that had been queued
    before it was sent; by then D had closed the connection, and all other transfers with it."""
    slow = Plan(
        0,
        (
            prompt(0, tuple(range(100)), at_s=0.0, wait_s=60.0, chunk_tokens=100),
            prompt(1, tuple(range(9)), at_s=0.1, wait_s=0.5, chunk_tokens=100),
        ),
        settings=KvSettings(
            KvLimits(ahead_bytes=256, max_held_share=1.0), FrameLimits(1, max_frame_bytes=64)
        ),
        # 75 frames of the first prompt take 7.5 s; CANCEL is answered within 5.
        part_s=0.1,
    )
    outcomes = run(slow).outcomes
    assert outcomes == {"landed": 1, "timeout": 1}

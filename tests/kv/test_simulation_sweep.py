"""One transfer, and every fault before or after every second thing that its connection delivers;
before and after each single one in the soak."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest

from tests.kv.simulation.faults import FAULTS, TRICKS
from tests.kv.simulation.plan import STORES, Plan, Strike, prompt
from tests.kv.simulation.run import Outcome, lines, run
from xpyd_kv.memory.store import StoreLimits
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.session.settings import KvLimits, KvSettings
from xpyd_kv.wire.messages import Mode

# Where the KV lands, when its request comes to D, and what is not as usual.
PLACES: dict[str, tuple[StoreLimits, float | None, Mode, float]] = {
    "direct": (STORES[0], 0.004, "put_async", 1.0),
    "buffer": (STORES[1], 0.004, "put_async", 1.0),
    "deferred": (STORES[3], 0.004, "put_async", 1.0),
    "orphan": (STORES[2], None, "put_async", 1.0),
    "put": (STORES[0], 0.004, "put", 1.0),
    # P may keep nothing in its blocks: the KV moves aside as soon as it is computed.
    "spilled": (STORES[2], 0.04, "get", 0.0),
}
# What passes: the transfer takes longer, or again, and lands.
PASSING = {
    *("hold_to_d", "p_freezes", "d_freezes", "corrupt", "d_fills"),
    *(name for name in TRICKS if not name.startswith("lose")),
}
# D pulls before P could move the KV aside, so that it is over its bound and gives up.
LOST = {("p_freezes", "spilled")}


@pytest.fixture(autouse=True)
def no_log(caplog: pytest.LogCaptureFixture) -> None:
    """Lost transfers are the subject here: keeping their log lines would take most of the time."""
    caplog.set_level(logging.ERROR, logger="xpyd_kv")


def transfer(place: str, *strikes: Strike, **changes: Any) -> Plan:
    """Ten tokens in two chunks, a frame for each layer; the request comes while P computes."""
    store, d_after_s, mode, max_held_share = PLACES[place]
    limits = KvLimits(ahead_bytes=1, max_held_share=max_held_share)
    one = prompt(0, tuple(range(10)), **{"d_after_s": d_after_s, "wait_s": 10.0, **changes})
    return Plan(
        seed=1,
        prompts=(one,),
        strikes=strikes,
        settings=KvSettings(limits, FrameLimits(group_bytes=1), store, mode),
        frame_parts=1,
        is_ordered=not any(strike.fault in TRICKS for strike in strikes),
    )


@cache
def undisturbed(place: str) -> Outcome:
    return run(transfer(place))


@pytest.mark.parametrize("place", PLACES)
def test_an_undisturbed_transfer_lands(place: str) -> None:
    outcome = undisturbed(place)
    assert outcome.outcomes == ({} if place == "orphan" else {"landed": 1})
    assert outcome.seen["spilled"] == (place == "spilled")
    # The handshake, OFFER, GRANT, frames in two pieces each, COMMIT, DONE at least. What has piled
    # up goes in fewer frames than the six of the layers of two chunks.
    assert outcome.boundaries >= (9 if place in ("put", "spilled") else 17)


FAULTS_AND_TRICKS = [*FAULTS, *TRICKS]


def strike_deliveries(fault: str, place: str, *sides: str, step: int = 1) -> None:
    """One run for each delivery, or for some of them, struck on these sides of it by turns."""
    # Faults by turns, so that each delivery is struck by half of them.
    first = 1 + FAULTS_AND_TRICKS.index(fault) % step
    for number, boundary in enumerate(range(first, undisturbed(place).boundaries + 1, step)):
        when = sides[number % len(sides)]
        outcome = run(transfer(place, Strike(fault, boundary=boundary, when=when)))
        if fault in PASSING and (fault, place) not in LOST and place != "orphan":
            assert outcome.outcomes["landed"] == 1, (boundary, when, outcome.outcomes)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fault", FAULTS_AND_TRICKS)
def test_a_fault_before_or_after_a_delivery_ends_the_transfer_cleanly(
    fault: str, place: str
) -> None:
    strike_deliveries(fault, place, "after", "before", step=2)


@pytest.mark.soak
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fault", FAULTS_AND_TRICKS)
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_fault_on_each_side_of_any_delivery_ends_the_transfer_cleanly(
    fault: str, place: str, side: str
) -> None:
    strike_deliveries(fault, place, side)


def test_a_frame_that_outlives_its_epoch_costs_the_next_one_nothing() -> None:
    again = 0
    for at in range(2, undisturbed("direct").boundaries):
        for later in range(at, at + 6):
            strikes = (
                Strike("linger_to_d", boundary=at),
                Strike("p_preempts", boundary=later, when="after"),
            )
            # The request comes when all is over: until then P may offer anew.
            plan = transfer("direct", *strikes, d_after_s=3.0)
            outcome = run(plan, keep_all=True)
            again += any("epoch=1 frames" in line for line in lines(outcome.trace))
            assert outcome.outcomes["landed"] == 1, (at, later, outcome.outcomes)
    assert again > 5


@pytest.mark.soak
@pytest.mark.parametrize("first", FAULTS_AND_TRICKS)
def test_two_faults_at_any_two_deliveries_end_the_transfer_cleanly(first: str) -> None:
    boundaries = undisturbed("buffer").boundaries
    for second in FAULTS_AND_TRICKS:
        for one in range(1, boundaries + 1, 2):
            for other in range(one, boundaries + 1, 2):
                strikes = (
                    Strike(first, boundary=one),
                    Strike(second, boundary=other, when="after"),
                )
                run(transfer("buffer", *strikes))

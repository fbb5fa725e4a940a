"""How much of prompts a step has beside decodes: bounded by time, as measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.worker.engine_driver import (
    DRAFTS,
    MODEL_DRAFTS,
    EngineDriver,
    make_request,
    prompt_of,
)
from xpyd_worker.engine.executor import StepInput, StepOutput
from xpyd_worker.engine.scheduler import Scheduler
from xpyd_worker.engine.sequences import ScheduledStep
from xpyd_worker.engine.speculation import SpeculativeConfig
from xpyd_worker.engine.step_times import LEAST_TOKENS, STRETCH, StepTimes

DECODE_S, TOKEN_S = 0.050, 0.001


def known(*, alone_s: float = DECODE_S, token_s: float = TOKEN_S, decodes: int = 4) -> StepTimes:
    times = StepTimes()
    times.measured(100 * token_s, decodes=0, prompt_tokens=100)
    times.measured(alone_s, decodes=decodes, prompt_tokens=0)
    return times


def test_a_step_has_as_much_of_prompts_as_its_decodes_can_wait_for():
    assert known().prompt_tokens(4) == pytest.approx((STRETCH - 1) * DECODE_S / TOKEN_S, abs=1)


def test_without_decodes_nobody_waits():
    assert known().prompt_tokens(0) is None


def test_prompts_go_on_however_slow_they_are():
    assert known(token_s=1.0).prompt_tokens(4) == LEAST_TOKENS
    assert known(token_s=0.0).prompt_tokens(4) is not None


def test_a_goal_of_the_first_token_sets_no_bound():
    times = StepTimes(None)
    times.measured(0.1, decodes=4, prompt_tokens=0)
    assert times.prompt_tokens(4) is None


def test_what_decodes_take_alone_is_measured_first_and_again_later():
    times = StepTimes()
    assert times.prompt_tokens(4) == 0
    times.measured(DECODE_S, decodes=4, prompt_tokens=0)
    # How long a prompt takes is not known yet: the next step shows it.
    assert times.prompt_tokens(4) is None
    for _ in range(63):
        times.measured(0.2, decodes=4, prompt_tokens=100)
        assert times.prompt_tokens(4)
    times.measured(0.2, decodes=4, prompt_tokens=100)
    assert times.prompt_tokens(4) == 0


def test_it_is_asked_for_a_few_times_where_there_is_no_such_step():
    times = StepTimes()
    assert [times.prompt_tokens(4) for _ in range(6)] == [0, 0, 0, 0, None, None]
    for _ in range(64):
        times.measured(0.2, decodes=4, prompt_tokens=1)
    assert times.prompt_tokens(4) == 0


def test_prompts_that_take_longer_get_less():
    times = known()
    before = times.prompt_tokens(4)
    for _ in range(40):
        times.measured(DECODE_S + 50 * 2 * TOKEN_S, decodes=4, prompt_tokens=50)
    assert before is not None
    assert times.prompt_tokens(4) == pytest.approx(before / 2, rel=0.05)


def test_each_number_of_decodes_has_a_time_of_its_own():
    times = known(decodes=4)
    times.measured(4 * DECODE_S, decodes=32, prompt_tokens=0)
    few, many = times.prompt_tokens(4), times.prompt_tokens(40)
    assert few is not None
    assert many == pytest.approx(4 * few, abs=4)


def test_few_decodes_wait_as_long_as_the_many_that_are_coming_will():
    times = known(decodes=1)
    times.measured(3 * DECODE_S, decodes=8, prompt_tokens=0)
    times.measured(9 * DECODE_S, decodes=32, prompt_tokens=0)
    alone, with_eight = times.prompt_tokens(1), times.prompt_tokens(1, 7)
    assert alone == pytest.approx((STRETCH - 1) * DECODE_S / TOKEN_S, abs=1)
    assert with_eight == pytest.approx((3 * STRETCH - 1) * DECODE_S / TOKEN_S, abs=1)
    # Sixteen were not measured: as of eight.
    assert times.prompt_tokens(1, 15) == with_eight


def test_of_more_than_were_measured_each_takes_what_a_token_of_a_prompt_does():
    """Else the first burst of an engine's life would wait for its prompts one by one."""
    times = known(decodes=1)
    expected = (STRETCH * (DECODE_S + 31 * TOKEN_S) - DECODE_S) / TOKEN_S
    assert times.prompt_tokens(1, 31) == pytest.approx(expected, abs=1)
    # Once they were measured that counts, though it is less.
    times.measured(DECODE_S + 10 * TOKEN_S, decodes=32, prompt_tokens=0)
    assert times.prompt_tokens(1, 31) == pytest.approx(expected - STRETCH * 21, abs=1)


def driven(
    goal: str, speculative: SpeculativeConfig | None = None
) -> tuple[EngineDriver, list[tuple[int, int]]]:
    """Four decodes run, then a prompt of 120 tokens comes; decodes and tokens of it by step."""
    driver = EngineDriver(
        blocks=256,
        budget=128,
        seqs=8,
        goal="itl" if goal == "itl" else "ttft",
        speculative=speculative,
    )

    def takes(step: StepInput) -> None:
        prompts = sum(len(s.token_ids) for s in step.sequences if len(s.token_ids) > 1 + s.drafts)
        driver.now += DECODE_S + prompts * TOKEN_S

    driver.executor.during = takes
    for number in range(4):
        prompt = prompt_of(40, number)
        driver.submit(make_request(f"r{number}", prompt, top_k=1, max_tokens=60, ignore_eos=True))
    driver.turns(8)
    begun = len(driver.executor.steps)
    driver.submit(make_request("long", prompt_of(120, 9), max_tokens=2, ignore_eos=True))
    driver.turns(8)
    found: list[tuple[int, int]] = []
    for step in driver.executor.steps[begun:]:
        sizes = {s.log_id: len(s.token_ids) for s in step.sequences}
        found.append((sum(name != "long" for name in sizes), sizes.get("long", 0)))
    driver.run()
    for name in driver.requests:
        driver.assert_as_alone(name)
    driver.assert_all_blocks_free()
    return driver, found


@pytest.mark.parametrize("speculative", [None, DRAFTS])
def test_a_long_prompt_comes_in_parts_that_decodes_can_wait_for(
    speculative: SpeculativeConfig | None,
):
    driver, steps = driven("itl", speculative)
    assert (driver.core.stats().spec_drafts > 0) == (speculative is not None)
    assert all(decodes == 4 for decodes, _ in steps)
    parts = [tokens for _, tokens in steps if tokens > 1]
    assert sum(parts) == 120
    assert max(parts) <= (STRETCH - 1) * DECODE_S / TOKEN_S + 1
    assert len(parts) <= 3


def test_steps_with_drafts_are_measured_like_others(monkeypatch: pytest.MonkeyPatch):
    measured: list[float] = []
    inner = StepTimes.measured

    def spied(times: StepTimes, seconds: float, *, decodes: int, prompt_tokens: int) -> None:
        measured.append(seconds)
        inner(times, seconds, decodes=decodes, prompt_tokens=prompt_tokens)

    monkeypatch.setattr(StepTimes, "measured", spied)
    driver, _ = driven("itl", DRAFTS)
    assert any(one.drafts for step in driver.executor.steps for one in step.sequences)
    assert len(measured) == len(driver.executor.steps)


def test_steps_behind_which_a_model_takes_prompts_in_are_not_measured(
    monkeypatch: pytest.MonkeyPatch,
):
    """It has no draft for them then; what decodes take alone would seem to be more."""
    given: list[bool] = []
    update, measured = Scheduler.update, StepTimes.measured
    seen: list[float] = []

    def updated(
        scheduler: Scheduler, step: ScheduledStep, result: StepOutput, seconds: float = 0.0
    ) -> None:
        asked = [part.sequence.seq_id for part in step.parts if part.scheduled.propose]
        if len(given) % 3 == 1 and asked:
            result = replace(result, proposals={})
        given.append({*asked} <= result.proposals.keys())
        update(scheduler, step, result, seconds)

    def spied(times: StepTimes, seconds: float, **kinds: int) -> None:
        seen.append(seconds)
        measured(times, seconds, **kinds)

    monkeypatch.setattr(Scheduler, "update", updated)
    monkeypatch.setattr(StepTimes, "measured", spied)
    driven("itl", MODEL_DRAFTS)
    assert given.count(False) > 3
    assert len(seen) == given.count(True)


def test_where_the_first_token_matters_more_it_comes_whole():
    _, steps = driven("ttft")
    assert [tokens for _, tokens in steps][:2] == [120, 1]

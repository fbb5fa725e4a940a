"""Whom the scheduler prefers: by priority, by arrival, and decodes before another's prompt."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker.engine_driver import EngineDriver, make_request, prompt_of
from tests.worker.engine_fakes import BLOCK, alone
from xpyd_core.request_id import TransferKey
from xpyd_worker.engine.request import ReceiveFrom, SchedulerConfig


def names(driver: EngineDriver) -> list[list[str]]:
    """Whose sequences each step has."""
    return [[s.log_id for s in step.sequences] for step in driver.executor.steps]


def counts(driver: EngineDriver) -> list[dict[str, int]]:
    """Tokens of each request in each step."""
    return [{s.log_id: len(s.token_ids) for s in step.sequences} for step in driver.executor.steps]


# --- priority


def test_by_priority_the_lowest_number_starts_first_and_ties_start_as_they_came():
    driver = EngineDriver(seqs=1, policy="priority")
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -7), ("e", 0)):
        driver.submit(make_request(name, prompt_of(3), max_tokens=1, priority=priority))
    driver.run()
    assert names(driver) == [["d"], ["b"], ["e"], ["a"], ["c"]]


def test_first_come_first_served_does_not_look_at_priorities():
    driver = EngineDriver(seqs=1)
    for name, priority in (("a", 1), ("b", -9), ("c", 0)):
        driver.submit(make_request(name, prompt_of(3), max_tokens=1, priority=priority))
    driver.run()
    assert names(driver) == [["a"], ["b"], ["c"]]


def test_a_running_request_is_not_thrown_out_for_one_of_higher_priority():
    driver = EngineDriver(seqs=1, policy="priority")
    driver.submit(make_request("low", prompt_of(3), max_tokens=5, ignore_eos=True, priority=5))
    driver.turns(1)
    driver.submit(make_request("high", prompt_of(3), max_tokens=1, priority=0))
    driver.run()
    assert names(driver) == [["low"]] * 5 + [["high"]]


def test_the_lowest_priority_is_preempted_first_then_the_last_come():
    driver = EngineDriver(blocks=12, budget=64, policy="priority")
    for name, first, priority in (("low", 1, 2), ("old", 9, 1), ("new", 17, 1), ("high", 25, 0)):
        driver.submit(
            make_request(
                name, prompt_of(8, first), max_tokens=14, ignore_eos=True, priority=priority
            )
        )
    seen: list[str] = []
    gone: list[str] = []
    for _ in range(40):
        before = driver.core.stats().preemptions
        driver.turns(1)
        now = [name for name in names(driver)[-1] if not driver.finished(name)]
        if driver.core.stats().preemptions > before:
            gone += [name for name in seen if name not in now and not driver.finished(name)]
        seen = now
    assert gone[:2] == ["low", "new"]
    driver.run()
    for name in driver.requests:
        driver.assert_as_alone(name)
    driver.assert_all_blocks_free()


def test_a_preempted_request_goes_back_behind_those_of_higher_priority():
    driver = EngineDriver(blocks=6, seqs=2, budget=64, policy="priority")
    for name, first, priority in (("low", 1, 5), ("mid", 9, 3)):
        prompt = prompt_of(8, first)
        driver.submit(make_request(name, prompt, max_tokens=12, ignore_eos=True, priority=priority))
    driver.turns(1)
    driver.submit(make_request("high", prompt_of(8, 17), max_tokens=2, priority=1))
    driver.run()
    assert driver.core.stats().preemptions > 0
    order = [name for step in names(driver)[1:] for name in step]
    restarted = [
        index
        for index, step in enumerate(driver.executor.steps)
        for s in step.sequences
        if s.log_id == "low" and len(s.token_ids) > 1 and index
    ]
    high = next(index for index, step in enumerate(names(driver)) if "high" in step)
    assert "high" in order
    assert high < restarted[0]
    for name in driver.requests:
        driver.assert_as_alone(name)


def test_under_fcfs_the_last_come_is_preempted_though_it_started_first():
    driver = EngineDriver(blocks=6, budget=64, receives=True)
    assert driver.consumer is not None
    key = TransferKey("a" * 32, 0)
    prompt = prompt_of(8)
    transfer = ReceiveFrom(key, 50.0)
    driver.consumer.arrive(key, prompt, "direct")
    driver.submit(make_request("old", prompt, max_tokens=12, ignore_eos=True, transfer=transfer))
    driver.submit(make_request("new", prompt_of(8, 9), max_tokens=12, ignore_eos=True))
    driver.turns(2)
    assert names(driver) == [["new"], ["new"]]
    driver.consumer.land(key)
    driver.run()
    assert driver.core.stats().preemptions > 0
    assert driver.core.stats().kv_recomputed == {}
    for name in driver.requests:
        driver.assert_as_alone(name)
    driver.assert_all_blocks_free()


# --- the budget


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_long_prompt_takes_no_decodes_turn_whatever_its_rank(policy: Any):
    driver = EngineDriver(blocks=64, budget=8, seqs=8, policy=policy)
    for number in range(4):
        prompt = prompt_of(1, number)
        driver.submit(make_request(f"r{number}", prompt, max_tokens=30, ignore_eos=True))
    driver.turns(1)
    driver.submit(make_request("long", prompt_of(40, 9), max_tokens=1, priority=-1))
    driver.turns(10)
    chunks = counts(driver)[1:]
    assert [step.get("long") for step in chunks] == [4] * 10
    assert all(step[f"r{number}"] == 1 for step in chunks for number in range(4))


def test_with_a_threshold_a_second_prompt_runs_beside_a_long_one():
    driver = EngineDriver(budget=12, threshold=5)
    driver.submit(make_request("long", prompt_of(25), max_tokens=1))
    driver.submit(make_request("short", prompt_of(6, 9), max_tokens=2, ignore_eos=True))
    driver.run()
    assert counts(driver)[:3] == [
        {"long": 5, "short": 5},
        {"long": 5, "short": 1},
        {"long": 5, "short": 1},
    ]
    for name in driver.requests:
        driver.assert_as_alone(name)


def test_a_threshold_below_nothing_is_refused():
    with pytest.raises(ValueError, match="threshold"):
        SchedulerConfig(8, 32, long_prefill_token_threshold=-1)


# --- the prefix cache


def test_a_prompt_hits_the_chunks_that_another_has_computed_so_far():
    driver = EngineDriver(budget=BLOCK, seqs=4, threshold=BLOCK - 1)
    shared = prompt_of(5 * BLOCK)
    driver.submit(make_request("a", [*shared, 5], max_tokens=1))
    driver.turns(3)  # 3 tokens each: two blocks are full, the third is not
    driver.submit(make_request("b", [*shared, 6], max_tokens=1))
    driver.turns(1)
    start = next(s.start for s in driver.executor.steps[-1].sequences if s.log_id == "b")
    assert start == 2 * BLOCK
    driver.run()
    assert driver.outputs["b"][-1].cached_tokens == 2 * BLOCK
    for name in driver.requests:
        driver.assert_as_alone(name)


def test_a_preempted_request_hits_what_it_had_computed():
    driver = EngineDriver(blocks=6, budget=64)
    driver.submit(make_request("old", prompt_of(8), max_tokens=12, ignore_eos=True))
    driver.submit(make_request("new", prompt_of(8, 9), max_tokens=2, ignore_eos=True))
    driver.turns(1)
    driver.submit(make_request("other", prompt_of(7, 17), max_tokens=12, ignore_eos=True))
    driver.run()
    starts = [s.start for step in driver.executor.steps for s in step.sequences]
    assert driver.core.stats().preemptions > 0
    assert any(start and start % BLOCK == 0 for start in starts)
    for name in driver.requests:
        driver.assert_as_alone(name)


def test_a_salt_is_a_cache_of_its_own():
    driver = EngineDriver()
    for name, salt in (("a", b""), ("b", b"x"), ("c", b"x"), ("d", b"")):
        driver.submit(make_request(name, prompt_of(9), max_tokens=1, cache_salt=salt))
        driver.run()
    cached = [driver.outputs[name][-1].cached_tokens for name in "abcd"]
    assert cached == [0, 0, 2 * BLOCK, 2 * BLOCK]


def test_hits_are_counted_against_what_was_looked_up():
    driver = EngineDriver()
    for name in ("a", "b"):
        driver.submit(make_request(name, prompt_of(9), max_tokens=1))
        driver.run()
    driver.submit(make_request("c", prompt_of(9), max_tokens=1, prompt_logprobs=0))
    driver.run()
    stats = driver.core.stats()
    assert (stats.prefix_hit_tokens, stats.prefix_query_tokens) == (2 * BLOCK, 18)


def test_without_a_cache_nothing_is_looked_up():
    driver = EngineDriver(caching=False)
    driver.submit(make_request("a", prompt_of(9), max_tokens=1))
    driver.run()
    assert driver.core.stats().prefix_query_tokens == 0


def reset(driver: EngineDriver) -> bool:
    answers: list[bool] = []
    driver.core.reset_prefix_cache(answers.append)
    assert answers == [], "the engine's thread answers"
    driver.turns(1)
    (answer,) = answers
    return answer


def test_after_a_reset_nothing_hits():
    driver = EngineDriver()
    driver.submit(make_request("a", prompt_of(9), max_tokens=1))
    driver.run()
    assert reset(driver)
    driver.submit(make_request("b", prompt_of(9), max_tokens=1))
    driver.run()
    assert driver.outputs["b"][-1].cached_tokens == 0
    driver.submit(make_request("c", prompt_of(9), max_tokens=1))
    driver.run()
    assert driver.outputs["c"][-1].cached_tokens == 2 * BLOCK


def test_a_reset_says_that_running_requests_keep_their_blocks_cached():
    driver = EngineDriver(budget=64)
    driver.submit(make_request("done", prompt_of(9, 5), max_tokens=1))
    driver.run()
    driver.submit(make_request("a", prompt_of(9), max_tokens=6, ignore_eos=True))
    driver.turns(1)
    assert not reset(driver)
    for name, prompt in (("b", prompt_of(9)), ("again", prompt_of(9, 5))):
        driver.submit(make_request(name, prompt, max_tokens=1))
    driver.run()
    assert driver.outputs["b"][-1].cached_tokens == 2 * BLOCK
    assert driver.outputs["again"][-1].cached_tokens == 0
    assert driver.tokens("a") == alone(driver.requests["a"], driver.model_len)[0][0]
    assert reset(driver)
    driver.assert_all_blocks_free()


def test_an_engine_that_has_ended_answers_a_reset_at_once():
    driver = EngineDriver()
    driver.core.start()
    driver.core.stop(5.0)
    answers: list[bool] = []
    driver.core.reset_prefix_cache(answers.append)
    assert answers == [False]

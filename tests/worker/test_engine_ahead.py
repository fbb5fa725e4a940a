"""The engine runs one step ahead of an executor that takes two: who takes part, and who waits.

The walks (test_engine_walks, test_scheduler_walks, test_engine_soak) go over the same with depth 2;
here is each rule by itself.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker.engine_driver import (
    EngineDriver,
    StepFailed,
    make_request,
    prompt_of,
    prompt_that_draws,
)
from tests.worker.engine_fakes import BLOCK, EOS
from xpyd_core.request_id import Address, TransferKey
from xpyd_worker.engine.executor import DRAWN_BEFORE, StepInput
from xpyd_worker.engine.request import EngineRequest, SendTo


def under_way(driver: EngineDriver) -> list[StepInput]:
    return list(driver.executor.launched)


def submit(driver: EngineDriver, name: str = "r", **options: Any) -> EngineRequest:
    """A request that does not end by itself before its max_tokens."""
    prompt = prompt_of(6, first=1 + len(driver.requests))
    request = make_request(name, prompt, ignore_eos=True, **options)
    return driver.submit(request)


def test_the_next_step_is_launched_before_the_last_one_is_waited_for() -> None:
    driver = EngineDriver(depth=2)
    submit(driver)
    driver.turns(1)
    assert [step.sequences[0].token_ids for step in under_way(driver)] == [tuple(prompt_of(6))]
    assert driver.tokens("r") == []
    driver.turns(1)
    (ahead,) = under_way(driver)
    assert ahead.sequences[0].token_ids == (DRAWN_BEFORE,)
    assert ahead.sequences[0].samples[0].position == 1
    assert len(driver.tokens("r")) == 1
    driver.run()
    driver.assert_as_alone("r")


def test_chunks_of_a_prompt_follow_each_other_without_a_wait() -> None:
    driver = EngineDriver(depth=2, budget=4, seqs=4)
    driver.submit(make_request("r", prompt_of(11), ignore_eos=True))
    driver.turns(4)
    launched = [step.sequences[0] for step in driver.executor.steps]
    assert [(s.start, len(s.token_ids)) for s in launched] == [(0, 4), (4, 4), (8, 3), (11, 1)]
    assert launched[3].token_ids == (DRAWN_BEFORE,)
    driver.run()
    driver.assert_as_alone("r")


def test_nobody_takes_part_behind_its_last_token_by_length() -> None:
    driver = EngineDriver(depth=2)
    submit(driver, max_tokens=3)
    driver.run()
    assert [len(step.sequences) for step in driver.executor.steps] == [1, 1, 1]
    driver.assert_as_alone("r")


def test_who_draws_eos_has_taken_part_once_more_and_puts_out_nothing_behind_it() -> None:
    driver = EngineDriver(depth=2)
    driver.submit(make_request("r", prompt_that_draws(EOS)))
    driver.turns(2)
    assert driver.reasons("r") == {0: "stop"}
    assert len(under_way(driver)) == 1
    assert not driver.core.is_idle()
    driver.run()
    assert driver.tokens("r") == [EOS]
    assert driver.core.is_idle()


def test_blocks_stay_until_the_step_that_writes_to_them_is_over() -> None:
    driver = EngineDriver(depth=2)
    driver.submit(make_request("r", prompt_that_draws(EOS, length=2 * BLOCK)))
    driver.turns(2)
    assert driver.finished("r")
    held = under_way(driver)[0].sequences[0].block_ids
    assert [driver.pool.references(block) for block in held] == [1] * len(held)
    driver.turns(1)
    driver.assert_all_blocks_free()


def test_blocks_of_an_aborted_request_stay_until_its_step_is_over() -> None:
    driver = EngineDriver(depth=2)
    submit(driver)
    driver.turns(3)
    driver.core.abort("r")
    driver.core.turn()
    driver.run()
    driver.assert_all_blocks_free()
    assert driver.core.is_idle()


@pytest.mark.parametrize(
    "options", [{"presence_penalty": 0.5}, {"bad_words": ((5,),)}, {"repetition_penalty": 1.2}]
)
def test_a_draw_that_reads_earlier_tokens_keeps_the_engine_from_running_ahead(
    options: dict[str, object],
) -> None:
    driver = EngineDriver(depth=2)
    submit(driver, "reads", **options)
    submit(driver, "other")
    driver.run()
    ids = [s.token_ids for step in driver.executor.steps for s in step.sequences]
    assert (DRAWN_BEFORE,) not in ids
    for name in ("reads", "other"):
        driver.assert_as_alone(name)


def test_a_fork_is_waited_for_and_then_it_runs_ahead_again() -> None:
    driver = EngineDriver(depth=2)
    submit(driver, n=3, max_tokens=9)
    driver.run()
    driver.assert_as_alone("r")
    assert [(DRAWN_BEFORE,) in _ids(step) for step in driver.executor.steps[:4]] == [
        *(False, False),
        *(True, True),
    ]


def test_chunks_of_a_prompt_that_is_scored_follow_each_other_without_a_wait() -> None:
    driver = EngineDriver(depth=2, budget=8)
    request = submit(driver, prompt_logprobs=1, max_tokens=6)
    long = driver.submit(make_request("long", prompt_of(21), ignore_eos=True, prompt_logprobs=0))
    driver.run()
    for one in (request, long):
        driver.assert_as_alone(one.request_id)
        (scored,) = (o.prompt_logprobs for o in driver.outputs[one.request_id] if o.prompt_logprobs)
        assert [s and s.token_id for s in scored] == [None, *one.prompt[1:]]


def test_who_lacks_a_block_waits_for_the_step_under_way_before_anyone_is_preempted() -> None:
    """Two fill the pool; the one that ends in the step under way makes room for the other."""
    driver = EngineDriver(depth=2, blocks=4)
    driver.submit(make_request("ends", prompt_of(BLOCK), max_tokens=4, ignore_eos=True))
    driver.submit(make_request("goes on", prompt_of(BLOCK, 2), max_tokens=6, ignore_eos=True))
    driver.run()
    assert driver.core.stats().preemptions == 0
    for name in ("ends", "goes on"):
        driver.assert_as_alone(name)


def test_a_choice_that_is_ended_while_its_token_is_drawn_gets_none() -> None:
    driver = EngineDriver(depth=2)
    submit(driver, n=3, max_tokens=4)
    driver.turns(1)
    driver.core.abort("r", (1,))
    driver.run()
    assert driver.tokens("r", 1) == []
    assert [len(driver.tokens("r", choice)) for choice in (0, 2)] == [4, 4]
    driver.assert_begins_as_alone("r")
    driver.assert_all_blocks_free()


def test_a_sender_takes_one_step_at_a_time() -> None:
    driver = EngineDriver(depth=2, sends=True)
    key = TransferKey("0" * 32, 0)
    send = SendTo(key, Address("127.0.0.1", 21001), 6, True)
    submit(driver, transfer=send)
    driver.turns(1)
    assert under_way(driver) == []
    driver.run()
    driver.assert_as_alone("r")


@pytest.mark.parametrize("where", ["fail_with", "refuse_with"])
def test_a_failed_step_ends_its_requests_and_the_one_behind_it_does_no_harm(where: str) -> None:
    driver = EngineDriver(depth=2)
    submit(driver, "r")
    driver.turns(2)
    setattr(driver.executor, where, StepFailed("out of luck"))
    submit(driver, "later")
    driver.run()
    assert driver.reasons("r") == {0: "error"}
    assert driver.outputs["r"][-1].error == "the step failed: out of luck"
    driver.assert_all_blocks_free()
    assert driver.core.is_idle()


def test_a_sequence_that_nothing_can_be_drawn_for_fails_alone_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = EngineDriver(depth=2)
    submit(driver, "unlucky", n=2)
    submit(driver, "other")
    driver.turns(3)
    driver.executor.unlucky.add("unlucky")
    driver.run()
    assert driver.reasons("unlucky") == {0: "error", 1: "error"}
    assert driver.outputs["unlucky"][-1].error == "the step failed: no token"
    assert {r.levelname for r in caplog.records if r.getMessage().endswith(": no token")} == {
        "ERROR"
    }
    driver.assert_as_alone("other")
    driver.assert_all_blocks_free()


def _ids(step: StepInput) -> list[tuple[int, ...]]:
    return [sequence.token_ids for sequence in step.sequences]

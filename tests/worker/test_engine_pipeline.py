"""As many steps under way as a pipeline has stages: who takes part in which, and what it brings.

The walks (test_engine_walks, test_scheduler_walks, test_engine_soak) go over the same at random.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker.engine_driver import EngineDriver, StepFailed, make_request, prompt_of
from tests.worker.engine_fakes import BLOCK
from tests.worker.timed_pipeline import timed
from xpyd_core.request_id import Address, TransferKey
from xpyd_worker.engine.executor import StepInput
from xpyd_worker.engine.request import EngineRequest, SendTo
from xpyd_worker.engine.scheduler import decodes_per_step

SEND = SendTo(TransferKey("0" * 32, 0), Address("127.0.0.1", 21001), 11, False)


def pipeline(stages: int = 4, **options: Any) -> EngineDriver:
    return EngineDriver(depth=stages, draws_ahead=False, **options)


def submit(driver: EngineDriver, name: str = "r", length: int = 6, **options: Any) -> EngineRequest:
    """A request that does not end by itself before its max_tokens."""
    prompt = prompt_of(length, first=1 + len(driver.requests))
    request = make_request(name, prompt, ignore_eos=True, **options)
    return driver.submit(request)


def shares(step: StepInput) -> dict[str, int]:
    return {sequence.log_id: len(sequence.token_ids) for sequence in step.sequences}


# --- time


@pytest.mark.parametrize(
    ("stages", "batches", "bubble"),
    [(4, 1, 0.75), (4, 4, 0.429), (4, 8, 0.273), (4, 16, 0.158), (8, 1, 0.875)],
)
def test_the_bubble_is_the_time_to_fill_the_stages(stages: int, batches: int, bubble: float):
    """A prompt of so many chunks: all stages have done them after stages + batches - 1 turns.

    Article fact 46.
    """
    driver, executor = timed(stages, budget=8, blocks=64)
    submit(driver, length=8 * batches, max_tokens=1)
    driver.run()
    assert driver.now == 10 * (stages + batches - 1)
    assert round(executor.bubble(), 3) == bubble
    driver.assert_as_alone("r")


def test_a_stage_begins_each_batch_as_soon_as_the_stage_before_is_done():
    """Article fact 46."""
    driver, executor = timed(4, budget=8)
    submit(driver, length=32, max_tokens=1)
    driver.run()
    for stage, spans in enumerate(executor.spans):
        assert spans == [(10 * (stage + m), 10 * (stage + m) + 10) for m in range(4)]


def test_without_the_queue_each_batch_takes_the_whole_pipeline():
    driver, executor = timed(4, queue=False, budget=8)
    submit(driver, length=32, max_tokens=1)
    driver.run()
    assert driver.now == 10 * 4 * 4
    assert executor.bubble() == 0.75


def test_a_single_request_ends_though_the_queue_never_fills():
    """Article fact 44."""
    driver, executor = timed(4)
    submit(driver, max_tokens=5)
    driver.run()
    assert driver.now == 5 * 40
    assert executor.waited_with == [1] * 5
    driver.assert_as_alone("r")


def test_who_comes_while_a_prompt_is_alone_in_the_pipeline_follows_it_at_once():
    driver, executor = timed(4)
    submit(driver, "first", max_tokens=1)
    executor.arrivals.append((3.0, lambda: submit(driver, "second", max_tokens=1)))
    driver.run()
    assert executor.spans[0] == [(0.0, 10.0), (10.0, 20.0)]
    assert driver.now == 50.0
    driver.assert_as_alone("first")
    driver.assert_as_alone("second")


@pytest.mark.parametrize("decodes", [4, 8, 9, 11])
def test_decodes_fill_the_pipeline_in_even_shares(decodes: int):
    driver, executor = timed(4, seqs=16, budget=128, blocks=128)
    for n in range(decodes):
        submit(driver, f"r{n}", max_tokens=30)
    driver.run()
    least, most = decodes // 4, -(-decodes // 4)
    # All but the prompts' step, which is waited for alone, and the last tokens.
    going = [len(shares(step)) for step in executor.steps[1 : 4 * 29 - 3]]
    assert {least, most} == set(going)
    assert all(sum(going[n : n + 4]) == decodes for n in range(0, len(going) - 4, 4))
    assert set(executor.waited_with[1 : 4 * 29 - 3]) == {4}
    for n in range(decodes):
        driver.assert_as_alone(f"r{n}")


def test_where_a_stage_takes_time_for_each_sequence_shares_bring_what_stages_there_are():
    ends: list[float] = []
    for queue in (True, False):
        driver, executor = timed(4, queue=queue, seqs=8, budget=128, blocks=128)
        executor.cost = lambda step: float(len(step.sequences))
        for n in range(8):
            submit(driver, f"r{n}", max_tokens=30)
        driver.run()
        ends.append(driver.now)
    # 8 sequences in 4 stages: the prompts' step takes 32; then 29 rounds of 8 with the queue (and 6
    # until the last is through), 32 without.
    assert ends == [32 + 29 * 8 + 6, 32 + 29 * 32]


def test_shares_that_are_uneven_become_even():
    driver, executor = timed(4, seqs=16, budget=128, blocks=128)
    submit(driver, "a", max_tokens=40)
    driver.turns(6)
    for n in range(7):
        submit(driver, f"r{n}", max_tokens=40)
    driver.turns(12)
    assert [len(shares(step)) for step in executor.steps[-4:]] == [2, 2, 2, 2]


def test_the_seconds_of_steps_are_those_that_the_pipeline_is_in_use():
    driver, _ = timed(4, seqs=8, budget=32)
    for n in range(8):
        submit(driver, f"r{n}", max_tokens=10)
    driver.run()
    assert driver.core.stats().steps.seconds.sum == pytest.approx(driver.now)


@pytest.mark.parametrize(
    ("decodes", "ready", "free", "share"),
    [
        (8, 8, 4, 2),
        (9, 9, 4, 3),
        (9, 6, 3, 2),
        (9, 2, 1, 2),
        (8, 5, 1, 2),
        (1, 1, 4, 1),
        (3, 0, 2, 0),
    ],
)
def test_the_share_of_a_step(decodes: int, ready: int, free: int, share: int):
    assert decodes_per_step(decodes, ready=ready, stages=4, free=free) == share


# --- who takes part


def test_chunks_follow_each_other_and_decodes_go_with_them():
    driver = pipeline(4, budget=5, seqs=5)
    submit(driver, "decodes", length=3, max_tokens=20)
    driver.turns(2)
    submit(driver, "long", length=19, max_tokens=2)
    driver.turns(3)
    assert [shares(step) for step in driver.executor.launched] == [
        {"decodes": 1, "long": 4},
        {"long": 5},
        {"long": 5},
    ]
    driver.run()
    for name in ("decodes", "long"):
        driver.assert_as_alone(name)


@pytest.mark.parametrize("options", [{"n": 3}, {"presence_penalty": 0.5}, {"bad_words": ((5,),)}])
def test_a_fork_or_a_draw_that_reads_tokens_keeps_nobody_else_waiting(options: dict[str, object]):
    driver = pipeline(2, budget=6, seqs=6)
    submit(driver, "r", **options)
    submit(driver, "other")
    driver.turns(1)
    assert [shares(step) for step in driver.executor.launched] == [{"r": 6}]
    driver.turns(1)
    assert [shares(step) for step in driver.executor.launched] == [{"other": 6}]
    driver.run()
    for name in ("r", "other"):
        driver.assert_as_alone(name)


def test_forked_choices_take_their_turn_with_the_first_of_them():
    driver = pipeline(2)
    submit(driver, "a")
    submit(driver, "b")
    driver.turns(3)
    submit(driver, "r", n=3)
    driver.turns(3)
    before, _, step = driver.executor.steps[-3:]
    assert shares(before) == {"b": 1, "r": 6}
    drawn = [(s.log_id, s.samples[0].choice_index) for s in step.sequences]
    assert drawn == [("b", 0), ("r", 0), ("r", 1)]


def test_blocks_of_an_aborted_prompt_stay_until_all_its_chunks_are_over():
    driver = pipeline(3, budget=BLOCK, seqs=4, blocks=8)
    submit(driver, length=4 * BLOCK)
    driver.turns(2)
    driver.core.abort("r")
    held: list[int] = []
    while not driver.core.is_idle():
        driver.turns(1)
        held.append(driver.pool.num_blocks - driver.pool.num_free)
    assert held == [4, 0]


def test_who_lacks_a_block_waits_for_the_last_to_land_while_those_before_it_go_on():
    """The pool is full. The second needs a block while the third, the last in rank, is in a
    step."""
    driver = pipeline(2, blocks=4, seqs=3, budget=16)
    for name, length in (("first", BLOCK), ("second", BLOCK - 1), ("third", BLOCK - 1)):
        submit(driver, name, length=length, max_tokens=6)
    driver.turns(4)
    preemptions = [driver.core.stats().preemptions]
    driver.turns(2)
    preemptions.append(driver.core.stats().preemptions)
    assert [shares(step) for step in driver.executor.steps[1:5]] == [
        {"first": 1, "second": 1},
        {"third": 1},
        {"first": 1},
        {"second": 1},
    ]
    assert preemptions == [0, 1]
    driver.run()
    for name in ("first", "second", "third"):
        driver.assert_as_alone(name)


# --- what fails


@pytest.mark.parametrize("where", ["fail_with", "refuse_with"])
def test_a_failed_step_ends_its_requests_and_chunks_behind_it_do_no_harm(where: str):
    driver = pipeline(4, budget=5, seqs=5)
    submit(driver, "r", length=19)
    driver.turns(2)
    setattr(driver.executor, where, StepFailed("out of luck"))
    driver.turns(1)
    submit(driver, "later")
    driver.run()
    assert driver.outputs["r"][-1].error == "the step failed: out of luck"
    driver.assert_as_alone("later")
    driver.assert_all_blocks_free()
    assert driver.core.is_idle()


def test_steps_before_one_that_is_refused_are_waited_for_first():
    driver = pipeline(4, budget=5, seqs=5)
    submit(driver, "r", length=5, max_tokens=1)
    submit(driver, "other", length=5)
    driver.turns(1)
    driver.executor.refuse_with = StepFailed("not even begun")
    driver.run()
    driver.assert_as_alone("r")
    assert driver.reasons("other") == {0: "error"}


# --- who sends KV


@pytest.mark.parametrize(("ranks_send", "most"), [(False, 1), (True, 4)])
def test_steps_follow_each_other_where_ranks_send(ranks_send: bool, most: int):
    driver, executor = timed(4, budget=4, seqs=4, sends=True, ranks_send=ranks_send)
    submit(driver, length=11, transfer=SEND, max_tokens=1)
    submit(driver, "other", length=11, max_tokens=1)
    driver.run()
    assert max(executor.waited_with, default=1) == most
    kv = b"1 chunks" if ranks_send else b""
    assert [step.kv for step in executor.steps[:2]] == [kv, kv]
    driver.assert_as_alone("r")


def test_a_step_is_held_for_d_while_those_behind_it_are_under_way():
    driver = pipeline(3, budget=4, seqs=4, sends=True, ranks_send=True)
    asked: list[tuple[int, int]] = []

    def held_until(now: float) -> float | None:
        asked.append((len(driver.executor.steps), len(driver.executor.launched)))
        return None

    assert driver.producer is not None
    driver.producer.hold = held_until
    submit(driver, length=11, transfer=SEND, max_tokens=1)
    driver.run()
    assert asked == [(3, 2), (3, 1), (3, 0)]

"""As many steps under way as a pipeline has stages: who takes part in which, and what it brings.

The walks (test_engine_walks, test_scheduler_walks, test_engine_soak) go over the same at random.
"""

from __future__ import annotations

import pytest

from tests.worker.engine_bench import Bench, StepFailed, make_request, prompt_of
from tests.worker.engine_fakes import BLOCK
from tests.worker.timed_pipeline import timed
from xpyd_core.request_id import Address, TransferKey
from xpyd_worker.engine.executor import StepInput
from xpyd_worker.engine.request import EngineRequest, SendTo
from xpyd_worker.engine.scheduler import decodes_per_step

SEND = SendTo(TransferKey("0" * 32, 0), Address("127.0.0.1", 21001), 11, False)


def pipeline(stages: int = 4, **options: object) -> Bench:
    return Bench(depth=stages, draws_ahead=False, **options)  # pyright: ignore


def submit(bench: Bench, name: str = "r", length: int = 6, **options: object) -> EngineRequest:
    """A request that does not end by itself before its max_tokens."""
    prompt = prompt_of(length, first=1 + len(bench.requests))
    request = make_request(name, prompt, ignore_eos=True, **options)  # pyright: ignore
    return bench.submit(request)


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
    bench, executor = timed(stages, budget=8, blocks=64)
    submit(bench, length=8 * batches, max_tokens=1)
    bench.run()
    assert bench.now == 10 * (stages + batches - 1)
    assert round(executor.bubble(), 3) == bubble
    bench.assert_as_alone("r")


def test_a_stage_begins_each_batch_as_soon_as_the_stage_before_is_done():
    """Article fact 46."""
    bench, executor = timed(4, budget=8)
    submit(bench, length=32, max_tokens=1)
    bench.run()
    for stage, spans in enumerate(executor.spans):
        assert spans == [(10 * (stage + m), 10 * (stage + m) + 10) for m in range(4)]


def test_without_the_queue_each_batch_takes_the_whole_pipeline():
    bench, executor = timed(4, queue=False, budget=8)
    submit(bench, length=32, max_tokens=1)
    bench.run()
    assert bench.now == 10 * 4 * 4
    assert executor.bubble() == 0.75


def test_a_single_request_ends_though_the_queue_never_fills():
    """Article fact 44."""
    bench, executor = timed(4)
    submit(bench, max_tokens=5)
    bench.run()
    assert bench.now == 5 * 40
    assert executor.waited_with == [1] * 5
    bench.assert_as_alone("r")


def test_who_comes_while_a_prompt_is_alone_in_the_pipeline_follows_it_at_once():
    bench, executor = timed(4)
    submit(bench, "first", max_tokens=1)
    executor.arrivals.append((3.0, lambda: submit(bench, "second", max_tokens=1)))
    bench.run()
    assert executor.spans[0] == [(0.0, 10.0), (10.0, 20.0)]
    assert bench.now == 50.0
    bench.assert_as_alone("first")
    bench.assert_as_alone("second")


@pytest.mark.parametrize("decodes", [4, 8, 9, 11])
def test_decodes_fill_the_pipeline_in_even_shares(decodes: int):
    bench, executor = timed(4, seqs=16, budget=128, blocks=128)
    for n in range(decodes):
        submit(bench, f"r{n}", max_tokens=30)
    bench.run()
    least, most = decodes // 4, -(-decodes // 4)
    # All but the prompts' step, which is waited for alone, and the last tokens.
    going = [len(shares(step)) for step in executor.steps[1 : 4 * 29 - 3]]
    assert {least, most} == set(going)
    assert all(sum(going[n : n + 4]) == decodes for n in range(0, len(going) - 4, 4))
    assert set(executor.waited_with[1 : 4 * 29 - 3]) == {4}
    for n in range(decodes):
        bench.assert_as_alone(f"r{n}")


def test_where_a_stage_takes_time_for_each_sequence_shares_bring_what_stages_there_are():
    ends: list[float] = []
    for queue in (True, False):
        bench, executor = timed(4, queue=queue, seqs=8, budget=128, blocks=128)
        executor.cost = lambda step: float(len(step.sequences))
        for n in range(8):
            submit(bench, f"r{n}", max_tokens=30)
        bench.run()
        ends.append(bench.now)
    # 8 sequences in 4 stages: the prompts' step takes 32; then 29 rounds of 8 with the queue (and 6
    # until the last is through), 32 without.
    assert ends == [32 + 29 * 8 + 6, 32 + 29 * 32]


def test_shares_that_are_uneven_become_even():
    bench, executor = timed(4, seqs=16, budget=128, blocks=128)
    submit(bench, "a", max_tokens=40)
    bench.turns(6)
    for n in range(7):
        submit(bench, f"r{n}", max_tokens=40)
    bench.turns(12)
    assert [len(shares(step)) for step in executor.steps[-4:]] == [2, 2, 2, 2]


def test_the_seconds_of_steps_are_those_that_the_pipeline_is_in_use():
    bench, _ = timed(4, seqs=8, budget=32)
    for n in range(8):
        submit(bench, f"r{n}", max_tokens=10)
    bench.run()
    assert bench.core.stats().steps.seconds.sum == pytest.approx(bench.now)


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
    bench = pipeline(4, budget=5, seqs=5)
    submit(bench, "decodes", length=3, max_tokens=20)
    bench.turns(2)
    submit(bench, "long", length=19, max_tokens=2)
    bench.turns(3)
    assert [shares(step) for step in bench.executor.launched] == [
        {"decodes": 1, "long": 4},
        {"long": 5},
        {"long": 5},
    ]
    bench.run()
    for name in ("decodes", "long"):
        bench.assert_as_alone(name)


@pytest.mark.parametrize("options", [{"n": 3}, {"presence_penalty": 0.5}, {"bad_words": ((5,),)}])
def test_a_fork_or_a_draw_that_reads_tokens_keeps_nobody_else_waiting(options: dict[str, object]):
    bench = pipeline(2, budget=6, seqs=6)
    submit(bench, "r", **options)
    submit(bench, "other")
    bench.turns(1)
    assert [shares(step) for step in bench.executor.launched] == [{"r": 6}]
    bench.turns(1)
    assert [shares(step) for step in bench.executor.launched] == [{"other": 6}]
    bench.run()
    for name in ("r", "other"):
        bench.assert_as_alone(name)


def test_forked_choices_take_their_turn_with_the_first_of_them():
    bench = pipeline(2)
    submit(bench, "a")
    submit(bench, "b")
    bench.turns(3)
    submit(bench, "r", n=3)
    bench.turns(3)
    before, _, step = bench.executor.steps[-3:]
    assert shares(before) == {"b": 1, "r": 6}
    drawn = [(s.log_id, s.samples[0].choice_index) for s in step.sequences]
    assert drawn == [("b", 0), ("r", 0), ("r", 1)]


def test_blocks_of_an_aborted_prompt_stay_until_all_its_chunks_are_over():
    bench = pipeline(3, budget=BLOCK, seqs=4, blocks=8)
    submit(bench, length=4 * BLOCK)
    bench.turns(2)
    bench.core.abort("r")
    held: list[int] = []
    while not bench.core.is_idle():
        bench.turns(1)
        held.append(bench.pool.num_blocks - bench.pool.num_free)
    assert held == [4, 0]


def test_who_lacks_a_block_waits_for_the_last_to_land_while_those_before_it_go_on():
    """The pool is full. The second needs a block while the third, the last in rank, is in a
    step."""
    bench = pipeline(2, blocks=4, seqs=3, budget=16)
    for name, length in (("first", BLOCK), ("second", BLOCK - 1), ("third", BLOCK - 1)):
        submit(bench, name, length=length, max_tokens=6)
    bench.turns(4)
    preemptions = [bench.core.stats().preemptions]
    bench.turns(2)
    preemptions.append(bench.core.stats().preemptions)
    assert [shares(step) for step in bench.executor.steps[1:5]] == [
        {"first": 1, "second": 1},
        {"third": 1},
        {"first": 1},
        {"second": 1},
    ]
    assert preemptions == [0, 1]
    bench.run()
    for name in ("first", "second", "third"):
        bench.assert_as_alone(name)


# --- what fails


@pytest.mark.parametrize("where", ["fail_with", "refuse_with"])
def test_a_failed_step_ends_its_requests_and_chunks_behind_it_do_no_harm(where: str):
    bench = pipeline(4, budget=5, seqs=5)
    submit(bench, "r", length=19)
    bench.turns(2)
    setattr(bench.executor, where, StepFailed("out of luck"))
    bench.turns(1)
    submit(bench, "later")
    bench.run()
    assert bench.outputs["r"][-1].error == "the step failed: out of luck"
    bench.assert_as_alone("later")
    bench.assert_all_blocks_free()
    assert bench.core.is_idle()


def test_steps_before_one_that_is_refused_are_waited_for_first():
    bench = pipeline(4, budget=5, seqs=5)
    submit(bench, "r", length=5, max_tokens=1)
    submit(bench, "other", length=5)
    bench.turns(1)
    bench.executor.refuse_with = StepFailed("not even begun")
    bench.run()
    bench.assert_as_alone("r")
    assert bench.reasons("other") == {0: "error"}


# --- who sends KV


@pytest.mark.parametrize(("ranks_send", "most"), [(False, 1), (True, 4)])
def test_steps_follow_each_other_where_ranks_send(ranks_send: bool, most: int):
    bench, executor = timed(4, budget=4, seqs=4, sends=True, ranks_send=ranks_send)
    submit(bench, length=11, transfer=SEND, max_tokens=1)
    submit(bench, "other", length=11, max_tokens=1)
    bench.run()
    assert max(executor.waited_with, default=1) == most
    kv = b"1 chunks" if ranks_send else b""
    assert [step.kv for step in executor.steps[:2]] == [kv, kv]
    bench.assert_as_alone("r")


def test_a_step_is_held_for_d_while_those_behind_it_are_under_way():
    bench = pipeline(3, budget=4, seqs=4, sends=True, ranks_send=True)
    asked: list[tuple[int, int]] = []

    def held_until(now: float) -> float | None:
        asked.append((len(bench.executor.steps), len(bench.executor.launched)))
        return None

    assert bench.producer is not None
    bench.producer.hold = held_until
    submit(bench, length=11, transfer=SEND, max_tokens=1)
    bench.run()
    assert asked == [(3, 2), (3, 1), (3, 0)]

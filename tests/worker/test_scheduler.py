"""The scheduler through the engine's loop, without a thread: order, budget, forks, stop rules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import pytest

from tests.worker.engine_driver import STATE_DRAFTS, EngineDriver, make_request, prompt_of
from tests.worker.engine_fakes import BLOCK, EOS, alone
from tests.worker.grammar_kit import GRAMMARS, start_of
from xpyd_core.request_id import TransferKey
from xpyd_worker.engine.request import ReceiveFrom, SchedulerConfig
from xpyd_worker.grammar.matcher import Start


def counts(driver: EngineDriver) -> list[list[int]]:
    """Tokens of each sequence in each step."""
    return [[len(s.token_ids) for s in step.sequences] for step in driver.executor.steps]


def test_a_step_mixes_decodes_and_a_chunk_within_the_budget():
    driver = EngineDriver(budget=8)
    driver.submit(make_request("a", prompt_of(4), max_tokens=9, ignore_eos=True))
    driver.turns(1)
    driver.submit(make_request("b", prompt_of(12, 5), max_tokens=3, ignore_eos=True))
    driver.turns(3)
    assert counts(driver) == [[4], [1, 7], [1, 5], [1, 1]]


def test_a_prompt_that_is_wholly_cached_computes_its_last_block_again():
    driver = EngineDriver()
    for name in ("a", "b"):
        driver.submit(make_request(name, prompt_of(2 * BLOCK), max_tokens=1))
        driver.run()
    assert driver.executor.steps[-1].sequences[0].start == BLOCK
    driver.assert_as_alone("b")


def states_read(prompt: list[int], *, known: int, max_tokens: int = 5) -> tuple[int, EngineDriver]:
    """How many tokens D computes of a prompt whose KV comes, where the prefix cache has `known` of
    it and what drafts reads states."""
    driver = EngineDriver(receives=True, budget=64, speculative=STATE_DRAFTS)
    consumer = driver.consumer
    assert consumer is not None
    if known:
        driver.submit(make_request("before", prompt[:known], max_tokens=1))
        driver.run()
    key = TransferKey("a" * 32, 0)
    consumer.arrive(key, prompt, "direct")
    consumer.land(key)
    before = driver.core.stats().prompt_tokens_computed
    transfer = ReceiveFrom(key, 5.0)
    more: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True}
    driver.submit(make_request("a", prompt, transfer=transfer, **more))
    driver.run()
    driver.assert_as_alone("a")
    driver.assert_all_blocks_free()
    return driver.core.stats().prompt_tokens_computed - before, driver


@pytest.mark.parametrize(("length", "again"), [(9, 9), (50, 32), (64, 32)])
def test_the_last_tokens_of_a_landed_prompt_are_computed_for_their_states(length: int, again: int):
    """So that a head drafts behind them as it does where the prompt was computed."""
    computed, driver = states_read(prompt_of(length), known=0)
    assert computed == again
    assert driver.outputs["a"][0].received_tokens == length


def test_but_not_where_no_draft_follows():
    computed, _ = states_read(prompt_of(50), known=0, max_tokens=2)
    assert computed == 1


def test_nor_in_blocks_that_others_have_too():
    """They may be read meanwhile."""
    computed, _ = states_read(prompt_of(50), known=40)
    assert computed == 10


@pytest.mark.parametrize(("length", "cached"), [(30, 0), (50, 16)])
def test_so_they_are_behind_a_cached_prefix(length: int, cached: int):
    """32 tokens, and what else the block has that the first of them is in."""
    driver = EngineDriver(budget=64, speculative=STATE_DRAFTS)
    for name in ("a", "b"):
        driver.submit(make_request(name, prompt_of(length), max_tokens=3, ignore_eos=True))
        driver.run()
        driver.assert_as_alone(name)
    starts = [s.start for step in driver.executor.steps for s in step.sequences if s.start < length]
    assert starts == [0, cached]
    assert driver.core.stats().prefix_hit_tokens == cached


# --- blocks run out


def test_the_last_come_is_preempted_recomputes_and_loses_nothing():
    driver = EngineDriver(blocks=6, budget=64)
    driver.submit(make_request("old", prompt_of(8), max_tokens=12, ignore_eos=True))
    driver.submit(make_request("new", prompt_of(7, 9), max_tokens=12, ignore_eos=True))
    driver.run()
    assert driver.core.stats().preemptions > 0
    starts = [s.log_id for step in driver.executor.steps for s in step.sequences if s.start < 4]
    assert starts[0] == "old"
    assert starts.count("old") == 1
    for name in ("old", "new"):
        driver.assert_as_alone(name)
    driver.assert_all_blocks_free()


def test_a_preempted_sequence_goes_before_those_that_wait():
    driver = EngineDriver(blocks=6, budget=64, seqs=2)
    for name, first in (("old", 1), ("new", 9), ("last", 17)):
        driver.submit(make_request(name, prompt_of(7, first), max_tokens=12, ignore_eos=True))
    driver.run()
    order = [(s.log_id, s.start) for step in driver.executor.steps for s in step.sequences]
    new = [(index, start) for index, (name, start) in enumerate(order) if name == "new"]
    restart = next(b for (_, a_start), (b, b_start) in pairwise(new) if b_start < a_start)
    assert restart < order.index(("last", 0))


def test_a_request_that_can_never_fit_is_refused_at_once():
    driver = EngineDriver(blocks=4)
    driver.submit(make_request("a", prompt_of(9), max_tokens=8))
    driver.run()
    (output,) = driver.outputs["a"]
    assert (output.finished, output.error_kind) == (True, "too_long")
    assert output.choices[0].finish_reason == "error"
    assert "17 tokens" in output.error
    assert driver.executor.steps == []


def test_a_grammar_that_breaks_ends_its_request_and_says_that_the_grammar_did():
    driver = EngineDriver()
    broken = start_of(GRAMMARS[0]).copy()
    assert not broken.accept([39])
    driver.submit(make_request("a", prompt_of(6), matchers=(broken,)))
    driver.submit(make_request("b", prompt_of(6)))
    driver.run()
    output = driver.outputs["a"][-1]
    assert (output.finished, output.error_kind) == (True, "grammar")
    assert driver.finished("b")
    driver.assert_all_blocks_free()


def test_a_request_that_fills_the_whole_cache_runs():
    driver = EngineDriver(blocks=4)
    driver.submit(make_request("a", prompt_of(9), max_tokens=7, ignore_eos=True))
    driver.run()
    driver.assert_as_alone("a")


@pytest.mark.parametrize(("length", "kind"), [(20, "too_long"), (21, "too_long"), (19, "")])
def test_a_prompt_needs_room_for_a_token_within_the_models_length(length: int, kind: str):
    driver = EngineDriver(model_len=20)
    driver.submit(make_request("a", prompt_of(length), max_tokens=5))
    driver.run()
    assert driver.outputs["a"][-1].error_kind == kind


def test_a_full_queue_refuses_and_says_so():
    driver = EngineDriver(max_waiting=1)
    for name in ("a", "b"):
        driver.submit(make_request(name, prompt_of(5)))
    driver.run()
    assert driver.outputs["b"][-1].error_kind == "busy"
    driver.assert_as_alone("a")


def test_a_budget_below_the_number_of_sequences_is_refused():
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=7)


# --- several choices


def test_n_choices_compute_the_prompt_once_and_copy_the_partial_block():
    driver = EngineDriver(budget=64)
    driver.submit(make_request("a", prompt_of(2 * BLOCK + 1), n=3, max_tokens=9, ignore_eos=True))
    driver.run()
    first, second = driver.executor.steps[:2]
    assert [len(s.samples) for s in first.sequences] == [3]
    assert [len(s.samples) for s in second.sequences] == [1, 1, 1]
    assert len(second.block_copies) == 2
    assert len({s.block_ids[:2] for s in second.sequences}) == 1
    assert driver.core.stats().prompt_tokens_computed == 2 * BLOCK + 1
    driver.assert_as_alone("a")
    driver.assert_all_blocks_free()


def test_choices_of_a_prompt_of_whole_blocks_copy_nothing():
    driver = EngineDriver(budget=64)
    driver.submit(make_request("a", prompt_of(2 * BLOCK), n=3, max_tokens=9, ignore_eos=True))
    driver.run()
    assert not any(step.block_copies for step in driver.executor.steps)
    driver.assert_as_alone("a")


def test_a_child_without_a_block_waits_and_recomputes():
    driver = EngineDriver(blocks=3, budget=64)
    driver.submit(make_request("a", prompt_of(2 * BLOCK + 1), n=2, max_tokens=3, ignore_eos=True))
    driver.run()
    assert not any(step.block_copies for step in driver.executor.steps)
    driver.assert_as_alone("a")
    driver.assert_all_blocks_free()


def test_children_without_a_block_go_before_those_that_wait():
    driver = EngineDriver(blocks=3, budget=64)
    driver.submit(make_request("a", prompt_of(2 * BLOCK + 1), n=3, max_tokens=3, ignore_eos=True))
    driver.submit(make_request("b", prompt_of(9, 5), first_choice=7, max_tokens=3))
    driver.run()
    drawn = [
        spec.choice_index
        for step in driver.executor.steps
        for s in step.sequences
        for spec in s.samples
        if spec.position == 1 or spec.choice_index == 7
    ]
    assert drawn[:4] == [0, 1, 2, 7]


def test_more_choices_than_sequences_may_run_take_turns():
    driver = EngineDriver(seqs=2, budget=8)
    driver.submit(make_request("a", prompt_of(6), n=5, max_tokens=5, ignore_eos=True))
    driver.run()
    driver.assert_as_alone("a")


def test_random_numbers_are_keyed_by_openais_index_and_the_position():
    driver = EngineDriver(budget=64)
    driver.submit(make_request("a", prompt_of(5), n=2, first_choice=4, max_tokens=2, min_tokens=2))
    driver.run()
    keys = [
        [(spec.choice_index, spec.position) for s in step.sequences for spec in s.samples]
        for step in driver.executor.steps
    ]
    assert keys == [[(4, 0), (5, 0)], [(4, 1), (5, 1)]]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_eos_is_masked_before_min_tokens_also_where_it_would_end_nothing(ignore_eos: bool):
    driver = EngineDriver(budget=64)
    driver.submit(
        make_request("a", prompt_of(5), max_tokens=4, min_tokens=3, ignore_eos=ignore_eos)
    )
    driver.run()
    masked = [s.eos_token_ids for step in driver.executor.steps for s in step.sequences]
    assert len(masked) >= 3
    assert set(masked) == {(EOS,)}


def test_a_choice_is_aborted_and_the_others_go_on():
    driver = EngineDriver(budget=64)
    driver.submit(make_request("a", prompt_of(5), n=3, max_tokens=6, ignore_eos=True))
    driver.turns(2)
    driver.core.abort("a", (1,))
    driver.run()
    expected = alone(driver.requests["a"], driver.model_len)
    assert driver.tokens("a", 0) == expected[0][0]
    assert driver.tokens("a", 1) == expected[1][0][:2]
    assert driver.tokens("a", 2) == expected[2][0]
    driver.assert_all_blocks_free()


def test_when_the_last_choice_is_aborted_a_last_output_follows():
    driver = EngineDriver()
    driver.submit(make_request("a", prompt_of(5), max_tokens=6, ignore_eos=True))
    driver.turns(2)
    driver.core.abort("a", (0,))
    driver.run()
    assert driver.outputs["a"][-1].finished
    assert driver.outputs["a"][-1].choices == ()
    assert driver.core.stats().finished == {"stop": 1}
    driver.assert_all_blocks_free()


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_an_aborted_request_gives_its_blocks_back_and_puts_out_nothing_more(turns: int):
    driver = EngineDriver(budget=4, seqs=4)
    driver.submit(make_request("a", prompt_of(9), n=2, max_tokens=6, ignore_eos=True))
    driver.turns(turns)
    before = list(driver.outputs["a"])
    driver.core.abort("a")
    driver.core.abort("a")
    driver.run()
    assert driver.outputs["a"] == before
    assert driver.core.is_idle()
    assert driver.core.stats().finished == {"abort": 1}
    driver.assert_all_blocks_free()


# --- continuation


def test_ids_to_continue_from_are_computed_in_one_step_and_not_put_out():
    driver = EngineDriver(budget=64)
    request = make_request("a", prompt_of(5), continue_from=((4, 9, 2),), max_tokens=6)
    driver.submit(request)
    driver.run()
    assert counts(driver)[0] == [8]
    driver.assert_as_alone("a")


def test_each_choice_continues_from_its_own_ids():
    driver = EngineDriver(budget=64)
    known = ((4, 9), (), (7,), (3, 3, 3, 3, 3))
    driver.submit(make_request("a", prompt_of(6), n=4, continue_from=known, max_tokens=9))
    driver.run()
    assert driver.core.stats().prompt_tokens_computed == 6
    driver.assert_as_alone("a")
    driver.assert_all_blocks_free()


@pytest.mark.parametrize(
    ("ids", "reason", "stop_id"),
    [((4, EOS), "stop", EOS), ((4, 30), "stop", 30), ((1, 2, 3), "length", None)],
)
def test_a_choice_that_ended_in_its_ids_ends_without_computing(
    ids: tuple[int, ...], reason: str, stop_id: int | None
):
    driver = EngineDriver()
    driver.submit(
        make_request("a", prompt_of(5), continue_from=(ids,), max_tokens=3, stop_token_ids=(30,))
    )
    driver.run()
    (output,) = driver.outputs["a"]
    assert output.finished
    assert (output.choices[0].finish_reason, output.choices[0].stop_token_id) == (reason, stop_id)
    assert driver.executor.steps == []


def test_choices_that_ended_are_told_at_once_and_the_living_one_goes_on():
    driver = EngineDriver()
    driver.submit(make_request("a", prompt_of(5), n=2, continue_from=((EOS,), (4,)), max_tokens=4))
    driver.turns(1)
    assert driver.outputs["a"][0].choices[0].finish_reason == "stop"
    driver.run()
    driver.assert_as_alone("a")


# --- stop rules


# --- prompt log probabilities


def test_prompt_logprobs_come_once_whole_and_without_the_prefix_cache():
    driver = EngineDriver(budget=4, seqs=4)
    for name in ("a", "b"):
        driver.submit(make_request(name, prompt_of(11), max_tokens=3, prompt_logprobs=0))
        driver.run()
    for name in ("a", "b"):
        first, *rest = driver.outputs[name]
        scored = first.prompt_logprobs
        assert scored is not None
        assert scored[0] is None
        assert [s and s.logprob for s in scored[1:]] == [-float(i) for i in range(1, 11)]
        assert [s and s.token_id for s in scored[1:]] == prompt_of(11)[1:]
        assert all(output.prompt_logprobs is None for output in rest)
    assert driver.core.stats().prefix_hit_tokens == 0


def test_a_preempted_prompt_is_not_scored_twice():
    driver = EngineDriver(blocks=9, budget=4, seqs=4)
    driver.submit(make_request("old", prompt_of(4), max_tokens=12, ignore_eos=True))
    driver.turns(1)
    driver.submit(make_request("a", prompt_of(27, 5), max_tokens=1, prompt_logprobs=0))
    driver.run()
    assert driver.core.stats().preemptions == 1
    scored = driver.outputs["a"][-1].prompt_logprobs or ()
    assert [s and s.token_id for s in scored] == [None, *prompt_of(27, 5)[1:]]


def test_a_prompt_is_scored_without_drawing_a_token():
    driver = EngineDriver(budget=4, seqs=4)
    driver.submit(make_request("a", prompt_of(7), max_tokens=0, prompt_logprobs=1))
    driver.run()
    (output,) = driver.outputs["a"]
    assert output.finished
    assert len(output.prompt_logprobs or ()) == 7
    assert [(c.tokens, c.finish_reason) for c in output.choices] == [((), "length")]
    assert not any(s.samples for step in driver.executor.steps for s in step.sequences)
    driver.assert_all_blocks_free()


def test_no_tokens_and_no_scores_asked_means_no_forward():
    driver = EngineDriver()
    driver.submit(make_request("a", prompt_of(7), max_tokens=0))
    driver.run()
    assert driver.reasons("a") == {0: "length"}
    assert driver.executor.steps == []


class DeadEnd:
    """As the library: a grammar that takes three tokens of any kind, and then finds nothing."""

    def __init__(self) -> None:
        self.taken = 0

    def deep_copy(self) -> DeadEnd:
        return DeadEnd()

    def consume_tokens(self, ids: Sequence[int]) -> bool:
        self.taken += len(ids)
        return not self.is_error()

    def compute_bitmask(self) -> bytes:
        return b"\xfe" + b"\xff" * 4

    def is_error(self) -> bool:
        return self.taken > 3

    def is_stopped(self) -> bool:
        return self.is_error()

    def get_error(self) -> str:
        return "lexer error" if self.is_error() else ""


def test_an_answer_that_its_grammar_cannot_go_on_with_ends_alone_and_is_no_failure_of_the_engine():
    driver = EngineDriver()
    start = Start(lambda: cast("Any", DeadEnd()))
    driver.submit(make_request("a", prompt_of(5), matchers=(start.matcher(),)))
    driver.submit(make_request("b", prompt_of(5), ignore_eos=True))
    driver.run()
    last = driver.outputs["a"][-1]
    assert (last.error_kind, last.finished) == ("grammar", True)
    assert len(driver.tokens("a")) == 3
    driver.assert_as_alone("b")
    driver.assert_all_blocks_free()

"""The articles' numbers 18 to 24: blocks, who runs, chunks, the prefix cache, what ends a choice.

24 is here as far as the scheduler can break it: one flat batch, each sequence with its own table.
That batched logits equal single ones is a matter of the runner: tests/worker/test_runner_tokens.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker.engine_driver import EngineDriver, make_request, prompt_of, prompt_that_draws
from tests.worker.engine_fakes import BLOCK, EOS
from tests.worker.server_fakes import ScriptedEngine, say, serving
from xpyd_core.blocks import block_hashes, blocks_for, next_block_hash, root_hash
from xpyd_worker.engine.block_manager import BlockManager
from xpyd_worker.engine.open_requests import End, StopRules
from xpyd_worker.engine.request import SamplingParams


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def fill(pool: BlockManager, ids: list[int], salt: bytes = b"") -> list[int]:
    """Blocks that hold `ids`, full ones registered, as after a prefill."""
    blocks = pool.allocate(blocks_for(len(ids)))
    assert blocks is not None
    for block, block_hash in zip(blocks, block_hashes(ids, salt=salt), strict=False):
        pool.register(block, block_hash)
    return blocks


def counts(driver: EngineDriver) -> list[list[int]]:
    """Tokens of each sequence in each step."""
    return [[len(s.token_ids) for s in step.sequences] for step in driver.executor.steps]


def names(driver: EngineDriver) -> list[list[str]]:
    """Whose sequences each step has."""
    return [[s.log_id for s in step.sequences] for step in driver.executor.steps]


# --- 18: blocks


@pytest.mark.parametrize(("count", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_for_n_tokens_is_n_over_16_rounded_up(count: int, blocks: int) -> None:
    """Article fact 18."""
    assert blocks_for(count) == blocks


@pytest.mark.parametrize(("length", "blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_sequence_has_that_many_in_its_table(length: int, blocks: int) -> None:
    """Article fact 18."""
    driver = EngineDriver()
    driver.submit(make_request("a", prompt_of(length), max_tokens=1))
    driver.run()
    assert len(driver.executor.steps[0].sequences[0].block_ids) == blocks == -(-length // BLOCK)


# --- 19: who runs


def test_running_sequences_come_first_then_the_queue_in_order() -> None:
    """Article fact 19."""
    driver = EngineDriver(seqs=2, budget=8)
    for name in ("a", "b", "c"):
        driver.submit(make_request(name, prompt_of(3), max_tokens=6, ignore_eos=True))
    driver.turns(3)
    assert names(driver) == [["a", "b"], ["a", "b"], ["a", "b"]]
    driver.run()
    assert driver.executor.steps[6].sequences[0].log_id == "c"
    for name in ("a", "b", "c"):
        driver.assert_as_alone(name)


def test_each_takes_its_tokens_from_the_budget() -> None:
    """Article fact 19."""
    driver = EngineDriver(budget=10)
    for number, length in enumerate((4, 3, 9)):
        prompt = prompt_of(length, number)
        driver.submit(make_request(f"r{number}", prompt, max_tokens=4, ignore_eos=True))
    driver.turns(2)
    assert counts(driver) == [[4, 3, 3], [1, 1, 6]]


def test_by_priority_the_queue_is_a_heap_and_fcfs_appends() -> None:
    """Article fact 19."""
    cases: list[tuple[Any, list[str]]] = [
        ("fcfs", ["a", "b", "c", "d"]),
        ("priority", ["c", "d", "b", "a"]),
    ]
    for policy, order in cases:
        driver = EngineDriver(seqs=1, policy=policy)
        for name, priority in (("a", 9), ("b", 5), ("c", -1), ("d", 0)):
            driver.submit(make_request(name, prompt_of(3), max_tokens=1, priority=priority))
        driver.run()
        assert [one for (one,) in names(driver)] == order


@pytest.mark.parametrize(("policy", "victim"), [("fcfs", "new"), ("priority", "old")])
def test_without_blocks_the_lower_in_rank_gives_its_blocks_back_and_recomputes(
    policy: Any, victim: str
) -> None:
    """Article fact 19."""
    driver = EngineDriver(blocks=6, budget=64, policy=policy)
    for name, first, priority in (("old", 1, 1), ("new", 9, 0)):
        prompt = prompt_of(8, first)
        driver.submit(make_request(name, prompt, max_tokens=12, ignore_eos=True, priority=priority))
    driver.run()
    restarts = {
        s.log_id
        for step in driver.executor.steps[1:]
        for s in step.sequences
        if s.start <= 8 and len(s.token_ids) > 1
    }
    assert restarts == {victim}
    assert driver.core.stats().preemptions == 1
    for name in ("old", "new"):
        driver.assert_as_alone(name)
    driver.assert_all_blocks_free()


def test_a_waiting_request_without_blocks_is_skipped_and_preempts_none() -> None:
    """Article fact 19."""
    driver = EngineDriver(blocks=5, budget=64, policy="priority")
    driver.submit(make_request("old", prompt_of(8), max_tokens=8, ignore_eos=True, priority=9))
    driver.turns(1)
    driver.submit(make_request("new", prompt_of(12, 5), max_tokens=2, priority=0))
    driver.run()
    assert driver.core.stats().preemptions == 0
    assert names(driver)[:8] == [["old"]] * 8
    driver.assert_as_alone("new")


# --- 20: chunked prefill


def test_a_prompt_of_18_in_chunks_of_8_takes_three_steps_and_samples_in_the_last() -> None:
    """Article fact 20."""
    for driver in (EngineDriver(budget=8), EngineDriver(budget=64, threshold=8)):
        driver.submit(make_request("a", prompt_of(18), max_tokens=1))
        driver.run()
        assert counts(driver) == [[8], [8], [2]]
        sampled = [bool(step.sequences[0].samples) for step in driver.executor.steps]
        assert sampled == [False, False, True]
        driver.assert_as_alone("a")


def test_the_threshold_caps_each_request_and_the_budget_cuts_in_any_case() -> None:
    """Article fact 20."""
    driver = EngineDriver(budget=10, threshold=6)
    driver.submit(make_request("a", prompt_of(13), max_tokens=1))
    driver.submit(make_request("b", prompt_of(13, 5), max_tokens=1))
    driver.run()
    assert counts(driver) == [[6, 4], [6, 4], [1, 5]]


# --- 21: what hits


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_shared_prefix_of_n_blocks_hits_exactly_n(blocks: int) -> None:
    """Article fact 21."""
    pool = BlockManager(16)
    held = fill(pool, tokens(64))
    prompt = tokens(16 * blocks) + tokens(20, first=900)
    assert pool.match_prefix(prompt, salt=b"", max_tokens=len(prompt) - 1) == held[:blocks]


def test_only_full_blocks_hit() -> None:
    """Article fact 21."""
    pool = BlockManager(16)
    held = fill(pool, tokens(40))
    assert pool.match_prefix(tokens(40), salt=b"", max_tokens=40) == held[:2]


def test_another_salt_never_hits() -> None:
    """Article fact 21."""
    pool = BlockManager(16)
    fill(pool, tokens(32), salt=b"a")
    assert pool.match_prefix(tokens(32), salt=b"b", max_tokens=32) == []
    assert len(pool.match_prefix(tokens(32), salt=b"a", max_tokens=32)) == 2


def test_a_hash_is_of_the_previous_one_and_the_tokens_and_the_first_of_the_salt() -> None:
    """Article fact 21."""
    first, second = block_hashes(tokens(32), salt=b"a")
    assert first == next_block_hash(root_hash(b"a"), tokens(16))
    assert second == next_block_hash(first, tokens(16, first=16))


@pytest.mark.parametrize("extra", [0, 1, 2, 3])
def test_of_a_shared_prefix_the_tokens_beyond_its_full_blocks_are_computed_again(
    extra: int,
) -> None:
    """Article fact 21."""
    driver = EngineDriver()
    shared = prompt_of(3 * BLOCK + extra)
    driver.submit(make_request("a", [*shared, 30], max_tokens=1))
    driver.run()
    driver.submit(make_request("b", [*shared, 9, 8, 7], max_tokens=1))
    driver.run()
    last = driver.executor.steps[-1].sequences[0]
    assert (last.start, len(last.token_ids)) == (3 * BLOCK, len(shared) % BLOCK + 3)
    assert driver.outputs["b"][-1].cached_tokens == 3 * BLOCK
    assert driver.core.stats().prefix_hit_tokens == 3 * BLOCK


# --- 22: reference counts


def test_a_hit_on_a_living_requests_block_counts_two() -> None:
    """Article fact 22."""
    pool = BlockManager(8)
    (first, second) = fill(pool, tokens(32))
    assert pool.match_prefix(tokens(32), salt=b"", max_tokens=31) == [first]
    assert (pool.references(first), pool.references(second)) == (2, 1)


def test_a_finished_requests_blocks_are_free_and_still_hit() -> None:
    """Article fact 22."""
    pool = BlockManager(8)
    held = fill(pool, tokens(32))
    pool.release(held)
    assert [pool.references(block) for block in held] == [0, 0]
    assert pool.num_free == 8
    assert pool.match_prefix(tokens(32), salt=b"", max_tokens=32) == held
    assert pool.num_free == 6


def test_content_is_forgotten_only_when_its_block_is_taken() -> None:
    """Article fact 22."""
    pool = BlockManager(4)
    held = fill(pool, tokens(32))
    pool.release(held)
    # The two never used come first, then the released ones, tail before head.
    assert set(pool.take(2) or []).isdisjoint(held)
    assert len(pool.lookup(block_hashes(tokens(32)))) == 2
    assert pool.take(1) == [held[1]]
    assert pool.lookup(block_hashes(tokens(32))) == held[:1]
    assert pool.take(1) == [held[0]]
    assert pool.lookup(block_hashes(tokens(32))) == []


def test_two_running_requests_share_the_blocks_of_their_prefix() -> None:
    """Article fact 22."""
    driver = EngineDriver(budget=64)
    shared = prompt_of(2 * BLOCK)
    driver.submit(make_request("a", [*shared, 5], max_tokens=6, ignore_eos=True))
    driver.turns(1)
    driver.submit(make_request("b", [*shared, 6], max_tokens=6, ignore_eos=True))
    driver.turns(1)
    first, second = (s.block_ids for s in driver.executor.steps[1].sequences)
    assert first[:2] == second[:2]
    assert [driver.pool.references(block) for block in first] == [2, 2, 1]
    driver.run()
    assert driver.pool.references(first[0]) == 0


# --- 23: what ends a choice


EOS_RULES = [
    (EOS, 0, {}, End("stop", EOS)),
    (EOS, 0, {"ignore_eos": True}, None),
    (EOS, 1, {"min_tokens": 2}, None),
    (EOS, 2, {"min_tokens": 2}, End("stop", EOS)),
    (EOS, 9, {}, End("stop", EOS)),
]
STOP_ID_RULES = [
    (6, 3, {"stop_token_ids": (5, 6)}, End("stop", 6)),
    (6, 3, {"stop_token_ids": (5, 6), "min_tokens": 4}, None),
]
LENGTH_RULES = [
    (7, 8, {}, None),
    (7, 9, {}, End("length")),
    (7, 4, {"max_tokens": 5}, End("length")),
    (7, 7, {"max_tokens": 99}, None),
    (7, 14, {"max_tokens": 99}, End("length")),
]


@pytest.mark.parametrize(
    ("token", "position", "params", "expected"), [*EOS_RULES, *STOP_ID_RULES, *LENGTH_RULES]
)
def test_eos_stop_ids_and_lengths_end_a_choice(
    token: int, position: int, params: dict[str, Any], expected: End | None
) -> None:
    """Article fact 23."""
    rules = StopRules((EOS,), max_model_len=20)
    sampling = SamplingParams(**{"max_tokens": 10, "seed": 1, **params})
    assert rules.end_at(token, position=position, prompt_tokens=5, sampling=sampling) == expected


def test_the_stop_token_stays_in_the_output() -> None:
    """Article fact 23."""
    driver = EngineDriver()
    driver.submit(make_request("a", prompt_that_draws(21), stop_token_ids=(21,)))
    driver.run()
    assert driver.tokens("a") == [21]
    assert driver.outputs["a"][-1].choices[0].stop_token_id == 21


async def test_a_stop_string_cuts_the_text_before_it_and_aborts_the_choice_in_the_engine() -> None:
    """Article fact 23."""

    engine = ScriptedEngine(script=say("hello, world, hello, moon"))
    async with serving(engine) as running:
        body = {"model": "fake", "prompt": "p", "stop": [", h", "wor"], "max_tokens": 100}
        answer = (await running.post("/v1/completions", body)).json()["choices"][0]
        assert (answer["text"], answer["finish_reason"]) == ("hello, ", "stop")
        assert answer["stop_reason"] == "wor"
        assert [name for name, _ in engine.aborted] == [engine.requests[0].request_id]


# --- 24: one flat batch


def test_a_batched_sequence_gets_the_tokens_it_gets_alone() -> None:
    """Article fact 24."""
    driver = EngineDriver(budget=64)
    for number in range(8):
        driver.submit(make_request(f"r{number}", prompt_of(3 + 2 * number, number), max_tokens=12))
    driver.run()
    for number in range(8):
        driver.assert_as_alone(f"r{number}")
    assert len(driver.executor.steps[0].sequences) == 8


def test_a_step_holds_each_sequences_own_tokens_and_no_padding() -> None:
    """Article fact 24."""
    driver = EngineDriver(budget=64)
    for number, length in enumerate((3, 8, 5)):
        driver.submit(make_request(f"r{number}", prompt_of(length, number), max_tokens=2))
    driver.turns(1)
    (step,) = driver.executor.steps
    assert step.tokens == 3 + 8 + 5
    flat = [list(s.token_ids) for s in step.sequences]
    assert flat == [prompt_of(3, 0), prompt_of(8, 1), prompt_of(5, 2)]

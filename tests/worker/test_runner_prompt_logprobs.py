"""Prompt log probabilities against transformers', in one piece and in chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.runner_driver import (
    Driver,
    make_runner,
    oracle_logits,
    poison,
    tiny_checkpoint,
    with_params,
)
from xpyd_worker.engine.request import TokenLogprob
from xpyd_worker.runner.batch import BatchRows
from xpyd_worker.runner.prompt_scores import PromptScorer

PROMPT = tuple((7 * i * i + 3) % 307 for i in range(41))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("qwen3")
    return folder, tiny_checkpoint(folder, "qwen3")


def check(scores: list[TokenLogprob], model: Any, prompt: tuple[int, ...], top: int) -> None:
    """Every prompt token but the first is scored as transformers does."""
    expected = oracle_logits(model, prompt).log_softmax(-1)
    assert [score.token_id for score in scores] == list(prompt[1:])
    for position, score in enumerate(scores):
        row = expected[position]
        own = row[prompt[position + 1]]
        assert score.logprob == pytest.approx(float(own), abs=1e-4)
        assert score.rank == 1 + int((row > own).sum())
        best = row.topk(top)
        assert [token for token, _ in score.top] == best.indices.tolist()
        assert [value for _, value in score.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("chunks", [(41,), (1, 40), (40, 1), (7, 16, 17, 1), (16, 16, 9)])
def test_scores_equal_transformers_in_any_chunks(
    chunks: tuple[int, ...], qwen: tuple[Path, Any]
) -> None:
    folder, model = qwen
    driver = Driver(make_runner(folder))
    poison(driver.runner)
    scored = driver.add(PROMPT, with_params(prompt_logprobs=3))
    other = driver.add(PROMPT[:5])
    for chunk in chunks:
        driver.step([(other, 5 if other.computed == 0 else 1), (scored, chunk)])
    driver.step([(scored, 1), (other, 1)])
    check(scored.prompt_logprobs, model, PROMPT, 3)


def test_only_those_who_ask_get_scores_and_output_tokens_have_none(qwen: tuple[Path, Any]) -> None:
    driver = Driver(make_runner(qwen[0]))
    asking = driver.add(PROMPT[:10], with_params(prompt_logprobs=0))
    silent = driver.add(PROMPT[:10])
    assert set(driver.step([(asking, 10), (silent, 10)]).prompt_logprobs) == {asking.seq_id}
    assert driver.step([(asking, 1), (silent, 1)]).prompt_logprobs == {asking.seq_id: ()}
    assert len(asking.prompt_logprobs) == 9


def test_a_request_that_starts_over_is_scored_from_its_start(qwen: tuple[Path, Any]) -> None:
    """Preempted after its prompt: prompt and output are computed again in one chunk."""
    folder, model = qwen
    driver = Driver(make_runner(folder))
    sequence = driver.add(PROMPT, with_params(prompt_logprobs=2))
    driver.step([(sequence, 20)])
    driver.step([(sequence, 21)])
    sequence.computed, sequence.prompt_logprobs = 0, []
    driver.step([(sequence, 42)])
    check(sequence.prompt_logprobs, model, PROMPT, 2)


def test_a_prompt_whose_beginning_was_not_seen_cannot_be_scored(qwen: tuple[Path, Any]) -> None:
    driver = Driver(make_runner(qwen[0]))
    first = driver.add(PROMPT[:32])
    driver.step([(first, 32)])
    second = driver.add(PROMPT, with_params(prompt_logprobs=0), shared_blocks=first.blocks)
    third = driver.add(PROMPT[:9], with_params(prompt_logprobs=0))
    output = driver.step([(second, 9), (third, 9)])
    assert set(output.failed) == {second.seq_id}
    assert f"{second.seq_id:032x}: prompt_logprobs" in output.failed[second.seq_id]
    assert set(output.prompt_logprobs) == set(output.samples) == {third.seq_id}


def test_scores_that_are_not_finite_fail_their_sequence_alone(qwen: tuple[Path, Any]) -> None:
    driver = Driver(make_runner(qwen[0]))
    broken = driver.add(PROMPT[:20], with_params(prompt_logprobs=0))
    sound = driver.add(PROMPT[:20], with_params(prompt_logprobs=0))
    driver.step([(broken, 9), (sound, 9)])
    for layer in driver.runner.kv_cache.layers:
        layer[broken.blocks] = float("nan")
    output = driver.step([(broken, 11), (sound, 11)])
    assert set(output.failed) == {broken.seq_id}
    assert "not finite" in output.failed[broken.seq_id]
    assert set(output.prompt_logprobs) == set(output.samples) == {sound.seq_id}


def test_a_long_prompt_is_scored_in_parts_that_fit_the_memory(qwen: tuple[Path, Any]) -> None:
    """A vocabulary so large that one row of logits is the limit."""
    calls: list[int] = []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(hidden.shape[0])
        return torch.zeros(hidden.shape[0], 307)

    scorer = PromptScorer(logits, vocab_size=8 << 20)
    driver = Driver(make_runner(qwen[0]))
    sequence = driver.add(PROMPT[:9], with_params(prompt_logprobs=0))
    scheduled = driver.schedule(sequence, 9)
    scored = scorer.score(torch.zeros(9, 4), [BatchRows(scheduled, 0)]).result()
    assert len(scored.scores[sequence.seq_id]) == 8
    assert calls == [2, 2, 2, 2]

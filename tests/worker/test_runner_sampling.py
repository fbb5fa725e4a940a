"""Options in a real model's steps: against transformers' generate, mixed, chunked and preempted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.runner_driver import Driver, make_runner, tiny_checkpoint, with_params
from xpyd_worker.engine.request import SamplingParams

PROMPTS = [tuple((7 * i * i + 3 * k) % 307 for i in range(5 + 9 * k)) for k in range(3)]
OPTIONS = [
    with_params(repetition_penalty=1.4),
    with_params(bad_words=(*((i,) for i in range(0, 307, 2)), (9, 11))),
    with_params(presence_penalty=1.5, frequency_penalty=0.5, temperature=1.2, seed=5),
    with_params(min_p=0.1, temperature=0.9, seed=6),
    with_params(logit_bias=((3, 9.0),), allowed_token_ids=tuple(range(90)), repetition_penalty=2.0),
    with_params(),
]
TOKENS = 12


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, tiny_checkpoint(folder, "llama")


def alone(folder: Path, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    """What one request puts out when nothing else runs."""
    driver = Driver(make_runner(folder))
    sequence = driver.add(prompt, params)
    driver.run([sequence], tokens=TOKENS)
    return sequence.output


def test_the_repetition_penalty_gives_the_tokens_of_transformers_generate(
    llama: tuple[Path, Any],
) -> None:
    folder, model = llama
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            whole = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                do_sample=False,
                repetition_penalty=1.4,
                pad_token_id=0,
            )
        assert (
            alone(folder, prompt, with_params(repetition_penalty=1.4))
            == whole[0, len(prompt) :].tolist()
        )


@pytest.mark.parametrize("budget", [7, 1000])
def test_all_options_in_one_batch_give_the_tokens_they_give_alone(
    budget: int, llama: tuple[Path, Any]
) -> None:
    folder, _model = llama
    driver = Driver(make_runner(folder, blocks=128))
    asked = [(PROMPTS[i % 3], params) for i, params in enumerate(OPTIONS)]
    sequences = [driver.add(prompt, params) for prompt, params in asked]
    driver.run(sequences, tokens=TOKENS, budget=budget)
    for sequence, (prompt, params) in zip(sequences, asked, strict=True):
        assert sequence.output == alone(folder, prompt, params)
    plain = alone(folder, PROMPTS[0], with_params())
    assert len({str(alone(folder, PROMPTS[0], one)) for one in OPTIONS}) == len(OPTIONS)
    assert plain == alone(folder, PROMPTS[0], OPTIONS[-1])


def test_another_runner_that_goes_on_behind_given_ids_draws_the_same(
    llama: tuple[Path, Any],
) -> None:
    """As D does behind P, and a preempted sequence that starts over."""
    folder, _model = llama
    for params in OPTIONS:
        whole = alone(folder, PROMPTS[1], params)
        driver = Driver(make_runner(folder))
        sequence = driver.add(PROMPTS[1], params)
        sequence.output = whole[:5]
        driver.run([sequence], tokens=TOKENS)
        assert sequence.output == whole
        sequence.computed, sequence.output = 0, whole[:7]
        driver.run([sequence], tokens=TOKENS)
        # The same sequence id with fewer tokens than before never comes from a scheduler.
        again = replace(sequence, seq_id=99, computed=0, output=whole[:7])
        driver.run([again], tokens=TOKENS)
        assert again.output == whole

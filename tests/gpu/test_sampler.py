"""The whole sampler with the kernel's draw beside the sampler on a CPU: the same tokens.

On a GPU also: nothing in it waits for the device before its results are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.gpu.conftest import Kit
from tests.gpu.waits import waits_are_errors
from xpyd_worker.engine.executor import KnownTokens, SampleSpec, ScheduledSequence
from xpyd_worker.engine.request import SamplingParams, TokenLogprob
from xpyd_worker.runner.adjustments import Adjustments
from xpyd_worker.runner.sampler import SampleRow, kernel_draw, sample, score
from xpyd_worker.runner.tensors import numbers

VOCAB = 150
EOS = 149
PROMPT, OUTPUT = (1, 2, 2, 30, 31, 32, 33), (4, 4, 6, 7, 8)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.4},
    {"temperature": 1.9, "logprobs": 5},
    {"top_k": 1},
    {"top_k": 12, "logprobs": 0},
    {"top_p": 0.7},
    {"top_p": 0.001},
    {"min_p": 0.08, "temperature": 1.6},
    {"min_p": 0.02, "top_k": 30, "top_p": 0.9, "temperature": 1.3},
    {"allowed_token_ids": (3, 4, 5, 59, 100)},
    {"bad_words": ((9,), (8, 12), (7, 8, 13))},
    {"min_tokens": 9, "stop_token_ids": (2, 3)},
    {"logit_bias": ((4, 3.0), (5, -2.5), (6, 90.0))},
    {"repetition_penalty": 1.7, "presence_penalty": 1.3, "frequency_penalty": 0.4},
    # Nothing is left but what bad words and min_tokens take away.
    {"allowed_token_ids": (EOS, 5), "bad_words": ((5,),), "min_tokens": 9},
    {"allowed_token_ids": (VOCAB + 3,)},
    {"repetition_penalty": 0.4, "top_p": 0.8, "bad_words": ((8, 40),), "logit_bias": ((41, 2.0),)},
]


def rows(count: int, **changes: Any) -> list[SampleRow]:
    """`count` rows of each set of options, on as many rows of logits."""
    adjustments = Adjustments(vocab_size=VOCAB)
    made: list[SampleRow] = []
    for index, options in enumerate(OPTIONS * count):
        base = SamplingParams(max_tokens=99, seed=index * 7919, temperature=1.0)
        params = replace(base, **(options | changes))
        known = KnownTokens(PROMPT, OUTPUT) if params.reads_tokens else None
        specs = (SampleSpec(0, len(OUTPUT)),)
        sequence = ScheduledSequence(index, (1,), 0, (0,), params, 7, specs, known=known)
        adjustment = adjustments.of(sequence)
        made.append(SampleRow(index, params, 0, len(OUTPUT), (EOS,), adjustment))
    return made


def noise(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """On a GPU whatever waits for it is an error."""
    if device.type != "cuda":
        yield
        return
    with waits_are_errors():
        yield


@pytest.fixture(autouse=True)
def _once(kit: Kit) -> None:
    if kit.dtype != torch.float32:
        pytest.skip("logits are float32")


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}])
def test_the_kernels_draw_gives_the_tokens_of_the_draw_on_a_cpu(
    kit: Kit, changes: dict[str, Any]
) -> None:
    asked = rows(3, **changes)
    logits = noise(len(asked), 5)
    logits[3], logits[20, 7], logits[40] = math.nan, math.inf, -math.inf
    expected = sample(logits, asked).result()
    assert [i for i, one in enumerate(expected) if one is None] == sorted(
        {3, 20, 40, *range(15, len(asked), len(OPTIONS))}
    )
    on_device, draw = logits.to(kit.device), kernel_draw(kit.gpu.sampling.sample)
    sample(on_device, asked, draw)
    with no_waits(kit.device):
        drawn = sample(on_device, asked, draw).to_host()
    if kit.device.type == "cuda":
        torch.cuda.synchronize()
    for found, wanted in zip(drawn.result(), expected, strict=True):
        assert (found and found.token_id) == (wanted and wanted.token_id)
        if found and wanted and wanted.logprob:
            assert found.logprob is not None
            assert found.logprob.logprob == pytest.approx(wanted.logprob.logprob, abs=1e-4)
            assert [i for i, _ in found.logprob.top] == [i for i, _ in wanted.logprob.top]


@pytest.mark.parametrize("masked", [slice(None), slice(None, None, 2)])
def test_what_a_grammar_allows_is_drawn_on_a_device_as_on_a_cpu(kit: Kit, masked: slice) -> None:
    """All rows under a mask, and every second one."""
    asked = rows(2)
    draws = torch.rand(len(asked), VOCAB, generator=torch.Generator().manual_seed(1)) < 0.3
    for index in range(len(asked))[masked]:
        bits = sum(1 << token for token in draws[index].nonzero()[:, 0].tolist())
        asked[index] = replace(asked[index], mask=bits.to_bytes(20, "little"))
    logits = noise(len(asked), 6)
    expected = sample(logits, asked).result()
    for index in range(len(asked))[masked]:
        token = expected[index]
        assert token is None or draws[index, token.token_id]
    on_device, draw = logits.to(kit.device), kernel_draw(kit.gpu.sampling.sample)
    sample(on_device, asked, draw)
    with no_waits(kit.device):
        drawn = sample(on_device, asked, draw).to_host()
    if kit.device.type == "cuda":
        torch.cuda.synchronize()
    found = [one and one.token_id for one in drawn.result()]
    assert found == [one and one.token_id for one in expected]


def test_the_mix_draws_many_tokens(kit: Kit) -> None:
    """What the equality above is worth: the rows are not all of one mind."""
    asked = rows(3)
    found = sample(noise(len(asked), 5), asked).result()
    assert len({one.token_id for one in found if one is not None}) > 25


def test_scores_and_ranks_come_without_a_wait(kit: Kit) -> None:
    logits, tokens = noise(6, 8), [5, 3, 149, 0, 77, 8]

    def scored(device: torch.device) -> list[TokenLogprob | None]:
        on_device = logits.to(device)
        with no_waits(device):
            ids = numbers(tokens, torch.int64, device)
            found = score(on_device, ids, [4] * 6)
            assert found is not None
            found = found.to_host()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return found.read(tokens)

    for found, wanted in zip(scored(kit.device), scored(torch.device("cpu")), strict=True):
        assert found is not None
        assert wanted is not None
        assert found.rank == wanted.rank
        assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert [i for i, _ in found.top] == [i for i, _ in wanted.top]

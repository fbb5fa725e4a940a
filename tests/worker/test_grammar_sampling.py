"""Masks where tokens are drawn: what a grammar forbids is never drawn, and scores stay raw."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from xpyd_worker.engine.executor import KnownTokens, SampleSpec, ScheduledSequence
from xpyd_worker.engine.request import SamplingParams
from xpyd_worker.runner.adjustments import Adjustments, apply_masks
from xpyd_worker.runner.sampler import SampleRow, sample

VOCAB = 70
EOS = 9
BASE = SamplingParams(max_tokens=99, seed=3, logprobs=2)


def mask_of(ids: Iterable[int], words: int = 3) -> bytes:
    return sum(1 << i for i in ids).to_bytes(words * 4, "little")


def row_of(mask: bytes | None, index: int = 0, position: int = 0, **options: Any) -> SampleRow:
    params = replace(BASE, **options)
    known = KnownTokens((1, 2), (3,)) if params.reads_tokens else None
    specs = (SampleSpec(0, position),)
    one = ScheduledSequence(index, (1,), 0, (0,), params, 2, specs, known=known)
    adjustment = Adjustments(vocab_size=VOCAB).of(one)
    return SampleRow(index, params, 0, position, (EOS,), adjustment, mask)


def logits(rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize(
    ("masks", "rows"),
    [
        ([mask_of([0, 31, 32, 63, 64, 69])], 1),
        ([mask_of([5]), None, mask_of([69])], 3),
        ([mask_of([40], words=2)], 1),
        ([mask_of([40, 95], words=40)], 1),
        ([mask_of([])], 2),
    ],
)
def test_a_mask_leaves_the_logits_of_its_ids_alone(masks: list[bytes | None], rows: int) -> None:
    before = logits(rows)
    after = before.clone()
    apply_masks(after, [(row, mask) for row, mask in enumerate(masks) if mask is not None])
    for row in range(rows):
        mask = masks[row] if row < len(masks) else None
        for token in range(VOCAB):
            is_in = mask is None or bool(int.from_bytes(mask, "little") >> token & 1)
            expected = before[row, token] if is_in else torch.tensor(float("-inf"))
            assert torch.equal(after[row, token], expected), (row, token)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.9])
@pytest.mark.parametrize(
    ("allowed", "options", "expected"),
    [
        ({7, 8, 40}, {}, {7, 8, 40}),
        ({7, 8, 40}, {"top_k": 50, "top_p": 0.99, "min_p": 0.001}, {7, 8, 40}),
        ({7, 8}, {"repetition_penalty": 1.9, "presence_penalty": 2.0}, {7, 8}),
        ({7, 8}, {"logit_bias": ((9, 100.0), (60, 100.0))}, {7, 8}),
        ({7, 8}, {"bad_words": ((8,),)}, {7}),
        ({7, 8}, {"allowed_token_ids": (8, 9)}, {8}),
        ({7, EOS}, {"min_tokens": 5}, {7}),
        # What else would leave nothing gives way; the mask never does.
        ({7}, {"bad_words": ((7,),)}, {7}),
        ({7}, {"allowed_token_ids": (8, 9)}, {7}),
        ({EOS}, {"min_tokens": 5}, {EOS}),
        ({EOS}, {"min_tokens": 5, "allowed_token_ids": (8,), "bad_words": ((9,),)}, {EOS}),
    ],
)
def test_only_what_the_grammar_allows_is_drawn(
    allowed: set[int], options: dict[str, Any], expected: set[int], temperature: float
) -> None:
    rows = [
        row_of(mask_of(allowed), position=position, temperature=temperature, **options)
        for position in range(5)
    ]
    drawn = sample(logits(), rows).result()
    assert {one.token_id for one in drawn if one is not None} <= expected
    assert None not in drawn


def test_log_probabilities_are_those_without_the_mask() -> None:
    (masked,) = sample(logits(), [row_of(mask_of([7]))]).result()
    assert masked is not None
    assert masked.logprob is not None
    scores = logits().log_softmax(-1)[0]
    assert masked.logprob.logprob == pytest.approx(float(scores[7]))
    assert [token for token, _ in masked.logprob.top] == scores.topk(2).indices.tolist()


def test_rows_without_a_mask_draw_as_alone() -> None:
    free = [row_of(None, index, position=index) for index in range(3)]
    alone = sample(logits(3), free).result()
    mixed = sample(logits(3), [free[0], row_of(mask_of([7]), 1), free[2]]).result()
    assert [mixed[0], mixed[2]] == [alone[0], alone[2]]


def test_a_mask_that_allows_nothing_gives_its_own_row_no_token() -> None:
    drawn = sample(logits(2), [row_of(mask_of([])), row_of(None, 1)]).result()
    assert drawn[0] is None
    assert drawn[1] is not None

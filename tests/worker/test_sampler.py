"""Drawing tokens: greedy, filters, masks, random numbers, log probabilities."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xpyd_worker.engine.request import SampledToken, SamplingParams
from xpyd_worker.runner import sampler
from xpyd_worker.runner.sampler import SampleRow, drop_unlikely, uniform

BASE = SamplingParams(max_tokens=100, seed=1)


def row(index: int = 0, *, position: int = 0, choice: int = 0, **changes: object) -> SampleRow:
    """A row of logits row `index` with changed parameters."""
    params = replace(BASE, **changes)  # type: ignore[arg-type]  # any field of the dataclass
    return SampleRow(index, params, choice, position)


def sample(logits: torch.Tensor, rows: list[SampleRow]) -> list[SampledToken]:
    """Tokens of rows that all have one."""
    found = [token for token in sampler.sample(logits, rows).result() if token is not None]
    assert len(found) == len(rows)
    return found


def ids(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    """Tokens alone."""
    return [token.token_id for token in sample(logits, rows)]


def log_probabilities(*values: float) -> torch.Tensor:
    """One row of logits with these probabilities."""
    return torch.tensor([values]).log()


def draws(logits: torch.Tensor, count: int, **changes: object) -> Counter[int]:
    """Tokens of `count` positions."""
    return Counter(ids(logits, [row(position=p, **changes) for p in range(count)]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ((0, 0, 0), 0.13870941014555427),
        ((1, 0, 0), 0.6935121390102292),
        ((0, 1, 0), 0.2691303195904541),
        ((0, 0, 1), 0.18436667429957676),
        ((2**63, 5, 1000), 0.05285568538961394),
        ((-1, 0, 0), 0.9844383619111032),
    ],
)
def test_the_random_numbers_of_a_seed_never_change(key: tuple[int, int, int], value: float) -> None:
    assert uniform(*key) == value


def test_random_numbers_are_even_and_unrelated_between_neighbours() -> None:
    numbers = [
        uniform(seed, choice, position)
        for seed in range(20)
        for choice in range(10)
        for position in range(50)
    ]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    counts = Counter(int(number * 20) for number in numbers)
    assert chi_square([counts[i] for i in range(20)], [500.0] * 20) < 43.8  # 0.1 % at 19
    pairs = list(pairwise(numbers))
    correlation = sum((a - 0.5) * (b - 0.5) for a, b in pairs) / len(pairs) * 12
    assert abs(correlation) < 0.04


def chi_square(seen: list[int], expected: list[float]) -> float:
    """The statistic."""
    return sum((s - e) ** 2 / e for s, e in zip(seen, expected, strict=True))


def test_greedy_takes_the_best_and_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(3, 500)
    logits[0, [17, 40, 499]] = 2.0
    logits[1, 499] = 1.0
    assert ids(logits, [row(i, temperature=0.0) for i in range(3)]) == [17, 499, 0]


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, {0: 0.4, 1: 0.3, 2: 0.2, 3: 0.1}),
        ({"temperature": 0.5}, {0: 16 / 30, 1: 9 / 30, 2: 4 / 30, 3: 1 / 30}),
        ({"temperature": 2.0, "top_k": 2}, {0: 2 / (2 + 3**0.5), 1: 3**0.5 / (2 + 3**0.5)}),
        ({"top_k": 1}, {0: 1.0}),
        ({"top_k": 3}, {0: 4 / 9, 1: 3 / 9, 2: 2 / 9}),
        ({"top_k": 50}, {0: 0.4, 1: 0.3, 2: 0.2, 3: 0.1}),
        ({"top_p": 0.65}, {0: 4 / 7, 1: 3 / 7}),
        ({"top_p": 0.39}, {0: 1.0}),
        ({"top_p": 0.01}, {0: 1.0}),
        # Of the three best, renormalised to 4/9, 3/9, 2/9, two reach 0.75; of all four they do not.
        ({"top_k": 3, "top_p": 0.75}, {0: 4 / 7, 1: 3 / 7}),
        ({"top_p": 0.75}, {0: 4 / 9, 1: 3 / 9, 2: 2 / 9}),
        # Temperature first: at 0.5 the best alone has 0.533.
        ({"temperature": 0.5, "top_p": 0.5}, {0: 1.0}),
    ],
)
@pytest.mark.parametrize("padding", [0, 1000])
def test_filters_keep_the_right_tokens_in_the_right_shares(
    changes: dict[str, object], kept: dict[int, float], padding: int
) -> None:
    """`padding`: so many impossible tokens in front, more than the sampler sorts at first."""
    logits = torch.cat(
        (torch.full((1, padding), -80.0), log_probabilities(0.4, 0.3, 0.2, 0.1)), dim=1
    )
    count = 4000
    seen = draws(logits, count, **changes)
    assert {token - padding for token in seen} == set(kept)
    tokens = sorted(kept)
    statistic = chi_square([seen[t + padding] for t in tokens], [kept[t] * count for t in tokens])
    assert statistic < 16.3  # 0.1 % at three degrees of freedom


@pytest.mark.parametrize(
    ("probabilities", "top_p", "kept"),
    [
        ((0.5, 0.5), 0.5, {0}),
        ((0.5, 0.25, 0.125, 0.125), 0.5, {0}),
        ((0.5, 0.25, 0.125, 0.125), 0.75, {0, 1}),
        ((0.25, 0.125, 0.5, 0.125), 0.75, {0, 2}),
        ((0.25, 0.25, 0.25, 0.25), 0.5, {0, 1}),
        ((0.5, 0.25, 0.125, 0.125), 0.5 + 2**-20, {0, 1}),
    ],
)
def test_a_share_that_is_reached_exactly_is_reached(
    probabilities: tuple[float, ...], top_p: float, kept: set[int]
) -> None:
    """These shares are exact in binary, so the border of top_p falls on a token's end."""
    left = torch.tensor([probabilities])
    drop_unlikely(left, left.log(), [replace(BASE, top_p=top_p)])
    assert set(left[0].nonzero().flatten().tolist()) == kept


def test_top_k_keeps_all_that_equal_the_last_of_them() -> None:
    logits = log_probabilities(0.2, 0.4, 0.2, 0.2)
    assert set(draws(logits, 300, top_k=2)) == {0, 1, 2, 3}
    assert set(draws(torch.zeros(1, 700), 3000, top_k=2)) > set(range(600, 650))


def test_a_flat_distribution_over_a_large_vocabulary_is_drawn_evenly() -> None:
    """All tokens are equals and the head sorted first never suffices."""
    seen = draws(torch.zeros(1, 1000), 8000)
    tens = Counter(token // 100 for token in seen.elements())
    assert chi_square([tens[i] for i in range(10)], [800.0] * 10) < 27.9  # 0.1 % at 9


def test_a_wide_top_p_over_a_large_vocabulary_cuts_where_it_should() -> None:
    logits = torch.linspace(0, -2, 1500)[None]
    probabilities = logits[0].softmax(0)
    inside = int((probabilities.cumsum(0) < 0.8).sum()) + 1
    seen = draws(logits, 8000, top_p=0.8)
    assert max(seen) < inside
    assert max(seen) > inside - 30


def test_top_p_is_a_share_of_what_top_k_keeps_however_large() -> None:
    logits = torch.linspace(0, -0.5, 1000)[None]
    kept = logits[0, :400].softmax(0)
    inside = int((kept.cumsum(0) < 0.2).sum()) + 1
    seen = draws(logits, 4000, top_k=400, top_p=0.2)
    assert inside - 10 < max(seen) < inside


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_eos_and_stop_ids_wait_for_min_tokens(temperature: float) -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, -3.0]])
    wanted = row(temperature=temperature, min_tokens=3, stop_token_ids=(1, 99), top_k=1)
    rows = [replace(wanted, position=p, eos_token_ids=(0,)) for p in range(5)]
    assert ids(logits, rows) == [2, 2, 2, 0, 0]


def test_a_tiny_temperature_is_greedy_and_a_huge_one_even() -> None:
    logits = torch.tensor([[1000.0, -1000.0, 999.0, 0.0]])
    assert set(draws(logits, 50, temperature=1e-9)) == {0}
    assert set(draws(logits, 50, temperature=0.001)) == {0}
    assert set(draws(logits, 200, temperature=1e6)) == {0, 1, 2, 3}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_logits_are_not_finite_has_no_token_and_the_others_do_not_care(
    bad: float, temperature: float
) -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(2))
    options: list[dict[str, object]] = [{}, {"top_p": 0.8}, {"top_k": 9}, {"min_p": 0.1}]
    rows = [
        row(i, **{"temperature": temperature, "logprobs": 2} | o) for i in range(5) for o in options
    ]
    before = sample(logits, rows)
    broken = logits.clone()
    broken[2] = bad
    broken[2, 7] = math.inf if bad == math.inf else -math.inf
    expected = [None if one.logits_row == 2 else t for one, t in zip(rows, before, strict=True)]
    assert sampler.sample(broken, rows).result() == expected


def test_the_tokens_of_a_step_are_a_tensor_that_the_next_step_can_be_made_of() -> None:
    logits = torch.zeros(3, 9)
    logits[0, 4] = logits[1, 8] = 50.0
    logits[2] = math.nan
    found = sampler.sample(logits, [row(i) for i in range(3)]).tokens
    assert found.dtype == torch.int64
    assert found.tolist() == [4, 8, -1]


def test_on_a_cpu_nothing_is_copied_to_be_read() -> None:
    drawn = sampler.sample(torch.randn(2, 9), [row(0, logprobs=3), row(1)])
    moved = drawn.to_host()
    assert moved.tokens is drawn.tokens
    assert moved.scores is not None
    assert drawn.scores is not None
    assert moved.scores.own is drawn.scores.own


def test_no_rows_are_no_tokens() -> None:
    assert sampler.sample(torch.zeros(2, 9), []).result() == []


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(100),
    seed=st.integers(0, 2**64 - 1),
    min_tokens=st.integers(0, 3),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 300, 5000]),
    stop_token_ids=st.just((3, 4)),
    logprobs=st.sampled_from([None, 0, 3]),
)


@settings(max_examples=60, deadline=None)
@given(
    params=st.lists(PARAMS, min_size=2, max_size=6),
    vocab=st.sampled_from([2, 7, 61, 257, 1031]),
    seed=st.integers(0, 1000),
    sharpness=st.sampled_from([0.0, 0.01, 1.0, 8.0]),
)
def test_a_row_draws_the_same_token_alone_and_in_any_batch(
    params: list[SamplingParams], vocab: int, seed: int, sharpness: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(params), vocab, generator=generator) * sharpness
    rows = [
        SampleRow(index, value, index, position, (vocab - 1,))
        for index, value in enumerate(params)
        for position in (0, 7)
    ]
    if vocab == 2:
        rows = [replace(r, sampling=replace(r.sampling, min_tokens=0)) for r in rows]
    together = ids(logits, rows)
    order = list(reversed(range(len(rows))))
    assert ids(logits, [rows[i] for i in order]) == [together[i] for i in order]
    for index, wanted in enumerate(rows):
        own = logits[wanted.logits_row : wanted.logits_row + 1].clone()
        assert ids(own, [replace(wanted, logits_row=0)]) == [together[index]]


def test_choices_of_one_row_differ_and_repeat_with_their_seed() -> None:
    logits = torch.zeros(1, 5000)
    rows = [row(choice=choice) for choice in range(4)]
    first = ids(logits, rows)
    assert len(set(first)) == 4
    assert ids(logits, rows) == first
    assert ids(logits, [row(choice=choice, seed=2) for choice in range(4)]) != first


def test_sampling_leaves_the_logits_alone() -> None:
    logits = torch.randn(2, 50)
    before = logits.clone()
    sample(logits, [row(0, min_tokens=5, stop_token_ids=(1,)), row(1, top_k=3, logprobs=2)])
    assert torch.equal(logits, before)


def test_logprobs_are_those_of_the_raw_logits_best_first() -> None:
    logits = log_probabilities(0.1, 0.4, 0.3, 0.1, 0.1)
    wanted = row(temperature=0.0, min_tokens=1, stop_token_ids=(1,), logprobs=4, top_k=1)
    (token,) = sample(logits, [wanted])
    assert token.token_id == 2
    assert token.logprob is not None
    assert token.logprob.logprob == pytest.approx(math.log(0.3))
    # Equal ones: lower ids first.
    assert [i for i, _ in token.logprob.top] == [1, 2, 0, 3]
    assert [v for _, v in token.logprob.top] == pytest.approx(
        [math.log(p) for p in (0.4, 0.3, 0.1, 0.1)]
    )


def test_each_row_gets_as_many_alternatives_as_it_asked_for() -> None:
    logits = torch.randn(1, 40)
    rows = [row(logprobs=n) for n in (None, 0, 1, 20, 99)]
    found = [token.logprob for token in sample(logits, rows)]
    assert found[0] is None
    assert [len(score.top) for score in found[1:] if score is not None] == [0, 1, 20, 40]


def test_logprobs_belong_to_the_row_that_asked() -> None:
    logits = torch.tensor([[0.0, 9.0], [0.0, 0.0]])
    silent, asking = row(0, temperature=0.0), row(1, temperature=0.0, logprobs=1)
    first, second = sample(logits, [silent, asking])
    assert first.logprob is None
    assert second.logprob is not None
    assert second.logprob.logprob == pytest.approx(math.log(0.5))

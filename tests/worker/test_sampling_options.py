"""Every option against an independent oracle: transformers' processors, in vLLM's order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xpyd_worker.engine.executor import KnownTokens, SampleSpec, ScheduledSequence
from xpyd_worker.engine.request import SampledToken, SamplingParams
from xpyd_worker.runner import sampler
from xpyd_worker.runner.adjustments import Adjustments
from xpyd_worker.runner.sampler import SampleRow, adjust, distribution

VOCAB = 61
EOS = 60
BASE = SamplingParams(max_tokens=100, seed=1)


@dataclass(frozen=True)
class Asked:
    """One row: its parameters and the tokens before it."""

    params: SamplingParams
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    seq_id: int = 0


def scheduled(asked: Asked) -> ScheduledSequence:
    """As the scheduler would give it."""
    return ScheduledSequence(
        asked.seq_id,
        (1,),
        0,
        (0,),
        asked.params,
        len(asked.prompt),
        (SampleSpec(0, len(asked.output)),),
        known=KnownTokens(asked.prompt, asked.output) if asked.params.reads_tokens else None,
    )


def row_of(asked: Asked, index: int = 0, adjustments: Adjustments | None = None) -> SampleRow:
    """The row of logits row `index`."""
    made = (adjustments or Adjustments(vocab_size=VOCAB)).of(scheduled(asked))
    position = len(asked.output)
    return SampleRow(index, asked.params, 0, position, (EOS,), adjustment=made)


def sample(logits: torch.Tensor, rows: list[SampleRow]) -> list[SampledToken]:
    """Tokens of rows that all have one."""
    found = [token for token in sampler.sample(logits, rows).result() if token is not None]
    assert len(found) == len(rows)
    return found


def oracle(logits: torch.Tensor, asked: Asked) -> torch.Tensor:
    """The exact distribution [vocab] of a row, one step after the other."""
    from transformers.generation import logits_process

    library: Any = logits_process
    params, nothing = asked.params, torch.zeros((1, 0), dtype=torch.int64)
    scores = logits[None].clone()
    if params.allowed_token_ids:
        others = [i for i in range(VOCAB) if i not in params.allowed_token_ids]
        scores[0, others] = -math.inf
    output = torch.tensor([asked.output], dtype=torch.int64)
    for word in params.bad_words:
        if asked.output[len(asked.output) - len(word) + 1 :] == word[:-1]:
            scores[0, word[-1]] = -math.inf
    if len(asked.output) < params.min_tokens:
        scores[0, [EOS, *params.stop_token_ids]] = -math.inf
    for token, bias in params.logit_bias:
        scores[0, token] += bias
    if params.repetition_penalty != 1:
        both = torch.tensor([asked.prompt + asked.output], dtype=torch.int64)
        scores = library.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(both, scores)
    for token in range(VOCAB):
        times = asked.output.count(token)
        scores[0, token] -= params.frequency_penalty * times
        scores[0, token] -= params.presence_penalty * (times > 0)
    assert output.shape[1] == len(asked.output)
    if params.temperature == 0:
        return torch.nn.functional.one_hot(scores[0].argmax(), VOCAB).float()
    scores = library.TemperatureLogitsWarper(params.temperature)(nothing, scores)
    if params.min_p:
        scores = library.MinPLogitsWarper(params.min_p)(nothing, scores)
    if params.top_k:
        scores = library.TopKLogitsWarper(params.top_k)(nothing, scores)
    if params.top_p < 1:
        scores = library.TopPLogitsWarper(params.top_p)(nothing, scores)
    return scores[0].softmax(dim=-1)


def ours(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """The distribution [rows, vocab] that the sampler draws from."""
    chosen = adjust(logits[torch.tensor([row.logits_row for row in rows])], rows)
    best, params = chosen.amax(dim=-1, keepdim=True), [row.sampling for row in rows]
    drawn = distribution(chosen, best, [replace(p, temperature=p.temperature or 1) for p in params])
    drawn /= drawn.sum(dim=-1, keepdim=True)
    for index, one in enumerate(params):
        if one.temperature == 0:
            drawn[index] = torch.nn.functional.one_hot(chosen[index].argmax(), VOCAB)
    return drawn


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    """Logits without equals."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCAB, generator=generator) * 2


CASES: dict[str, dict[str, Any]] = {
    "allowed": {"allowed_token_ids": (3, 4, 5, 59)},
    "one allowed": {"allowed_token_ids": (7,)},
    "bad words": {
        "bad_words": ((9,), (8, 12), (7, 8, 13), (1, 2, 3, 4, 6, 7, 8, 10), (6, 8, 15), (5, 14))
    },
    "min tokens": {"min_tokens": 9, "stop_token_ids": (2, 3)},
    "min tokens reached": {"min_tokens": 4, "stop_token_ids": (2, 3)},
    "bias": {"logit_bias": ((4, 3.0), (5, -2.5), (6, 1.5), (7, -100.0))},
    "repetition": {"repetition_penalty": 1.7},
    "less than no repetition": {"repetition_penalty": 0.4},
    "presence": {"presence_penalty": 1.3},
    "frequency": {"frequency_penalty": -0.9},
    "penalties": {"presence_penalty": 1, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "min_p": {"min_p": 0.08},
    "the likeliest alone": {"min_p": 1.0},
    "min_p after temperature": {"min_p": 0.2, "temperature": 1.8},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.7},
    "filters": {"min_p": 0.05, "top_k": 9, "top_p": 0.8, "temperature": 1.4},
    "min_p leaves fewer than top_k": {"min_p": 0.3, "top_k": 50, "top_p": 0.9},
    "all": {
        "allowed_token_ids": tuple(range(3, 50)),
        "bad_words": ((9,), (8, 12)),
        "min_tokens": 7,
        "stop_token_ids": (5,),
        "logit_bias": ((4, 1.0), (6, 2.0)),
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.3,
        "min_p": 0.02,
        "top_k": 20,
        "top_p": 0.9,
        "temperature": 0.8,
    },
}
PROMPT, OUTPUT = (1, 2, 2, 30, 31, 32, 33), (4, 4, 6, 7, 8)


@pytest.mark.parametrize("temperature", [None, 0.0])
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_the_distribution_is_the_oracles(
    changes: dict[str, Any], temperature: float | None
) -> None:
    heat = {} if temperature is None else {"temperature": temperature}
    asked = Asked(replace(BASE, **{**changes, **heat}), PROMPT, OUTPUT)
    for seed in range(5):
        logits = logits_of(seed)
        expected = oracle(logits[0], asked)
        found = ours(logits, [row_of(asked)])[0]
        assert torch.equal(found > 0, expected > 0)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_no_two_of_the_cases_are_alike() -> None:
    logits = logits_of(1, rows=4)
    kinds: dict[str, str] = {}
    for name, changes in CASES.items():
        asked = Asked(replace(BASE, **changes), PROMPT, OUTPUT)
        found = ours(logits, [row_of(asked, index) for index in range(4)]).tolist()
        other = kinds.setdefault(str(found), name)
        assert other == name


@pytest.mark.parametrize("name", ["min_p", "penalties", "bias", "bad words", "all"])
def test_tokens_come_in_the_oracles_shares(name: str) -> None:
    """Chi-square over 4000 draws; the seed is fixed, so that chance has no part in the verdict."""
    asked = Asked(replace(BASE, **CASES[name]), PROMPT, OUTPUT)
    logits, count = logits_of(3), 4000
    expected = oracle(logits[0], asked)
    row, position = row_of(asked), len(OUTPUT)
    rows = [replace(row, choice_index=choice, position=position) for choice in range(count)]
    seen = Counter(token.token_id for token in sample(logits, rows))
    assert set(seen) <= set(expected.nonzero()[:, 0].tolist())
    # Those of fewer than five expected draws count as one.
    common = [i for i in range(VOCAB) if expected[i] * count >= 5]
    rest = max(1 - float(expected[common].sum()), 0.0) * count
    statistic = sum(
        (seen[i] - float(expected[i]) * count) ** 2 / (float(expected[i]) * count) for i in common
    )
    others = count - sum(seen[i] for i in common)
    statistic += (others - rest) ** 2 / rest if rest > 1 else 0.0
    freedom = len(common) - (0 if rest > 1 else 1)
    # 0.1 % by Wilson and Hilferty.
    bound = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < bound


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(100),
    seed=st.integers(0, 2**64 - 1),
    min_tokens=st.integers(0, 8),
    temperature=st.sampled_from([0.0, 0.6, 1.3]),
    top_p=st.sampled_from([0.4, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 9]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.1]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.8]),
    logit_bias=st.sampled_from([(), ((3, 4.0), (EOS, 9.0))]),
    allowed_token_ids=st.sampled_from([(), (3, 4), tuple(range(20, VOCAB)), (EOS,)]),
    bad_words=st.sampled_from([(), ((3,), (4,), (5, 6)), tuple((i,) for i in range(VOCAB))]),
    logprobs=st.sampled_from([None, 2]),
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12).map(tuple)
ASKED = st.builds(Asked, PARAMS, TOKENS, TOKENS)


@settings(max_examples=80, deadline=None)
@given(st.lists(ASKED, min_size=2, max_size=7), st.integers(0, 99))
def test_a_row_draws_the_same_token_alone_and_among_others(asked: list[Asked], seed: int) -> None:
    logits = logits_of(seed, len(asked))
    before = logits.clone()
    adjustments = Adjustments(vocab_size=VOCAB)
    many = [replace(one, seq_id=index) for index, one in enumerate(asked)]
    together = sample(logits, [row_of(one, i, adjustments) for i, one in enumerate(many)])
    assert torch.equal(logits, before)
    for index, one in enumerate(asked):
        assert sample(logits, [row_of(one, index)]) == [together[index]]


@settings(max_examples=80, deadline=None)
@given(ASKED, TOKENS, st.integers(0, 99))
def test_counts_that_grow_step_by_step_equal_counts_made_anew(
    asked: Asked, more: tuple[int, ...], seed: int
) -> None:
    """Tokens come one at a time, or several where the sequence goes on from elsewhere."""
    logits = logits_of(seed)
    adjustments = Adjustments(vocab_size=VOCAB)
    for end in (0, 1, 2, 5, *range(6, len(more) + 1)):
        grown = replace(asked, output=asked.output + more[:end])
        kept, anew = row_of(grown, 0, adjustments), row_of(grown)
        assert torch.equal(adjust(logits, [kept]), adjust(logits, [anew]))


def test_more_distinct_tokens_than_there_was_room_for_are_counted() -> None:
    params = replace(BASE, temperature=0.0, presence_penalty=2.0)
    adjustments = Adjustments(vocab_size=1000)
    logits = torch.linspace(1, 0, 1000)[None]
    output: tuple[int, ...] = ()
    for step in range(300):
        made = adjustments.of(scheduled(Asked(params, (), output)))
        (token,) = sample(logits, [SampleRow(0, params, 0, step, adjustment=made)])
        assert token.token_id == step
        output += (token.token_id,)


def test_sequences_that_no_longer_fit_are_counted_anew() -> None:
    params = replace(BASE, temperature=0.0, repetition_penalty=2.0, frequency_penalty=2.0)
    adjustments = Adjustments(vocab_size=VOCAB)
    logits = logits_of(1)
    first = Asked(params, (), (3, 3, 4), seq_id=0)
    before = ours(logits, [row_of(first, 0, adjustments)])
    long = replace(first, prompt=(7,) * 100_000, output=(5,))
    for seq_id in range(1, 8):
        row_of(replace(long, seq_id=seq_id), 0, adjustments)
    assert torch.equal(ours(logits, [row_of(first, 0, adjustments)]), before)
    huge = replace(first, seq_id=9, prompt=(7,) * 600_000)
    for _ in range(2):
        assert torch.equal(
            ours(logits, [row_of(huge, 0, adjustments)]), ours(logits, [row_of(huge)])
        )


def test_what_was_counted_of_a_sequence_goes_when_the_next_step_draws_for_it_no_more() -> None:
    """Its small tensors would stand between large ones that come and go: the heap would grow."""
    params = replace(BASE, temperature=0.0, frequency_penalty=2.0)
    adjustments = Adjustments(vocab_size=VOCAB)
    for seq_id in range(100):
        adjustments.begin_step()
        for member in (seq_id, 1000):
            row_of(Asked(params, (), (3, 3, 4), seq_id=member), 0, adjustments)
        assert adjustments.remembered == min(3, seq_id + 2)


def test_a_request_without_options_asks_nothing_of_its_tokens() -> None:
    assert row_of(Asked(BASE)).adjustment is None
    plain = replace(BASE, logit_bias=((1, 1.0),), allowed_token_ids=(1,), min_p=0.5, min_tokens=3)
    assert not plain.reads_tokens
    for field, value in (
        ("repetition_penalty", 1.1),
        ("presence_penalty", -0.1),
        ("frequency_penalty", 0.1),
        ("bad_words", ((1,),)),
    ):
        assert replace(BASE, **{field: value}).reads_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_the_options_leave_no_token_bad_words_and_min_tokens_give_way(
    temperature: float,
) -> None:
    """One request's contradiction must not fail the others of its step, nor free them of theirs."""
    nothing = replace(
        BASE, temperature=temperature, allowed_token_ids=(EOS, 5), bad_words=((5,),), min_tokens=9
    )
    logits = logits_of(2, 3)
    best = int(logits[2].argmax())
    kept = replace(BASE, temperature=temperature, bad_words=((best,),), logit_bias=((best, 90.0),))
    broken = logits[:1] * math.nan
    rows = [
        row_of(Asked(replace(BASE, temperature=0.0)), 0),
        row_of(Asked(nothing), 1),
        row_of(Asked(kept), 2),
        row_of(Asked(nothing), 3),
    ]
    first, second, third, last = sampler.sample(torch.cat((logits, broken)), rows).result()
    assert first == SampledToken(int(logits[0].argmax()))
    assert second in (SampledToken(EOS), SampledToken(5))
    (alone,) = sample(logits, [rows[2]])
    assert third == alone
    assert third != SampledToken(best)
    assert last is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_found_behind_the_options_too(bad: float) -> None:
    logits = logits_of(0)
    logits[0, 7] = bad
    for changes in (
        {"repetition_penalty": 1.2},
        {"logit_bias": ((7, -5.0),)},
        {"bad_words": ((3,),)},
    ):
        row = row_of(Asked(replace(BASE, **changes), (7,), (7,)))
        assert sampler.sample(logits, [row]).result() == [None]


def test_allowed_ids_that_the_model_has_not_leave_no_token() -> None:
    params = replace(BASE, allowed_token_ids=(VOCAB, VOCAB + 5))
    rows = [row_of(Asked(params), 0), row_of(Asked(replace(BASE, allowed_token_ids=(4,))), 0)]
    assert sampler.sample(logits_of(0), rows).result() == [None, SampledToken(4)]


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e37])
def test_no_penalty_makes_logits_infinite(penalty: float, scale: float) -> None:
    params = replace(BASE, repetition_penalty=penalty, frequency_penalty=2.0, min_p=0.1, top_p=0.9)
    logits = logits_of(4) * scale
    (token,) = sample(logits, [row_of(Asked(params, tuple(range(VOCAB)), (3,) * 50))])
    assert 0 <= token.token_id < VOCAB
    assert bool(adjust(logits, [row_of(Asked(params, tuple(range(VOCAB))))]).isfinite().all())


def test_equals_at_the_border_of_top_p_leave_the_lower_ids() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, 40] = 1.0
    rows = [SampleRow(i, replace(BASE, top_p=0.5), 0, 0) for i in range(2)]
    flat, one_better = ours(logits, rows)
    assert flat.nonzero()[:, 0].tolist() == list(range(31))
    others = math.ceil(0.5 * (60 + math.e) - math.e)
    assert one_better.nonzero()[:, 0].tolist() == [*range(others), 40]

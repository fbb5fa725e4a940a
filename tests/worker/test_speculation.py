"""Drafts: what is proposed, when it pays, and what an engine makes of them. Over the fakes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.worker.engine_driver import DRAFTS, EngineDriver, make_request, prompt_of
from tests.worker.engine_fakes import BLOCK
from tests.worker.grammar_kit import FORTY, GRAMMARS, start_of
from xpyd_core.errors import UserError
from xpyd_worker.engine.executor import StepInput
from xpyd_worker.engine.speculation import (
    NgramIndex,
    SequenceDraft,
    Speculation,
    SpeculativeConfig,
    read_speculative,
)

ARTICLE = SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_max=5, prompt_lookup_min=3)


def proposal(tokens: Sequence[int], most: int = 3, longest: int = 5, least: int = 3) -> list[int]:
    return list(NgramIndex(longest=longest, least=least).propose(tokens, most))


def searched(tokens: Sequence[int], most: int, longest: int, least: int) -> list[int]:
    """The same by looking at every place: article fact 27 as it stands."""
    for n in range(longest, least - 1, -1):
        for start in range(len(tokens) - n):
            if list(tokens[start : start + n]) == list(tokens[-n:]):
                return list(tokens[start + n : start + n + most])
    return []


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        # Three tokens are found, not four or five.
        ([1, 2, 3, 9, 8, 7, 1, 2, 3, 4, 5, 6, 1, 2, 3], [9, 8, 7]),
        # Two repeated tokens are fewer than the least.
        ([1, 2, 1, 2], []),
        ([1, 2], []),
        # Five win over three that came earlier.
        ([3, 4, 5, 7, 7, 1, 2, 3, 4, 5, 8, 8, 1, 2, 3, 4, 5], [8, 8, 1]),
        # Of two places the first.
        ([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], [7, 1, 2]),
        # Where a text repeats itself a place may overlap the end, and what follows is short.
        ([6, 6, 6, 6], [6]),
    ],
)
def test_what_followed_the_first_place_of_the_longest_match_is_proposed(
    tokens: list[int], expected: list[int]
) -> None:
    """Article fact 27."""
    assert proposal(tokens) == expected


@pytest.mark.parametrize("seed", range(5))
def test_an_index_that_grows_with_a_text_proposes_what_a_search_finds(seed: int) -> None:
    rng = random.Random(seed)
    index = NgramIndex(longest=4, least=2)
    tokens: list[int] = []
    found = 0
    for _ in range(400):
        tokens.append(rng.randrange(5))
        expected = searched(tokens, 3, 4, 2)
        assert list(index.propose(tokens, 3)) == expected
        found += bool(expected)
        if rng.random() < 0.2:
            tokens += [rng.randrange(5) for _ in range(rng.randrange(4))]
    assert found > 100


def test_a_long_prompt_is_indexed_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xpyd_worker.engine.speculation._INDEXED_AT_ONCE", 10)
    index = NgramIndex(longest=3, least=3)
    tokens = [1, 2, 3, 4, *range(10, 25), 1, 2, 3]
    assert [index.propose(tokens, 1) for _ in range(3)] == [(), (), (4,)]


# --- the flag


OF_NGRAMS: dict[str, object] = {"method": "ngram", "num_speculative_tokens": 3}
OF_A_MODEL: dict[str, object] = {"model": "m", "num_speculative_tokens": 3}


def test_the_flag_has_vllms_keys_and_defaults() -> None:
    given = OF_NGRAMS
    assert read_speculative({**given, "prompt_lookup_max": 5, "prompt_lookup_min": 3}) == ARTICLE
    same = replace(ARTICLE, prompt_lookup_max=5, prompt_lookup_min=5)
    assert read_speculative(given) == same
    assert read_speculative({**given, "prompt_lookup_max": 5}) == same
    assert read_speculative({**given, "prompt_lookup_min": 5}) == same
    named = {**OF_A_MODEL, "method": "draft_model", "draft_tensor_parallel_size": 1}
    assert read_speculative(OF_A_MODEL) == read_speculative(named)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "method: expected"),
        ({"method": "eagle", "num_speculative_tokens": 3}, "'eagle'"),
        ({"method": "medusa", "num_speculative_tokens": 3}, "model: expected where"),
        ({**OF_A_MODEL, "prompt_lookup_max": 2}, "unknown key"),
        ({**OF_A_MODEL, "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size: expected 1"),
        ({"method": "ngram"}, "tokens: missing"),
        *[({**OF_NGRAMS, "num_speculative_tokens": n}, "1 to 16") for n in (0, 17, True)],
        ({**OF_A_MODEL, "method": "ngram"}, "unknown key 'model'"),
        (
            {**OF_NGRAMS, "prompt_lookup_max": 2, "prompt_lookup_min": 3},
            "prompt_lookup_min: 3; at most prompt_lookup_max, 2",
        ),
    ],
)
def test_what_the_flag_cannot_be_is_said_with_its_key(given: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=f"--speculative-config: .*{named}"):
        read_speculative(given)


# --- whether a draft pays


def judged(
    *,
    accepted: int,
    plain_s: float = 0.010,
    draft_s: float = 0.012,
    decodes: int = 1,
    drafts: int = 4,
) -> SequenceDraft:
    """A sequence with so many drafts of 3 tokens, `accepted` of each, where steps take so long."""
    speculation = Speculation(ARTICLE, waits=False)
    draft = speculation.begin()
    speculation.measured(plain_s, decodes=decodes, draft_tokens=0)
    speculation.measured(draft_s, decodes=decodes, draft_tokens=3 * decodes)
    for _ in range(drafts):
        speculation.verified(draft, accepted=accepted, drafted=3, tokens=100, decodes=decodes)
    return draft


def test_drafts_that_bring_more_than_they_cost_go_on() -> None:
    # One token more for a fifth of a step more.
    assert judged(accepted=1).is_on(100)


def test_drafts_that_bring_nothing_rest_and_try_again() -> None:
    draft = judged(accepted=0)
    assert not draft.is_on(100)
    assert not draft.is_on(163)
    assert draft.is_on(164)
    assert draft.tried == 0


def test_a_new_sequence_begins_with_a_rest_where_others_drafts_did_not_pay() -> None:
    speculation = Speculation(ARTICLE, waits=False)
    text = [1, 2, 3] * 4
    for _ in range(3):
        speculation.measured(0.010, decodes=4, draft_tokens=0)
    speculation.measured(0.030, decodes=4, draft_tokens=12)
    assert speculation.room(4, 100) == 50
    first, second = speculation.begin(), speculation.begin()
    assert speculation.propose(first, text, 3)
    for _ in range(4):
        speculation.verified(first, accepted=0, drafted=3, tokens=100, decodes=4)
    assert not speculation.propose(second, text, 3)
    # The more decode the longer, for all wait for each trial.
    assert second.resume_at == len(text) + 4 * 64
    assert speculation.propose(second, text * 30, 3)


def test_a_trial_ends_also_where_noise_makes_drafts_free() -> None:
    assert judged(accepted=0, drafts=3).is_on(100)
    assert not judged(accepted=0, draft_s=0.009).is_on(100)


def test_a_token_is_worth_its_share_of_a_step() -> None:
    # With 8 sequences it is an eighth of the step that it saves: 8 x 3 more tokens for twice the
    # time cost more than one of three that are accepted brings.
    assert judged(accepted=1, plain_s=0.010, draft_s=0.013, decodes=8).is_on(100)
    assert not judged(accepted=1, plain_s=0.010, draft_s=0.030, decodes=8).is_on(100)


def test_a_trial_needs_more_than_what_goes_on() -> None:
    """A token brings 10 ms here, and three cost 9."""
    assert not judged(accepted=1, draft_s=0.019).is_on(100)
    speculation = Speculation(ARTICLE, waits=False)
    draft = speculation.begin()
    speculation.measured(0.010, decodes=1, draft_tokens=0)
    speculation.measured(0.019, decodes=1, draft_tokens=3)
    draft.passed = True
    for _ in range(20):
        speculation.verified(draft, accepted=1, drafted=3, tokens=100, decodes=1)
    assert draft.is_on(100)
    for _ in range(20):
        speculation.verified(draft, accepted=0, drafted=3, tokens=100, decodes=1)
    assert not draft.is_on(100)


def test_each_trial_that_fails_doubles_the_rest_and_one_that_passes_ends_that() -> None:
    speculation = Speculation(ARTICLE, waits=False)
    draft = speculation.begin()
    speculation.measured(0.010, decodes=1, draft_tokens=0)
    speculation.measured(0.012, decodes=1, draft_tokens=3)
    at, rests = 0, list[int]()

    def trial(accepted: int) -> None:
        for _ in range(4):
            speculation.verified(draft, accepted=accepted, drafted=3, tokens=at, decodes=1)

    for _ in range(8):
        trial(0)
        rests.append(draft.resume_at - at)
        at = draft.resume_at
    assert rests == [64, 128, 256, 512, 1024, 2048, 4096, 4096]
    trial(3)
    assert draft.is_on(at)
    for _ in range(30):
        speculation.verified(draft, accepted=0, drafted=3, tokens=at, decodes=1)
        if not draft.is_on(at):
            break
    assert draft.resume_at - at == 64


def test_the_worst_case_costs_less_than_three_percent() -> None:
    """Each draft token costs half a step, as if nothing were shared, and none is accepted."""
    speculation = Speculation(ARTICLE, waits=False)
    draft = speculation.begin()
    tokens, drafts = 100, 0
    speculation.measured(0.010, decodes=1, draft_tokens=0)
    for _ in range(8192):
        tokens += 1
        if draft.is_on(tokens):
            drafts += 1
            speculation.measured(0.025, decodes=1, draft_tokens=3)
            speculation.verified(draft, accepted=0, drafted=3, tokens=tokens, decodes=1)
    assert drafts * 1.5 / 8192 < 0.03


def test_steps_without_drafts_are_made_to_measure_what_they_take() -> None:
    speculation = Speculation(ARTICLE, waits=False)
    for _ in range(3):
        assert speculation.room(4, 100) == 0
        speculation.measured(0.010, decodes=4, draft_tokens=0)
    assert speculation.room(4, 100) == 50
    for _ in range(64):
        speculation.measured(0.011, decodes=4, draft_tokens=6)
    assert speculation.room(4, 100) == 0
    # Prompts came into those steps, each time: there are a few tries.
    assert [speculation.room(4, 100) for _ in range(4)] == [0, 0, 0, 50]


def test_what_was_not_measured_is_taken_from_steps_that_are_alike_or_as_dear() -> None:
    speculation = Speculation(ARTICLE, waits=False)
    unknown, known = speculation.begin(), speculation.begin()
    for _ in range(4):
        speculation.verified(unknown, accepted=3, drafted=3, tokens=100, decodes=9)
    assert not unknown.is_on(100)
    speculation.measured(0.010, decodes=4, draft_tokens=0)
    speculation.measured(0.012, decodes=4, draft_tokens=12)
    for _ in range(4):
        speculation.verified(known, accepted=3, drafted=3, tokens=100, decodes=9)
    assert known.is_on(100)


# --- an engine


def drafting(**changes: Any) -> EngineDriver:
    return EngineDriver(**({"budget": 40, "speculative": DRAFTS} | changes))


def repeating(name: str, length: int = 6, **options: Any) -> Any:
    """A request whose text can be drafted, mostly."""
    asked: dict[str, Any] = {"top_k": 1, "max_tokens": 40, "ignore_eos": True} | options
    return make_request(name, prompt_of(length), **asked)


def drafts_of(driver: EngineDriver) -> list[int]:
    return [one.drafts for step in driver.executor.steps for one in step.sequences]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_text_that_repeats_itself_takes_fewer_steps_and_is_the_same(depth: int) -> None:
    driver = drafting(depth=depth)
    driver.submit(repeating("r"))
    driver.run()
    driver.assert_as_alone("r")
    stats = driver.core.stats()
    assert len(driver.executor.steps) < 30
    assert stats.spec_drafts == sum(count > 0 for count in drafts_of(driver))
    assert stats.spec_draft_tokens == sum(drafts_of(driver))
    assert stats.spec_accepted_tokens == sum(stats.spec_accepted_at.values()) > 10
    assert list(stats.spec_accepted_at) == [0, 1, 2]
    assert len(driver.executor.steps) == 40 - stats.spec_accepted_tokens
    driver.assert_all_blocks_free()


def test_without_the_flag_nothing_is_drafted() -> None:
    driver = EngineDriver()
    driver.submit(repeating("r"))
    driver.run()
    assert not any(drafts_of(driver))
    assert len(driver.executor.steps) == 40


def test_several_tokens_of_a_step_are_one_output() -> None:
    driver = drafting()
    driver.submit(repeating("r"))
    driver.run()
    sizes = [len(part.tokens) for output in driver.outputs["r"] for part in output.choices]
    assert max(sizes) == 4
    assert all(len(output.choices) == 1 for output in driver.outputs["r"])


@pytest.mark.parametrize("max_tokens", range(1, 24))
def test_no_token_is_drafted_behind_the_last_that_is_allowed(max_tokens: int) -> None:
    for model_len in (200, 6 + max_tokens):
        driver = drafting(model_len=model_len)
        driver.submit(repeating("r", max_tokens=max_tokens if model_len == 200 else 100))
        driver.run()
        driver.assert_as_alone("r")
        assert len(driver.tokens("r")) == max_tokens
        for step in driver.executor.steps:
            for one in step.sequences:
                assert one.start + len(one.token_ids) <= 6 + max_tokens - (one.drafts > 0)


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_stop_token_inside_of_a_draft_ends_the_choice_there(stop: int) -> None:
    driver = drafting()
    driver.submit(repeating("r", min_tokens=11, stop_token_ids=(stop,)))
    driver.run()
    driver.assert_as_alone("r")
    last = driver.outputs["r"][-1].choices[-1]
    assert last.stop_token_id == last.tokens[-1].token_id == stop
    assert driver.reasons("r") == {0: "stop"}
    driver.assert_all_blocks_free()


def test_a_client_that_leaves_while_a_draft_is_verified_leaves_nothing_behind() -> None:
    driver = drafting(depth=2)
    driver.submit(repeating("r"))
    for _ in range(200):
        driver.turns(1)
        if any(one.drafts for step in driver.executor.launched for one in step.sequences):
            break
    else:
        raise AssertionError("no draft came under way")
    driver.core.abort("r")
    driver.run()
    driver.assert_begins_as_alone("r")
    driver.assert_all_blocks_free()


@pytest.mark.parametrize("blocks", [16, 12])
def test_drafts_take_blocks_only_where_there_are_some_and_preempt_nobody(blocks: int) -> None:
    """Two requests fill the cache to the last block as they end, or one waits for the other."""
    assert 2 * (6 + 26) // BLOCK == 16
    driver = drafting(blocks=blocks, caching=False)
    for name in ("a", "b"):
        driver.submit(repeating(name, max_tokens=26))
    driver.run()
    assert (driver.core.stats().preemptions > 0) == (blocks < 16)
    assert driver.core.stats().spec_accepted_tokens > 0
    for name in ("a", "b"):
        driver.assert_as_alone(name)


def test_what_was_drafted_wrong_is_in_no_prefix() -> None:
    """A second request with the whole text as its prompt hits what was accepted, and goes on
    right."""
    driver = drafting()
    driver.submit(repeating("a", max_tokens=34))
    driver.run()
    stats = driver.core.stats()
    assert stats.spec_accepted_tokens < stats.spec_draft_tokens
    text = [*prompt_of(6), *driver.tokens("a")]
    driver.submit(make_request("b", text, max_tokens=20, top_k=1))
    driver.run()
    driver.assert_as_alone("b")
    assert driver.core.stats().prefix_hit_tokens == len(text) // BLOCK * BLOCK - BLOCK


def test_a_prompt_beside_has_half_of_the_room_at_least() -> None:
    driver = drafting(budget=12, seqs=4)
    for name in ("a", "b", "c"):
        driver.submit(repeating(name, max_tokens=60))
    for _ in range(200):
        driver.turns(1)
        if sum(one.drafts for one in driver.executor.steps[-1].sequences) > 3:
            break
    before = len(driver.executor.steps)
    driver.submit(make_request("long", prompt_of(80, first=5)))
    driver.turns(10)
    steps = driver.executor.steps[before:]
    shares = [
        len(one.token_ids) for step in steps for one in step.sequences if one.log_id == "long"
    ]
    assert len(shares) >= 9
    assert min(shares[:9]) >= 4
    driver.run()
    for name in ("a", "b", "c", "long"):
        driver.assert_as_alone(name)


def test_choices_of_a_request_draft_each_for_itself() -> None:
    driver = drafting()
    driver.submit(repeating("r", n=3, continue_from=((), (1, 2, 3, 4, 1), (3,))))
    driver.run()
    driver.assert_as_alone("r")
    assert driver.core.stats().spec_accepted_tokens > 30


@pytest.mark.parametrize(
    ("text", "draft", "allowed"),
    [
        # Up to the end of the grammar, and then nothing but EOS.
        ("abc", "dei", 3),
        # What may not come is followed by anything, and is not drawn.
        ("ab", "uaa", 0),
        ("ab", "cua", 1),
        ("abcdei", "aaa", 0),
    ],
)
def test_a_matcher_has_a_mask_behind_each_draft_token_and_stays_where_it_is(
    text: str, draft: str, allowed: int
) -> None:
    matcher = start_of(GRAMMARS[0]).copy()
    assert matcher.accept(FORTY.ids(text))
    ids = FORTY.ids(draft)
    beside = matcher.copy()
    found = matcher.mask(ids).words()
    each = len(found) // 4
    assert found[:each] == beside.mask().words()
    for count in range(1, allowed + 1):
        assert beside.accept(ids[count - 1 : count])
        if not beside.is_finished:
            assert found[count * each : (count + 1) * each] == beside.mask().words()
    # The next mask is that of the place before the drafts.
    assert matcher.accept(())
    assert matcher.mask().words() == found[:each]
    assert matcher.is_finished == (text == "abcdei")


@pytest.mark.parametrize("grammar", range(len(GRAMMARS)))
@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_follow_a_grammar(grammar: int, depth: int) -> None:
    driver = drafting(depth=depth)
    for number in range(6):
        matcher = start_of(GRAMMARS[grammar]).copy()
        driver.submit(
            make_request(
                f"r{number}",
                prompt_of(30, first=number),
                max_tokens=30,
                min_tokens=number,
                matchers=(matcher,),
            )
        )
    driver.run()
    for number in range(6):
        driver.assert_as_alone(f"r{number}")
    driver.assert_all_blocks_free()


def test_a_device_that_draws_ahead_does_so_where_nothing_is_drafted_for_long() -> None:
    """A text without repetition waits for its tokens, finds nothing, and then is drawn ahead."""
    driver = drafting(depth=2, model_len=300, blocks=128, speculative=ARTICLE)
    driver.submit(make_request("r", prompt_of(6), max_tokens=200, ignore_eos=True))
    under_way: list[int] = []

    def during(step: StepInput) -> None:
        under_way.append(len(driver.executor.launched))

    driver.executor.during = during
    driver.run()
    driver.assert_as_alone("r")
    assert under_way[:16].count(1) < 3
    assert under_way[40:].count(1) > 60


def test_an_engine_measures_its_steps_and_stops_drafting_where_it_does_not_pay() -> None:
    """A draft of 3 takes five times as long, and about one in 40 tokens is right."""
    driver = drafting(model_len=400, blocks=128)

    def during(step: StepInput) -> None:
        driver.now += 0.01 + 0.04 * sum(one.drafts for one in step.sequences) / 3

    driver.executor.during = during
    driver.submit(make_request("r", prompt_of(6), max_tokens=390, ignore_eos=True))
    driver.run()
    driver.assert_as_alone("r")
    assert 4 <= driver.core.stats().spec_drafts < 30

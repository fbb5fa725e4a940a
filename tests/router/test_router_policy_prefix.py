"""PrefixAware: prompts go where their beginnings are, unless computing them again costs less."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
from msgspec.structs import replace

from tests.router.choosing import Bench, key_of
from xpyd_router.policy import prefix_aware
from xpyd_router.policy.base import PrefixMark, Want
from xpyd_router.policy.pairs import Alone, Pair


def marks(text: str, tokens: int) -> tuple[PrefixMark, ...]:
    """One mark for each 100 tokens of a prompt whose beginnings are those of `text`."""
    return tuple((end, f"{text[: end // 100]}".encode()) for end in range(100, tokens + 1, 100))


def ask(text: str, tokens: int | None = None) -> Want:
    """A prompt of 100 tokens for each letter."""
    tokens = tokens or 100 * len(text)
    return Want("m", prompt_tokens=tokens, marks=marks(text, tokens))


def place(bench: Bench, want: Want) -> Pair:
    """Choose, and go there."""
    pair = bench.pair(want)
    bench.policy.placed(pair, want)
    return pair


def test_a_conversation_stays_and_others_are_spread() -> None:
    bench = Bench(4, 4, "PrefixAware")
    first = [place(bench, ask(letter * 5)) for letter in "abcd"]
    assert {pair.prefill.key for pair in first} == {key_of(one) for one in bench.p}
    assert {pair.decode.key for pair in first} == {key_of(one) for one in bench.d}
    for letter, home in zip("abcd", first, strict=True):
        for turn in range(6, 12):
            assert place(bench, ask(letter * turn)) == home


def test_it_waits_for_its_cache_as_long_as_computing_again_takes() -> None:
    bench = Bench(2, 1, "PrefixAware")
    home = bench.p.index(place(bench, ask("a" * 50)).prefill.beat)
    load = bench.load(bench.p[home])
    load.begin(4900)
    assert bench.p_index(ask("a" * 50)) == home
    load.begin(200)
    assert bench.p_index(ask("a" * 50)) == 1 - home
    # A beginning of a tenth is worth a tenth.
    load.end(4900)
    assert bench.p_index(ask("a" * 5 + "b" * 45)) == home
    load.begin(400)
    assert bench.p_index(ask("a" * 5 + "b" * 45)) == 1 - home


def test_a_prompt_that_all_begin_with_is_soon_everywhere() -> None:
    bench = Bench(3, 1, "PrefixAware")
    tally: Counter[int] = Counter()
    for number in range(60):
        want = ask("s" * 20 + chr(200 + number))
        pair = bench.pair(want)
        left = bench.policy.placed(pair, want)
        bench.load(pair.prefill.beat).begin(left)
        tally[bench.p.index(pair.prefill.beat)] += 1
    assert min(tally.values()) >= 15


def test_what_is_left_to_compute_is_told() -> None:
    bench = Bench(1, 1, "PrefixAware")
    for want, left in ((ask("aaaa"), 400), (ask("aaaab"), 100), (ask("aaaab"), 1), (ask("b"), 100)):
        assert bench.policy.placed(bench.pair(want), want) == left
    plain = Bench(1, 1, "LeastLoaded")
    assert [plain.policy.placed(plain.pair(), ask("aa")) for _ in range(2)] == [200, 200]


def test_a_decode_instance_is_taken_for_its_kv_unless_its_batch_is_long() -> None:
    bench = Bench(1, 2, "LeastLoaded", decode_policy="PrefixAware")
    want = ask("a" * 82)  # worth four requests
    home = bench.d.index(place(bench, want).decode.beat)
    load = bench.load(bench.d[home])
    for _ in range(3):
        load.begin(0)
    assert {bench.d_index(want) for _ in range(4)} == {home}
    for _ in range(2):
        load.begin(0)
    assert {bench.d_index(want) for _ in range(4)} == {1 - home}
    assert {bench.d_index() for _ in range(4)} == {1 - home}


def test_a_short_prompt_is_worth_no_more_than_its_own_tokens() -> None:
    """Marks come of an estimate; a count of the tokens may be far below it."""
    bench = Bench(2, 1, "PrefixAware")
    home = bench.p.index(place(bench, ask("a" * 50)).prefill.beat)
    bench.load(bench.p[home]).begin(1000)
    counted = replace(ask("a" * 50), prompt_tokens=100)
    assert {bench.p_index(counted) for _ in range(4)} == {1 - home}
    policy = bench.policy._prefill  # pyright: ignore[reportPrivateUsage] - what others build on
    assert policy.cached_tokens(key_of(bench.p[home]), counted) == 100


def test_a_prefill_instance_whose_room_ends_is_spared() -> None:
    bench = Bench(2, 1, "PrefixAware")
    home = bench.p.index(place(bench, ask("a" * 9)).prefill.beat)
    bench.load(bench.p[home]).begin(200)
    assert {bench.p_index(ask("a" * 9)) for _ in range(4)} == {home}
    bench.load(bench.p[home]).weight = 0.1
    assert {bench.p_index(ask("a" * 9)) for _ in range(4)} == {1 - home}


def test_the_fuller_a_decode_instance_is_the_more_its_kv_is_worth() -> None:
    """As its requests: each of them takes four times the room that it does elsewhere."""
    bench = Bench(1, 2, "LeastLoaded", decode_policy="PrefixAware")
    want = ask("a" * 41)  # worth two requests
    home = bench.d.index(place(bench, want).decode.beat)
    full, other = bench.load(bench.d[home]), bench.load(bench.d[1 - home])
    full.weight = 0.25
    for _ in range(3):
        full.begin(0)
    for _ in range(6):
        other.begin(0)
    assert {bench.d_index(want) for _ in range(4)} == {1 - home}
    for _ in range(2):
        other.begin(0)
    assert {bench.d_index(want) for _ in range(4)} == {home}
    assert {bench.d_index() for _ in range(4)} == {1 - home}


@pytest.mark.parametrize("side", ["P", "D"])
def test_a_request_without_marks_goes_to_the_least_loaded(side: str) -> None:
    bench = Bench(3, 3, "PrefixAware")
    place(bench, ask("a" * 9))
    index, beats = (bench.p_index, bench.p) if side == "P" else (bench.d_index, bench.d)
    for busy in (0, 2):
        bench.load(beats[busy]).begin(500)
    assert {index(Want("m", prompt_tokens=900)) for _ in range(6)} == {1}
    for busy in (0, 2):
        bench.load(beats[busy]).end(500)
    assert Counter(index(Want("m", prompt_tokens=900)) for _ in range(9)) == {0: 3, 1: 3, 2: 3}


def test_a_request_alone_is_noted_where_it_ran() -> None:
    bench = Bench(2, 1, "PrefixAware")
    want = replace(ask("a" * 9), alone="P")
    home = bench.alone(want)
    bench.policy.placed(home, want)
    assert {bench.pair(ask("a" * 9)).prefill.key for _ in range(4)} == {home.instance.key}


def test_who_left_has_no_cache_when_it_comes_back() -> None:
    bench = Bench(2, 1, "PrefixAware")
    home = place(bench, ask("a" * 9)).prefill
    bench.policy.forget(home.key)
    assert {bench.p_index(ask("a" * 9)) for _ in range(4)} == {0, 1}


def test_a_cache_holds_no_more_than_the_instance_has_blocks() -> None:
    bench = Bench(1, 1, "PrefixAware")
    only = bench.snapshot.any_model.groups[0].prefill[0]
    small = dataclasses.replace(only, beat=replace(only.beat, total_blocks=100))  # 1,600 tokens
    for letter in "abc":
        bench.policy.placed(Alone(small), ask(letter * 8))
    assert bench.policy.placed(Alone(small), ask("c" * 8)) == 1
    bench.policy.placed(Alone(small), ask("b" * 8))
    assert bench.policy.placed(Alone(small), ask("a" * 8)) == 800


def test_blocks_have_as_many_tokens_as_the_instance_says() -> None:
    """vLLM's have 128 on a CPU."""
    bench = Bench(1, 1, "PrefixAware")
    only = bench.snapshot.any_model.groups[0].prefill[0]
    said = replace(only.beat, total_blocks=13, block_tokens=128)  # 1,664 tokens
    small = dataclasses.replace(only, beat=said)
    for letter in "abc":
        bench.policy.placed(Alone(small), ask(letter * 8))
    assert bench.policy.placed(Alone(small), ask("c" * 8)) == 1
    assert bench.policy.placed(Alone(small), ask("b" * 8)) == 1
    assert bench.policy.placed(Alone(small), ask("a" * 8)) == 800


def test_a_prompt_that_was_used_again_outlives_others() -> None:
    cache = prefix_aware._Cache()  # pyright: ignore[reportPrivateUsage] - its order is the rule
    cache.use(marks("a" * 4, 400))
    cache.use(marks("b" * 4, 400))
    cache.use(marks("a" * 4, 400))
    cache.trim(6)
    assert (cache.length(marks("a" * 4, 400)), cache.length(marks("b" * 4, 400))) == (400, 200)
    cache.trim(9, most_tokens=300)
    assert (cache.length(marks("a" * 4, 400)), len(cache)) == (300, 3)


def test_all_caches_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_aware, "MAX_MARKS", 100)
    bench = Bench(8, 1, "PrefixAware", decode_policy="LeastLoaded")
    policy = bench.policy._prefill  # pyright: ignore[reportPrivateUsage] - the bound is its own
    assert isinstance(policy, prefix_aware.PrefixAware)
    chance = random.Random(1)
    seen: set[int] = set()
    for number in range(300):
        place(bench, ask(chr(500 + number) * chance.randrange(1, 40)))
        assert policy.marks <= 100
        seen.add(policy.marks)
        if number % 50 == 49:
            bench.policy.forget(key_of(bench.p[chance.randrange(8)]))
    assert max(seen) > 80


def test_those_that_stay_share_what_one_that_left_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_aware, "MAX_MARKS", 100)
    bench = Bench(10, 1, "PrefixAware", decode_policy="LeastLoaded")
    for number in range(10):
        place(bench, ask(chr(500 + number) * 30))
    last = key_of(bench.p[0])
    for one in bench.p[1:]:
        bench.policy.forget(key_of(one))
    others = frozenset(key_of(one) for one in bench.p[1:])
    want = replace(ask("z" * 60), exclude=others)
    place(bench, want)
    policy = bench.policy._prefill  # pyright: ignore[reportPrivateUsage] - the bound is its own
    assert policy.cached_tokens(last, want) == 6000


def test_equals_take_turns_and_second_tries_have_their_own() -> None:
    bench = Bench(2, 1, "PrefixAware")
    place(bench, ask("zz"))
    assert Counter(bench.p_index(ask("q")) for _ in range(10)) == {0: 5, 1: 5}
    failing, met = key_of(bench.p[0]), 0
    for _ in range(10):
        if bench.p_index(ask("q")) == 0:
            met += 1
            bench.pair(replace(ask("q"), exclude=frozenset({failing})))
    assert met == 5

"""Selective disaggregation: who computes short prompts, and prompts that D mostly has."""

from __future__ import annotations

import argparse
from collections import Counter

import pytest

from tests.router.choosing import Bench, key_of, make_policy, snapshot, some
from tests.router.fakes import pair, text_of
from tests.router.test_router_policy_prefix import ask
from xpyd_core.errors import UserError
from xpyd_router.command import command, read_config
from xpyd_router.policy.base import Want
from xpyd_router.policy.pairs import Alone, Pair

POLICIES = [
    *("RoundRobin", "Random", "PowerOfTwo", "LeastLoaded", "PrefixAware", "SessionAffinity"),
    "SloAware",
]


@pytest.mark.parametrize("policy", POLICIES)
def test_short_prompts_stay_on_d_and_long_ones_go_to_p(policy: str) -> None:
    bench = Bench(2, 2, policy, local_prefill_tokens=100)
    for tokens, is_local in ((99, True), (100, False), (1, True), (5000, False), (0, False)):
        choice = bench.policy.pick(bench.snapshot, Want("m", prompt_tokens=tokens))
        assert isinstance(choice, Alone if is_local else Pair)
        assert choice[-1].beat.type == "D"


def test_without_the_flag_every_prompt_goes_to_p() -> None:
    bench = Bench(1, 1, "PrefixAware")
    bench.policy.placed(bench.pair(ask("aaa")), ask("aaa"))
    assert bench.pair(Want("m", prompt_tokens=1))
    assert bench.pair(ask("aaa"))


def test_what_ds_cache_has_need_not_be_computed() -> None:
    bench = Bench(1, 2, "LeastLoaded", decode_policy="PrefixAware", local_prefill_tokens=150)
    first = bench.pair(ask("a" * 8))
    bench.policy.placed(first, ask("a" * 8))
    assert bench.alone(ask("a" * 9)).instance == first.decode
    assert bench.pair(ask("a" * 8 + "bb"))
    bench.policy.forget(first.decode.key)
    assert bench.pair(ask("a" * 9))


def test_engines_that_cannot_run_a_bare_id_get_every_prompt_by_a_pair() -> None:
    found = snapshot(*some("P", 1), *some("D", 1))
    policy = make_policy("LeastLoaded", local_prefill_tokens=100)
    assert isinstance(policy.pick(found, Want("m", prompt_tokens=5)), Pair)


def test_short_prompts_between_long_ones_do_not_bind_these_to_one_p() -> None:
    bench = Bench(2, 2, "RoundRobin", local_prefill_tokens=100)
    long: Counter[int] = Counter()
    short: Counter[str] = Counter()
    for _ in range(8):
        long[bench.p_index(Want("m", prompt_tokens=500))] += 1
        short[bench.alone(Want("m", prompt_tokens=5)).instance.key.http] += 1
    assert long == {0: 4, 1: 4}
    assert sorted(short.values()) == [4, 4]


def test_what_failed_on_one_d_stays_on_another() -> None:
    bench = Bench(1, 2, "LeastLoaded", local_prefill_tokens=100)
    failed = key_of(bench.d[0])
    want = Want("m", prompt_tokens=5, exclude=frozenset({failed}))
    assert bench.alone(want).instance.key == key_of(bench.d[1])


async def test_a_short_prompt_is_answered_by_d_alone() -> None:
    async with pair(local_prefill_tokens=100) as (fleet_, p, d):
        whole = await fleet_.json()
        assert whole["choices"][0]["text"] == "t0.0 t0.1 t0.2 t0.3 "
        assert text_of(await fleet_.events()) == "t0.0 t0.1 t0.2 t0.3 "
        assert (p.served, d.served) == (0, 2)
        await fleet_.json(prompt="x" * 500)
        assert (p.served, d.served) == (1, 3)


def test_the_flag_is_checked() -> None:

    parser = argparse.ArgumentParser()
    command.configure(parser)
    given = parser.parse_args(["--kv-insecure", "--local-prefill-tokens", "300"])
    assert read_config(given).local_prefill_tokens == 300
    given = parser.parse_args(["--kv-insecure", "--local-prefill-tokens=-1"])
    with pytest.raises(UserError, match="--local-prefill-tokens: expected 0 or more"):
        read_config(given)

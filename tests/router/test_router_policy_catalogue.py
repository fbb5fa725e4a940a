"""Policies by name: ours, other packages', and names that nobody has."""

from __future__ import annotations

import argparse
from collections import Counter
from importlib.metadata import EntryPoint

import pytest

from tests.router.choosing import snapshot, some
from xpyd_core.errors import UserError
from xpyd_router.command import command, read_config
from xpyd_router.fleet.loads import LoadTable
from xpyd_router.policy.base import Candidate, PolicyContext, Side, SidePolicy, Want
from xpyd_router.policy.pairs import GROUP, Alone, Pair, build_policy, installed


class Last(SidePolicy):
    """Another package's policy."""

    def __init__(self, context: PolicyContext) -> None:
        self.context = context

    def choose(self, side: Side, want: Want) -> Candidate:
        return side.candidates[-1]


def half() -> float:
    return 0.5


def build(policy: str = "RoundRobin", **config: str):
    known = {**installed(), "Last": EntryPoint("Last", f"{__name__}:Last", GROUP)}
    return build_policy(policy, loads=LoadTable(), random=half, known=known, **config)


def test_ours_are_installed_by_name() -> None:
    ours = {"RoundRobin", "Random", "PowerOfTwo", "LeastLoaded", "PrefixAware", "SessionAffinity"}
    assert {*ours, "SloAware"} <= set(installed())


def test_each_side_has_its_own_policy() -> None:
    found = snapshot(*some("P", 3), *some("D", 3))
    tallies: dict[str, tuple[int, int]] = {}
    for side in ("policy", "prefill_policy", "decode_policy"):
        policy = build(**{side: "Last"})
        picks = [policy.pick(found, Want("m")) for _ in range(6)]
        assert all(isinstance(pick, Pair) for pick in picks)
        ps, ds = (Counter(pick[place].key for pick in picks if pick) for place in (0, 1))
        tallies[side] = (len(ps), len(ds))
    assert tallies == {"policy": (1, 1), "prefill_policy": (1, 3), "decode_policy": (3, 1)}


def test_aggregated_instances_go_by_the_general_policy() -> None:
    found = snapshot(*some("A", 3))
    general = build(policy="Last", prefill_policy="RoundRobin", decode_policy="RoundRobin")
    picks = [general.pick(found, Want("m")) for _ in range(6)]
    assert {pick.instance.key for pick in picks if isinstance(pick, Alone)} == {
        found.any_model.aggregated[-1].key
    }


@pytest.mark.parametrize("flag", ["--policy", "--prefill-policy", "--decode-policy"])
def test_an_unknown_name_is_refused_with_the_known_ones(flag: str) -> None:
    with pytest.raises(UserError, match=f"{flag}: no policy 'Best'; there are .*RoundRobin"):
        build(**{flag.strip("-").replace("-", "_"): "Best"})


def test_the_flags_reach_the_config() -> None:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    given = "--kv-insecure --policy Random --prefill-policy RoundRobin --decode-policy PowerOfTwo"
    config = read_config(parser.parse_args(given.split()))
    assert config.policy == "Random"
    assert (config.prefill_policy, config.decode_policy) == ("RoundRobin", "PowerOfTwo")
    plain = read_config(parser.parse_args(["--kv-insecure"]))
    assert (plain.policy, plain.prefill_policy, plain.decode_policy) == ("LeastLoaded", None, None)

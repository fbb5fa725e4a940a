"""A P and a D of different engines are a pair where D uses P's KV, and in no group before."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.router.beats import beat
from xpyd_router.fleet.instances import Instance, InstanceKey, ModelInstances
from xpyd_router.fleet.introductions import Verdict, Verdicts, mixed_pairs
from xpyd_router.fleet.loads import LoadTable
from xpyd_router.fleet.registry import Registry
from xpyd_router.policy.base import Want
from xpyd_router.policy.pairs import Alone, Pair, build_policy, build_sides

VLLM = "vllm 0.32.0"
OTHER = "vllm 0.33.0"
ENGINES = ("", VLLM, OTHER)


def spoken(engine: str, **fields: Any) -> dict[str, Any]:
    """What an engine says of itself in beats."""
    own = {"dialect": "pair-id", "prompt_ids": 1} if engine else {"continuation": 1}
    return {"engine": engine, "compatibility": "k", "models": ("m",), **own, **fields}


@dataclass
class Known:
    """A registry and the instances that it has."""

    registry: Registry = field(
        default_factory=lambda: Registry(period_s=3.0, missed_beats=3, decode_alone=True)
    )
    number: int = 0

    def add(self, kind: str, engine: str = "", **fields: Any) -> InstanceKey:
        self.number += 1
        said = beat(kind, self.number, **spoken(engine, incarnation=f"i{self.number}", **fields))
        assert self.registry.apply(said, 0.0)[0] == "new"
        return InstanceKey(said.http_address, said.incarnation)

    @property
    def found(self) -> ModelInstances:
        return self.registry.snapshot.of_model("m")

    def groups(self) -> list[tuple[str, list[InstanceKey], list[InstanceKey]]]:
        return [(g.name, keys(g.prefill), keys(g.decode)) for g in self.found.groups]


def keys(instances: Sequence[Instance]) -> list[InstanceKey]:
    return [one.key for one in instances]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_fleet_of_one_engine_is_one_group(engine: str) -> None:
    known = Known()
    ps, ds = [known.add("P", engine) for _ in range(3)], [known.add("D", engine) for _ in range(2)]
    assert known.groups() == [("k", ps, ds)]
    assert not known.registry.is_mixed


@pytest.mark.parametrize(
    "fields",
    [
        {"compatibility": ""},  # beats from beside vLLM
        {"dialect": "nixl", "continuation": 0},
        {"dialect": "nixl-push", "continuation": 0},
    ],
)
def test_pairs_that_compare_nothing_are_pairs_at_once(fields: dict[str, Any]) -> None:
    known = Known()
    p, d = known.add("P", VLLM, **fields), known.add("D", "", **fields)
    assert known.groups() == [(known.found.groups[0].prefill[0].pairing, [p], [d])]


def test_a_mixed_pair_is_a_pair_from_its_verdict_on() -> None:
    known = Known()
    p, d = known.add("P", VLLM), known.add("D")
    assert known.groups() == [("k 10.0.0.2:20001", [], [d]), ("k", [p], [])]
    assert known.registry.judge(p, d, "met")
    assert known.groups() == [("k", [p], [d])]
    assert not known.registry.judge(p, d, "refused")
    assert known.groups() == [("k", [p], [d])]


def test_a_refused_pair_is_none_and_d_serves_alone() -> None:
    known = Known()
    p, d = known.add("P", VLLM), known.add("D")
    known.registry.judge(p, d, "refused")
    assert not any(g.prefill and g.decode for g in known.found.groups)
    assert known.found.is_routable  # D alone


def test_a_verdict_ends_with_either_instance() -> None:
    for leaver in ("P", "D"):
        known = Known()
        p, d = known.add("P", VLLM), known.add("D")
        known.registry.judge(p, d, "met")
        (gone,) = (i for i in known.registry.instances if i.beat.type == leaver)
        said = {"models": ("m",), "incarnation": "another"}
        known.registry.apply(
            beat(leaver, 1 if leaver == "P" else 2, **spoken(gone.beat.engine, **said)), 1.0
        )
        assert not any(g.prefill and g.decode for g in known.found.groups), leaver
        assert list(known.registry.verdicts.known()) == []


@pytest.mark.parametrize("leaver", [0, 1])
def test_an_instance_that_comes_back_is_introduced_again(leaver: int) -> None:
    known = Known()
    pair = known.add("P", VLLM), known.add("D")
    known.registry.judge(*pair, "met")
    (said,) = (i.beat for i in known.registry.instances if i.key == pair[leaver])
    known.registry.drop([pair[leaver]])
    assert list(known.registry.verdicts.known()) == []
    known.registry.apply(said, 1.0)
    assert not any(g.prefill and g.decode for g in known.found.groups)


def test_verdicts_on_the_absent_are_not_kept() -> None:
    known = Known()
    p = known.add("P", VLLM)
    assert not known.registry.judge(p, InstanceKey("10.0.0.9:20001", "x"), "met")
    assert list(known.registry.verdicts.known()) == []


def test_verdicts_are_bounded_and_leave_room_when_an_instance_leaves() -> None:
    first, second, third, d = (InstanceKey(f"10.0.0.{n}:1", "i") for n in range(4))
    verdicts = Verdicts(most=2)
    assert [verdicts.put(p, d, "met") for p in (first, second, third)] == [True, True, False]
    assert verdicts.is_full
    verdicts.forget(first)
    assert verdicts.put(third, d, "refused")
    assert set(verdicts.known()) == {(second, d, "met"), (third, d, "refused")}


def test_an_open_breaker_takes_a_p_no_d_while_the_others_have_not_met_it() -> None:
    known = Known()
    p, own, other = known.add("P", VLLM), known.add("D", VLLM), known.add("D")
    known.registry.set_standing(own, "Open")
    assert ([p], [own]) in [(ps, ds) for _, ps, ds in known.groups()]
    known.registry.judge(p, other, "met")
    assert known.groups() == [("k", [p], [other])]


@pytest.mark.parametrize("standing", ["Open", "Trial"])
def test_a_d_whose_breaker_is_open_is_left_out_where_it_would_have_no_p(standing: Any) -> None:
    known = Known()
    other, own = known.add("D"), known.add("D", VLLM)
    known.registry.set_standing(own, standing)
    assert known.groups() == [("k", [], [other])]


@dataclass
class Walk:
    """A fleet of several engines in which instances come, leave and meet at random."""

    random: random.Random
    known: Known = field(default_factory=Known)
    verdicts: dict[tuple[InstanceKey, InstanceKey], Verdict] = field(
        default_factory=dict[tuple[InstanceKey, InstanceKey], Verdict]
    )

    def step(self) -> None:
        registry, draw = self.known.registry, self.random.random()
        everyone = registry.instances
        if draw < 0.3 and len(everyone) < 14:
            self.known.add(self.random.choice("PD"), self.random.choice(ENGINES))
        elif draw < 0.4 and everyone:
            registry.drop([self.random.choice(everyone).key])
        elif pairs := list(mixed_pairs(everyone)):
            p, d = self.random.choice(pairs)
            verdict: Verdict = self.random.choice(("met", "met", "refused"))
            registry.judge(p.key, d.key, verdict)
            self.verdicts.setdefault((p.key, d.key), verdict)

    def may_pair(self, p: Instance, d: Instance) -> bool:
        return p.beat.engine == d.beat.engine or self.verdicts.get((p.key, d.key)) == "met"

    def check(self) -> None:
        everyone = [i for i in self.known.registry.instances if i.beat.type != "A"]
        ps = [i for i in everyone if i.beat.type == "P"]
        groups = self.known.found.groups
        for d in (i for i in everyone if i.beat.type == "D"):
            (group,) = (g for g in groups if d.key in keys(g.decode))
            assert keys(group.prefill) == [p.key for p in ps if self.may_pair(p, d)]
        assert {p.key for p in ps} == {p.key for g in groups for p in g.prefill}
        assert sorted(keys(self.known.found.everyone)) == sorted(keys(everyone))
        assert len({g.name for g in groups}) == len(groups)
        sides = build_sides(self.known.found, LoadTable())
        alone = [one.instance.key for one in sides.alone_on_prefill.candidates]
        assert sorted(alone) == sorted(keys(ps))

    def picks(self, policy: str) -> Iterator[Pair]:
        chosen = build_policy(policy, loads=LoadTable(), random=self.random.random)
        for turn in range(200):
            want = Want("m", prompt_tokens=100, session=f"s{turn}", marks=((9, b"%d" % turn),))
            if (choice := chosen.pick(self.known.registry.snapshot, want)) is None:
                return
            assert not isinstance(choice, Alone)
            yield choice


@pytest.mark.parametrize("seed", range(20))
def test_each_d_gets_kv_of_the_ps_that_it_has_met_alone(seed: int) -> None:
    walk = Walk(random.Random(seed))
    for _ in range(60):
        walk.step()
        walk.check()
    everyone = walk.known.registry.instances
    ps = [i for i in everyone if i.beat.type == "P"]
    ds = [i for i in everyone if i.beat.type == "D"]
    pairs = {(p.key, d.key) for p in ps for d in ds if walk.may_pair(p, d)}
    for policy in ("RoundRobin", "Random", "LeastLoaded", "PrefixAware", "SessionAffinity"):
        met = {(pair.prefill.key, pair.decode.key) for pair in walk.picks(policy)}
        assert met <= pairs
        assert {d for _, d in met} == {d for _, d in pairs}, policy
    assert {(p.prefill.key, p.decode.key) for p in walk.picks("RoundRobin")} == pairs

"""Mixed pairs get no requests until the router's own prompts have shown that D uses P's KV."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.router.beats import beat
from tests.router.fakes import Call, Fleet, HttpEngine, answer, fleet, hang, serve_model, until
from tests.router.several import Client, several, when
from xpyd_core.keys import call_mac
from xpyd_core.kv_outcome import KvPeer
from xpyd_router.fleet.instances import Instance, InstanceKey, ModelInstances
from xpyd_router.fleet.introductions import Verdict, Verdicts, mixed_pairs
from xpyd_router.fleet.loads import LoadTable
from xpyd_router.fleet.registry import Registry
from xpyd_router.policy.base import Want
from xpyd_router.policy.pairs import Alone, Pair, build_policy, build_sides
from xpyd_router.request.introductions import words

pytestmark = pytest.mark.usefixtures("uv_loop")
VLLM = "vllm 0.32.0"
OTHER = "vllm 0.33.0"
ENGINES = ("", VLLM, OTHER)


# --- the groups of a snapshot


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


def test_prompts_are_words_that_no_cache_knows() -> None:
    assert words(bytes(range(64))) != words(bytes(range(1, 65)))
    assert len(words(bytes(128)).split()) == 64


# --- the router's own prompts


@dataclass
class Comparing:
    """A D that compares: the first prompt of a P is not used, the next ones are as `then` says.
    `says`: whether its answers do, as our engine's; a vLLM says it in its beats alone."""

    made: Fleet
    engine: HttpEngine
    then: str = "moved"
    says: bool = True
    has_room: bool = True
    known: set[str] = field(default_factory=set[str])
    counts: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])

    async def __call__(
        self, engine: HttpEngine, call: Call, request: web.Request
    ) -> web.StreamResponse:
        p, _, _ = call.request_id.removeprefix("___prefill_addr_").partition("___")
        said = self.then if p in self.known else "recomputed; reason=unverified"
        if self.has_room:
            self.known.add(p)
        engine.said_of_kv = said if self.says else ""
        word = said.partition("reason=")[2]
        cause = word.partition(":")[0]
        self.counts.setdefault(p, {}).setdefault(cause, 0)
        self.counts[p][cause] += 1
        if not self.says:
            peers = tuple(
                KvPeer(
                    peer=peer,
                    moved=found.get("", 0),
                    last=cause,
                    failed={c: n for c, n in found.items() if c},
                )
                for peer, found in self.counts.items()
            )
            await self.made.beat(engine, kv_peers=peers)
        return await serve_model(engine, call, request)


async def mixed_p(made: Fleet, engine: str, **more: Any) -> HttpEngine:
    said: dict[str, Any] = {"continuation": 0, **spoken(engine), **more}
    return await made.engine("P", **said)


async def mixed_d(made: Fleet, engine: str, **how: Any) -> Comparing:
    """A D that is Ready when it compares: the router is quick."""
    said: dict[str, Any] = {"continuation": 0, **spoken(engine), "state": "Starting"}
    d = await made.engine("D", **said)
    d.script = comparing = Comparing(made, d, **how)
    await made.beat(d, state="Ready")
    return comparing


async def mixed(
    made: Fleet, of_p: str = VLLM, of_d: str = "", **how: Any
) -> tuple[HttpEngine, Comparing]:
    """A P and a D of two engines."""
    return await mixed_p(made, of_p), await mixed_d(made, of_d, **how)


def introductions_of(made: Fleet, result: str) -> float:
    return made.metric("xpyd_router_introductions_total", result=result)


async def report(made: Fleet, engine: HttpEngine) -> dict[str, Any]:
    async with made.http.get(f"{made.base}/instances") as response:
        found = (await response.json())["instances"]
    (one,) = (one for one in found if one["instance"] == engine.beat.instance)
    return one


@pytest.mark.parametrize(("of_p", "of_d"), [(VLLM, ""), ("", VLLM), (VLLM, OTHER)])
@pytest.mark.parametrize("says", [True, False])
async def test_the_first_request_of_a_client_gets_kv_already(
    of_p: str, of_d: str, says: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with fleet(pair_wait_s=60.0) as made:
        p, d = await mixed(made, of_p, of_d, says=says)
        await until(lambda: made.router.state.fleet.has_pair)
        assert [call.request_id for call in p.calls] == [c.request_id for c in d.engine.calls]
        before = len(d.engine.calls)
        assert before == 2
        assert introductions_of(made, "met") == introductions_of(made, "unverified") == 1
        await made.json(prompt="a client's")
        assert len(d.engine.calls) == before + 1
        assert d.counts[p.beat.zmq_address] == {"unverified": 1, "": 2}
        assert (await report(made, p))["unmet"] == []
    assert f"({of_p or 'xpyd'})" in caplog.text
    assert "have met" in caplog.text


async def test_introductions_are_short_signed_prompts_each_another_one(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a secret of the whole fleet\n")

    async with fleet(kv_key_file=tmp_path / "key", kv_insecure=False) as made:
        p, d = await mixed(made)
        await until(lambda: made.router.state.fleet.has_pair)
        assert made.key is not None
        for call in (*p.calls, *d.engine.calls):
            mac = call_mac(made.key, "pair", call.request_id)
            assert call.headers["x-xpyd-pair-mac"] == mac
            assert call.body["kv_transfer_params"]["pair_mac"] == mac
            assert call.body["temperature"] == 0
        assert [call.body["max_tokens"] for call in p.calls] == [1, 1]
        assert [call.body["max_tokens"] for call in d.engine.calls] == [2, 2]
        prompts = [call.body["prompt"] for call in p.calls]
        assert prompts == [call.body["prompt"] for call in d.engine.calls]
        assert len(set(prompts)) == 2
        assert all(len(set(prompt.split())) >= 16 for prompt in prompts)


async def test_introductions_count_as_no_requests_of_clients(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with fleet() as made:
        await mixed(made)
        await until(lambda: made.router.state.fleet.has_pair)
        text = made.router.state.metrics.render(made.router.state.fleet.instances).decode()
        counted = [
            line for line in text.splitlines() if "_requests_total" in line or "kv_outcomes" in line
        ]
        assert [
            line
            for line in counted
            if not line.startswith("#") and not line.endswith((" 0.0", " 0"))
        ] == []
    assert "completions" not in capsys.readouterr().err


async def test_until_it_has_met_a_p_a_mixed_d_serves_alone() -> None:
    async with fleet(on_no_prefill="PrefillOnDecode", heartbeat_interval_s=60.0) as made:
        p, d = await mixed(made, has_room=False)
        await until(lambda: introductions_of(made, "unverified") >= 3)
        sent = len(p.calls)
        await made.json(prompt="a client's")
        assert all(call.body["prompt"] != "a client's" for call in p.calls)
        assert len(p.calls) - sent <= 2
        assert (await report(made, p))["unmet"] == [d.engine.beat.instance]
        assert (await report(made, d.engine))["unmet"] == [p.beat.instance]
        d.has_room = True
        await until(lambda: introductions_of(made, "met") == 1)


@pytest.mark.parametrize("says", [True, False])
async def test_a_pair_whose_kv_differs_gets_no_requests(
    caplog: pytest.LogCaptureFixture, says: bool
) -> None:
    async with fleet() as made:
        then = "recomputed; reason=incompatible:kv_values"
        p, d = await mixed(made, then=then, says=says)
        await until(lambda: introductions_of(made, "refused") == 1)
        sent = len(p.calls)
        async with await made.post(prompt="a client's") as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "no_instances"
        assert (await report(made, p))["refused"] == [d.engine.beat.instance]
        assert (await report(made, d.engine))["unmet"] == []
        # A P of D's own engine is a pair at once; the refused one is not asked any more.
        other = await made.engine("P", **spoken(""))
        await made.json(prompt="a client's")
        assert (len(other.calls), len(p.calls)) == (1, sent)
    assert "are never a pair: incompatible" in caplog.text


async def test_a_p_that_says_why_it_sends_nothing_is_refused_by_its_word() -> None:
    async with fleet() as made:
        p, _ = await mixed(made, says=False)
        p.not_sent = "incompatible:kv_layout"
        await until(lambda: introductions_of(made, "refused") == 1)


async def test_a_p_that_restarts_is_introduced_again() -> None:
    async with fleet() as made:
        p, d = await mixed(made)
        await until(lambda: made.router.state.fleet.has_pair)
        d.known.clear()
        await made.beat(p, incarnation="another")
        assert not made.router.state.fleet.has_pair
        await until(lambda: made.router.state.fleet.has_pair)
        assert introductions_of(made, "met") == 2
        assert introductions_of(made, "unverified") == 2


async def test_failed_introductions_open_no_breaker_and_are_tried_again() -> None:
    async with fleet() as made:
        p, d = await mixed_p(made, VLLM, state="Starting"), await mixed_d(made, "")
        d.engine.script = answer(500, {"error": {"message": "broken"}})
        await made.beat(p, state="Ready")
        await until(lambda: introductions_of(made, "failed") >= 3)
        for engine in (p, d.engine):
            found = await report(made, engine)
            assert found["state"] == "Ready"
            assert found["health"]["breaker"] == "Closed"
        # What P had for a D that failed is given back.
        await until(lambda: len(d.engine.releases) == len(p.calls))
        d.engine.script = d
        await until(lambda: made.router.state.fleet.has_pair)


async def test_a_d_that_dies_under_an_introduction_ends_it() -> None:
    async with fleet() as made:
        p, d = await mixed_p(made, VLLM, state="Starting"), await mixed_d(made, "")
        d.engine.script = hang
        await made.beat(p, state="Ready")
        await until(lambda: len(d.engine.calls) == 1)
        d.engine.script = d
        await made.beat(d.engine, incarnation="another")
        await until(lambda: made.router.state.fleet.has_pair)
        assert introductions_of(made, "failed") == 1


async def test_each_pair_of_several_is_introduced_one_at_a_time_for_an_engine() -> None:
    async with fleet() as made:
        running: set[str] = set()

        async def once(engine: HttpEngine, call: Call, request: web.Request) -> web.StreamResponse:
            assert engine.beat.instance not in running
            running.add(engine.beat.instance)
            await asyncio.sleep(0.01)
            running.remove(engine.beat.instance)
            return await serve_model(engine, call, request)

        ps = [await mixed_p(made, VLLM, state="Starting") for _ in range(3)]
        for p in ps:
            p.script = once
            await made.beat(p, state="Ready")
        ds = [await mixed_d(made, "") for _ in range(3)]
        await until(lambda: introductions_of(made, "met") == 9)
        (group,) = made.router.state.fleet.snapshot.of_model("m").groups
        assert (len(group.prefill), len(group.decode)) == (3, 3)
        assert [len(d.known) for d in ds] == [3, 3, 3]


async def has_met(client: Client, p: HttpEngine) -> bool:
    found = (await client.get("/instances"))["instances"]
    (one,) = (one for one in found if one["instance"] == p.beat.instance)
    return one["unmet"] == []


@pytest.mark.slow
async def test_all_processes_know_who_has_met_also_those_that_start_later() -> None:
    async with several(processes=2, pair_wait_s=60.0) as made:
        p, d = await mixed(made)
        await until(lambda: introductions_of(made, "met") == 1)
        clients = [await made.client(0), await made.client(1)]
        for client in clients:
            await when(lambda client=client: has_met(client, p))
            assert await client.status() == 200
        worker = made.workers[0]
        assert worker.pid is not None
        old = worker.pid
        os.kill(old, signal.SIGKILL)
        await until(lambda: made.workers[0].pid not in (None, old))
        late = await made.client(0)
        assert await has_met(late, p)
        assert await late.status() == 200
        assert d.counts[p.beat.zmq_address] == {"unverified": 1, "": 4}
        assert (await late.samples())['xpyd_router_introductions_total{result="met"}'] == 1

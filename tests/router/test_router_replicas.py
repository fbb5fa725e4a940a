"""Instances with replicas: the router picks a replica, and counts by instance (docs/adr/0124)."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import orjson
import pytest
from aiohttp import web

from tests.router.beats import beat
from tests.router.fakes import Call, Fleet, HttpEngine, fleet, serve_model
from xpyd_core.errors import ProtocolError
from xpyd_core.messages import Heartbeat, ReplicaBeat, decode_heartbeat, encode_heartbeat
from xpyd_core.request_id import parse_pair_id
from xpyd_router.fleet.breaker import Transfers
from xpyd_router.fleet.instances import InstanceKey, leaving_places
from xpyd_router.fleet.introductions import PairFound
from xpyd_router.fleet.loads import LoadTable
from xpyd_router.fleet.registry import Registry, is_readable
from xpyd_router.fleet.view import FleetView
from xpyd_router.policy.base import Want
from xpyd_router.policy.pairs import Pair, PairPolicy, build_policy

OURS = {"models": ("m",), "compatibility": "k", "continuation": 1, "incarnation": "i"}


def replicas(host: int, serving: str = "11", **numbers: Any) -> tuple[ReplicaBeat, ...]:
    """One for each letter of `serving`, 0 or 1: two ports behind each other."""
    return tuple(
        ReplicaBeat(zmq_address=f"10.0.0.{host}:{21001 + 2 * at}", serving=int(one), **numbers)
        for at, one in enumerate(serving)
    )


class World:
    """A view of a fleet and a policy that picks from its snapshots."""

    def __init__(self, policy: str = "LeastLoaded", *, only_verified: bool = False) -> None:
        self.loads = LoadTable()
        registry = Registry(period_s=3.0, missed_beats=3, only_verified=only_verified)
        self.view = FleetView(registry, lambda: 0.0, self.loads)
        self.policy: PairPolicy = build_policy(
            policy, loads=self.loads, random=random.Random(1).random
        )
        self.view.on_gone(self.policy.forget)

    def hear(self, kind: str, host: int, serving: str = "", **fields: Any) -> Heartbeat:
        said = beat(kind, host, **{**OURS, "replicas": replicas(host, serving), **fields})
        # As it comes over the wire.
        assert self.view.apply(decode_heartbeat(encode_heartbeat(said))) in ("new", "refreshed")
        return said

    def pick(self, **want: Any) -> Pair:
        asked = Want("m", **want)
        choice = self.policy.pick(self.view.snapshot, asked)
        assert isinstance(choice, Pair)
        self.policy.placed(choice, asked)
        return choice

    def ports(self, times: int = 24, **want: Any) -> Counter[tuple[int, int]]:
        """The KV ports of so many picks."""
        pairs = [self.pick(**want) for _ in range(times)]
        return Counter((pair.prefill.kv.port, pair.decode.kv.port) for pair in pairs)


@pytest.mark.parametrize("policy", ["LeastLoaded", "RoundRobin"])
def test_each_replica_of_p_and_d_gets_its_share(policy: str) -> None:
    world = World(policy)
    world.hear("P", 1, "11")
    world.hear("D", 2, "111")
    found = world.ports(60)
    assert Counter(p for p, _ in found.elements()).keys() == {21001, 21003}
    assert Counter(d for _, d in found.elements()).keys() == {21001, 21003, 21005}
    # Instances count once, whatever they are made of.
    assert len(world.view.instances) == 2
    assert [one.key.replica for one in world.view.instances] == [0, 0]


def test_a_beat_without_a_list_is_one_replica() -> None:
    world = World()
    world.hear("P", 1)
    world.hear("D", 2)
    pair = world.pick()
    assert [one.replica for one in pair] == [None, None]
    assert [one.place for one in pair] == [one.key for one in pair]
    assert "".join(one.replica_line for one in pair) == ""


def test_a_replica_that_does_not_serve_is_not_picked_and_comes_back() -> None:
    world = World()
    world.hear("P", 1)
    for serving, ports in (("11", {21001, 21003}), ("01", {21003}), ("11", {21001, 21003})):
        world.hear("D", 2, serving)
        assert {d for _, d in world.ports()} == ports
    world.hear("D", 2, "00")
    assert not world.view.snapshot.is_ready
    assert world.view.snapshot.of_model("m").lost == "decode"


def test_a_replica_that_drains_is_picked_no_more_and_nothing_of_it_stays_when_it_is_gone() -> None:
    world = World("RoundRobin")
    world.hear("P", 1)
    world.hear("D", 2, "11")
    picked = next(one for one in (world.pick().decode for _ in range(9)) if one.replica == 1)
    load = world.loads.of(picked.place)
    load.begin(100)
    first, second = replicas(2)
    leaving = msgspec.structs.replace(second, draining=1)
    said = world.hear("D", 2, replicas=(first, leaving))
    assert {d for _, d in world.ports()} == {21001}
    d = next(one for one in world.view.instances if one.beat.type == "D")
    assert leaving_places(d.key, said) == (picked.place,)
    assert world.view.in_flight(leaving_places(d.key, said)) == 1
    # What all instances say of their end holds for replicas that leave with them.
    draining = msgspec.structs.replace(said, state="Draining")
    assert leaving_places(d.key, draining) == d.places
    assert leaving_places(d.key, msgspec.structs.replace(said, state="Gone")) == ()
    load.end(100)
    world.hear("D", 2, "1")
    assert picked.place not in {one.key for one in world.loads}
    # The next replica of that number is another one.
    world.hear("D", 2, "11")
    assert {port for _, port in world.ports()} == {21001, 21003}
    assert world.loads.of(picked.place) is not load


def test_a_probe_that_ends_behind_its_replica_says_nothing_of_the_next_one() -> None:
    world = World(only_verified=True)
    world.hear("P", 1)
    p, d = InstanceKey("10.0.0.1:20001", "i"), InstanceKey("10.0.0.2:20001", "i")
    world.hear("D", 2, "11")
    first, second = replicas(2)
    world.hear("D", 2, replicas=(first, msgspec.structs.replace(second, draining=1)))
    world.view.pair_found(p, d._replace(replica=1), PairFound())
    world.hear("D", 2, "11")
    assert not world.view.snapshot.is_ready


def test_the_least_loaded_replica_is_picked_by_what_is_on_it() -> None:
    world = World()
    world.hear("P", 1)
    world.hear("D", 2, "11")
    busy = world.pick().decode
    for _ in range(3):
        world.loads.of(busy.place).begin(100)
    assert {world.pick().decode.replica for _ in range(6)} == {1 - (busy.replica or 0)}
    one = next(one for one in world.view.instances if one.beat.type == "D")
    assert world.view.requests(one) == (3, 0)
    assert world.view.in_flight(one.places) == 3
    for _ in range(3):
        world.loads.of(busy.place).end(100)
    # What a beat says of other routers' requests is each replica's own, too.
    said = replicas(2)
    full = ReplicaBeat(zmq_address=said[0].zmq_address, running=9, total_blocks=10, free_blocks=1)
    world.hear("D", 2, replicas=(full, said[1]))
    assert {world.pick().decode.replica for _ in range(6)} == {1}


def test_a_session_stays_on_its_replica_and_sessions_use_all() -> None:
    world = World("SessionAffinity")
    world.hear("P", 1, "11")
    world.hear("D", 2, "11")
    picked = [world.ports(3, session=f"session {number}") for number in range(40)]
    assert all(len(one) == 1 for one in picked)
    assert len({port for one in picked for port in one}) == 4
    world.hear("D", 2, "10")
    moved = [world.ports(3, session=f"session {number}") for number in range(40)]
    world.hear("D", 2, "11")
    again = [world.ports(3, session=f"session {number}") for number in range(40)]
    assert moved != picked
    assert again == picked


def test_a_prefix_finds_its_replica() -> None:
    world = World("PrefixAware")
    world.hear("P", 1, "111", total_blocks=0)
    world.hear("D", 2)
    own: dict[str, int] = {}
    for letter in "abc":
        marks = tuple((end, f"{letter}{end}".encode()) for end in range(100, 600, 100))
        chosen = {world.pick(prompt_tokens=500, marks=marks).prefill.replica for _ in range(7)}
        assert len(chosen) == 1
        own[letter] = chosen.pop() or 0
    assert sorted(own.values()) == [0, 1, 2]


def test_only_the_replicas_that_probes_reach_are_picked_where_pairs_must_be_verified() -> None:
    world = World(only_verified=True)
    world.hear("P", 1, "11")
    d = InstanceKey("10.0.0.2:20001", "i")
    p = InstanceKey("10.0.0.1:20001", "i")
    world.hear("D", 2, "11")
    assert not world.view.snapshot.is_ready
    world.view.pair_found(p._replace(replica=1), d._replace(replica=1), PairFound())
    assert world.ports().keys() == {(21003, 21003)}
    world.view.pair_found(p, d._replace(replica=1), PairFound())
    assert world.ports().keys() == {(21001, 21003), (21003, 21003)}
    world.view.pair_found(p, d, PairFound("no_answer", "no answer at 10.0.0.2:21001"))
    assert [(one.prefill, one.decode) for one in world.view.pair_problems()] == [
        ("10.0.0.1:20001", "10.0.0.2:20001")
    ]
    unverified = world.view.partners_without_kv()
    assert unverified[d].unverified == ["10.0.0.1:20001"]
    # Its next start has yet to be probed.
    world.hear("D", 2, "10")
    world.hear("D", 2, "11")
    assert not world.view.snapshot.is_ready


def test_a_kv_address_that_another_instance_has_is_a_conflict() -> None:
    world = World()
    world.hear("D", 2, "11")
    taken = (*replicas(3, "1"), *replicas(2, "1"))
    assert world.view.apply(beat("D", 3, **OURS, replicas=taken)) == "conflict"
    assert world.view.apply(beat("D", 3, **OURS, replicas=replicas(3))) == "new"
    # What it has no more is free.
    world.hear("D", 2, "1")
    free = (*replicas(4, "1"), replicas(2)[1])
    assert world.view.apply(beat("P", 4, **OURS, replicas=free)) == "new"


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (replicas(2)[:1] * 2, "replicas: two of them have the same zmq_address"),
        ((ReplicaBeat(zmq_address="d.example:21001"),), "zmq_address d.example:21001"),
        ((ReplicaBeat(zmq_address="10.0.0.2:80"),), "zmq_address 10.0.0.2:80"),
    ],
)
def test_replicas_with_addresses_that_cannot_be_are_refused(
    bad: tuple[ReplicaBeat, ...], named: str
) -> None:
    with pytest.raises(ProtocolError, match=named):
        World().hear("D", 2, replicas=bad)
    with pytest.raises(ProtocolError, match="port must be 1 to 65535"):
        World().hear("D", 2, replicas=(ReplicaBeat(zmq_address="10.0.0.2:99999"),))


def test_failed_transfers_are_a_replicas_and_count_for_its_instance() -> None:
    p, d = InstanceKey("p", "1"), InstanceKey("d", "1")
    known = Transfers()
    assert known.failed(p, d._replace(replica=1), 0.0) == []
    assert known.failed(p._replace(replica=1), d, 0.0) == [], "another replica of each"
    found = known.failed(p._replace(replica=1), d._replace(replica=1), 0.0)
    assert {key.instance for key in found} == {p, d}
    known.forget(d)
    assert known.failed(p._replace(replica=2), d._replace(replica=1), 0.0) == []


# --- with a router that serves


def two(port: int) -> dict[str, Any]:
    """The fields of a beat with two replicas."""
    each = (ReplicaBeat(zmq_address=f"127.0.0.1:{port + 2 * at}") for at in range(2))
    return {"replicas": tuple(each)}


def named(call: Call) -> tuple[str, int, int]:
    """The replica that a call's header names, and the KV ports of its id."""
    pair = parse_pair_id(call.request_id)
    assert pair is not None
    return call.headers["x-data-parallel-rank"], pair.prefill.port, pair.decode.port


async def test_the_call_and_the_pairs_id_name_the_replica() -> None:
    async with fleet() as fleet_:
        p = await fleet_.engine("P", **two(22001))
        d = await fleet_.engine("D", **two(23001))
        for _ in range(8):
            await fleet_.json(headers={"X-data-parallel-rank": "1"})
    for calls, at in ((p.calls, 1), (d.calls, 2)):
        seen = {named(call) for call in calls}
        assert {one[0] for one in seen} == {"0", "1"}, "whatever the client's header says"
        assert all(one[at] == (22001, 23001)[at - 1] + 2 * int(one[0]) for one in seen)


async def test_instances_shows_how_many_replicas_stay_and_why_there_are_not_more() -> None:
    async def shown(fleet_: Fleet) -> list[tuple[int, str]]:
        async with fleet_.http.get(f"{fleet_.admin}/instances") as response:
            rows = (await response.json())["instances"]
        return [(row["replicas"], row["scaling_problem"]) for row in rows]

    async with fleet() as fleet_:
        d = await fleet_.engine("D")
        assert await shown(fleet_) == [(0, "")]
        starts, serves, leaves = replicas(2, "011")
        said = (starts, serves, msgspec.structs.replace(leaves, draining=1))
        await fleet_.beat(d, replicas=said, scaling_problem="no room")
        assert await shown(fleet_) == [(1, "no room")]
        unreadable = msgspec.structs.replace(d.beat, scaling_problem="a\nb")
        assert not is_readable(unreadable)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_whose_replica_is_lost_goes_to_another_one_of_the_same_instance(
    is_stream: bool,
) -> None:
    async def first_is_lost(engine: HttpEngine, call: Call, request: Any) -> web.StreamResponse:
        if call.headers["x-data-parallel-rank"] == "0":
            error = {"message": "lost", "code": "replica_lost"}
            return web.Response(status=503, body=orjson.dumps({"error": error}))
        return await serve_model(engine, call, request)

    async with fleet(max_tries=1) as fleet_:
        await fleet_.engine("P")
        d = await fleet_.engine("D", **two(23001))
        d.script = first_is_lost
        for _ in range(4):
            await (fleet_.events() if is_stream else fleet_.json())
        tried = [call.headers["x-data-parallel-rank"] for call in d.calls]
        assert {"0", "1"} == set(tried)
        assert fleet_.metric("xpyd_router_errors_total", phase="decode", cause="refused") > 0

"""Engines of a list, which send no heartbeats: how they are named, asked, picked and left."""

from __future__ import annotations

import contextlib
from typing import Any

import orjson
import pytest

from tests.router.fakes import Fleet, HttpEngine, fleet, text_of, until
from tests.router.test_router_dialects import Pinned, expected
from tests.router.vllm_engines import CONTEXT_TOKENS, silent_vllm
from xpyd_core.errors import UserError
from xpyd_core.messages import Heartbeat
from xpyd_router.fleet.instances import pairing_of
from xpyd_router.fleet.listed import MAX_LISTED, ListedInstance, listed_beat, parse_listed


def test_a_list_is_read() -> None:
    assert parse_listed(
        [
            "P=http://10.0.0.1:8000,dialect=nixl",
            "D=http://[::1]:8000/,dialect=nixl-push",
            "D=http://vllm-d:8000,dialect=pair-id,kv=10.0.0.3:14579",
            "D=http://10.0.0.5:8000,prompt-ids=no,dialect=nixl",
            "D=http://10.0.0.6:8000,dialect=nixl,compat=v1.2_a-b",
            "A=http://10.0.0.4:8000",
        ]
    ) == (
        ListedInstance("P", "10.0.0.1:8000", "nixl"),
        ListedInstance("D", "[::1]:8000", "nixl-push"),
        ListedInstance("D", "vllm-d:8000", "pair-id", "10.0.0.3:14579"),
        ListedInstance("D", "10.0.0.5:8000", "nixl", takes_ids=False),
        ListedInstance("D", "10.0.0.6:8000", "nixl", compat="v1.2_a-b"),
        ListedInstance("A", "10.0.0.4:8000"),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("10.0.0.1:8000", "expected P|D|A=http"),
        ("P=ftp://a:1,dialect=nixl", "expected P|D|A=http"),
        ("X=http://a:1,dialect=nixl", "expected P|D|A=http"),
        ("P=http://a:1,dialect", "dialect: expected"),
        ("P=http://a:1", "dialect: expected nixl, nixl-push, pair-id"),
        ("P=http://a:1,dialect=sglang", "dialect: expected"),
        ("P=http://a:1,dialect=nixl,kv=a:2", "for pair-id and only there"),
        ("P=http://a:1,dialect=pair-id", "for pair-id and only there"),
        ("P=http://a:1,dialect=nixl,tp=2", "expected P|D|A=http"),
        ("P=http://a:1,dialect=nixl,dialect=nixl", "expected P|D|A=http"),
        ("P=http://a:1,dialect=nixl,prompt-ids=yes", "prompt-ids: expected no"),
        ("A=http://a:1,prompt-ids=no", "moves no KV"),
        ("P=http://a:1,dialect=nixl,compat=", "expected 1 to 64 letters"),
        ("P=http://a:1,dialect=nixl,compat=a b", "expected 1 to 64 letters"),
        ("P=http://a:1,dialect=pair-id,kv=a:2,compat=a", "compat: only for nixl and nixl-push"),
        ("P=http://a,dialect=nixl", "host:port"),
        ("P=http://a:1/v1,dialect=nixl", "host:port"),
        ("A=http://a:1,dialect=nixl", "moves no KV"),
    ],
)
def test_a_wrong_entry_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(UserError, match="--static-instance") as error:
        parse_listed([text])
    assert says in str(error.value)


def test_no_address_is_there_twice_and_the_list_is_bounded() -> None:
    with pytest.raises(UserError, match="there twice"):
        parse_listed(["P=http://a:1,dialect=nixl", "D=http://a:1/,dialect=nixl"])
    with pytest.raises(UserError, match="at most"):
        parse_listed([f"A=http://a:{port}" for port in range(1, MAX_LISTED + 2)])


def beat_of(models: Any = None, version: Any = None, **one: Any) -> Heartbeat:
    listed = ListedInstance(**{"type": "P", "http": "a:1", "dialect": "nixl", **one})
    texts = (b"" if body is None else orjson.dumps(body) for body in (models, version))
    return listed_beat(listed, *texts, period_s=3.0)


@pytest.mark.parametrize(
    ("version", "takes_ids"),
    [("0.31.9", 0), ("0.32.0", 1), ("0.32.0+cpu", 1), ("1.0.0rc1", 1), ("dev", 0), (3, 0)],
)
def test_its_version_says_what_it_takes_and_who_its_partners_are(
    version: Any, takes_ids: int
) -> None:
    beat = beat_of(version={"version": version})
    assert beat.prompt_ids == takes_ids
    assert beat.compatibility == f"vllm {version if isinstance(version, str) else ''}"


def test_those_of_one_version_and_different_names_are_no_pair() -> None:
    said = {"version": "0.32.0"}
    p, d = (beat_of(version=said, type=kind, compat=name) for kind, name in ("Pa", "Db"))
    assert pairing_of(p) != pairing_of(d)
    assert pairing_of(d) == pairing_of(beat_of(version=said, compat="b"))
    assert d.compatibility == "vllm 0.32.0 b"


def test_its_models_and_the_shortest_context_are_taken() -> None:
    cards = [{"id": "m", "max_model_len": 9}, {"id": "lora", "max_model_len": 7}, {"id": "m"}]
    beat = beat_of({"data": cards})
    assert (beat.models, beat.max_model_len) == (("m", "lora"), 7)
    for nothing in (None, [], {"data": None}, {"data": [{"id": ""}]}):
        assert beat_of(nothing).models == ()


def test_xpyds_own_connector_compares_versions_itself() -> None:
    beat = beat_of(version={"version": "0.32.0"}, dialect="pair-id", kv="b:2")
    assert (beat.dialect, beat.zmq_address, beat.compatibility) == ("pair-id", "b:2", "")
    assert beat.prompt_ids == 1


@contextlib.asynccontextmanager
async def listed_fleet(*versions: str, more: str = "", cap: int | None = None) -> Any:
    """A router with a P and a D of a list; the versions are P's and D's, `more` is behind both."""
    async with contextlib.AsyncExitStack() as stack:
        pinned = Pinned()
        engines: list[HttpEngine] = []
        texts: list[str] = []
        for kind, version in zip("PD", versions, strict=True):
            engine, model = await silent_vllm(stack, kind, pinned, version=version)
            model.cap = cap
            engines.append(engine)
            texts.append(f"{kind}=http://127.0.0.1:{engine.port},dialect=nixl{more}")
        made = await stack.enter_async_context(
            fleet(static_instances=parse_listed(texts), heartbeat_interval_s=0.2, pair_wait_s=20.0)
        )
        yield made, *engines


async def test_a_fleet_of_silent_engines_serves() -> None:
    async with listed_fleet("0.32.0", "0.32.0") as (fleet_, p, d):
        events = await fleet_.events(prompt="San Francisco is a", max_tokens=5)
        assert text_of(events) == expected("San Francisco is a", 5)
        assert (len(p.calls), len(d.calls)) == (1, 1)
        async with fleet_.http.get(f"{fleet_.base}/v1/models") as response:
            (model,) = (await response.json())["data"]
        assert (model["id"], model["max_model_len"]) == ("m", CONTEXT_TOKENS)


async def test_a_silent_engine_that_counts_its_output_makes_no_token_too_many() -> None:
    """The list says so: it has a cap of its own, which counts from the end of the prompt."""
    async with listed_fleet("0.32.0", "0.32.0", more=",prompt-ids=no", cap=3) as (fleet_, _, d):
        events = await fleet_.events(prompt="San Francisco is a", max_tokens=5)
        assert text_of(events) == expected("San Francisco is a", 3)
        assert d.calls[0].body["prompt"] == "San Francisco is a"


async def test_xpyds_connector_gets_the_signed_pair_id_and_nothing_of_nixls() -> None:
    async with contextlib.AsyncExitStack() as stack:
        p, _ = await silent_vllm(stack, "P", Pinned())
        d, _ = await silent_vllm(stack, "D", Pinned())
        texts = [
            f"P=http://127.0.0.1:{p.port},dialect=pair-id,kv=127.0.0.1:30101",
            f"D=http://127.0.0.1:{d.port},dialect=pair-id,kv=127.0.0.1:30102",
        ]
        made = fleet(
            static_instances=parse_listed(texts), heartbeat_interval_s=0.2, pair_wait_s=20.0
        )
        fleet_ = await stack.enter_async_context(made)
        events = await fleet_.events(prompt="San Francisco is a", max_tokens=5)
        assert text_of(events) == expected("San Francisco is a", 5)
        (to_p,), (to_d,) = p.calls, d.calls
        assert to_p.request_id == to_d.request_id
        assert "decode_addr_127.0.0.1:30102_" in to_p.request_id
        mac = {"pair_mac": to_p.headers["x-xpyd-pair-mac"]}
        assert to_p.body["kv_transfer_params"] == to_d.body["kv_transfer_params"] == mac
        assert len(to_d.body["prompt"]) == len("San Francisco is a") + 1, "P's token is in it"


async def test_a_silent_engine_that_is_dead_is_not_picked_and_comes_back() -> None:
    async with listed_fleet("0.32.0", "0.32.0") as (fleet_, p, d):
        await fleet_.json()
        view: Fleet = fleet_
        d.health_status = 503
        await until(lambda: not view.router.state.fleet.has_pair)
        d.health_status = 200
        await until(lambda: view.router.state.fleet.has_pair)
        await p.stop()
        await until(lambda: not view.router.state.fleet.has_pair)
        assert len(d.calls) == 1


async def test_two_versions_are_no_pair() -> None:
    async with listed_fleet("0.32.0", "0.33.0") as (fleet_, _, __):
        view: Fleet = fleet_
        await until(lambda: len(view.router.state.fleet.instances) == 2)
        assert not view.router.state.fleet.has_pair


async def test_what_an_engine_said_of_itself_holds_while_it_is_too_busy_to_say_it_again() -> None:
    """Without its version it would have no partner, and without its models get every name."""
    async with listed_fleet("0.32.0", "0.32.0") as (fleet_, p, _):
        view: Fleet = fleet_
        await until(lambda: view.router.state.fleet.has_pair)
        pages, p.pages = p.pages, {}
        asked = p.probes
        await until(lambda: p.probes > asked + 2)
        said = {one.key.http: one.beat for one in view.router.state.fleet.instances}
        beat = said[f"127.0.0.1:{p.port}"]
        assert (beat.compatibility, beat.models) == ("vllm 0.32.0", ("m",))
        p.health_status = 503
        await until(lambda: not view.router.state.fleet.has_pair)
        p.health_status, p.pages = 200, {**pages, "/version": {"version": "0.33.0"}}
        await until(
            lambda: (
                "vllm 0.33.0"
                in {one.beat.compatibility for one in view.router.state.fleet.instances}
            )
        )
        assert not view.router.state.fleet.has_pair

"""IPv6 addresses and host names, from the beat to the ids that engines get."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import pytest
import zmq
from aiohttp import web

from tests.router.fakes import Fleet, HttpEngine, fleet, until
from xpyd_core.request_id import Address, is_dialable, parse_pair_id
from xpyd_router.upstream.client import Dialer


@contextlib.asynccontextmanager
async def fleet_on_ipv6(**config: Any) -> AsyncGenerator[Fleet]:
    """A router whose ports are on ::1."""
    async with fleet(host="::1", discovery_host="::1", **config) as fleet_:
        port = fleet_.router.discovery_port
        fleet_.dealer.disconnect(f"tcp://127.0.0.1:{port}")
        fleet_.dealer.setsockopt(zmq.IPV6, 1)
        fleet_.dealer.connect(f"tcp://[::1]:{port}")
        yield fleet_


async def moved_to(fleet_: Fleet, kind: str, host: str, **fields: Any) -> HttpEngine:
    """An engine that also serves on ::1, and whose beats name it as `host`."""
    engine = await fleet_.engine(kind, state="Starting", **fields)
    assert engine.runner is not None
    site = web.TCPSite(engine.runner, "::1", engine.port)
    await site.start()
    await fleet_.beat(engine, state="Gone")
    text = f"[{host}]" if ":" in host else host
    kv = fields.get("zmq_address", f"[::1]:{engine.beat.kv.port}")
    await fleet_.beat(
        engine,
        state="Ready",
        incarnation=f"{engine.beat.incarnation}-moved",
        http_address=f"{text}:{engine.port}",
        zmq_address=kv,
    )
    return engine


@pytest.mark.parametrize("host", ["::1", "0:0:0:0:0:0:0:1", "localhost", "LocalHost"])
async def test_a_fleet_on_ipv6_or_by_names_serves_and_its_ids_can_be_dialled(host: str) -> None:
    async with fleet_on_ipv6() as fleet_:
        p = await moved_to(fleet_, "P", host)
        d = await moved_to(fleet_, "D", host)
        url = f"http://[::1]:{fleet_.router.http_port}/v1/completions"
        body = {"model": "m", "prompt": "x", "max_tokens": 3}
        async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
            raw = await response.read()
            assert response.status == 200, raw
        (to_p,), (to_d,) = p.calls, d.calls
        assert to_p.request_id == to_d.request_id
        pair = parse_pair_id(to_p.request_id)
        assert pair is not None
        assert (pair.prefill, pair.decode) == (p.beat.kv, d.beat.kv)
        assert is_dialable(pair.decode)
        assert b"::1" not in raw
        assert to_p.headers["host"].lower().startswith("[::1]:" if ":" in host else "localhost:")


async def test_a_router_on_a_loopback_address_of_its_own_calls_engines_elsewhere() -> None:
    async with fleet(host="127.0.3.1", discovery_host="127.0.0.1") as fleet_:
        engine = await moved_to(fleet_, "A", "::1")
        url = f"http://127.0.3.1:{fleet_.router.http_port}/v1/completions"
        body = {"model": "m", "prompt": "x", "max_tokens": 3}
        async with fleet_.http.post(url, json=body) as response:
            assert response.status == 200, await response.text()
        await until(lambda: fleet_.metric("xpyd_router_probes_total", result="ok") > 0)
        assert engine.served == 1
        assert not fleet_.metric("xpyd_router_probes_total", result="connect")


@pytest.mark.parametrize(
    ("to", "local", "source"),
    [
        ("127.1.2.3", "127.0.3.1", ("127.0.3.1", 0)),
        ("127.1.2.3", None, None),
        ("10.0.0.1", "127.0.3.1", None),
        ("::1", "127.0.3.1", None),
        ("localhost", "127.0.3.1", None),
    ],
)
def test_who_is_called_from_the_routers_own_loopback_address(
    to: str, local: str | None, source: tuple[str, int] | None
) -> None:
    assert Dialer(local).source(Address(to, 20001)) == source


async def test_a_name_that_nobody_resolves_fails_its_calls_and_shows_in_no_answer() -> None:
    async with fleet() as fleet_:
        await fleet_.engine("A", is_ours=False, models=())
        await fleet_.beat(fleet_.engines[0], state="Gone")
        await fleet_.beat(
            fleet_.engines[0], state="Ready", http_address="no-such-host.invalid:20001"
        )
        async with await fleet_.post() as response:
            raw = await response.read()
        assert response.status in (502, 503)
        assert b"no-such-host" not in raw


@pytest.mark.parametrize("kind", ["P", "D"])
async def test_a_kv_address_by_name_is_refused_from_engines_that_others_dial(kind: str) -> None:
    async with fleet() as fleet_:
        engine = await fleet_.engine(kind)
        await fleet_.beat(engine, incarnation="other", zmq_address="engine-1:21001")
        assert fleet_.metric("xpyd_router_heartbeats_total", result="malformed") == 1
        (known,) = fleet_.router.state.fleet.instances
        assert known.key.incarnation != "other"
        await fleet_.beat(engine, zmq_address="[fd00::1]:21001")
        (known,) = fleet_.router.state.fleet.instances
        assert (known.key.incarnation, known.kv_text) == ("other", "[fd00::1]:21001")

"""Engines that serve HTTPS: whom the router trusts, and that every call goes over TLS."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.router.fakes import Fleet, HttpEngine, begin_and_die, die, fleet, text_of, until
from tests.tls_kit import authority, of_engines, write_ca, write_pair
from xpyd_core.errors import UserError
from xpyd_core.messages import Heartbeat, decode_heartbeat, encode_heartbeat
from xpyd_core.request_id import Address, TlsAddress
from xpyd_core.tls import ClientFiles, ServerFiles, WatchedContext
from xpyd_router.fleet.listed import parse_listed
from xpyd_router.tokens.service import fetch
from xpyd_router.upstream.client import Dialer

pytestmark = pytest.mark.usefixtures("both_loops")
NAME = "fleet-engines.default.svc"
"""What a certificate of a Secret can say: pods' addresses are not known before."""


@pytest.fixture(autouse=True)
def plain_again() -> Iterator[None]:
    token = of_engines.set(None)
    yield
    of_engines.reset(token)


def serve(directory: Path, *names: str, client_ca: str = "") -> None:
    """Engines that start from now on serve HTTPS with a certificate of `engines` for `names`."""
    files = write_pair(directory / "engine", *names, ca=authority("engines"))
    if client_ca:
        ca = write_ca(directory / "client_ca.crt", authority(client_ca))
        files = ServerFiles(files.certificate, files.key, ca, 2)
    of_engines.set(files.make())


def trusted(directory: Path, ca: str = "engines") -> ClientFiles:
    return ClientFiles(write_ca(directory / f"{ca}.crt", authority(ca)))


async def secure(made: Fleet, kind: str, **beat: Any) -> HttpEngine:
    return await made.engine(kind, tls=1, **beat)


@pytest.mark.parametrize("name", [NAME, None])
async def test_a_pair_over_tls_answers_and_streams(name: str | None, tmp_path: Path) -> None:
    serve(tmp_path, name or "127.0.0.1")

    async with fleet(engine_tls=trusted(tmp_path), engine_server_name=name) as made:
        p, d = await secure(made, "P"), await secure(made, "D")
        assert (await made.json())["choices"]
        assert text_of(await made.events(max_tokens=40))
        assert (await made.json(prompt="x" * 500_000))["choices"]
        assert (p.served, d.served) == (3, 3)
        await until(lambda: made.metric("xpyd_router_probes_total", result="ok") > 1)
        assert not made.metric("xpyd_router_probes_total", result="connect")


async def test_a_request_that_breaks_off_goes_on_elsewhere_and_is_released(tmp_path: Path) -> None:
    serve(tmp_path, NAME)

    async with fleet(engine_tls=trusted(tmp_path), engine_server_name=NAME) as made:
        p, d = await secure(made, "P"), await secure(made, "D")
        p.script = die
        async with await made.post() as answer:
            assert answer.status >= 500
        await until(lambda: len(d.releases) > 0)
        del p
        d.script = begin_and_die
        async with await made.post(stream=True) as answer:
            assert b"[DONE]" not in await answer.read()


DOUBTS = {
    "another authority": ("strangers", NAME, "self-signed|self signed|unable to get"),
    "another name": ("engines", "other.default.svc", "ostname mismatch"),
    "no name": ("engines", None, "IP address mismatch"),
}


@pytest.mark.parametrize("doubt", DOUBTS)
async def test_an_engine_that_is_not_trusted_gets_no_request(
    doubt: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ca, name, reason = DOUBTS[doubt]
    serve(tmp_path, NAME)

    async with fleet(engine_tls=trusted(tmp_path, ca), engine_server_name=name) as made:
        engine = await secure(made, "A")
        async with await made.post() as answer:
            assert answer.status in (502, 503)
        await until(lambda: made.metric("xpyd_router_probes_total", result="connect") > 0)
        assert engine.served == engine.probes == 0
        said = [one.message for one in caplog.records if "TLS with the engine" in one.message]
        assert len(said) == 1
        assert any(one in said[0] for one in reason.split("|"))
        assert "--engine-ca-file" in said[0]


async def test_without_authorities_those_of_the_system_count(tmp_path: Path) -> None:
    serve(tmp_path, "127.0.0.1")

    async with fleet() as made:
        engine = await secure(made, "A")
        async with await made.post() as answer:
            assert answer.status in (502, 503)
        assert engine.served == 0


@pytest.mark.parametrize("shows", [True, False])
async def test_the_router_shows_its_own_certificate(shows: bool, tmp_path: Path) -> None:
    serve(tmp_path, NAME, client_ca="routers")
    own = write_pair(tmp_path / "router", "router", ca=authority("routers"))
    files = trusted(tmp_path)
    if shows:
        files = dataclasses.replace(files, certificate=own.certificate, key=own.key)

    async with fleet(engine_tls=files, engine_server_name=NAME) as made:
        engine = await secure(made, "A")
        async with await made.post() as answer:
            assert (answer.status == 200) == shows
        assert bool(engine.served) == shows
        shown = made.metric("xpyd_router_tls_not_after_seconds", use="client")
        assert bool(shown) == shows


async def test_engines_with_and_without_tls_serve_beside_each_other(tmp_path: Path) -> None:
    """So it is while a fleet rolls from one to the other."""
    async with fleet(engine_tls=trusted(tmp_path), engine_server_name=NAME) as made:
        plain = await made.engine("A")
        serve(tmp_path, NAME)
        over_tls = await secure(made, "A")
        for _ in range(4):
            await made.json()
        assert (plain.served, over_tls.served) == (2, 2)


async def test_listed_engines_and_their_files_are_asked_over_tls(tmp_path: Path) -> None:
    serve(tmp_path, NAME)

    async with fleet() as made:
        engine = HttpEngine(Heartbeat(type="A", http_address="x:1", zmq_address="x:1"), 0)
        engine.pages = {"/v1/models": {"data": [{"id": "m"}]}, "/version": {"version": "0.32.0"}}
        engine.files = b"files"
        await engine.start()
        made.stack.push_async_callback(engine.stop)
        listed = parse_listed([f"A=https://127.0.0.1:{engine.port}"])
        tls = trusted(tmp_path)
        async with fleet(
            engine_tls=tls,
            engine_server_name=NAME,
            static_instances=listed,
            heartbeat_interval_s=0.05,
        ) as other:
            await until(lambda: not other.router.state.fleet.snapshot.is_empty)
            assert (await other.json())["choices"]
            dialer = Dialer(None, WatchedContext(tls, "--engine-ca-file"), NAME)
            to = TlsAddress("127.0.0.1", engine.port)
            assert await fetch(to, "/tokenizer", max_bytes=100, dialer=dialer) == b"files"


def test_a_beat_says_that_the_port_speaks_tls() -> None:
    beat = Heartbeat(type="A", http_address="127.0.0.1:1", zmq_address="127.0.0.1:2", tls=1)
    assert type(decode_heartbeat(encode_heartbeat(beat)).http) is TlsAddress
    old = Heartbeat(type="A", http_address="127.0.0.1:1", zmq_address="127.0.0.1:2")
    assert type(decode_heartbeat(encode_heartbeat(old)).http) is Address
    assert b"tls" not in encode_heartbeat(old)


@pytest.mark.parametrize("fault", ["missing", "no pem"])
async def test_a_router_does_not_start_with_unusable_authorities(
    fault: str, tmp_path: Path
) -> None:
    ca = tmp_path / "ca.crt"
    if fault == "no pem":
        ca.write_text("hello")
    with pytest.raises(UserError, match=r"--engine-ca-file: .*ca\.crt"):
        async with fleet(engine_tls=ClientFiles(ca)):
            pass

"""The router's HTTP port over TLS: who gets in, who is told what, and certificates that change."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import io
import json
import logging
import os
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import httpx
import openai
import pytest
from cryptography.hazmat.primitives import serialization

from tests.router.fakes import Fleet, fleet, parse_events, text_of, until
from tests.router.several import several, when
from tests.tls_kit import authority, client_context, write_ca, write_pair
from xpyd_core import tls, tls_connection
from xpyd_core.errors import UserError
from xpyd_core.tls import (
    ServerFiles,
    WatchedContext,
    add_server_arguments,
    not_after_s,
    read_server_files,
)
from xpyd_router.keys.lines import line_of, new_key

pytestmark = pytest.mark.usefixtures("both_loops")
YEAR_2001 = datetime.datetime(2001, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)
YEAR_2051 = datetime.datetime(2051, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)
"""Certificates write years from 2050 on in another form."""
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def https(
    port: int, context: ssl.SSLContext | None = None
) -> AsyncGenerator[aiohttp.ClientSession]:
    """A client of its own connections to the port."""
    connector = aiohttp.TCPConnector(ssl=context or client_context())
    async with aiohttp.ClientSession(f"https://127.0.0.1:{port}", connector=connector) as session:
        yield session


async def shown(port: int) -> bytes:
    """The certificate that a new connection gets."""
    context = client_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return der


def der_of(files: ServerFiles) -> bytes:
    pem = files.certificate.read_text()
    return ssl.PEM_cert_to_DER_cert(pem[: pem.index("-----END") + 26])


async def test_long_bodies_and_streams_pass_both_ways(tmp_path: Path) -> None:
    prompt = "x" * 900_000

    async with fleet(tls=write_pair(tmp_path)) as made, https(made.router.http_port) as http:
        engine = await made.engine("A")
        body = {"model": "m", "prompt": prompt, "max_tokens": 4, "stream": True}
        data = io.BytesIO(json.dumps(body).encode())
        async with http.post("/v1/completions", data=data) as answer:
            assert answer.status == 200, await answer.text()
            assert text_of(parse_events(await answer.read()))
        assert len(engine.calls[0].body["prompt"]) == len(prompt)
        async with made.http.get(f"{made.admin}/metrics") as answer:  # that port stays plain
            assert 'xpyd_router_tls_handshakes_total{result="ok"} 1.0' in await answer.text()


async def test_openais_client_works_unchanged(tmp_path: Path) -> None:
    async with fleet(tls=write_pair(tmp_path)) as made:
        await made.engine("A")
        async with (
            httpx.AsyncClient(verify=client_context()) as http,
            openai.AsyncOpenAI(
                base_url=f"https://127.0.0.1:{made.router.http_port}/v1",
                api_key="unused",
                http_client=http,
                max_retries=0,
            ) as client,
        ):
            whole = await client.completions.create(model="m", prompt="x", max_tokens=4)
            assert whole.choices[0].text
            stream = await client.completions.create(
                model="m", prompt="x", max_tokens=4, stream=True
            )
            assert [chunk async for chunk in stream]


async def test_a_request_may_follow_its_handshake_in_one_piece(tmp_path: Path) -> None:
    context, incoming, outgoing = client_context(), ssl.MemoryBIO(), ssl.MemoryBIO()
    told = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    request = b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n"

    async with fleet(tls=write_pair(tmp_path)) as made:
        reader, writer = await plainly(made)
        with contextlib.suppress(ssl.SSLWantReadError):
            told.do_handshake()
        writer.write(outgoing.read())
        while True:
            incoming.write(await reader.read(65536))
            with contextlib.suppress(ssl.SSLWantReadError):
                told.do_handshake()
                break
        for piece in (request, *[b"a" * 10_000] * 20):
            told.write(piece)
        writer.write(outgoing.read())
        while b" 404 " not in (answer := read_all(told)):
            assert answer == b""
            incoming.write(await reader.read(65536))
        writer.close()


def read_all(told: ssl.SSLObject) -> bytes:
    with contextlib.suppress(ssl.SSLWantReadError):
        return told.read(65536)
    return b""


async def test_a_client_that_would_rather_speak_http_2_gets_http_1(tmp_path: Path) -> None:
    context = client_context()
    context.set_alpn_protocols(["h2", "http/1.1"])

    async with fleet(tls=write_pair(tmp_path)) as made:
        where = "127.0.0.1", made.router.http_port
        _, writer = await asyncio.open_connection(*where, ssl=context)
        spoken = writer.get_extra_info("ssl_object")
        assert (spoken.selected_alpn_protocol(), spoken.version()) == ("http/1.1", "TLSv1.3")
        writer.transport.abort()


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_versions_before_1_2_are_refused(tmp_path: Path) -> None:
    context = client_context()
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1

    async with fleet(tls=write_pair(tmp_path)) as made:
        with pytest.raises(OSError):  # noqa: PT011 - of either side's OpenSSL
            await asyncio.open_connection("127.0.0.1", made.router.http_port, ssl=context)
        await until(lambda: handshakes(made, "failed") == 1)


def handshakes(made: Fleet, result: str) -> float:
    return made.metric("xpyd_router_tls_handshakes_total", result=result)


async def plainly(made: Fleet) -> Streams:
    return await asyncio.open_connection("127.0.0.1", made.router.http_port)


@pytest.mark.parametrize("end", ["waits", "ends its side", "goes on"])
async def test_a_client_that_speaks_plain_http_is_told_so(end: str, tmp_path: Path) -> None:
    async with fleet(tls=write_pair(tmp_path)) as made:
        reader, writer = await plainly(made)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        if end == "ends its side":
            writer.write_eof()
        if end == "goes on":
            await reader.readuntil(b" 400 ")
            writer.write(b"a" * 100_000)
            await writer.drain()
        answer = await reader.read()
        assert b"https://" in answer
        assert handshakes(made, "plain") == 1
        writer.close()


async def test_what_is_neither_is_closed_without_a_word(tmp_path: Path) -> None:
    async with fleet(tls=write_pair(tmp_path)) as made:
        for said in (b"\x00" * 100, b"\x16\x03\x01\xff\xff" + b"\x00" * 200_000):
            reader, writer = await plainly(made)
            writer.write(said)
            with contextlib.suppress(ConnectionError):
                assert not (await reader.read()).startswith(b"HTTP")
            writer.transport.abort()
        await until(lambda: handshakes(made, "failed") == 2)


async def test_a_client_that_says_nothing_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_connection, "HANDSHAKE_S", 0.05)

    async with fleet(tls=write_pair(tmp_path)) as made:
        reader, writer = await plainly(made)
        assert await reader.read() == b""
        assert handshakes(made, "late") == 1
        writer.close()


async def test_of_too_many_handshakes_the_oldest_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_connection, "MAX_HANDSHAKES", 3)
    monkeypatch.setattr(tls_connection, "HANDSHAKE_S", 3600.0)

    async with fleet(tls=write_pair(tmp_path)) as made:
        silent = [await plainly(made) for _ in range(3)]
        await asyncio.sleep(0)
        async with https(made.router.http_port) as http, http.get("/health") as answer:
            assert answer.status == 200
        assert await silent[0][0].read() == b""
        assert handshakes(made, "crowded") == 1
        for _, writer in silent:
            writer.close()


async def test_all_of_a_crowd_get_in(tmp_path: Path) -> None:
    async with fleet(tls=write_pair(tmp_path)) as made, https(made.router.http_port) as http:

        async def ask() -> int:
            async with http.get("/health") as answer:
                return answer.status

        assert await asyncio.gather(*(ask() for _ in range(60))) == [200] * 60


async def test_a_new_certificate_is_for_new_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a Secret is mounted: the files are links through a link to a directory, which changes."""
    monkeypatch.setattr(tls, "LOOK_S", 0.02)
    old, new = write_pair(tmp_path / "v1"), write_pair(tmp_path / "v2", until=YEAR_2051)
    (tmp_path / "..data").symlink_to("v1")
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).symlink_to(Path("..data") / name)
    mounted = ServerFiles(tmp_path / "tls.crt", tmp_path / "tls.key")

    async with fleet(tls=mounted) as made, https(made.router.http_port) as http:
        engine = await made.engine("A")
        go_on = asyncio.Event()
        serve = engine.script

        async def wait_first(*args: object) -> object:
            await go_on.wait()
            return await serve(*args)  # type: ignore[arg-type]

        engine.script = wait_first  # type: ignore[assignment]
        body = {"model": "m", "prompt": "x", "max_tokens": 4, "stream": True}
        running = asyncio.create_task(http.post("/v1/completions", json=body))
        await until(lambda: engine.served == 1)
        assert await shown(made.router.http_port) == der_of(old)

        (tmp_path / "swap").symlink_to("v2")
        os.replace(tmp_path / "swap", tmp_path / "..data")
        await until(lambda: reloads(made, "ok") == 1)

        assert await shown(made.router.http_port) == der_of(new)
        end = made.metric("xpyd_router_tls_not_after_seconds", use="server")
        assert end == YEAR_2051.timestamp()
        go_on.set()
        async with await running as answer:
            assert text_of(parse_events(await answer.read()))


def reloads(made: Fleet, result: str) -> float:
    return made.metric("xpyd_router_tls_reloads_total", use="server", result=result)


async def test_failures_are_shown_before_there_is_one_so_that_an_alert_sees_the_first(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(line_of("a", new_key(), {}))
    async with fleet(tls=write_pair(tmp_path), api_key_file=keys) as made:
        shown = made.router.state.metrics.render(()).decode().splitlines()
        assert 'xpyd_router_tls_reloads_total{result="failed",use="server"} 0.0' in shown
        lines = [one for one in shown if one.startswith("xpyd_router_key_file_loads_total")]
        assert [line.rpartition(" ")[2] for line in lines if "failed" in line] == ["0"]


def with_password(key: bytes) -> bytes:
    read = serialization.load_pem_private_key(key, None)
    form, locked = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
    return read.private_bytes(serialization.Encoding.PEM, form, locked)


@pytest.mark.parametrize("fault", ["another key", "half a file", "no file", "a password"])
async def test_files_that_cannot_be_used_leave_the_last_good_ones(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "LOOK_S", 0.02)
    good = write_pair(tmp_path)
    first, other = der_of(good), write_pair(tmp_path / "other")
    key = good.key
    assert key is not None
    assert other.key is not None

    async with fleet(tls=good) as made:
        match fault:
            case "another key":
                key.write_bytes(other.key.read_bytes())
            case "half a file":
                good.certificate.write_text(good.certificate.read_text()[:300])
            case "a password":
                key.write_bytes(with_password(key.read_bytes()))
            case _:
                good.certificate.unlink()
        await until(lambda: reloads(made, "failed") == 1)
        assert await shown(made.router.http_port) == first
        said = [one for one in caplog.records if "last good" in one.message]
        assert len(said) == 1
        assert str(tmp_path) in said[0].message

        new = write_pair(tmp_path)
        await until(lambda: reloads(made, "ok") >= 1)
        await when(lambda: is_shown(made, der_of(new)))


async def is_shown(made: Fleet, der: bytes) -> bool:
    return await shown(made.router.http_port) == der


@pytest.mark.parametrize("until_when", [YEAR_2001, YEAR_2051])
async def test_an_expired_certificate_is_served_and_said(
    until_when: datetime.datetime, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = write_pair(tmp_path, until=until_when)

    async with fleet(tls=files) as made:
        assert await shown(made.router.http_port) == der_of(files)
        said = [one for one in caplog.records if "EXPIRED" in one.message]
        assert [one.levelno for one in said] == [logging.ERROR] * (until_when == YEAR_2001)
        end = made.metric("xpyd_router_tls_not_after_seconds", use="server")
        assert end == until_when.timestamp()


def test_the_end_of_a_certificate_is_said_when_it_comes_once_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = YEAR_2051.timestamp() - 30 * 86400.0
    files = write_pair(tmp_path, until=YEAR_2051)
    context = WatchedContext(files, "--ssl-certfile", clock=lambda: now_s)

    def said() -> list[int]:
        context.look()
        return [one.levelno for one in caplog.records if "certificate" in one.message]

    assert said() == []
    now_s += 25 * 86400.0
    assert [said(), said()] == [[logging.WARNING]] * 2, "not at each look"
    now_s += 6 * 86400.0
    assert [said(), said()] == [[logging.WARNING, logging.ERROR]] * 2
    assert "EXPIRED" in caplog.text


def certified(directory: Path, name: str) -> ssl.SSLContext:
    """A client with a certificate by the authority `name`."""
    context = client_context()
    own = write_pair(directory / name, "client", ca=authority(name))
    context.load_cert_chain(own.certificate, own.key)
    return context


@pytest.mark.parametrize("required", [1, 2])
async def test_clients_show_certificates_of_the_authority(required: int, tmp_path: Path) -> None:
    own = write_pair(tmp_path)
    files = ServerFiles(
        own.certificate,
        own.key,
        write_ca(tmp_path / "ca.crt", authority("clients")),
        2 if required == 2 else 1,
    )

    async def status(made: Fleet, context: ssl.SSLContext) -> int:
        try:
            async with (
                https(made.router.http_port, context) as http,
                http.get("/health") as answer,
            ):
                return answer.status
        except (aiohttp.ClientError, ConnectionError):
            return 0

    async with fleet(tls=files) as made:
        assert await status(made, certified(tmp_path, "clients")) == 200
        assert await status(made, certified(tmp_path, "strangers")) == 0
        assert await status(made, client_context()) == (200 if required == 1 else 0)


FAULTS = {
    "no file": r"cannot read \S+missing\.crt: No such file",
    "no key": r"no key in PEM in \S+tls\.crt",
    "no pem": r"no certificate in PEM in \S+tls\.crt",
    "a password": "the key has a password; give a key without one",
    "the authority first": "is the leaf behind its authority",
    "another's key": "the key is not that of the first certificate",
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_router_does_not_start_with_unusable_files(fault: str, tmp_path: Path) -> None:
    good = write_pair(tmp_path, ca=authority().create_child_ca())
    files, key = good, good.key
    assert key is not None
    match fault:
        case "no file":
            files = ServerFiles(tmp_path / "missing.crt", good.key)
        case "no key":
            files = ServerFiles(good.certificate)
        case "no pem":
            good.certificate.write_text("hello")
        case "a password":
            key.write_bytes(with_password(key.read_bytes()))
        case "the authority first":
            leaf, issuer = good.certificate.read_text().split("-----END CERTIFICATE-----\n")[:2]
            end = "-----END CERTIFICATE-----\n"
            good.certificate.write_text(issuer + end + leaf + end)
        case _:
            files = ServerFiles(good.certificate, write_pair(tmp_path / "other").key)

    with pytest.raises(UserError, match=f"--ssl-certfile: .*{FAULTS[fault]}"):
        async with fleet(tls=files):
            pass


@pytest.mark.parametrize(("mode", "is_said"), [(0o644, True), (0o440, False), (0o600, False)])
async def test_a_key_that_every_user_may_read_is_said(
    mode: int, is_said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = write_pair(tmp_path)
    assert files.key is not None
    files.key.chmod(mode)
    WatchedContext(files, "--ssl-certfile")
    said = [one for one in caplog.records if "every user may read the key" in one.message]
    assert bool(said) == is_said


FLAGS = {
    "--ssl-keyfile k": "--ssl-keyfile: needs --ssl-certfile",
    "--ssl-cert-reqs 1": "--ssl-cert-reqs: needs --ssl-certfile",
    "--ssl-certfile c --ssl-cert-reqs 2": "--ssl-cert-reqs: needs --ssl-ca-certs",
    "--ssl-certfile c --ssl-ca-certs a --ssl-cert-reqs 0": "--ssl-ca-certs: does nothing",
}


@pytest.mark.parametrize("line", FLAGS)
def test_flags_that_do_nothing_are_refused(line: str) -> None:
    with pytest.raises(UserError, match=FLAGS[line]):
        read(line)


def read(line: str) -> ServerFiles | None:
    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    return read_server_files(parser.parse_args(line.split()))


def test_an_authority_of_clients_means_that_certificates_are_required() -> None:
    assert read("") is None
    assert read("--ssl-certfile c") == ServerFiles(Path("c"))
    assert read("--ssl-certfile c --ssl-keyfile k --ssl-ca-certs a") == ServerFiles(
        Path("c"), Path("k"), Path("a"), 2
    )


def test_the_end_of_a_cut_certificate_is_no_answer(tmp_path: Path) -> None:
    der = der_of(write_pair(tmp_path))
    for size in range(len(der)):
        with contextlib.suppress(ValueError):  # as good where the end is in what is left
            not_after_s(ssl.DER_cert_to_PEM_cert(der[:size]))


@pytest.mark.slow
async def test_every_process_of_a_router_takes_the_new_certificate(tmp_path: Path) -> None:
    files = write_pair(tmp_path)

    async with several(processes=2, tls=files) as made:
        port = made.router.http_port
        assert {await shown(port) for _ in range(8)} == {der_of(files)}
        new = write_pair(tmp_path, until=YEAR_2051)

        async def is_everywhere() -> bool:
            return {await shown(port) for _ in range(8)} == {der_of(new)}

        await when(is_everywhere)
        async with made.http.get(f"{made.admin}/metrics") as answer:
            text = await answer.text()
        end = f'xpyd_router_tls_not_after_seconds{{use="server"}} {int(YEAR_2051.timestamp())}'
        assert end in text

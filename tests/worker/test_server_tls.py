"""An engine's HTTP port over TLS."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest
from quart import Quart, request

from tests.tls_kit import authority, client_context, write_ca, write_pair
from tests.worker.server_fakes import kv_probe, run
from xpyd_core.errors import UserError
from xpyd_core.tls import ServerFiles, WatchedContext
from xpyd_core.tls_connection import TlsServer
from xpyd_worker import command
from xpyd_worker.server.http.server import listen, make_server


@contextlib.asynccontextmanager
async def serving(
    directory: Path, files: ServerFiles | None = None, *, only_certified: bool = False
) -> AsyncGenerator[int]:
    """The port of a server whose one route says how it was reached."""
    app = Quart(__name__)

    @app.post("/echo")
    async def echo() -> dict[str, object]:
        return {"scheme": request.scheme, "bytes": len(await request.get_data())}

    @app.get("/health")
    async def health() -> dict[str, object]:
        return {}

    @app.post("/kv/probe")
    async def probe() -> dict[str, object]:
        return {"ok": True, "transport": "tcp", "bytes": 65536, "seconds": 0.002}

    _ = echo, health, probe
    tls = TlsServer(WatchedContext(files or write_pair(directory), "--ssl-certfile"))
    server = make_server(app, tls, only_certified=only_certified)
    sockets = listen("127.0.0.1", 0)
    task = asyncio.create_task(server.serve(sockets=sockets))
    try:
        yield sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task
        tls.close()


def test_requests_come_over_tls(tmp_path: Path) -> None:
    async def body() -> None:
        async with (
            serving(tmp_path) as port,
            httpx.AsyncClient(verify=client_context(), timeout=10) as client,
        ):
            answer = await client.post(f"https://127.0.0.1:{port}/echo", content=b"x" * 900_000)
            assert answer.json() == {"scheme": "https", "bytes": 900_000}

    run(body())


def test_a_client_of_plain_http_is_told_so(tmp_path: Path) -> None:
    async def body() -> None:
        async with serving(tmp_path) as port, httpx.AsyncClient(timeout=10) as client:
            answer = await client.post(f"http://127.0.0.1:{port}/echo")
            assert answer.status_code == 400
            assert "https://" in answer.text

    run(body())


def test_without_a_certificate_probes_alone_are_answered(tmp_path: Path) -> None:
    own = write_pair(tmp_path)
    files = ServerFiles(own.certificate, own.key, write_ca(tmp_path / "ca", authority("r")), 1)
    certified = client_context()
    router = write_pair(tmp_path / "router", "router", ca=authority("r"))
    certified.load_cert_chain(router.certificate, router.key)
    stranger = client_context()
    other = write_pair(tmp_path / "other", "router", ca=authority("others"))
    stranger.load_cert_chain(other.certificate, other.key)

    async def body() -> None:
        async with serving(tmp_path, files, only_certified=True) as port:

            async def status(context: ssl.SSLContext, method: str, path: str) -> int:
                async with httpx.AsyncClient(verify=context, timeout=10) as client:
                    url = f"https://127.0.0.1:{port}{path}"
                    return (await client.request(method, url)).status_code

            assert await status(certified, "POST", "/echo") == 200
            assert await status(certified, "GET", "/health") == 200
            assert await status(client_context(), "GET", "/health") == 200
            for method, path in (("POST", "/echo"), ("POST", "/health"), ("GET", "/health/x")):
                assert await status(client_context(), method, path) == 403
            with pytest.raises((ssl.SSLError, httpx.TransportError)):
                await status(stranger, "GET", "/health")

    run(body())


@pytest.mark.parametrize(
    "line", ["", "--ssl-certfile c", "--ssl-certfile c --ssl-ca-certs a --ssl-cert-reqs 1"]
)
def test_open_probes_need_certificates_of_all_others(line: str) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    command.configure(parser)
    args = parser.parse_args(["--model=m", "--ssl-open-probes", *line.split()])
    with pytest.raises(UserError, match="--ssl-open-probes: needs --ssl-ca-certs"):
        command.read_config(args)


@pytest.fixture(name="engine")
def certified_engine(tmp_path: Path) -> ServerFiles:
    """An engine's files: a name that all engines share, and who asks needs a certificate."""
    own = write_pair(tmp_path / "engine", "engines.example", ca=authority("engines"))
    write_ca(tmp_path / "ca.crt", authority("engines"))
    write_pair(tmp_path / "router", "router", ca=authority("routers"))
    routers = write_ca(tmp_path / "routers.crt", authority("routers"))
    return ServerFiles(own.certificate, own.key, routers, 1)


CA, NAME = ("--engine-ca-file", "ca.crt"), ("--engine-server-name", "engines.example")
OWN = ("--engine-certfile", "router/tls.crt", "--engine-keyfile", "router/tls.key")


@pytest.mark.parametrize(
    ("scheme", "flags", "said"),
    [
        ("https", (*CA, *NAME, *OWN), ""),
        ("https", (*CA, *OWN), "its certificate is refused: IP address mismatch"),
        ("https", (*NAME, *OWN), "--engine-certfile: needs --engine-ca-file"),
        ("https", NAME, "its certificate is refused: .*--engine-ca-file"),
        ("https", (*CA, *NAME), "refuses \\(403\\)"),
        ("https", ("--engine-ca-file", "none.crt"), "--engine-ca-file: cannot read none.crt"),
        ("http", (*CA, *NAME), "need an https:// URL"),
        ("http", (), "does it serve HTTPS"),
        ("ftp", (), "is not a URL"),
    ],
)
def test_kv_probe_reaches_engines_with_tls(
    engine: ServerFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
    flags: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)

    expected = pytest.raises(UserError, match=said) if said else contextlib.nullcontext()

    async def body() -> None:
        async with serving(tmp_path, engine, only_certified=True) as port:
            way = ("--engine", f"{scheme}://127.0.0.1:{port}", "--peer", "10.0.0.7:21001")
            with expected:
                assert await asyncio.to_thread(kv_probe, *way, "--kv-insecure", *flags) == 0

    run(body())

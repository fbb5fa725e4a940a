"""`xpyd router` as a process: its flags, its ports, its drain; and the articles' numbers."""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import xpyd_router.command
from tests.router.fakes import Fleet, begin_and_hang, fleet, pair, serve_model, text_of, until
from tests.router.several import process
from xpyd_core.errors import UserError
from xpyd_core.request_id import parse_pair_id
from xpyd_router import router
from xpyd_router.command import command, read_config
from xpyd_router.http import server as http_server
from xpyd_router.processes import parent
from xpyd_router.router import open_router


def flags(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return parser.parse_args(argv)


def test_ports_and_periods_without_flags() -> None:
    config = read_config(flags("--kv-insecure"))
    assert (config.port, config.discovery_port) == (10001, 30001)
    assert (config.heartbeat_interval_s, config.missed_beats) == (3.0, 3)


@pytest.mark.parametrize(("processes", "runs"), [("1", "router"), ("2", "parent")])
def test_one_process_has_no_parent(
    processes: str, runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    for module, name in ((router, "router"), (parent, "parent")):
        monkeypatch.setattr(module, f"run_{name}", lambda _, name=name: seen.append(name) or 0)
    monkeypatch.setattr(xpyd_router.command, "set_up_logging", lambda *_: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert command.run(flags("--kv-insecure", "--processes", processes)) == 0
    assert seen == [runs]


def test_the_environment_gives_defaults_and_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XPYD_POD_IP", "127.1.3.1")
    monkeypatch.setenv("XPYD_KV_KEY_FILE", "/some/key")
    config = read_config(flags("--host", "127.0.0.1", "--max-body-bytes", "1Mi"))
    assert config.host == config.discovery_host == "127.0.0.1"
    assert config.kv_key_file == Path("/some/key")
    assert config.max_body_bytes == 1024 * 1024
    assert read_config(flags()).host == "127.1.3.1"


@pytest.mark.parametrize(
    "argv",
    [
        ("--port", "70000"),
        ("--admin-port", "70000"),
        ("--admin-port", "10001"),
        ("--admin-listen-fd", "2"),
        ("--listen-fd", "2"),
        ("--processes", "0"),
        ("--processes", "65"),
        ("--missed-beats", "0"),
        ("--heartbeat-interval-ms", "0"),
        ("--request-timeout", "0"),
        ("--request-timeout", "inf"),
        ("--prefill-timeout", "nan"),
        ("--prefill-timeout", "86401"),
        ("--drain-seconds", "-1"),
        ("--drain-seconds", "inf"),
        ("--max-body-bytes", "lots"),
        ("--max-concurrent-requests", "0"),
        ("--max-concurrent-tokens", "0"),
        ("--max-concurrent-tokens", "1099511627777"),
        ("--queue-size", "-1"),
        ("--queue-size", "1000001"),
        ("--queue-bytes", "lots"),
        ("--queue-timeout-seconds", "-1"),
        ("--queue-timeout-seconds", "inf"),
    ],
)
def test_a_wrong_flag_is_named(argv: tuple[str, str]) -> None:
    with pytest.raises(UserError, match=f"^{argv[0]}: "):
        read_config(flags("--kv-insecure", *argv))


def test_a_router_needs_the_fleets_key_or_the_word_that_there_is_none() -> None:
    with pytest.raises(UserError, match=r"openssl rand .* --kv-key-file .* --kv-insecure"):
        read_config(flags())
    with pytest.raises(UserError, match="leave one of them out"):
        read_config(flags("--kv-insecure", "--kv-key-file", "k"))
    assert read_config(flags("--kv-insecure")).kv_insecure


@pytest.mark.parametrize("has_key", [True, False])
async def test_a_router_without_key_warns_once_at_its_start(
    has_key: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 16)

    async with fleet(**({"kv_key_file": key} if has_key else {})):
        pass
    warnings = [line for line in caplog.messages if "--kv-insecure" in line]
    assert len(warnings) == (0 if has_key else 1)


@pytest.mark.parametrize("taken", ["port", "admin_port", "discovery_port"])
async def test_a_taken_port_is_an_error_that_names_it(taken: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        ports: dict[str, Any] = {"port": 0, "admin_port": 0, "discovery_port": 0}
        ports[taken] = busy.getsockname()[1]
        config = read_config(flags("--kv-insecure"))
        with pytest.raises(UserError, match=str(ports[taken])):
            async with open_router(replace(config, **ports)):
                pass


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
async def test_clients_of_inherited_sockets_wait_while_no_router_runs(processes: str) -> None:
    with (
        socket.create_server(("127.0.0.1", 0), backlog=16) as listener,
        socket.create_server(("127.0.0.1", 0), backlog=16) as admin,
    ):
        ports = [one.getsockname()[1] for one in (listener, admin)]
        numbers = [one.fileno() for one in (listener, admin)]
        for _ in range(2):
            asked = [await asyncio.open_connection("127.0.0.1", port) for port in ports]
            for (_, writer), path in zip(asked, (b"/health", b"/metrics"), strict=True):
                writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
            flags_ = [f"--listen-fd={numbers[0]}", f"--admin-listen-fd={numbers[1]}"]
            flags_ += ["--processes", processes, "--discovery-port=0"]
            async with process(*flags_, inherit=numbers) as (child, *urls):
                assert urls == [f"http://127.0.0.1:{port}" for port in ports]
                for reader, writer in asked:
                    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
                    writer.close()
                child.kill()
                await child.wait()


@pytest.mark.parametrize("processes", ["1", "2"])
async def test_a_router_that_drains_does_not_keep_clients_on_an_inherited_socket(
    processes: str,
) -> None:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [one.getsockname()[1] for one in listeners]
    numbers = [one.fileno() for one in listeners]
    flags_ = [f"--listen-fd={numbers[0]}", f"--admin-listen-fd={numbers[1]}", "--drain-seconds=0"]
    flags_ += ["--discovery-port=0", "--processes", processes]
    async with process(*flags_, inherit=numbers) as (child, *_):
        for listener in listeners:
            listener.close()
        child.terminate()
        assert await child.wait() == 0
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize("kind", ["a file", "udp", "not listening", "closed"])
async def test_what_is_no_listening_socket_is_refused_by_the_flags_name(
    kind: str, tmp_path: Path
) -> None:
    held: Any = (tmp_path / "file").open("w") if kind == "a file" else socket.socket()
    if kind == "udp":
        held.close()
        held = socket.socket(type=socket.SOCK_DGRAM)
    number = held.fileno()
    with held:
        if kind == "closed":
            held.close()
        config = replace(read_config(flags("--kv-insecure")), listen_fd=number, discovery_port=0)
        with pytest.raises(UserError, match=f"^--listen-fd {number}: "):
            async with open_router(config):
                pass


async def test_the_first_request_of_a_user_is_served_by_1p3d() -> None:
    async with fleet() as fleet_:
        p = await fleet_.engine("P")
        ds = [await fleet_.engine("D") for _ in range(3)]
        await fleet_.json(prompt="San Francisco is a", max_tokens=10, temperature=0)
        [d] = [d for d in ds if d.served]
        assert p.calls[0].body["max_tokens"] == 1
        assert d.calls[0].body["max_tokens"] == 10
        found = parse_pair_id(p.calls[0].request_id)
        assert found is not None
        assert (found.prefill, found.decode) == (p.beat.kv, d.beat.kv)
        assert parse_pair_id(f"cmpl-{p.calls[0].request_id}-0") == found


async def test_a_draining_router_is_not_ready_still_serves_and_finishes_its_streams() -> None:
    async with pair(drain_s=0.3) as (fleet_, _, d):
        gate = asyncio.Event()

        async def gated(engine: Any, call: Any, request: Any) -> Any:
            await gate.wait()
            return await serve_model(engine, call, request)

        d.script = gated
        running = asyncio.create_task(fleet_.events())
        await until(lambda: d.served == 1)
        fleet_.router.stop()
        async with fleet_.http.get(f"{fleet_.base}/readiness") as response:
            assert response.status == 503
        late = asyncio.create_task(fleet_.json())
        await until(lambda: d.served == 2)
        await until(lambda: refuses(fleet_))
        gate.set()
        assert text_of(await running) == "t0.0 t0.1 t0.2 t0.3 "
        assert (await late)["choices"][0]["finish_reason"] == "length"


async def test_the_admin_port_of_a_draining_router_is_open_until_its_last_request_has_ended() -> (
    None
):
    async with pair() as (fleet_, _, d):
        gate = asyncio.Event()

        async def gated(engine: Any, call: Any, request: Any) -> Any:
            await gate.wait()
            return await serve_model(engine, call, request)

        d.script = gated
        running = asyncio.create_task(fleet_.events())
        await until(lambda: d.served == 1)
        fleet_.router.stop()
        await until(lambda: refuses(fleet_))
        # Each on a connection of its own, as one who comes now; and one that stays open.
        for path, expected in (("/readiness", 503), ("/health", 200), ("/instances", 200)):
            async with (
                aiohttp.ClientSession() as http,
                http.get(f"{fleet_.admin}{path}") as response,
            ):
                assert response.status == expected
        async with fleet_.http.get(f"{fleet_.admin}/metrics") as response:
            assert "xpyd_router_in_flight 1" in (await response.text()).splitlines()
        gate.set()
        assert text_of(await running) == "t0.0 t0.1 t0.2 t0.3 "
        await until(lambda: refuses(fleet_, fleet_.router.admin_port))


async def test_who_still_asks_at_the_admin_port_holds_no_router_up_that_has_drained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "_LAST_ANSWERS_S", 0.05)
    async with fleet() as fleet_:
        asked = asyncio.Event()

        async def hang() -> bytes:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        monkeypatch.setattr(fleet_.router.state.control, "metrics", hang)
        scrape = asyncio.create_task(fleet_.http.get(f"{fleet_.admin}/metrics"))
        await asked.wait()
        # Left here: the router has ended, which the test's deadline bounds.
    with pytest.raises(aiohttp.ClientError):
        await scrape


async def test_new_connections_are_taken_for_as_long_as_the_drain_says() -> None:
    async with pair(drain_s=60.0) as (fleet_, _, __):
        fleet_.router.stop()
        await asyncio.sleep(0.3)  # three times as long as the server takes to close its port
        assert not refuses(fleet_)
        await fleet_.json()


def refuses(fleet_: Fleet, port: int = 0) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port or fleet_.router.http_port)) != 0


FREE_PORTS = ("--port", "0", "--admin-port", "0", "--discovery-port", "0")
V6 = ("--host", "::1", "--discovery-host", "::1")


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_the_process_and_it_exits_0(
    number: signal.Signals, processes: str
) -> None:
    async with (
        process(*FREE_PORTS, "--drain-seconds", "0.2", "--processes", processes) as (child, url, _),
        aiohttp.ClientSession() as http,
    ):
        async with http.get(f"{url}/health") as response:
            assert response.status == 200
        child.send_signal(number)
        assert await child.wait() == 0


async def test_the_start_line_gives_an_ipv6_address_as_urls_do() -> None:
    async with process(*FREE_PORTS, *V6, "--drain-seconds", "0") as (_, url, admin):
        assert url.startswith("http://[::1]:")
        async with aiohttp.ClientSession() as http, http.get(f"{admin}/metrics") as response:
            assert response.status == 200


async def test_a_second_signal_ends_a_router_that_still_streams() -> None:
    async with pair() as (fleet_, _, d):
        d.script = begin_and_hang
        running = asyncio.create_task(fleet_.events())
        await until(lambda: d.served == 1)
        fleet_.router.stop()
        await until(lambda: refuses(fleet_))
        fleet_.router.stop()
        running.cancel()
        await asyncio.wait([running])

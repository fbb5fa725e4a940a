"""Client keys as clients meet them: 401s in each API's form, limits, salts, files that change."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.router.fakes import Call, Fleet, HttpEngine, begin_and_hang, hang, pair, until
from xpyd_core.errors import UserError
from xpyd_router.admission import AdmissionLimits
from xpyd_router.keys import watch
from xpyd_router.keys.lines import line_of, new_key, salted
from xpyd_router.processes.events import decode_config, encode_config

KEY, OTHER = new_key(), new_key()


def bearer(key: str = KEY) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@contextlib.asynccontextmanager
async def keyed(
    folder: Path, *lines: str, **config: Any
) -> AsyncGenerator[tuple[Fleet, HttpEngine, HttpEngine]]:
    """A pair behind a router with these keys; without lines KEY is the key of `a`."""
    file = folder / "keys.txt"
    file.write_text("\n".join(lines or [line_of("a", KEY, {})]))
    async with pair(api_key_file=file, **config) as found:
        yield found


def change(fleet_: Fleet, file: Path, *lines: str) -> None:
    """What the next read of the file brings."""
    file.write_text("\n".join(lines))
    keys = fleet_.router.state.client_keys
    assert keys is not None
    keys.watch.try_load()


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(
    ("path", "headers", "kind"),
    [
        ("completions", {}, "openai"),
        ("chat/completions", {"Authorization": "Bearer wrong"}, "openai"),
        ("responses", {"x-api-key": "wrong"}, "openai"),
        ("messages", {"x-api-key": "wrong"}, "anthropic"),
    ],
)
async def test_without_a_valid_key_the_answer_is_401_in_the_apis_own_form(
    tmp_path: Path, path: str, headers: dict[str, str], kind: str
) -> None:
    async with keyed(tmp_path) as (fleet_, p, d):
        async with await fleet_.post(path, headers=headers) as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
            body = await response.json()
            assert body["error"]["type"] == "authentication_error"
            assert ("type" in body) == (kind == "anthropic")
        assert (p.served, d.served) == (0, 0)
        assert fleet_.metric("xpyd_router_requests_total", endpoint=path, status="401") == 1
        assert await fleet_.json(headers=bearer()), "the fleet still serves"


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m", "/v1/responses/x", "/nothing"])
async def test_other_paths_need_a_key_but_health_readiness_and_version(
    tmp_path: Path, path: str
) -> None:
    async with keyed(tmp_path) as (fleet_, _, _):
        for open_path in ("/health", "/readiness", "/version", "//health"):
            async with fleet_.http.get(fleet_.base + open_path) as response:
                assert response.status == 200
        async with fleet_.http.get(fleet_.base + path) as response:
            assert response.status == 401
        async with fleet_.http.get(f"{fleet_.base}/{path}") as response:
            assert response.status == 401, "with two slashes, too"
        async with fleet_.http.get(f"{fleet_.base}/v1/models", headers=bearer()) as response:
            assert response.status == 200
        async with fleet_.http.post(f"{fleet_.base}/tokenize", json={"prompt": "x"}) as response:
            assert response.status == 401


async def test_a_401_comes_before_the_body_which_is_not_read(tmp_path: Path) -> None:
    async with keyed(tmp_path) as (fleet_, _, _):
        port = int(fleet_.base.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{"
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 401 ")
        assert b"connection: close" in head.lower()
        writer.close()
        await until(lambda: fleet_.router.state.metrics.requests.in_flight == 0)


async def test_what_comes_behind_a_refused_request_in_one_read_is_not_served(
    tmp_path: Path,
) -> None:
    async with keyed(tmp_path) as (fleet_, p, _):
        port = int(fleet_.base.rpartition(":")[2])
        body = b'{"model": "m", "prompt": "x"}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(body)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        good = b"Authorization: Bearer " + KEY.encode() + b"\r\n\r\n" + body
        writer.write(head + b"\r\n" + body + head + good)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert answer.count(b"HTTP/1.1") == 1
        writer.close()
        await fleet_.json(headers=bearer())
        assert p.served == 1, "it, and nothing that began before"


async def test_the_official_clients_send_their_keys(tmp_path: Path) -> None:
    async with keyed(tmp_path) as (fleet_, p, d):
        async with openai.AsyncOpenAI(base_url=f"{fleet_.base}/v1", api_key=KEY) as client:
            answer = await client.completions.create(model="m", prompt="x", max_tokens=4)
            assert answer.choices[0].text
        async with openai.AsyncOpenAI(
            base_url=f"{fleet_.base}/v1", api_key=OTHER, max_retries=0
        ) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with anthropic.AsyncAnthropic(
            base_url=fleet_.base, api_key=OTHER, max_retries=0
        ) as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(
                    model="m", max_tokens=4, messages=[{"role": "user", "content": "x"}]
                )
        for call in (*p.calls, *d.calls):
            assert not {"authorization", "x-api-key"} & {name.lower() for name in call.headers}
            assert KEY not in call.raw.decode()


@pytest.mark.usefixtures("both_ways")
async def test_a_refusal_has_one_line_in_the_log_and_no_line_has_a_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    async with keyed(tmp_path) as (fleet_, _, _):
        for headers in ({}, bearer(OTHER), {"x-api-key": OTHER}):
            async with await fleet_.post(headers=headers) as response:
                assert response.status == 401
        await fleet_.json(headers=bearer())
        lines = [r.getMessage() for r in caplog.records if "refused 401" in r.getMessage()]
        assert [line.split("reason=")[1] for line in lines] == [
            "'no key'",
            "'unknown key'",
            "'unknown key'",
        ]
        assert "path=/v1/completions client=127.0.0.1" in lines[0]
        assert fleet_.metric("xpyd_router_key_refusals_total", reason="unknown key") == 2
        assert fleet_.metric("xpyd_router_key_requests_total", key="a", status="200") == 1
        assert fleet_.metric("xpyd_router_key_output_tokens_total", key="a") == 4
    said = caplog.text + capfd.readouterr().err
    assert KEY not in said
    assert OTHER not in said
    assert " key=a " in said
    assert "POST /v1/completions 401" not in said, "strangers fill the access log"


async def test_the_lines_of_a_flood_are_bounded_and_the_rest_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 0.0
    audit = watch.Audit(watch.KeyTable(), lambda: now_s)
    for _ in range(1000):
        audit.refused("no key", "/v1/models\n", "10.0.0.1")
    assert len(caplog.records) == 50
    now_s = 1.0
    audit.refused("no key", "/", "10.0.0.1")
    assert "(and 950 more, not logged)" in caplog.text
    assert "\\n" in caplog.records[0].getMessage(), "a path ends no line"


PROXIES = watch.read_proxies(["10.0.0.0/8, 127.0.0.1", "fd00::/8"])


@pytest.mark.parametrize(
    ("connected", "said", "client"),
    [
        ("10.0.0.1", ["192.0.2.1"], "192.0.2.1"),
        ("10.0.0.1", ["192.0.2.7, 192.0.2.1"], "192.0.2.1"),  # the client wrote the first
        ("10.0.0.1", ["192.0.2.1, 10.0.0.9"], "192.0.2.1"),
        ("10.0.0.1", ["192.0.2.1", "10.0.0.9"], "192.0.2.1"),
        ("10.0.0.1", ["192.0.2.1:5000"], "192.0.2.1"),
        ("fd00::1", ["[2001:db8::1]:5000"], "2001:db8::1"),
        ("fd00::1", ["2001:db8::1"], "2001:db8::1"),
        ("10.0.0.1", ["10.0.0.8, 10.0.0.9"], "10.0.0.8"),
        ("10.0.0.1", ["192.0.2.1, x\n2026 refused"], "10.0.0.1"),
        ("10.0.0.1", ["unknown"], "10.0.0.1"),
        ("10.0.0.1", [","], "10.0.0.1"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("192.0.2.5", ["192.0.2.1"], "192.0.2.5"),  # no proxy of ours
        ("-", ["192.0.2.1"], "-"),
    ],
)
def test_who_asks_behind_a_proxy_is_what_the_proxy_added(
    connected: str, said: list[str], client: str
) -> None:
    headers = [(b"x-forwarded-for", one.encode()) for one in said]
    assert watch.client_behind(connected, headers, PROXIES) == client
    assert watch.client_behind(connected, headers, ()) == connected


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("proxies", [(), ("127.0.0.1",)])
async def test_the_log_of_refusals_has_the_client_of_a_named_proxy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, proxies: tuple[str, ...]
) -> None:
    async with keyed(tmp_path, proxies=proxies) as (fleet_, _, _):
        response = await fleet_.post(headers={"X-Forwarded-For": "192.0.2.1"})
        assert response.status == 401
        response.release()
    assert f"client={'192.0.2.1' if proxies else '127.0.0.1'} " in caplog.text


async def test_a_revoked_key_stops_at_once_with_what_runs_under_its_name(tmp_path: Path) -> None:
    async with keyed(tmp_path) as (fleet_, _, d):
        d.script = begin_and_hang
        response = await fleet_.post(stream=True, headers=bearer())
        assert response.status == 200
        change(fleet_, tmp_path / "keys.txt", line_of("b", OTHER, {}))
        with pytest.raises(Exception, match=r"."):
            await response.read()
        async with await fleet_.post(headers=bearer()) as refused:
            assert refused.status == 401
        await until(lambda: fleet_.router.state.admission.in_flight.requests == 0)


async def test_a_key_that_is_replaced_leaves_what_runs_alone(tmp_path: Path) -> None:
    async with keyed(tmp_path) as (fleet_, p, _):
        p.script = hang
        first = asyncio.create_task(fleet_.post(headers=bearer()))
        await until(lambda: p.served == 1)
        change(fleet_, tmp_path / "keys.txt", line_of("a", OTHER, {}))
        async with await fleet_.post(headers=bearer()) as refused:
            assert refused.status == 401
        assert not first.done()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_a_broken_file_keeps_the_last_good_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with keyed(tmp_path) as (fleet_, _, _):
        for _ in range(3):
            change(fleet_, tmp_path / "keys.txt", "a sha256:broken")
        await fleet_.json(headers=bearer())
        assert fleet_.metric("xpyd_router_key_file_loads_total", result="failed") == 3
        said = [r for r in caplog.records if "the keys stay as they were" in r.getMessage()]
        assert len(said) == 1


async def test_the_file_is_read_again_while_the_router_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "RELOAD_S", 0.01)
    async with keyed(tmp_path) as (fleet_, _, _):
        (tmp_path / "next.txt").write_text(line_of("a", OTHER, {}))
        (tmp_path / "next.txt").replace(tmp_path / "keys.txt")
        keys = fleet_.router.state.client_keys
        assert keys is not None
        await until(lambda: fleet_.metric("xpyd_router_key_file_loads_total", result="ok") == 2)
        await fleet_.json(headers=bearer(OTHER))


async def test_a_name_server_that_does_not_answer_holds_up_no_revocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "RELOAD_S", 0.01)
    file, answers, ring = tmp_path / "keys.txt", threading.Event(), watch.KeyRing(lambda: 0.0)
    file.write_text(line_of("a", KEY, {}))

    def count(_: str) -> int:
        answers.wait()
        return 1

    keys = watch.KeyWatch(ring, watch.KeyTable(), path=file, peers="routers", count=count)
    keys.load()
    running = asyncio.create_task(keys.run())
    try:
        file.write_text(line_of("b", OTHER, {}))
        await until(lambda: ring.names == ("b",))
    finally:
        answers.set()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_router_does_not_start_with_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="line 1: expected sha256"):
        async with keyed(tmp_path, "a nothing"):
            pass


async def test_api_keys_of_the_flag_are_keys_and_stay_out_of_what_is_shown() -> None:
    async with pair(api_keys=("token-abc123",)) as (fleet_, _, _):
        await fleet_.json(headers=bearer("token-abc123"))
        async with await fleet_.post(headers=bearer("token-abc1234")) as response:
            assert response.status == 401
        config = fleet_.router.state.config
        assert "token-abc123" not in repr(config)
        assert decode_config(encode_config(config)) == config


async def test_a_chosen_key_goes_the_long_way_once(tmp_path: Path) -> None:
    line = line_of("alice", "correct-horse", {}, is_chosen=True)
    async with keyed(tmp_path, line) as (fleet_, _, _):
        for _ in range(2):
            await fleet_.json(headers=bearer("correct-horse"))
        for _ in range(2):
            async with await fleet_.post(headers=bearer("wrong-horse")) as response:
                assert response.status == 401


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_engines_get_a_salt_of_the_key_that_a_client_cannot_choose(
    tmp_path: Path, path: str
) -> None:
    lines = [line_of("a", KEY, {}), line_of("b", OTHER, {"salt": "a"})]
    async with keyed(tmp_path, *lines) as (fleet_, p, d):
        await fleet_.json(path, headers=bearer())
        await fleet_.json(path, headers=bearer(OTHER))
        await fleet_.json(path, headers=bearer(), cache_salt=salted("b"))
        salts = [call.body["cache_salt"] for call in p.calls]
        assert salts[0] == salts[1] == salted("a")
        assert salts[2] not in (salted("a"), salted("b"))
        assert [call.body["cache_salt"] for call in d.calls] == salts
        async with await fleet_.post(path, headers=bearer(), cache_salt=7) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "cache_salt"


async def test_a_key_may_ask_for_no_earlier_place_than_its_own(tmp_path: Path) -> None:
    line = line_of("a", KEY, {"priority": "10"})
    limits = AdmissionLimits(requests=5)
    async with keyed(tmp_path, line, limits=limits) as (fleet_, p, _):
        await fleet_.json(headers=bearer(), priority=-7)
        await fleet_.json(headers=bearer(), priority=70)
        await fleet_.json(headers=bearer())
        assert [call.body.get("priority") for call in p.calls] == [10, 70, None]


async def test_a_key_sees_and_uses_its_models_alone(tmp_path: Path) -> None:
    lines = [line_of("a", KEY, {"models": "other"}), line_of("b", OTHER, {"models": "m,other"})]
    async with keyed(tmp_path, *lines) as (fleet_, _, _):
        async with await fleet_.post(headers=bearer()) as response:
            assert response.status == 404
            assert "Served: none" in (await response.json())["error"]["message"]
        async with fleet_.http.get(f"{fleet_.base}/v1/models", headers=bearer()) as response:
            assert (await response.json())["data"] == []
        async with fleet_.http.get(f"{fleet_.base}/v1/models/m", headers=bearer()) as response:
            assert response.status == 404
        async with fleet_.http.post(
            f"{fleet_.base}/tokenize", json={"model": "m", "prompt": "x"}, headers=bearer()
        ) as response:
            assert response.status == 404
        await fleet_.json(headers=bearer(OTHER))


@pytest.mark.usefixtures("both_ways")
async def test_a_key_over_its_limit_gets_429_with_what_is_left_and_others_go_on(
    tmp_path: Path,
) -> None:
    lines = [line_of("a", KEY, {"requests": "1"}), line_of("b", OTHER, {})]
    async with keyed(tmp_path, *lines) as (fleet_, p, _):
        usual, p.script = p.script, hang
        first = asyncio.create_task(fleet_.post(headers=bearer()))
        await until(lambda: p.served == 1)
        async with await fleet_.post(headers=bearer()) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            assert response.headers["x-ratelimit-limit-requests"] == "1"
            assert response.headers["x-ratelimit-remaining-requests"] == "0"
            assert (await response.json())["error"]["code"] == "rate_limit_exceeded"
        second = asyncio.create_task(fleet_.post(headers=bearer(OTHER)))
        await until(lambda: p.served == 2)
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        p.script = usual
        keys = fleet_.router.state.client_keys
        assert keys is not None
        found = keys.ring.find([(b"authorization", f"Bearer {KEY}".encode())])
        await until(lambda: not found.running)  # type: ignore[union-attr]
        async with await fleet_.post(headers=bearer()) as response:
            assert response.status == 200
            assert response.headers["x-ratelimit-remaining-requests"] == "0"
        async with await fleet_.post(headers=bearer(OTHER)) as response:
            assert not [name for name in response.headers if "ratelimit" in name.lower()]


async def test_tokens_per_minute_are_what_requests_took(tmp_path: Path) -> None:
    line = line_of("a", KEY, {"tokens-per-minute": "6000"})
    async with keyed(tmp_path, line) as (fleet_, p, d):
        p.stop_at = d.stop_at = {0: 4}
        async with await fleet_.post(headers=bearer(), max_tokens=5000) as response:
            await response.read()
        async with await fleet_.post(headers=bearer(), max_tokens=5000) as response:
            assert response.status == 200, "the first took a few tokens of its 5000"
        async with await fleet_.post(headers=bearer(), max_tokens=5000, model="none") as response:
            assert response.status == 404
        async with await fleet_.post(headers=bearer(), max_tokens=5000) as response:
            assert response.status == 200, "what was refused took nothing"


async def test_a_flood_of_one_key_lets_another_keys_request_go_next(tmp_path: Path) -> None:
    lines = [line_of("a", KEY, {}), line_of("b", OTHER, {})]
    async with keyed(tmp_path, *lines, limits=AdmissionLimits(requests=1)) as (fleet_, p, _):
        release = asyncio.Event()
        usual = p.script

        async def hold(engine: HttpEngine, call: Call, request: Any) -> Any:
            await release.wait()
            return await usual(engine, call, request)

        p.script = hold
        admission = fleet_.router.state.admission
        flood = [
            asyncio.create_task(fleet_.json(headers=bearer(), prompt="flood")) for _ in range(10)
        ]
        await until(lambda: p.served == 1 and admission.waiting == 9)
        other = asyncio.create_task(fleet_.json(headers=bearer(OTHER), prompt="other"))
        await until(lambda: admission.waiting == 10)
        release.set()
        await asyncio.gather(other, *flood)
        assert [call.body["prompt"] for call in p.calls[:3]] == ["flood", "other", "flood"]


async def test_the_limits_are_divided_by_the_routers_that_the_name_has() -> None:
    ring = watch.KeyRing(lambda: 0.0)
    counts = iter([3, OSError("no such name"), UnicodeError("label too long"), 1])

    def count(host: str) -> int:
        found = next(counts)
        assert host == "routers"
        if isinstance(found, Exception):
            raise found
        return found

    keys = watch.KeyWatch(ring, watch.KeyTable(), path=None, peers="routers", count=count)
    ring.take(watch.keys_of(line_of("a", KEY, {"requests": "10"}), (), None))

    def share() -> bytes:
        found = ring.find([(b"x-api-key", KEY.encode())])
        return dict(found.headers())[b"x-ratelimit-limit-requests"]  # type: ignore[union-attr]

    shares: list[bytes] = []
    for _ in range(4):
        await keys.count_routers()
        shares.append(share())
    assert shares == [b"3", b"3", b"3", b"10"], "a name that is not found changes nothing"
    assert watch.count_addresses("127.0.0.1") == 1

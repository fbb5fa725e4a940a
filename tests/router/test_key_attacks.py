"""Hostile clients and careless admins: what they send, write and break, and that nothing leaks."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.router.fakes import (
    Fleet,
    answer,
    begin_and_die,
    begin_and_hang,
    die,
    hang,
    pair,
    serve_model,
    until,
)
from tests.router.test_router_keys import KEY, OTHER, bearer, change, keyed
from xpyd_core.errors import ApiError, UserError
from xpyd_router.access_log import Trace
from xpyd_router.admission import AdmissionLimits
from xpyd_router.fair_queue import Cost
from xpyd_router.key_metrics import MAX_SHOWN, KeyTable
from xpyd_router.keys import watch
from xpyd_router.keys.client import REQUESTS, TOKENS, Client
from xpyd_router.keys.lines import MAX_FILE_BYTES, MAX_NAMES, line_of, parse_keys
from xpyd_router.keys.ring import KeyRing, Refused, Shown
from xpyd_router.request_metrics import Exposition

LIMITED = line_of("a", KEY, {"requests": "4", "tokens": "100000", "tokens-per-minute": "100000"})


def owner_in(fleet_: Fleet, key: str = KEY) -> Client:
    keys = fleet_.router.state.client_keys
    assert keys is not None
    found = keys.ring.find([(b"authorization", f"Bearer {key}".encode())])
    assert isinstance(found, Client)
    return found


def said(owner: Client, name: str) -> int:
    return int(dict(owner.headers())[f"x-ratelimit-{name}".encode()])


async def raw(fleet_: Fleet, *parts: bytes) -> bytes:
    """All that the router writes to a connection with these bytes, until it or a second's silence
    ends it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", fleet_.router.http_port)
    for part in parts:
        writer.write(part)
        await writer.drain()
    found = b""
    try:
        async with asyncio.timeout(1.0):
            while data := await reader.read(65536):
                found += data
    except TimeoutError:
        pass
    finally:
        writer.close()
    return found


def post(*lines: bytes, body: bytes = b'{"model":"m","prompt":"x","max_tokens":4}') -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(body)
    return head + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


GOOD = b"Authorization: Bearer " + KEY.encode()
BAD = b"Authorization: Bearer " + OTHER.encode()


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ([GOOD], b"200"),
        ([GOOD.replace(b"Bearer", b"bEARER")], b"200"),
        ([GOOD.replace(b"Bearer ", b"Bearer   ") + b"  "], b"200"),
        ([GOOD, GOOD], b"200"),
        ([GOOD, BAD], b"401"),
        ([BAD, GOOD], b"401"),
        ([b"x-api-key: " + KEY.encode(), b"x-api-key: " + OTHER.encode()], b"401"),
        ([b"Authorization: Basic abc", GOOD], b"200"),
        ([GOOD, b"x-api-key: " + OTHER.encode()], b"200"),
        ([BAD, b"x-api-key: " + KEY.encode()], b"401"),
        ([b"Authorization: " + KEY.encode()], b"401"),
        ([b"Authorization: Bearer"], b"401"),
        ([GOOD + b"\xff"], b"401"),
        ([GOOD + b"x" * 60_000], b"401"),
        ([b"Cookie: api_key=" + KEY.encode()], b"401"),
    ],
)
async def test_one_key_counts_and_only_where_it_belongs(
    tmp_path: Path, lines: list[bytes], status: bytes
) -> None:
    async with keyed(tmp_path) as (fleet_, _, _):
        found = await raw(fleet_, post(*lines, b"Connection: close"))
        assert found.startswith(b"HTTP/1.1 " + status)


async def test_a_key_in_the_query_is_none_and_is_in_no_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG")
    async with keyed(tmp_path) as (fleet_, p, _):
        for path in ("completions", "models"):
            url = f"{fleet_.base}/v1/{path}?api_key={KEY}&key={KEY}"
            async with fleet_.http.post(url, json={"model": "m", "prompt": "x"}) as response:
                assert response.status == 401
        assert p.served == 0
    assert KEY not in caplog.text + capfd.readouterr().err


async def test_each_request_of_a_connection_is_of_the_key_that_it_bears(tmp_path: Path) -> None:
    """Also behind another one that waits for its answer (pipelining), and after a change."""
    lines = [line_of("a", KEY, {}), line_of("b", OTHER, {})]
    async with keyed(tmp_path, *lines) as (fleet_, _, _):

        def counted(name: str) -> float:
            return fleet_.metric("xpyd_router_key_requests_total", key=name, status="200")

        unknown = b"Authorization: Bearer nobody"
        found = await raw(fleet_, post(GOOD) + post(BAD) + post(GOOD) + post(unknown))
        assert found.count(b"HTTP/1.1 200") == 3
        assert found.count(b"HTTP/1.1 401") == 1
        assert (counted("a"), counted("b")) == (2, 1)
        for header, status in ((GOOD, 200), (GOOD, 200), (BAD, 200)):
            key = header.rpartition(b" ")[2].decode()
            async with await fleet_.post(headers=bearer(key)) as response:
                assert response.status == status
        assert (counted("a"), counted("b")) == (4, 2)
        change(fleet_, tmp_path / "keys.txt", lines[1])
        async with await fleet_.post(headers=bearer()) as response:
            assert response.status == 401, "the connection that showed it is not remembered"


def test_what_a_connection_showed_counts_for_the_same_header_and_file_alone() -> None:
    ring, shown = KeyRing(lambda: 0.0), Shown()
    ring.take(parse_keys(line_of("a", KEY, {}), "keys"))
    good, bad = (b"authorization", GOOD[15:]), (b"authorization", BAD[15:])
    for _ in range(2):
        assert isinstance(ring.find([good], shown), Client)
        for headers in ([bad], [good, bad], [bad, good], [(b"x-api-key", GOOD[15:])], []):
            assert isinstance(ring.find(headers, shown), Refused)
    ring.take(parse_keys(line_of("b", OTHER, {}), "keys"))
    assert isinstance(ring.find([good], shown), Refused)


@pytest.mark.parametrize(
    "value",
    [b"Basic cHJveHk6", b"Bearer", b"Bearer ", b"", pytest.param(KEY.encode(), id="the key alone")],
)
async def test_a_header_without_a_key_is_not_taken_for_the_key_that_came_beside_it(
    tmp_path: Path, value: bytes
) -> None:
    """A proxy in front has one connection for many clients, and may ask them for a password."""
    lines = [line_of("a", KEY, {}), line_of("b", OTHER, {})]
    async with keyed(tmp_path, *lines) as (fleet_, _, _):
        basic = b"Authorization: " + value
        known, other = (b"x-api-key: " + key.encode() for key in (KEY, OTHER))
        reader, writer = await asyncio.open_connection("127.0.0.1", fleet_.router.http_port)
        statuses: list[bytes] = []
        for request in (post(basic, known), post(basic, other), post(basic)):
            writer.write(request)  # one behind the answer to the other
            head = await reader.readuntil(b"\r\n\r\n")
            statuses.append(head[:12])
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
        writer.close()
        assert statuses == [b"HTTP/1.1 200", b"HTTP/1.1 200", b"HTTP/1.1 401"]
        for name in "ab":
            counted = fleet_.metric("xpyd_router_key_requests_total", key=name, status="200")
            assert counted == 1


async def test_a_key_that_goes_while_the_body_comes_serves_nothing(tmp_path: Path) -> None:
    async with keyed(tmp_path) as (fleet_, p, _):
        whole = post(GOOD)
        reader, writer = await asyncio.open_connection("127.0.0.1", fleet_.router.http_port)
        writer.write(whole[:-5])
        await asyncio.sleep(0.05)
        change(fleet_, tmp_path / "keys.txt", line_of("b", OTHER, {}))
        writer.write(whole[-5:])
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 401")
        writer.close()
        assert p.served == 0


@pytest.mark.usefixtures("both_ways")
async def test_a_flood_of_long_bodies_of_one_key_leaves_memory_for_another_key(
    tmp_path: Path,
) -> None:
    lines = [line_of("a", KEY, {}), line_of("b", OTHER, {})]
    most = {"max_body_bytes": 80_000, "max_open_body_bytes": 1_600_000}
    async with keyed(tmp_path, *lines, **most) as (fleet_, _, _):
        owner, writers = owner_in(fleet_), list[asyncio.StreamWriter]()
        whole = post(GOOD, body=b'{"model":"m","prompt":"' + b"x" * 79_000 + b'","max_tokens":4}')
        for _ in range(24):
            _, writer = await asyncio.open_connection("127.0.0.1", fleet_.router.http_port)
            writer.write(whole[:-5])
            writers.append(writer)
        await until(lambda: owner.bodies is not None and owner.bodies.used_bytes > 1_400_000)
        assert owner.bodies is not None
        for _ in range(3):  # whatever else has come
            await fleet_.json(headers=bearer(OTHER), prompt="x" * 20_000)
        assert owner.bodies.used_bytes <= 1_500_000
        for writer in writers:
            writer.close()
        await until(lambda: owner.bodies is not None and not owner.bodies.used_bytes)
        await fleet_.json(headers=bearer(), prompt="x" * 20_000)


@pytest.mark.usefixtures("both_ways")
async def test_a_revoked_key_ends_what_waits_and_what_is_at_p(tmp_path: Path) -> None:
    limits = AdmissionLimits(requests=1)
    async with keyed(tmp_path, LIMITED, limits=limits) as (fleet_, p, _):
        p.script = hang
        owner, admission = owner_in(fleet_), fleet_.router.state.admission
        running = asyncio.create_task(fleet_.post(headers=bearer()))
        await until(lambda: p.served == 1)
        waiting = asyncio.create_task(fleet_.post(headers=bearer()))
        await until(lambda: admission.waiting == 1)
        change(fleet_, tmp_path / "keys.txt", line_of("b", OTHER, {}))
        for answer_ in await asyncio.gather(running, waiting):
            assert answer_.status == 401
            assert (await answer_.json())["error"]["code"] == "invalid_api_key"
        await until(lambda: not owner.running and admission.in_flight.requests == 0)
        assert (admission.waiting, p.served) == (0, 1)
        await until(lambda: p.calls[0].is_closed)


async def _as_the_client_of(fleet_: Fleet, how: str, **body: Any) -> None:
    request = asyncio.create_task(fleet_.post(headers=bearer(), max_tokens=200, **body))
    if how == "leaves":
        await until(lambda: sum(engine.served for engine in fleet_.engines) > 0)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        return
    async with await request as response:
        try:
            await response.read()
        except aiohttp.ClientError:  # a stream that was cut; what counts is what is held
            return


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "how"),
    [
        (serve_model, "reads"),
        (answer(400, {"error": {"message": "no"}}), "reads"),
        (answer(500, {}), "fails"),
        (die, "fails"),
        (begin_and_die, "reads"),
        (hang, "leaves"),
        (begin_and_hang, "leaves"),
    ],
)
async def test_nothing_of_a_keys_limits_stays_taken_however_a_request_ends(
    tmp_path: Path, script: Any, how: str, *, stream: bool
) -> None:
    async with keyed(tmp_path, LIMITED, pair_wait_s=0.1) as (fleet_, p, d):
        p.script = d.script = script
        owner = owner_in(fleet_)
        await _as_the_client_of(fleet_, how, stream=stream)
        await until(lambda: not owner.running)
        assert said(owner, "remaining-requests") == 4
        assert fleet_.router.state.admission.in_flight == Cost(0, 0)
        if how == "fails":
            await until(lambda: bool(d.releases))  # it is on its way when the engines stop


async def test_a_request_that_leaves_the_queue_takes_no_tokens_of_the_minute(
    tmp_path: Path,
) -> None:
    limits = AdmissionLimits(requests=1)
    async with keyed(tmp_path, LIMITED, limits=limits) as (fleet_, p, _):
        p.script = hang
        admission, owner = fleet_.router.state.admission, owner_in(fleet_)
        first = asyncio.create_task(fleet_.post(headers=bearer(), max_tokens=10))
        await until(lambda: p.served == 1)
        before = said(owner, "remaining-tokens")
        second = asyncio.create_task(fleet_.post(headers=bearer(), max_tokens=50_000))
        await until(lambda: admission.waiting == 1)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        await until(lambda: len(owner.running) == 1)
        assert said(owner, "remaining-tokens") >= before
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await until(lambda: not owner.running)


@pytest.mark.parametrize("seed", range(10))
def test_random_walks_of_a_key_leave_nothing_in_flight_and_say_what_is_left(seed: int) -> None:
    draw, now_s = random.Random(seed), 0.0
    ring = KeyRing(lambda: now_s)
    options = {"requests": "8", "tokens": "5000", "tokens-per-minute": "60000"}
    ring.take(parse_keys(line_of("a", KEY, options), "keys"))
    client = ring.find([(b"x-api-key", KEY.encode())])
    assert isinstance(client, Client)
    held: list[tuple[Cost, int]] = []
    for _ in range(500):
        what = draw.random()
        if what < 0.5:
            cost = Cost(1, draw.choice([1, 100, 3000, 9000]))
            try:
                held.append((client.enter(cost), cost.tokens))
            except ApiError as error:
                retry_s = error.retry_after_s or 0
                if "minute" in error.message and retry_s < 60:
                    now_s += retry_s  # what it says is enough, if nothing else comes
                    held.append((client.enter(cost), cost.tokens))
        elif what < 0.9 and held:
            mine, charged = held.pop(draw.randrange(len(held)))
            client.leave(mine, charged, draw.choice([None, 0, charged // 2, 2 * charged]))
        elif what < 0.95:
            ring.set_routers(draw.choice([1, 2, 3]))
        else:
            now_s += draw.random() * 30
        left = said(client, "remaining-requests")
        assert left == max(0, said(client, "limit-requests") - len(held))
        assert 0 <= said(client, "remaining-tokens") <= said(client, "limit-tokens")
    for mine, charged in held:
        client.leave(mine, charged, None)
    cells = client._own  # pyright: ignore[reportPrivateUsage]
    assert (cells[REQUESTS], cells[TOKENS]) == (0, 0)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(
    ("path", "member"), [("completions", "code"), ("responses", "code"), ("messages", "type")]
)
async def test_a_429_of_a_key_has_the_form_of_the_api_that_was_asked(
    tmp_path: Path, path: str, member: str
) -> None:
    async with keyed(tmp_path, line_of("a", KEY, {"requests": "1"})) as (fleet_, p, _):
        p.script = hang
        first = asyncio.create_task(fleet_.post(headers=bearer()))
        await until(lambda: p.served == 1)
        turn = [{"role": "user", "content": "x"}]
        body = {
            "completions": {"prompt": "x"},
            "responses": {"input": "x"},
            "messages": {"messages": turn, "max_tokens": 4},
        }[path]
        async with fleet_.http.post(
            f"{fleet_.base}/v1/{path}", headers=bearer(), json={"model": "m", **body}
        ) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            error = (await response.json())["error"]
            wanted = {"code": "rate_limit_exceeded", "type": "rate_limit_error"}
            assert error[member] == wanted[member]
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"other","prompt":"x","model":"m"}',
        b'{"model":"other","prompt":"x","mod\\u0065l":"m"}',
        b'{"model":"M","prompt":"x"}',
        b'{"model":"m ","prompt":"x"}',
    ],
)
async def test_a_key_gets_no_other_model_by_how_its_name_is_written(
    tmp_path: Path, body: bytes
) -> None:
    async with keyed(tmp_path, line_of("a", KEY, {"models": "other"})) as (fleet_, p, d):
        found = await raw(fleet_, post(GOOD, b"Connection: close", body=body))
        assert found.startswith(b"HTTP/1.1 404")
        assert (p.served, d.served) == (0, 0)


def test_a_limit_of_nothing_is_refused_with_the_fix() -> None:
    with pytest.raises(UserError, match="requests: expected a whole number, 1 to"):
        parse_keys(line_of("a", KEY, {}) + " requests=0", "keys")


def test_a_file_with_crlf_and_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_bytes(b"\xef\xbb\xbf" + f"{line_of('a', KEY, {})}\r\n# x\r\n\r\n".encode())
    assert list(parse_keys(watch.read_key_file(file), "keys").options) == ["a"]


@pytest.mark.parametrize(
    ("what", "complaint"),
    [
        ("pipe", "not a regular file"),
        ("folder", "not a regular file"),
        ("gone", "No such file"),
        ("long", "longer than"),
        ("binary", "not UTF-8"),
        ("loop", "symbolic links"),
    ],
)
def test_what_is_no_key_file_is_refused_and_holds_nobody_up(
    tmp_path: Path, what: str, complaint: str
) -> None:
    path = tmp_path / "keys.txt"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "loop":
        path.symlink_to(path)
    elif what != "gone":
        path.write_bytes(b"#" * (MAX_FILE_BYTES + 1) if what == "long" else b"a sha256:\xff")
    with pytest.raises(UserError, match=complaint):
        watch.read_key_file(path)


async def test_a_secret_that_the_kubelet_swaps_is_taken(tmp_path: Path) -> None:
    for name, key in (("..1", KEY), ("..2", OTHER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys").write_text(line_of("a", key, {}))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "keys").symlink_to("..data/keys")
    async with pair(api_key_file=tmp_path / "keys") as (fleet_, _, _):
        await fleet_.json(headers=bearer())
        (tmp_path / "..data_tmp").symlink_to("..2")
        (tmp_path / "..data_tmp").replace(tmp_path / "..data")
        keys = fleet_.router.state.client_keys
        assert keys is not None
        keys.watch.try_load()
        await fleet_.json(headers=bearer(OTHER))
        async with await fleet_.post(headers=bearer()) as response:
            assert response.status == 401


async def test_a_file_that_is_being_written_revokes_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most editors empty a file before they write it."""
    monkeypatch.setattr(watch, "RELOAD_S", 0.0)
    monkeypatch.setattr(watch, "_SETTLE_S", 0.0)
    texts = iter(["", line_of("a", KEY, {}) + "\n" + line_of("b", OTHER, {}), "rest"])
    last = ""

    def read(_: Path) -> str:
        nonlocal last
        found = next(texts, None)
        last = last if found in (None, "rest") else str(found)
        return last

    monkeypatch.setattr(watch, "read_key_file", read)
    ring = KeyRing(lambda: 0.0)
    ring.take(parse_keys(line_of("a", KEY, {}), "keys"))
    owner = ring.find([(b"x-api-key", KEY.encode())])
    assert isinstance(owner, Client)
    work = asyncio.create_task(watch.KeyWatch(ring, watch.KeyTable(), path=tmp_path / "keys").run())
    await until(lambda: len(ring.names) == 2)
    work.cancel()
    assert not owner.is_gone, "the empty file was not taken"


def test_metrics_of_many_names_are_bounded_and_of_those_that_come_again_go_on() -> None:
    table = KeyTable()
    for number in range(MAX_SHOWN + MAX_NAMES):
        table.ended(Trace("completions", 0.0, key=f"k{number}", prompt_tokens=1), 200)
    table.ended(Trace("completions", 0.0, key="k0", output_tokens=5), 499)
    out = Exposition()
    table.write(out)
    text = out.text().decode()
    assert text.count("xpyd_router_key_requests_total{") <= MAX_SHOWN + 2
    assert f'xpyd_router_key_requests_total{{key="other",status="200"}} {MAX_NAMES}' in text
    assert 'xpyd_router_key_output_tokens_total{key="k0"} 5' in text

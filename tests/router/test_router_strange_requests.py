"""What no well-behaved client sends: each gets an error that says why, in OpenAI's form, and costs
the router nothing. Bytes on a socket: HTTP clients would not send them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging

import pytest

from tests.router.fakes import fleet, hang, pair, parse_events, text_of, until


def post(body: bytes, *headers: bytes) -> bytes:
    lines = (b"POST /v1/completions HTTP/1.1", b"Host: x", *headers)
    return b"\r\n".join((*lines, b"Content-Length: %d" % len(body), b"", body))


def get(path: bytes, method: bytes = b"GET") -> bytes:
    return method + b" " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n"


def nested(levels: int) -> bytes:
    value = b"[" * levels + b"]" * levels
    return post(b'{"model": "m", "prompt": "x", "extra": ' + value + b"}")


async def answer_to(port: int, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """The status, headers and body of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer):
        writer.write(request)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:-2])
        body = await reader.readexactly(int(headers["content-length"]))
    return int(lines[0].split()[1]), headers, body


def refused(answer: tuple[int, dict[str, str], bytes], status: int, param: str | None) -> str:
    """The message of a refusal in OpenAI's form."""
    assert answer[0] == status, answer
    assert answer[1]["content-type"] == "application/json"
    error = json.loads(answer[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    return error["message"]


FIELDS = {
    "too deep to be read": (nested(5000), None),
    "choices without end": (post(b'{"model":"m","prompt":"x","n":9223372036854775807}'), "n"),
    "a stream of them on P alone": (
        post(b'{"model":"m","prompt":"x","n":100000000,"max_tokens":1,"stream":true}'),
        "n",
    ),
    "prompts without end": (
        post(b'{"model":"m","max_tokens":1,"prompt":[' + b'"",' * 20_000 + b'""]}'),
        "prompt",
    ),
    "not a number": (post(b'{"model":"m","prompt":"x","temperature":NaN}'), None),
    "a seed above 64 bits": (
        post(b'{"model":"m","prompt":"x","seed":36893488147419103232}'),
        "seed",
    ),
    "half a character": (post(b'{"model":"m","prompt":"\\ud800"}'), None),
    "no UTF-8": (post(b'{"model":"m","prompt":"\xff"}'), None),
    "two bodies": (post(b'{"model":"m","prompt":"x"}{}'), None),
    "the last of two fields counts": (post(b'{"model":"m","prompt":"x","n":1,"n":0}'), "n"),
    "compressed": (post(b"\x1f\x8b\x08\x00", b"Content-Encoding: gzip"), None),
    "nothing": (post(b""), None),
}


@pytest.mark.parametrize("case", FIELDS)
async def test_a_strange_body_is_the_clients_error(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    request, param = FIELDS[case]

    async with pair() as (fleet_, p, d):
        message = refused(await answer_to(fleet_.router.http_port, request), 400, param)
        assert param is None or message.startswith(f"{param}: ")
        assert p.served + d.served == 0
        assert not d.releases
        await until(lambda: fleet_.metric("xpyd_router_in_flight") == 0)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


HEADS = {
    "a NUL in a header": (b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: a\x00b\r\n\r\n", 400),
    "a header without a name": (b"GET /health HTTP/1.1\r\nHost: x\r\n: x\r\n\r\n", 400),
    "no ASCII in the path": (get(b"/h\xffealth"), 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "a tunnel": (get(b"x:443", b"CONNECT"), 400),
    "two lengths": (post(b"{}", b"Content-Length: 3"), 400),
    "length and chunks": (post(b"{}", b"Transfer-Encoding: chunked"), 400),
    "a head without end": (b"GET /health HTTP/1.1\r\nX-A: " + b"a" * 200_000, 431),
    "NUL and others in the path": (get(b"/v1/models/%00%ff%0a"), 404),
    "two slashes": (get(b"/v1//models"), 404),
    "dots": (get(b"/v1/models/../../etc/passwd"), 404),
    "no folder of static files": (get(b"/static/x"), 404),
    "the asterisk": (get(b"*", b"OPTIONS"), 404),
}


@pytest.mark.parametrize("case", HEADS)
async def test_a_strange_head_is_the_clients_error(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    request, status = HEADS[case]

    async with fleet() as fleet_:
        answer = await answer_to(fleet_.router.http_port, request)
        refused(answer, status, "model" if case == "dots" else None)
        assert (answer[1].get("connection") == "close") == (status != 404)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_no_status_is_written_into_a_running_answer() -> None:
    async with pair() as (fleet_, p, _):
        p.script = hang
        port = fleet_.router.http_port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b'{"model": "m", "prompt": "x", "stream": true}'))
        await until(lambda: p.served == 1)
        writer.write(b"\x00\x00 no request\r\n\r\n")
        assert await reader.read() == b""
        writer.close()
        await until(lambda: p.calls[0].is_closed)


UPGRADE = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk")
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + b"\r\n".join(UPGRADE) + b"\r\n"
    b'Transfer-Encoding: chunked\r\n\r\n1d\r\n{"model": "m", "prompt": "x"}\r\n0\r\n\r\n'
)


@pytest.mark.parametrize("cut", [None, 100, -20, -1])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_the_body_of_a_client_that_would_rather_speak_http_2_is_read(
    cut: int | None, is_chunked: bool
) -> None:
    whole = CHUNKED if is_chunked else post(b'{"model": "m", "prompt": "x"}', *UPGRADE)

    async with pair() as (fleet_, _, d):
        reader, writer = await asyncio.open_connection("127.0.0.1", fleet_.router.http_port)
        writer.write(whole[:cut])
        if cut is not None:
            async with fleet_.http.get(f"{fleet_.base}/health"):  # what was sent is read first
                writer.write(whole[cut:])
        answer = await reader.read()  # to the end: the connection is not used again
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"connection: close\r\n" in answer
        assert d.calls[0].body["prompt"] == "x"
        writer.close()


async def test_a_wish_to_upgrade_without_a_body_is_passed_over() -> None:
    async with fleet() as fleet_:
        port = fleet_.router.http_port
        wish = b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"\r\n".join(UPGRADE) + b"\r\n\r\n"
        assert (await answer_to(port, wish))[0] == 200


METHODS: list[tuple[str, str, int, set[str]]] = [
    ("HEAD", "/health", 200, set()),
    ("OPTIONS", "/v1/completions", 200, {"POST", "OPTIONS"}),
    ("HEAD", "/v1/completions", 405, {"POST", "OPTIONS"}),
    ("PUT", "/v1/chat/completions", 405, {"POST", "OPTIONS"}),
    ("TRACE", "/health", 405, {"GET", "HEAD", "OPTIONS"}),
    ("QUERY", "/v1/models", 405, {"GET", "HEAD", "OPTIONS"}),
    ("DELETE", "/admin/state", 405, {"GET", "HEAD", "OPTIONS"}),
]


@pytest.mark.parametrize(("method", "path", "status", "allowed"), METHODS)
async def test_other_methods(method: str, path: str, status: int, allowed: set[str]) -> None:
    async with fleet() as f:
        base = f.admin if path.startswith("/admin") else f.base
        response = await f.stack.enter_async_context(f.http.request(method, base + path))
        assert response.status == status
        if method == "HEAD":
            assert await response.read() == b""
        found = response.headers.get("Allow", "")
        assert set(found.replace(" ", "").split(",")) - {""} == allowed


async def test_a_stream_for_an_http_1_0_client_has_no_chunks_and_ends_with_its_connection() -> None:
    body = b'{"model": "m", "prompt": "x", "max_tokens": 3, "stream": true}'
    old = post(body, b"Connection: keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0")

    async with pair() as (fleet_, _, __):
        reader, writer = await asyncio.open_connection("127.0.0.1", fleet_.router.http_port)
        writer.write(old)
        head, _, events = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\r\nconnection: close" in head
        assert b"transfer-encoding" not in head
        assert text_of(parse_events(events)) == "t0.0 t0.1 t0.2 "
        assert events.endswith(b"data: [DONE]\n\n")
        writer.close()

"""The mock engine of `make bench-router` speaks vLLM's wire and ours, and HTTP."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from bench.router.mocks import Mocks, engines
from bench.router.programs import Programs

_WAIT_S = 60.0


@pytest.fixture(scope="module")
def mocks(bench_programs: Programs) -> Iterator[Mocks]:
    with engines(bench_programs.engine) as found:
        yield found


def ask(port: int, body: dict[str, Any], path: str = "/v1/completions", id_: str = "an-id") -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_WAIT_S)
    connection.request("POST", path, json.dumps(body), {"X-Request-Id": id_})
    with connection.getresponse() as response:
        assert response.status == 200
        text = response.read().decode()
    connection.close()
    if not body.get("stream"):
        return json.loads(text)
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def test_the_engine_answers_whole_and_in_streams_as_vllm_does(mocks: Mocks) -> None:
    before_ns = time.monotonic_ns()
    whole = ask(mocks.decodes[1], {"prompt": 'a "quoted" one', "max_tokens": 3})
    assert (whole["id"], whole["usage"]["completion_tokens"]) == ("cmpl-an-id", 3)
    assert before_ns <= int(whole["choices"][0]["text"][2:]) <= time.monotonic_ns()
    assert "token_ids" not in whole["choices"][0]
    chat: dict[str, Any] = {
        "messages": [],
        "max_tokens": 9,
        "max_completion_tokens": 3,
        "stream": True,
    }
    chunks = ask(mocks.decodes[0], chat, "/v1/chat/completions")
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-an-id"}
    stamps = [int(chunk["choices"][0]["delta"]["content"][2:21]) for chunk in chunks[:-1]]
    assert len(stamps) == 3
    assert before_ns < stamps[0] < stamps[1] < stamps[2] <= time.monotonic_ns()
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [*[None] * 3, "length"]
    first = ask(mocks.prefills[0], {"prompt": "a", "max_tokens": 1})
    assert (first["object"], first["usage"]["completion_tokens"]) == ("text_completion", 1)


def test_the_engine_continues_as_ours_does_where_it_is_asked_to(mocks: Mocks) -> None:
    params: dict[str, Any] = {"seed": 1, "client_max_tokens": 3}
    body = {"prompt": "a", "max_tokens": 1, "return_token_ids": True, "kv_transfer_params": params}
    first = ask(mocks.prefills[0], body)
    assert first["choices"][0]["token_ids"] == [1234]
    assert first["kv_transfer_params"]["transfer"] == ["granted"]
    assert "kv_transfer_params" not in ask(mocks.prefills[0], {"prompt": "a", "max_tokens": 1})
    params = {"emit_from": [1], "response_id": "cmpl-of-the-router", "created": 7}
    rest = ask(mocks.decodes[0], {"max_tokens": 3, "stream": True, "kv_transfer_params": params})
    assert {(chunk["id"], chunk["created"]) for chunk in rest} == {("cmpl-of-the-router", 7)}
    assert [chunk["choices"][0]["token_ids"] for chunk in rest] == [[1234], [1234], []]


def exchange(port: int, pieces: Sequence[bytes], answers: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=_WAIT_S) as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            one.sendall(piece)
        got = b""
        while len(re.findall(rb'"usage"|\r\n0\r\n\r\n', got)) < answers:
            more = one.recv(65536)
            assert more, got
            got += more
        return got


def request(body: bytes, head: bytes = b"") -> bytes:
    line = b"POST /v1/completions HTTP/1.1\r\n"
    return line + head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


def test_the_engine_takes_requests_in_any_cut_and_one_after_another(mocks: Mocks) -> None:
    long = request(b'{"prompt": "%s", "max_tokens": 2}' % (b"a " * 50_000))
    stream = request(b'{"prompt": "a", "stream": true, "max_tokens": 2}')
    data = stream + long + request(b"{}", b"X-Request-ID: last\r\n")
    for pieces in ([data], [data[n : n + 4093] for n in range(0, len(data), 4093)]):
        got = exchange(mocks.decodes[0], pieces, 3)
        assert got.count(b"HTTP/1.1 200 OK") == 3
        assert b'"completion_tokens":2' in got
        assert got.index(b"data: [DONE]") < got.index(b'"usage"')
        assert b"cmpl-last" in got


def test_an_event_of_a_stream_is_one_chunk_of_the_same_length(mocks: Mocks) -> None:
    for length in (32, 110):
        name = b"X-Request-Id: %s\r\n" % (b"i" * length)
        got = exchange(mocks.decodes[0], [request(b'{"stream": true, "max_tokens": 3}', name)], 1)
        events = re.findall(rb"12c\r\n(data: \{[^\r\n]*\}\n\n)\r\n", got)
        assert [len(event) for event in events] == [300] * 3


def test_the_engine_refuses_what_it_does_not_know_and_ends_broken_connections(
    mocks: Mocks,
) -> None:
    assert ask_get(mocks.decodes[0], "/v1/models")["data"][0]["id"] == "m"
    assert ask_get(mocks.prefills[0], "/health")["status"] == "ok"
    for broken in (b"no head " * 4000, b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", mocks.decodes[0]), timeout=_WAIT_S) as one:
            one.sendall(broken)
            assert ended(one)


def test_streams_go_on_when_others_end_or_leave(bench_programs: Programs, mocks: Mocks) -> None:
    port = mocks.decodes[0]
    leaving = [socket.create_connection(("127.0.0.1", port), timeout=_WAIT_S) for _ in range(20)]
    for one in leaving:
        one.sendall(request(b'{"stream": true, "max_tokens": 100000}'))
    words = [str(port), "streams", "100", "512", "0.3", "0", "60", "10"]
    with subprocess.Popen([bench_programs.load, *words], stdout=subprocess.PIPE) as load:
        for one in leaving:
            assert one.recv(100).startswith(b"HTTP/1.1 200 OK")
            one.close()
        said, _ = load.communicate(timeout=_WAIT_S)
    found = json.loads(said.splitlines()[-1])
    assert (found["answered"], found["errors"]) == (100, 0), found["firstError"]


def ended(one: socket.socket) -> bool:
    try:
        return one.recv(1) == b""
    except ConnectionResetError:
        return True


def ask_get(port: int, path: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_WAIT_S)
    connection.request("GET", path)
    with connection.getresponse() as response:
        made = json.loads(response.read())
    connection.close()
    return made

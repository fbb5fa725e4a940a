"""What the load generator of `make bench-router` asks, and what it takes for an answer."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench.environments import NotHere
from bench.router.programs import Programs, programs
from bench.router.tls import certificate

_WAIT_S = 60.0


def stamp(at_ns: int) -> str:
    return f"@{at_ns:019d}"


class Answerer(BaseHTTPRequestHandler):
    """Answers by `make`, which is a server's, and keeps what was asked."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def do_POST(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        number = len(server.asked)
        server.asked.append((self.client_address, json.loads(body)))
        answer: bytes = server.make(number)
        self.wfile.write(answer)
        self.wfile.flush()
        self.close_connection = b"connection: close" in answer or b"content-length" not in answer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name
        del format, args


@contextmanager
def answering(make: Callable[[int], bytes]) -> Generator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Answerer)
    server.make, server.asked = make, []
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def loaded(bench_programs: Programs, server: Any, *words: object) -> dict[str, Any]:
    argv = [str(bench_programs.load), str(server.server_address[1]), *map(str, words)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=_WAIT_S)
    return json.loads(done.stdout.splitlines()[-1])


def answer(body: str, *, status: int = 200, head: str = "") -> bytes:
    length = f"content-length: {len(body)}\r\n"
    return f"HTTP/1.1 {status} X\r\n{head}{length}\r\n{body}".encode()


def aged(number: int) -> bytes:
    """A token that was written 10 s to 100 s ago, every second one the connection's last."""
    old_ns = time.monotonic_ns() - (number * 7 % 10 + 1) * 10 * 10**9
    return answer(stamp(old_ns), head="connection: close\r\n" if number % 2 else "")


def test_the_load_asks_as_often_as_told_never_the_same_and_sorts_what_it_sees(
    bench_programs: Programs,
) -> None:
    with answering(aged) as server:
        found = loaded(bench_programs, server, "count", 1, 600, 10)
    assert (found["answered"], found["tokens"], found["errors"]) == (10, 10, 0)
    bodies = [body for _, body in server.asked]
    assert {(body["max_tokens"], body["stream"]) for body in bodies} == {(16, False)}
    assert {len(body["prompt"]) for body in bodies} == {600}
    assert len({body["prompt"] for body in bodies}) == 10
    assert len({address for address, _ in server.asked}) == 5
    spread = found["relayUs"]
    for name, at_s in {"p50": 50, "p90": 90, "p99": 90, "max": 100}.items():
        assert at_s * 1e6 <= spread[name] < (at_s + 10) * 1e6
    assert found["latencyUs"]["count"] == 10
    assert found["ttftUs"] is None


def test_the_load_over_tls_asks_and_reads_the_same(tmp_path: Path) -> None:
    try:
        made = programs(tls=True)
    except NotHere as error:
        pytest.skip(str(error))
    assert made.tls_load is not None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate(tmp_path))
    with answering(aged) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        over_tls = Programs(made.engine, made.tls_load)
        found = loaded(over_tls, server, "count", 4, 30_000, 40)
    assert (found["answered"], found["tokens"], found["errors"]) == (40, 40, 0)
    assert {len(body["prompt"]) for _, body in server.asked} == {30_000}


def test_a_stream_is_read_to_its_end_and_asks_for_one(bench_programs: Programs) -> None:
    def make(_: int) -> bytes:
        return answer(stamp(time.monotonic_ns()) * 5 + "data: [DONE]\n\n")

    with answering(make) as server:
        found = loaded(bench_programs, server, "streams", 3, 512, 0, 0, 60, 5)
    assert (found["answered"], found["tokens"], found["errors"]) == (3, 15, 0)
    assert {(body["max_tokens"], body["stream"]) for _, body in server.asked} == {(5, True)}
    assert (found["ttftUs"]["count"], found["relayUs"]["count"]) == (3, 15)


NO_ANSWERS = {
    "a refusal": (answer(stamp(1), status=500), "refused: status 500, 1 stamps"),
    "no token": (answer("x"), "wrong number of tokens: status 200, 0 stamps"),
    "too many": (answer(stamp(1) * 5 + '"\n'), "wrong number of tokens: status 200, 5 stamps"),
    "a cut": (answer(stamp(1))[:-1], "connection closed"),
    "a closed connection": (b"", "connection closed"),
    "no HTTP": (b"no head " * 4000, "no HTTP"),
}


@pytest.mark.parametrize("name", NO_ANSWERS)
def test_what_is_no_answer_is_an_error(bench_programs: Programs, name: str) -> None:
    made, complaint = NO_ANSWERS[name]
    ends = b"connection: close\r\n"
    with answering(lambda _: made.replace(b"content-length", ends + b"content-length")) as server:
        found = loaded(bench_programs, server, "count", 1, 512, 3)
    assert (found["errors"], found["answered"]) == (1, 0)
    assert complaint in found["firstError"]


def test_a_stream_without_its_end_is_an_error(bench_programs: Programs) -> None:
    with answering(lambda _: answer(stamp(1) * 5 + "data: [DONE]\n")) as server:
        found = loaded(bench_programs, server, "streams", 1, 512, 0, 0, 60, 5)
    assert (found["errors"], found["answered"]) == (1, 0)
    assert "no [DONE]" in found["firstError"]

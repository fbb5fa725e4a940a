"""Bad input costs its sender an error that names the fault, and nobody else anything."""

import json
import os
import socket
import struct
from typing import Any

import pytest

from tests.e2e.harness import Fleet, Process, http, wait_for

pytestmark = pytest.mark.slow

PROMPT = {"model": "demo", "prompt": "Return a", "max_tokens": 4}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}

BAD: list[tuple[str, str, Any, int, str]] = [
    ("broken JSON", "completions", b'{"model": "demo", "prompt": ', 400, ""),
    ("not an object", "completions", b"[1, 2]", 400, ""),
    ("NaN temperature", "completions", b'{"model":"demo","prompt":"x","temperature":NaN}', 400, ""),
    ("no prompt", "completions", {"model": "demo"}, 400, "prompt"),
    ("prompt of a wrong type", "completions", {**PROMPT, "prompt": {"a": 1}}, 400, "prompt"),
    ("empty prompt list", "completions", {**PROMPT, "prompt": []}, 400, "prompt"),
    ("token id out of range", "completions", {**PROMPT, "prompt": [10**9]}, 400, "prompt"),
    ("unknown model", "completions", {**PROMPT, "model": "gpt-9"}, 404, "model"),
    ("max_tokens 10^9", "completions", {**PROMPT, "max_tokens": 10**9}, 400, "max_tokens"),
    ("max_tokens of a wrong type", "completions", {**PROMPT, "max_tokens": "7"}, 400, "max_tokens"),
    ("negative max_tokens", "completions", {**PROMPT, "max_tokens": -1}, 400, "max_tokens"),
    ("prompt over the context", "completions", {**PROMPT, "prompt": [5] * 9000}, 400, ""),
    ("temperature -1", "completions", {**PROMPT, "temperature": -1}, 400, "temperature"),
    ("temperature text", "completions", {**PROMPT, "temperature": "hot"}, 400, "temperature"),
    ("top_p 2", "completions", {**PROMPT, "top_p": 2}, 400, "top_p"),
    ("n 0", "completions", {**PROMPT, "n": 0}, 400, "n"),
    ("n true", "completions", {**PROMPT, "n": True}, 400, "n"),
    ("stream text", "completions", {**PROMPT, "stream": "yes"}, 400, "stream"),
    ("stop number", "completions", {**PROMPT, "stop": 5}, 400, "stop"),
    ("not built", "completions", {**PROMPT, "suffix": "tail"}, 400, "suffix"),
    ("not built here", "completions", {**PROMPT, "ebnf": "root ::= a"}, 400, "ebnf"),
    (
        "own kv_transfer_params",
        "completions",
        {**PROMPT, "kv_transfer_params": {"seed": 1}},
        400,
        "kv_transfer_params",
    ),
    ("no messages", "chat/completions", {"model": "demo"}, 400, "messages"),
    ("empty messages", "chat/completions", {**CHAT, "messages": []}, 400, "messages"),
    ("unknown role", "chat/completions", {**CHAT, "messages": [{"role": "x"}]}, 400, "messages"),
    (
        "an image part",
        "chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages",
    ),
    ("tools", "chat/completions", {**CHAT, "tools": [{"type": "function"}]}, 400, "tools"),
    ("no such path", "nowhere", PROMPT, 404, ""),
]


@pytest.mark.parametrize(("what", "path", "body", "status", "param"), BAD, ids=[b[0] for b in BAD])
def test_bad_requests_get_openais_error(
    fleet_1p3d: Fleet, what: str, path: str, body: Any, status: int, param: str
) -> None:
    got, raw = http(f"{fleet_1p3d.router.url}/v1/{path}", body, timeout_s=20)
    assert got == status, (what, raw)
    error = json.loads(raw)["error"]
    assert error["message"]
    assert error["type"]
    if param:
        assert param in (error["param"] or "")
    assert fleet_1p3d.subnet not in raw.decode()


def test_a_streamed_bad_request_gets_a_plain_error(fleet_1p3d: Fleet) -> None:
    body = {**PROMPT, "max_tokens": 10**9, "stream": True}
    status, raw = http(f"{fleet_1p3d.router.url}/v1/completions", body)
    assert status == 400
    assert json.loads(raw)["error"]["param"] == "max_tokens"


def _junk() -> list[bytes]:
    huge = b"XKV1" + struct.pack("<BBHI", 5, 0, 0xFFFF, 0xFFFF_FFFF) + bytes(4)
    return [
        os.urandom(4096),
        huge,
        b"XKV1\x01\x00",  # half a frame, then silence until the close
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + os.urandom(200),
        b"",
    ]


def _throw(host: str, port: int) -> None:
    for junk in _junk():
        with socket.create_connection((host, port), timeout=5) as sock:
            try:
                sock.sendall(junk)
                sock.shutdown(socket.SHUT_WR)
                sock.settimeout(5)
                while sock.recv(65536):
                    pass
            except OSError:  # reset by the other side: as good as closed
                continue


def test_junk_on_the_kv_and_discovery_ports_costs_its_own_connection(fleet_1p3d: Fleet) -> None:
    def connections(process: Process) -> float:
        return process.metric("xpyd_kv_connections")

    fleet_1p3d.complete(prompt="Return a", max_tokens=4)
    engines = [p for p in fleet_1p3d.processes if p.role == "Decode"]  # P only dials
    before = {p.name: connections(p) for p in engines}
    for engine in engines:
        _throw(engine.ip, 21001)
    _throw(fleet_1p3d.router.ip, 30001)
    fleet_1p3d.complete(prompt="Return a", max_tokens=4)
    for engine in engines:
        wait_for(
            f"{engine.name} closed the strangers' connections",
            lambda e=engine: connections(e) <= max(before[e.name], 3),
        )
        assert engine.popen.poll() is None
    assert set(fleet_1p3d.states().values()) == {"Ready"}

"""vLLM's own engines behind this router: what they send, written down in tests/testdata/vllm, is
said again by engines that know nothing else.

`{id}` in a file stands for the request's id as the engine makes it: the X-Request-Id, and behind it
what vLLM adds; `{http}` for the engine's own address, which it may quote in an error.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from aiohttp import web

from tests.router.fakes import (
    Call,
    Fleet,
    HttpEngine,
    fleet,
    parse_events,
    start_stream,
    text_of,
    until,
)
from xpyd_core.messages import decode_heartbeat
from xpyd_core.request_id import parse_pair_id

FOLDER = Path(__file__).parents[1] / "testdata/vllm"
SUFFIXES = ["", "-0", "-0-1a2b3c4d", "-9f8e7d6c"]
"""With VLLM_DISABLE_REQUEST_ID_RANDOMIZATION, and without it."""
CUT = 7
"""Bytes of a stream that come at once: ids and addresses arrive in pieces."""


def beats() -> dict[str, bytes]:
    lines = (FOLDER / "heartbeats.txt").read_text().splitlines()
    pairs = (line.split() for line in lines if not line.startswith("#"))
    return {kind: bytes.fromhex(data) for kind, data in pairs}


def replay(name: str, *, status: int = 200, suffix: str = "") -> Any:
    """An engine that says what stands in the file."""

    async def script(engine: HttpEngine, call: Call, request: web.Request) -> web.StreamResponse:
        text = (FOLDER / name).read_text().replace("{id}", call.request_id + suffix)
        data = text.replace("{http}", f"http://{engine.beat.http_address}").encode()
        if not name.endswith(".sse"):
            return web.Response(body=data, status=status, content_type="application/json")
        response = await start_stream(request)
        for begin in range(0, len(data), CUT):
            await response.write(data[begin : begin + CUT])
        await response.write_eof()
        return response

    return script


async def vllm_pair(fleet_: Fleet, prefill: Any, decode: Any) -> tuple[HttpEngine, HttpEngine]:
    """Two engines that beat three fields, byte for byte as in the file but for the addresses."""
    engines: list[HttpEngine] = []
    for kind, script in (("P", prefill), ("D", decode)):
        engine = await fleet_.engine(kind, is_ours=False)
        engine.script = script
        engines.append(engine)
    return engines[0], engines[1]


def leaks(data: bytes, *engines: HttpEngine) -> list[bytes]:
    """What of the pair's ids and addresses stands in `data`."""
    secrets = [b"___prefill_addr_", b"___decode_addr_"]
    for engine in engines:
        secrets += [engine.beat.http_address.encode(), engine.beat.zmq_address.encode()]
        secrets += [call.uuid.encode() for call in engine.calls]
    return [secret for secret in secrets if secret in data]


@pytest.mark.parametrize("kind", ["P", "D"])
async def test_their_heartbeats_register_and_ours_of_three_fields_are_the_same_bytes(
    kind: str,
) -> None:
    async with fleet() as fleet_:
        frame = beats()[kind]
        beat = decode_heartbeat(frame)
        fields = ("type", "http_address", "zmq_address")
        assert msgspec.msgpack.encode({f: getattr(beat, f) for f in fields}) == frame
        await fleet_.dealer.send(frame)
        await until(lambda: bool(fleet_.router.state.fleet.instances))
        (found,) = fleet_.router.state.fleet.instances
        assert (found.beat.type, found.beat.continuation) == (kind, 0)
        assert found.serves("whatever")


both_endpoints = pytest.mark.parametrize(
    ("path", "stem", "text"),
    [("completions", "completions", " city in the"), ("chat/completions", "chat", "A city in")],
    ids=["completions", "chat"],
)


@pytest.mark.parametrize("suffix", SUFFIXES)
@both_endpoints
async def test_whole_answers_are_ds_and_show_no_address(
    path: str, stem: str, text: str, suffix: str
) -> None:
    async with fleet() as fleet_:
        p, d = await vllm_pair(
            fleet_,
            replay(f"{stem}-p.json", suffix=suffix),
            replay(f"{stem}-d.json", suffix=suffix),
        )
        async with await fleet_.post(path, max_tokens=3) as response:
            raw = await response.read()
            headers = str(response.headers).encode()
        assert leaks(raw + headers, p, d) == []
        answer = orjson.loads(raw)
        (choice,) = answer["choices"]
        assert (choice["message"]["content"] if "message" in choice else choice["text"]) == text
        assert re.match(r"(chat)?cmpl-[0-9a-f]{32}", answer["id"])
        assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("suffix", SUFFIXES)
@both_endpoints
async def test_streams_are_ds_and_show_no_address_however_they_are_cut(
    path: str, stem: str, text: str, suffix: str
) -> None:
    async with fleet() as fleet_:
        p, d = await vllm_pair(
            fleet_,
            replay(f"{stem}-p.json", suffix=suffix),
            replay(f"{stem}-d.sse", suffix=suffix),
        )
        async with await fleet_.post(path, max_tokens=3, stream=True) as response:
            raw = await response.read()
        assert leaks(raw, p, d) == []
        events = parse_events(raw)
        assert text_of(events) == text
        assert len({event["id"] for event in events[:-1]}) == 1
        assert events[-1] == "[DONE]"


async def test_they_are_asked_as_vllms_protocol_says_and_are_told_nothing_of_ours() -> None:
    async with fleet() as fleet_:
        p, d = await vllm_pair(fleet_, replay("completions-p.json"), replay("completions-d.sse"))
        async with await fleet_.post(
            max_tokens=3, stream=True, stream_options={"include_usage": True}
        ) as response:
            await response.read()
        (to_p,), (to_d,) = p.calls, d.calls
        assert to_p.body == {
            "model": "m",
            "prompt": "San Francisco is a",
            "max_tokens": 1,
            "stream": False,
            "stream_options": None,
        }
        assert orjson.loads(to_d.raw) == {
            "model": "m",
            "prompt": "San Francisco is a",
            "max_tokens": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        assert to_p.request_id == to_d.request_id
        pair = parse_pair_id(to_p.request_id)
        assert pair is not None
        assert str(pair.prefill) == p.beat.zmq_address
        assert str(pair.decode) == d.beat.zmq_address
        # What vLLM's own parser takes for the peers' addresses.
        theirs = re.search(r"___decode_addr_(.*):(\d+)", to_p.request_id)
        assert theirs is not None
        assert f"{theirs[1]}:{theirs[2]}" == d.beat.zmq_address
        theirs = re.search(r"___prefill_addr_(.*):(\d+)___", to_d.request_id)
        assert theirs is not None
        assert f"{theirs[1]}:{theirs[2]}" == p.beat.zmq_address
        assert d.releases == []
        assert [call.headers["content-type"] for call in (to_p, to_d)] == [
            "application/json",
            "application/json",
        ]


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("error-404.json", 404, "does not exist"),
        ("error-400.json", 400, "maximum context length"),
        ("error-old.json", 400, "refused the request"),
        ("error-500.json", 500, ""),
    ],
)
async def test_their_errors_come_in_openais_form_without_addresses(
    name: str, status: int, says: str
) -> None:
    async with fleet() as fleet_:
        refusal = replay(name, status=status)
        p, d = await vllm_pair(fleet_, refusal, refusal)
        async with await fleet_.post(max_tokens=3) as response:
            raw = await response.read()
        assert response.status == (status if status < 500 else 502)
        assert leaks(raw, p, d) == []
        assert says in orjson.loads(raw)["error"]["message"]
        assert d.calls == [], "P refused: D holds nothing and is not asked"


async def test_an_error_event_of_theirs_that_begins_a_stream_is_no_answer() -> None:
    async with fleet() as fleet_:
        p, d = await vllm_pair(fleet_, replay("completions-p.json"), replay("error-d.sse"))
        other = await fleet_.engine("D", is_ours=False)
        other.script = replay("completions-d.sse")
        for _ in range(2):
            async with await fleet_.post(max_tokens=3, stream=True) as response:
                raw = await response.read()
            assert leaks(raw, p, d, other) == []
            assert text_of(parse_events(raw)) == " city in the"
        assert d.calls, "it was asked, and its error was tried elsewhere"

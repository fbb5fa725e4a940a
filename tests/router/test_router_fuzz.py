"""Requests that are broken on the wire or in their fields: a 4xx, or a closed connection; the
router never fails at one, and goes on serving.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import AsyncGenerator
from typing import Any

import orjson
import pytest

from tests.router.fakes import Fleet, answer, fleet, until

_FIELDS = (
    *("model", "prompt", "messages", "stream", "stream_options", "max_tokens", "min_tokens", "n"),
    *("max_completion_tokens", "seed", "echo", "logprobs", "prompt_logprobs", "return_token_ids"),
    *("kv_transfer_params", "stop", "user", "prompt_cache_key", "priority", "tools"),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**63, 2**70, 1.5, 1e308, "", "x", "\x00", "\u2028", "9" * 5000),
    *([], [[]], [None], [[1], "x"], [2**64], {}, {"": None}, {"include_usage": 1}, [{"role": 1}]),
)
_BREAKS = (b"\x00", b"\r", b"\n", b"\r\n\r\n", b"\xff", b" ", b":", b"Content-Length: 5\r\n", b"{")


def broken(rng: random.Random) -> bytes:
    """A request with some of its bytes cut out, doubled, or others put in between."""
    body = orjson.dumps({"model": "m", "prompt": "x", "stream": rng.random() < 0.5})
    lines = [
        rng.choice([b"POST /v1/completions", b"POST /v1/chat/completions", b"GET /health"])
        + b" HTTP/1.1",
        b"Host: x",
        *([b"Transfer-Encoding: chunked"] if rng.random() < 0.2 else []),
        b"Content-Length: %d" % rng.choice([len(body), len(body) - 1, -1, 2**64, 10**9]),
    ]
    data = b"\r\n".join(lines) + b"\r\n\r\n" + body
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(data))
        end = at + rng.choice([0, 0, 1, 5, 40])
        data = data[:at] + rng.choice([*_BREAKS, data[at:end] * 2]) + data[end:]
    return data


def strange(rng: random.Random) -> bytes:
    """A body with strange values, sometimes no JSON or no object."""
    fields = {"model": "m", "prompt": "x"}
    values = {name: rng.choice(_VALUES) for name in rng.sample(_FIELDS, rng.randrange(1, 4))}
    bodies: list[Any] = [{**fields, **values}] * 8 + [rng.choice(_VALUES)]
    # orjson cannot write 2**70; on the wire it may stand.
    raw = json.dumps(rng.choice(bodies)).encode()
    return raw[: rng.randrange(len(raw) + 1)] if rng.random() < 0.1 else raw


@contextlib.asynccontextmanager
async def refusing() -> AsyncGenerator[Fleet]:
    """A fleet whose engines refuse all that the router lets through."""
    async with fleet() as fleet_:
        for kind in "PD":
            engine = await fleet_.engine(kind, period_ms=60_000)
            engine.script = answer(400, {"error": {"message": "no", "type": "x", "code": None}})
        yield fleet_


async def still_serves(fleet_: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody is left in the router, and it logged no failure of its own."""
    await until(lambda: fleet_.metric("xpyd_router_in_flight") == 0)
    async with await fleet_.post() as response:
        assert response.status == 400
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


async def test_what_is_broken_on_the_wire_is_refused_or_closed(
    both_ways: None, caplog: pytest.LogCaptureFixture
) -> None:
    async def client(port: int, data: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            said = b""
            with contextlib.suppress(TimeoutError):
                # What waits for more of its body is left alone: the client gives up.
                async with asyncio.timeout(0.3):
                    said = await reader.readline()
            assert not said or said.split()[1][:1] == b"4" or b"/health" in data, (data, said)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async with refusing() as fleet_:
        rng = random.Random(5)
        for _ in range(12):
            crowd = [client(fleet_.router.http_port, broken(rng)) for _ in range(25)]
            await asyncio.gather(*crowd)
        await still_serves(fleet_, caplog)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_strange_fields_are_refused_with_an_error_object(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with refusing() as fleet_:
        rng = random.Random(6)
        for _ in range(300):
            raw = strange(rng)
            async with fleet_.http.post(f"{fleet_.base}/v1/{path}", data=raw) as response:
                said = await response.json()
                assert response.status in (400, 404), (raw, said)
                assert said["error"]["message"], raw
        await still_serves(fleet_, caplog)

"""Every refusal is quick, in OpenAI's format, and computes nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.worker.server_fakes import ScriptedEngine, serving
from xpyd_core.request_id import TransferKey
from xpyd_kv.values import OfferedPrompt
from xpyd_worker.engine.request import ErrorKind

GOOD = {"prompt": "hi"}
CHAT = "/v1/chat/completions"
PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        (PATH, b"{", 400, None, None),
        (PATH, b"", 400, None, None),
        (PATH, b"[1]", 400, None, None),
        (PATH, b'{"prompt": "hi", "temperature": NaN}', 400, None, None),
        (PATH, b'{"prompt": "hi", "temperature": Infinity}', 400, None, None),
        (PATH, b'{"prompt": "hi", "temperature": 1e999}', 400, "temperature", None),
        (PATH, b'{"prompt": "\\ud800"}', 400, None, None),
        (PATH, b'{"prompt": "\xff"}', 400, None, None),
        (PATH, {"prompt": "hi", "model": "other"}, 404, "model", "model_not_found"),
        (PATH, {"prompt": [300]}, 400, "prompt", None),
        (PATH, {"prompt": "x" * 200}, 400, "prompt", "context_length_exceeded"),
        (PATH, {"prompt": "x" * 9000}, 400, "prompt", "context_length_exceeded"),
        (PATH, {**GOOD, "max_tokens": 10**9}, 400, "max_tokens", "context_length_exceeded"),
        (PATH, {**GOOD, "max_tokens": 199}, 400, "max_tokens", "context_length_exceeded"),
        (PATH, {**GOOD, "stop_token_ids": [258]}, 400, "stop_token_ids", None),
        (PATH, {**GOOD, "min_tokens": 17}, 400, "min_tokens", None),
        (CHAT, {"messages": []}, 400, "messages", None),
        (CHAT, {"messages": [{"role": "assistant", "content": "x"}]}, 400, "messages", None),
        (CHAT, GOOD, 400, "messages", None),
        ("/v1/embeddings", GOOD, 404, None, None),
        ("/health", GOOD, 405, None, None),
    ],
)
async def test_bad_input_is_refused(
    path: str, body: Any, status: int, param: Any, code: Any
) -> None:
    async with serving() as server:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await server.client.post(path, content=content)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert (error["param"], error["code"]) == (param, code)
        assert error["type"] in ("invalid_request_error", "not_found_error")
        assert server.engine.requests == []


async def test_a_long_prompt_says_how_long_it_may_be() -> None:
    async with serving() as server:
        answer = await server.post(PATH, {"prompt": "x" * 150, "max_tokens": 51})
        message = answer.json()["error"]["message"]
        assert "maximum context length is 200 tokens" in message
        assert "you requested 201 tokens (150 in the prompt, 51 in the completion)" in message
        assert (await server.post(PATH, {"prompt": "x" * 150, "max_tokens": 50})).is_success


async def test_a_body_over_the_limit_is_refused_unread() -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n"
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 413 " in head
        writer.close()


async def test_nobody_is_served_while_starting() -> None:
    async with serving(ready=False) as server:
        assert (await server.client.get("/health")).status_code == 503
        for answer in (await server.post(PATH, GOOD), await server.client.get("/v1/models")):
            assert answer.status_code == 503
            assert answer.headers["Retry-After"] == "1"


async def test_a_full_queue_sends_requests_elsewhere_but_not_those_whose_kv_is_here() -> None:
    uuid = "93923d63113b4b338973f24d19d4bf11"
    pair = f"___prefill_addr_10.0.1.2:21001___decode_addr_10.0.1.3:22001_{uuid}"

    engine = ScriptedEngine(silent=True)
    async with serving(engine, max_requests=2, role="Decode") as server:
        waiting = [asyncio.create_task(server.post(PATH, GOOD)) for _ in range(2)]
        await engine.submitted(2)
        answer = await server.post(PATH, GOOD)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        engine.offers[TransferKey(uuid, 0)] = OfferedPrompt((1,), 1)
        engine.silent = False
        headers = {"X-Request-Id": pair}
        assert (await server.client.post(PATH, json=GOOD, headers=headers)).is_success
        for task in waiting:
            task.cancel()


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("busy", 503),
        ("too_long", 400),
        ("kv_failed", 503),
        ("grammar", 400),
        ("replica_lost", 503),
        ("internal", 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engines_error_is_a_status_before_the_first_token(
    kind: ErrorKind, status: int, stream: bool
) -> None:
    engine = ScriptedEngine(error="at 10.0.0.1: secret detail", error_kind=kind)
    async with serving(engine) as server:
        answer = await server.post(PATH, {**GOOD, "stream": stream})
        assert answer.status_code == status
        assert "secret" not in answer.text


async def test_an_error_in_a_stream_is_an_event_and_no_done_follows() -> None:
    engine = ScriptedEngine(fail_after=2)
    async with serving(engine) as server:
        answer = await server.post(PATH, {**GOOD, "stream": True})
        events = [line[6:] for line in answer.text.split("\n\n") if line]
        assert len(events) == 3
        assert json.loads(events[-1])["error"]["type"] == "server_error"


async def test_a_client_names_a_replica_by_vllms_header() -> None:
    async with serving(replicas=3) as server:
        for named in (None, "0", "2"):
            headers = {} if named is None else {"X-data-parallel-rank": named}
            assert (await server.client.post(PATH, json=GOOD, headers=headers)).is_success
        assert [request.replica for request in server.engine.requests] == [None, 0, 2]
        for named in ("3", "-1", "first", "", "9" * 20):
            headers = {"X-data-parallel-rank": named}
            answer = await server.client.post(PATH, json=GOOD, headers=headers)
            assert answer.status_code == 400
            message = answer.json()["error"]["message"]
            assert message == "X-data-parallel-rank: must be 0 to 2"


async def test_a_bug_in_a_handler_is_a_plain_500() -> None:
    async with serving() as server:
        answer = await server.post(PATH, {"prompt": "bug"})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "internal error"

"""Clients that leave or do not read, release, drain, failure, health and metrics."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.worker.server_fakes import KEY, Running, ScriptedEngine, say, serving
from xpyd_core.keys import call_mac
from xpyd_core.request_id import TransferKey
from xpyd_kv.values import OfferedPrompt
from xpyd_worker.server.http.server import WriteDeadline
from xpyd_worker.server.openai.generation import Ending, Generation
from xpyd_worker.server.openai.jobs import make_jobs
from xpyd_worker.server.openai.params import parse_completion
from xpyd_worker.server.request_ids import RequestId

UUID = "93923d63113b4b338973f24d19d4bf11"
PAIR = f"___prefill_addr_10.0.1.2:21001___decode_addr_10.0.1.3:22001_{UUID}"
PATH = "/v1/completions"


async def send(server: Running, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*server.address)
    data = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    writer.write(head + data)
    await writer.drain()
    return reader, writer


async def until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110 - other threads and the kernel change it
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_aborts(stream: bool) -> None:
    async with serving(ScriptedEngine(silent=True)) as server:
        _, writer = await send(server, {"prompt": "hi", "stream": stream})
        await server.engine.submitted(1)
        writer.close()
        await until(lambda: server.engine.aborted)
        assert server.bridge.open_requests == 0


async def test_a_client_that_leaves_a_stream_aborts() -> None:
    engine = ScriptedEngine(lambda _r, _c: [97] * 1000, step_s=0.01)
    async with serving(engine, max_model_len=2000) as server:
        reader, writer = await send(
            server, {"prompt": "hi", "stream": True, "max_tokens": 900, "ignore_eos": True}
        )
        await reader.readuntil(b'"text":"a"')
        writer.close()
        await until(lambda: engine.aborted)
        assert engine.aborted[0][1] is None
        assert server.bridge.open_requests == 0


async def test_outputs_merge_while_nobody_takes_them() -> None:
    async with serving(ScriptedEngine(lambda _r, _c: [97] * 50)) as server:
        service = server.api.ready_service()
        options = parse_completion(b'{"prompt": "hi", "max_tokens": 50}').options
        jobs = make_jobs(service, RequestId(UUID), options, [(1, 2)], default_max_tokens=16)
        generation = Generation(service, jobs, Ending())
        generation.start()
        await until(lambda: server.bridge.open_requests == 0)
        steps = [step async for step in generation.steps()]
        assert [[len(delta.token_ids) for delta in step] for step in steps] == [[50]]


async def test_a_write_that_takes_too_long_ends_the_request() -> None:
    async def app(_scope: Any, _receive: Any, send_message: Any) -> None:
        await send_message({"type": "http.response.body"})

    async def stuck(_message: Any) -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await WriteDeadline(app, deadline_s=0.01)({}, stuck, stuck)


async def test_release_needs_the_mac_of_the_uuid() -> None:
    async with serving(role="Decode") as server:
        good = {"X-Xpyd-Mac": call_mac(KEY, "kv-release", UUID)}
        for _ in range(2):
            answer = await server.post("/kv/release", {"uuid": UUID}, **good)
            assert answer.status_code == 200
        assert server.engine.released == [UUID, UUID]
        for headers in ({}, {"X-Xpyd-Mac": call_mac(b"x" * 32, "kv-release", UUID)}):
            answer = await server.post("/kv/release", {"uuid": UUID}, **headers)
            assert answer.status_code == 403
        assert (await server.post("/kv/release", {"uuid": "x"}, **good)).status_code == 400
        assert (await server.post("/kv/release", {}, **good)).status_code == 400
        assert len(server.engine.released) == 2


async def test_draining_refuses_new_requests_but_not_those_whose_kv_is_here() -> None:
    engine = ScriptedEngine(say("x" * 20), step_s=0.01)
    async with serving(engine, role="Decode") as server:
        running = asyncio.create_task(server.post(PATH, {"prompt": "hi", "max_tokens": 30}))
        await engine.submitted(1)
        server.api.lifecycle.become("Draining")
        answer = await server.post(PATH, {"prompt": "hi"})
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        headers = {"X-Request-Id": PAIR}
        assert (await server.post(PATH, {"prompt": "hi"}, **headers)).status_code == 503
        engine.offers[TransferKey(UUID, 0)] = OfferedPrompt((1,), 1)
        assert (await server.post(PATH, {"prompt": "hi"}, **headers)).status_code == 200
        # Of several prompts any may be the one whose KV is here.
        engine.offers[TransferKey(UUID, 2)] = engine.offers.pop(TransferKey(UUID, 0))
        several = {"prompt": ["a", "b", "c"], "max_tokens": 1}
        assert (await server.post(PATH, several, **headers)).status_code == 200
        assert (await running).json()["choices"][0]["text"] == "x" * 20
        assert (await server.client.get("/health")).status_code == 200


async def test_among_too_many_open_requests_one_whose_kv_is_here_comes_in() -> None:
    engine = ScriptedEngine(silent=True)
    async with serving(engine, role="Decode", max_requests=1) as server:
        # A client that sends its body late holds its place all the same.
        _, late = await asyncio.open_connection(*server.address)
        late.write(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n".encode())
        running = asyncio.create_task(server.post(PATH, {"prompt": "hi"}))
        await engine.submitted(1)
        await until(lambda: server.api.admission.requests == 2)
        engine.silent = False
        body = {"prompt": ["a", "b"], "max_tokens": 1}
        headers = {"X-Request-Id": PAIR}
        assert (await server.post(PATH, body, **headers)).status_code == 503
        engine.offers[TransferKey(UUID, 1)] = OfferedPrompt((1,), 1)
        assert (await server.post(PATH, body, **headers)).status_code == 200
        running.cancel()
        late.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_when_the_engine_is_gone_nobody_waits(stream: bool) -> None:
    async with serving(ScriptedEngine(silent=True)) as server:
        body = {"prompt": "hi", "stream": stream}
        waiting = asyncio.create_task(server.post(PATH, body))
        await server.engine.submitted(1)
        server.bridge.fail()
        assert (await waiting).status_code == 500
        server.api.lifecycle.fail()
        assert (await server.post(PATH, body)).status_code == 503
        health = await server.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")


@pytest.mark.parametrize("ready", [False, True])
async def test_a_process_that_loads_or_serves_is_alive_and_a_failed_one_is_not(ready: bool) -> None:
    async with serving(ready=ready) as server:
        assert (await server.client.get("/live")).status_code == 200
        assert (await server.client.get("/health")).status_code == (200 if ready else 503)
        server.api.lifecycle.fail()
        assert (await server.client.get("/live")).status_code == 503


async def test_metrics_show_the_engines_counters_and_latencies() -> None:
    async with serving() as server:
        await server.post(PATH, {"prompt": "hi", "max_tokens": 3})
        text = (await server.client.get("/metrics")).text
        for line in (
            "xpyd_engine_forward_total 3.0",
            "xpyd_engine_kv_blocks_total 10.0",
            "xpyd_engine_kv_blocks_free 7.0",
            'xpyd_engine_requests_total{finish_reason="stop"} 2.0',
            "xpyd_engine_ttft_seconds_count 1.0",
            "xpyd_engine_itl_seconds_count 2.0",
            "xpyd_engine_e2e_seconds_count 1.0",
        ):
            assert f"\n{line}\n" in text


def test_a_wrong_checkpoint_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from xpyd_core.cli import main;"
        f"status = main(['worker', '--model', {str(tmp_path / 'none')!r}, '--host', '127.0.0.9',"
        " '--port', '0']); print(status, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["2", "False"]
    assert "is not a folder" in done.stderr

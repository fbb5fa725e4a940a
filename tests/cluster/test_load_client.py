"""load_client.py: the load is open, and each failure is counted by its kind; no cluster."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

CLIENT = Path(__file__).with_name("load_client.py")
CASES = [{"prompt": [1, 2], "ids": [7]}]
CHAT = {"messages": [{"role": "user", "content": "hello"}], "ids": [7]}
RATE = 50.0


async def start(
    url: str, requests: int, *more: str, cases: Any = CASES
) -> asyncio.subprocess.Process:
    argv = (sys.executable, str(CLIENT), url, str(RATE), str(requests), *more)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    process.stdin.write(f"{json.dumps(cases)}\n".encode())
    await process.stdin.drain()
    return process


async def report_of(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """Ends a load that goes on until standard input ends."""
    out, _ = await process.communicate(b"")
    assert process.returncode == 0
    begun, *each, report_text = out.splitlines()
    assert begun == b"begun"
    report: dict[str, Any] = json.loads(report_text)
    kinds = [json.loads(line)[2] for line in each]
    assert len(kinds) == report["requests"]
    assert Counter(filter(None, kinds)) == report["failures"]
    return report


async def serve(handler: Any) -> tuple[web.AppRunner, str]:
    app = web.Application()
    for path in ("completions", "chat/completions"):
        app.router.add_post(f"/v1/{path}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def answer(request: web.Request) -> web.StreamResponse:
    choices = [{"token_ids": [7]}]
    if not (await request.json())["stream"]:
        return web.json_response({"choices": choices})
    response = web.StreamResponse()
    await response.prepare(request)
    event = json.dumps({"choices": choices})
    await response.write(f"data: {event}\n\ndata: [DONE]\n\n".encode())
    return response


async def test_requests_start_though_no_earlier_one_is_answered_each_on_its_own_connection() -> (
    None
):
    """More of them than a connector of aiohttp allows by default."""
    wanted = 120
    connections: set[Any] = set()
    all_came = asyncio.Event()

    async def hold(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        connections.add(request.transport.get_extra_info("peername"))
        if len(connections) == wanted:
            all_came.set()
        await all_came.wait()
        return await answer(request)

    runner, url = await serve(hold)
    try:
        process = await start(url, wanted)
        await all_came.wait()
        report = await report_of(process)
    finally:
        await runner.cleanup()
    assert (report["requests"], report["failed"]) == (wanted, 0), report
    assert len(connections) == wanted


async def test_a_load_without_a_number_goes_on_until_its_standard_input_ends() -> None:
    served = asyncio.Semaphore(0)

    async def count(request: web.Request) -> web.StreamResponse:
        response = await answer(request)
        served.release()
        return response

    runner, url = await serve(count)
    try:
        process = await start(url, 0)
        for _ in range(5):
            await served.acquire()
        report = await report_of(process)
    finally:
        await runner.cleanup()
    assert report["requests"] >= 5
    assert report["failed"] == 0, report


async def test_refused_connections_are_counted_as_such() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        process = await start(f"http://127.0.0.1:{taken.getsockname()[1]}", 6)
        report = await report_of(process)
    assert (report["requests"], report["failures"]) == (6, {"refused": 6})


async def unavailable(_: web.Request) -> web.StreamResponse:
    return web.Response(status=503)


async def leave(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def wrong(_: web.Request) -> web.StreamResponse:
    choices = [{"token_ids": [8]}]
    body = f"data: {json.dumps({'choices': choices})}\n\ndata: [DONE]\n\n"
    return web.Response(text=body)


@pytest.mark.parametrize(
    ("handler", "kind"),
    [(unavailable, "status 503"), (leave, "broken"), (wrong, "wrong tokens")],
)
async def test_each_failure_is_named(handler: Any, kind: str) -> None:
    runner, url = await serve(handler)
    try:
        report = await report_of(await start(url, 1))
    finally:
        await runner.cleanup()
    assert report["failures"] == {kind: 1}, report


async def test_each_request_has_the_key_that_the_file_has_then(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("first\n")
    seen: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers["Authorization"])
        file.write_text("second\n")
        return await answer(request)

    runner, url = await serve(handler)
    try:
        report = await report_of(await start(url, 8, str(file)))
    finally:
        await runner.cleanup()
    assert report["failed"] == 0
    assert (seen[0], seen[-1]) == ("Bearer first", "Bearer second")


async def test_a_case_with_messages_is_a_chat() -> None:
    seen: list[tuple[str, Any]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        seen.append((request.path, body.get("messages") or body.get("prompt")))
        return await answer(request)

    runner, url = await serve(handler)
    try:
        report = await report_of(await start(url, 2, cases=[CHAT, *CASES]))
    finally:
        await runner.cleanup()
    assert report["failed"] == 0
    assert sorted(seen) == [
        ("/v1/chat/completions", CHAT["messages"]),
        ("/v1/completions", CASES[0]["prompt"]),
    ]

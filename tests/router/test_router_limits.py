"""Limits, the queue and its refusals as clients meet them; and that every place comes back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import pytest

from tests.router.fakes import (
    Call,
    Fleet,
    HttpEngine,
    Script,
    answer,
    begin_and_die,
    die,
    hang,
    pair,
    serve_model,
    until,
)
from xpyd_router.admission import AdmissionLimits
from xpyd_router.fair_queue import Cost
from xpyd_router.http.inference import cost_of
from xpyd_router.request.client_request import parse_request

ONE = AdmissionLimits(requests=1)
NOTHING = Cost(0, 0)


def in_flight(fleet_: Fleet) -> Cost:
    return fleet_.router.state.admission.in_flight


def waiting(fleet_: Fleet) -> int:
    return fleet_.router.state.admission.waiting


@contextlib.asynccontextmanager
async def busy(limits: AdmissionLimits) -> AsyncGenerator[tuple[Fleet, HttpEngine, asyncio.Event]]:
    """A fleet whose P holds one request until the event is set."""
    async with pair(limits=limits) as (fleet_, p, _):
        release = asyncio.Event()

        async def hold(engine: HttpEngine, call: Call, request: Any) -> Any:
            await release.wait()
            return await serve_model(engine, call, request)

        p.script = hold
        first = asyncio.create_task(fleet_.json())
        await until(lambda: p.served == 1)
        try:
            yield fleet_, p, release
        finally:
            release.set()
            await first
        assert in_flight(fleet_) == NOTHING


@pytest.mark.parametrize(
    ("endpoint", "body", "tokens"),
    [
        ("completions", b'{"model": "m", "prompt": "abcd", "max_tokens": 9000}', 14 + 9000),
        ("completions", b'{"model": "m", "prompt": "abcd"}', 9 + 16),
        ("completions", b'{"model": "m", "prompt": ["a", "b"], "n": 3}', 12 + 6 * 16),
        ("completions", b'{"model": "m", "prompt": "", "n": 3, "max_tokens": 9}', 14 + 3 * 9),
        ("chat/completions", b'{"model": "m", "messages": []}', 8 + 256),
        ("chat/completions", b'{"model": "m", "messages": [], "max_completion_tokens": 9}', 15 + 9),
    ],
)
def test_a_request_costs_a_quarter_of_its_bytes_and_what_it_may_put_out(
    endpoint: Any, body: bytes, tokens: int
) -> None:
    ask = parse_request(endpoint, body)
    assert cost_of(ask, ask.prompt_tokens) == Cost(1, tokens, len(body))
    assert cost_of(ask, ask.prompt_tokens + 70) == Cost(1, tokens + 70, len(body))


async def test_a_second_request_waits_until_the_first_is_answered() -> None:
    async with busy(ONE) as (fleet_, p, release):
        second = asyncio.create_task(fleet_.json())
        await until(lambda: waiting(fleet_) == 1)
        assert p.served == 1
        release.set()
        assert (await second)["choices"][0]["text"] == "t0.0 t0.1 t0.2 t0.3 "
        assert fleet_.metric("xpyd_router_queue_seconds_count") == 1


@pytest.mark.parametrize(
    ("urgent", "headers"),
    [({"priority": -1}, None), ({}, {"X-Xpyd-Priority": "High"})],
    ids=["body", "header"],
)
async def test_a_higher_priority_is_served_first(
    urgent: dict[str, Any], headers: dict[str, str] | None
) -> None:
    async with busy(ONE) as (fleet_, p, release):
        plain = asyncio.create_task(fleet_.json(prompt="plain"))
        await until(lambda: waiting(fleet_) == 1)
        first = asyncio.create_task(fleet_.json(prompt="urgent", headers=headers, **urgent))
        await until(lambda: waiting(fleet_) == 2)
        release.set()
        await asyncio.gather(plain, first)
        assert [call.body["prompt"] for call in p.calls[1:]] == ["urgent", "plain"]
        assert all("x-xpyd-priority" not in call.headers for call in p.calls)


async def test_a_full_queue_answers_429() -> None:
    async with busy(AdmissionLimits(requests=1, queue_entries=0)) as (fleet_, _, __):
        async with await fleet_.post() as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            error = (await response.json())["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert fleet_.metric("xpyd_router_requests_total", endpoint="completions", status="429")


async def test_a_turn_that_does_not_come_answers_503() -> None:
    limits = AdmissionLimits(requests=1, queue_timeout_s=0.05)
    async with busy(limits) as (fleet_, _, __), await fleet_.post(stream=True) as response:
        assert response.status == 503
        assert 1 <= int(response.headers["Retry-After"]) <= 60
        assert (await response.json())["error"]["code"] == "queue_timeout"


@pytest.mark.parametrize(("limits", "status"), [(ONE, 400), (AdmissionLimits(), 200)])
async def test_priorities_are_read_where_they_matter(limits: AdmissionLimits, status: int) -> None:
    headers = {"X-Xpyd-Priority": "urgent"}
    async with pair(limits=limits) as (fleet_, _, __), await fleet_.post(headers=headers) as r:
        assert r.status == status


async def test_a_client_that_leaves_the_queue_is_gone_from_it() -> None:
    async with busy(ONE) as (fleet_, p, release):
        waiter = asyncio.create_task(fleet_.json())
        await until(lambda: waiting(fleet_) == 1)
        waiter.cancel()
        await until(lambda: waiting(fleet_) == 0)
        release.set()
        await fleet_.json()
        assert p.served == 2
        assert fleet_.metric("xpyd_router_requests_total", endpoint="completions", status="499")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "script"),
    [
        ("P", serve_model),
        ("P", die),
        ("P", answer(400, {"error": {"message": "no", "type": "x", "param": None, "code": None}})),
        ("D", die),
        ("D", begin_and_die),
        ("D", answer(500, {})),
    ],
)
async def test_a_place_comes_back_however_a_request_ends(
    kind: str, script: Script, stream: bool
) -> None:
    async with pair(limits=ONE) as (fleet_, p, d):
        {"P": p, "D": d}[kind].script = script
        for _ in range(2):
            with contextlib.suppress(aiohttp.ClientPayloadError):
                async with await fleet_.post(stream=stream) as response:
                    await response.read()
        await until(lambda: in_flight(fleet_) == NOTHING)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["P", "D"])
async def test_a_place_comes_back_when_the_client_leaves(kind: str, stream: bool) -> None:
    async with pair(limits=ONE) as (fleet_, p, d):
        engine = {"P": p, "D": d}[kind]
        engine.script = hang
        gone = asyncio.create_task(fleet_.events() if stream else fleet_.json())
        await until(lambda: engine.served == 1)
        gone.cancel()
        await until(lambda: in_flight(fleet_) == NOTHING)
        engine.script = serve_model
        await fleet_.json()


async def test_the_access_log_says_how_long_a_request_waited(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "xpyd_router")

    waited: list[float] = []
    async with busy(ONE) as (fleet_, _, release):
        second = asyncio.create_task(fleet_.json())
        await until(lambda: waiting(fleet_) == 1)
        release.set()
        await second
        waited.append(fleet_.metric("xpyd_router_queue_seconds_sum"))
    found = re.findall(r" queue_seconds=([0-9.e-]+)", capfd.readouterr().err)
    # The line says also how long a pair was looked for.
    assert len(found) == 2
    assert max(map(float, found)) >= round(waited[0], 4) > 0

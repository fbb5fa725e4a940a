"""What users of OpenAI's client see: values, headers, and each error as the class they catch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from tests.router.fakes import (
    Fleet,
    answer,
    begin_and_die,
    begin_and_hang,
    die,
    fleet,
    hang,
    pair,
    serve_model,
    until,
)
from xpyd_router.admission import AdmissionLimits

pytestmark = pytest.mark.usefixtures("both_ways")
HELLO: Any = [{"role": "user", "content": "hello"}]
WHOLE = "t0.0 t0.1 t0.2 t0.3 "


@asynccontextmanager
async def client_of(fleet_: Fleet, **options: Any) -> AsyncGenerator[openai.AsyncOpenAI]:
    options = {"api_key": "x", "max_retries": 0, **options}
    async with openai.AsyncOpenAI(base_url=f"{fleet_.base}/v1", **options) as client:
        yield client


async def test_models() -> None:
    async with pair() as (fleet_, p, d), client_of(fleet_) as client:
        for engine in (p, d):
            await fleet_.beat(engine, models=("m", "org/other"))
        assert [model.id async for model in client.models.list()] == ["m", "org/other"]
        assert (await client.models.retrieve("org/other")).id == "org/other"
        with pytest.raises(openai.NotFoundError) as error:
            await client.models.retrieve("none")
        assert error.value.code == "model_not_found"


@pytest.mark.parametrize("client_id", [None, "my request"])
async def test_the_requests_id_is_where_the_client_looks_for_it(client_id: str | None) -> None:
    headers = {"X-Request-Id": client_id} if client_id else {}

    async with pair() as (fleet_, p, _), client_of(fleet_, default_headers=headers) as client:
        completion = await client.completions.create(model="m", prompt="x", max_tokens=4)
        assert completion._request_id == (client_id or completion.id)
        raw = await client.chat.completions.with_raw_response.create(
            model="m", messages=HELLO, max_tokens=4
        )
        chat = raw.parse()
        assert chat.choices[0].message.content == WHOLE
        assert raw.request_id == (client_id or chat.id)
        assert raw.headers["content-type"].startswith("application/json")
        async with client.completions.with_streaming_response.create(
            model="m", prompt="x", stream=True
        ) as response:
            assert response.request_id
            assert client_id in (None, response.request_id)
            assert response.headers["content-type"].startswith("text/event-stream")
            await response.read()
        p.script = answer(400, {"error": {"message": "no", "type": "x", "code": None}})
        with pytest.raises(openai.BadRequestError) as error:
            await client.completions.create(model="m", prompt="x")
        assert error.value.request_id
        assert client_id in (None, error.value.request_id)
        # The router's own, which no response has an id for yet.
        with pytest.raises(openai.BadRequestError) as error:
            await client.completions.create(model="m", prompt="x", n=0)
        assert error.value.request_id == client_id
        assert (await client.models.list())._request_id == client_id


async def test_choices_stops_logprobs_and_usage_come_as_the_clients_types() -> None:
    async with pair() as (fleet_, _, d), client_of(fleet_) as client:
        stream = await client.chat.completions.create(
            model="m",
            messages=HELLO,
            n=2,
            max_completion_tokens=4,
            stop=["END"],
            logprobs=True,
            top_logprobs=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        texts = {0: "", 1: ""}
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == {0: WHOLE, 1: WHOLE.replace("t0", "t1")}
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 8
        assert len({chunk.id for chunk in chunks}) == 1
        asked = d.calls[0].body
        assert (asked["stop"], asked["logprobs"], asked["top_logprobs"]) == (["END"], True, 2)


async def probed(fleet_: Fleet) -> None:
    """Those that died were asked how they are: no connection is under way when the test ends."""
    await until(lambda: all(engine.probes for engine in fleet_.engines if engine.calls))


FAILURES: dict[str, tuple[Any, type[openai.APIStatusError], int, str | None]] = {
    "wrong field": (
        answer(
            400, {"error": {"message": "top_k: no", "type": "x", "param": "top_k", "code": "y"}}
        ),
        openai.BadRequestError,
        400,
        "y",
    ),
    "too large for the engine": (
        answer(413, {"error": {"message": "no", "type": "x"}}),
        openai.APIStatusError,
        413,
        None,
    ),
    "all dead": (die, openai.InternalServerError, 502, "upstream_failed"),
    "all drain": (
        answer(503, {"error": {"message": "I drain", "code": "x"}}),
        openai.InternalServerError,
        503,
        "no_instances",
    ),
    "too slow": (hang, openai.InternalServerError, 504, "timeout"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", FAILURES)
async def test_a_failure_is_the_class_that_users_catch(case: str, stream: bool) -> None:
    script, kind, status, code = FAILURES[case]

    timeout_s = 0.3 if case == "too slow" else 10
    async with fleet(request_timeout_s=timeout_s) as fleet_, client_of(fleet_) as client:
        for engine in [await fleet_.engine(kind) for kind in ("P", "P", "P", "P", "D")]:
            engine.script = script
        with pytest.raises(kind) as error:
            await client.completions.create(model="m", prompt="x", stream=stream)
        assert error.value.status_code == status
        assert error.value.code == code
        assert ("retry-after" in error.value.response.headers) == (status == 503)
        if case == "wrong field":
            assert error.value.param == "top_k"
        if script is die:
            await probed(fleet_)
        if script is hang:
            calls = [call for engine in fleet_.engines for call in engine.calls]
            await until(lambda: bool(calls) and all(call.is_closed for call in calls))


async def test_who_is_over_the_limits_sees_when_to_come_again() -> None:
    limits = AdmissionLimits(requests=1, queue_entries=0)
    async with pair(limits=limits) as (fleet_, p, _), client_of(fleet_) as client:
        p.script = hang
        first = asyncio.create_task(client.completions.create(model="m", prompt="x"))
        await until(lambda: p.served == 1)
        with pytest.raises(openai.RateLimitError) as error:
            await client.completions.create(model="m", prompt="y")
        assert error.value.code == "queue_full"
        assert int(error.value.response.headers["retry-after"]) >= 1
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await until(lambda: p.calls[0].is_closed)
        p.script = serve_model
        assert (await client.completions.create(model="m", prompt="z")).choices


async def test_a_stream_that_fails_raises_in_the_loop_over_it() -> None:
    async with fleet() as fleet_, client_of(fleet_) as client:
        for kind in "PD":  # vLLM's: nobody can go on for them
            engine = await fleet_.engine(kind, is_ours=False)
        engine.script = begin_and_die
        stream = await client.completions.create(model="m", prompt="x", max_tokens=4, stream=True)
        assert (await anext(stream)).choices[0].text == "t0.0 "
        with pytest.raises(openai.APIError, match="generating instance failed") as error:
            await anext(stream)
        assert error.value.code == "decode_failed"
        await probed(fleet_)


async def test_a_client_that_times_out_or_leaves_its_stream_frees_the_engines() -> None:
    async with pair() as (fleet_, p, d), client_of(fleet_) as client:
        p.script = hang
        timeout_s = 0.25
        while not p.calls:  # a slow machine does not get to P within the first
            with pytest.raises(openai.APITimeoutError):
                await client.completions.create(model="m", prompt="x", timeout=timeout_s)
            timeout_s *= 2
        await until(lambda: all(call.is_closed for call in p.calls))
        p.script, d.script = serve_model, begin_and_hang
        stream = await client.completions.create(model="m", prompt="x", stream=True, timeout=None)
        await anext(aiter(stream))
        await stream.close()
        await until(lambda: bool(d.calls) and d.calls[0].is_closed)
        await until(lambda: fleet_.metric("xpyd_router_in_flight") == 0)

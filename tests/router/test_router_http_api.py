"""The HTTP surface: state, models, errors in OpenAI's format, bad input, back-pressure."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import openai
import orjson
import pytest

from tests.router.fakes import (
    Call,
    Fleet,
    HttpEngine,
    fleet,
    pair,
    parse_events,
    sse,
    start_stream,
    text_of,
    until,
)
from xpyd_core.messages import InstanceType

pytestmark = pytest.mark.usefixtures("both_ways")


async def test_a_router_that_starts_is_healthy_and_is_ready_with_its_first_pair() -> None:
    async with fleet() as fleet_:
        async with fleet_.http.get(f"{fleet_.base}/health") as response:
            assert response.status == 200
        async with await fleet_.post() as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "3"
            assert (await response.json())["error"]["type"] == "server_error"
        assert await readiness(fleet_) == (503, "starting")
        assert await readiness(fleet_, "?pairs=true") == (503, "no instances")
        await fleet_.engine("P")
        assert await readiness(fleet_) == (503, "starting")
        await fleet_.engine("D")
        assert await readiness(fleet_) == (200, "ready")
        assert await readiness(fleet_, "?pairs=true") == (200, "ready")
        assert await has_pair(fleet_) == 1.0


@pytest.mark.parametrize("path", ["/metrics", "/instances", "/admin/state", "/admin"])
async def test_what_is_not_for_clients_is_not_on_their_port_which_says_where_it_is(
    path: str,
) -> None:
    async with fleet() as made, made.http.get(f"{made.base}{path}") as response:
        assert response.status == 404
        said = (await response.json())["error"]["message"]
        assert f"the admin port, {made.router.admin_port} (--admin-port)" in said


async def test_the_admin_port_serves_no_clients_and_says_how_the_router_is() -> None:
    async with pair() as (made, _, __):
        for path in ("/health", "/readiness", "/version"):
            async with made.http.get(f"{made.admin}{path}") as response:
                assert response.status == 200
        body = {"model": "m", "prompt": "x"}
        async with made.http.post(f"{made.admin}/v1/completions", json=body) as response:
            assert response.status == 404
            said = (await response.json())["error"]["message"]
            assert f"clients ask port {made.router.http_port} (--port)" in said


async def readiness(fleet_: Fleet, query: str = "") -> tuple[int, str]:
    async with fleet_.http.get(f"{fleet_.base}/readiness{query}") as response:
        return response.status, (await response.json())["status"]


async def has_pair(fleet_: Fleet) -> float:
    async with fleet_.http.get(f"{fleet_.admin}/metrics") as response:
        lines = (await response.text()).splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith("xpyd_router_has_pair ")]
    return float(value)


@pytest.mark.parametrize("lost", ["P", "D"])
async def test_a_router_that_loses_its_last_pair_stays_ready_and_says_that_it_has_none(
    lost: InstanceType,
) -> None:
    """Without endpoints a Service refuses connections, and no request would reach the queue."""
    async with fleet() as fleet_:
        engines = {kind: await fleet_.engine(kind) for kind in ("P", "D")}
        assert await readiness(fleet_) == (200, "ready")
        await fleet_.beat(engines[lost], state="Gone")
        assert await readiness(fleet_) == (200, "ready")
        assert await readiness(fleet_, "?pairs=true") == (503, "no instances")
        assert await has_pair(fleet_) == 0.0


async def test_a_question_for_pairs_that_is_neither_true_nor_false_is_refused() -> None:
    async with fleet() as fleet_:
        async with fleet_.http.get(f"{fleet_.base}/readiness?pairs=yes") as response:
            assert response.status == 400
            error = (await response.json())["error"]
        assert (error["param"], error["message"]) == ("pairs", "pairs: expected true or false")


async def test_instances_shows_the_registry() -> None:
    async with pair() as (fleet_, p, d):
        await fleet_.beat(d, state="Draining", running=3)
        async with fleet_.http.get(f"{fleet_.admin}/instances") as response:
            found = (await response.json())["instances"]
        assert [i["http_address"] for i in found] == sorted(i["http_address"] for i in found)
        by_type = {i["type"]: i for i in found}
        assert by_type["P"]["zmq_address"] == p.beat.zmq_address
        assert by_type["D"]["state"] == "Draining"
        assert by_type["D"]["load"]["running"] == 3
        assert by_type["P"]["age_seconds"] >= 0
        async with fleet_.http.get(f"{fleet_.admin}/metrics") as response:
            text = await response.text()
        assert 'xpyd_router_instances{state="Draining",type="D"} 1.0' in text


async def test_models_are_those_that_can_be_served_now() -> None:
    async with pair() as (fleet_, p, d):
        await fleet_.beat(p, models=("m", "org/other"))
        await fleet_.beat(d, models=("m", "org/other"))
        async with fleet_.http.get(f"{fleet_.base}/v1/models") as response:
            assert [m["id"] for m in (await response.json())["data"]] == ["m", "org/other"]
        async with fleet_.http.get(f"{fleet_.base}/v1/models/org/other") as response:
            assert (await response.json())["id"] == "org/other"
        async with fleet_.http.get(f"{fleet_.base}/v1/models/none") as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
    ],
)
async def test_wrong_paths_and_methods_are_openai_errors(
    method: str, path: str, status: int
) -> None:
    async with fleet() as f, f.http.request(method, f.base + path) as response:
        assert response.status == status
        assert (await response.json())["error"]["message"]
        assert ("Allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"{", 400),
        (b'{"model": "m", "temperature": NaN}', 400),
        (b'{"model": "other"}', 404),
        (b'{"model": "m", "prompt": "' + b"x" * 70_000 + b'"}', 413),
    ],
)
async def test_bad_bodies_are_refused_before_any_engine(data: bytes, status: int) -> None:
    async with pair(max_body_bytes=65536) as (fleet_, p, d):
        url = f"{fleet_.base}/v1/completions"
        async with fleet_.http.post(url, data=data) as response:
            assert response.status == status
            assert (await response.json())["error"]["message"]
        assert p.served + d.served == 0
        await until(lambda: fleet_.metric("xpyd_router_in_flight") == 0)


@pytest.mark.parametrize(
    ("body", "server"), [({"max_tokens": 1}, "P"), ({"echo": True}, "D"), ({}, "PD")]
)
async def test_who_serves_what(body: dict[str, Any], server: str) -> None:
    async with pair() as (fleet_, p, d):
        await fleet_.json(**body)
        assert (p.served, d.served) == (int("P" in server), int("D" in server))
        alone = (p if server == "P" else d).calls[0]
        if server != "PD":
            assert len(alone.request_id) == 32
            assert "kv_transfer_params" not in alone.body


async def test_old_engines_get_the_clients_bytes_and_nothing_added() -> None:
    async with fleet() as fleet_:
        p = await fleet_.engine("P", is_ours=False)
        d = await fleet_.engine("D", is_ours=False)
        raw = b'{ "model":"anything", "prompt":"a",  "max_tokens":3,"stream":true, "x":1.0 }'
        url = f"{fleet_.base}/v1/completions"
        async with fleet_.http.post(url, data=raw) as response:
            events = parse_events(await response.read())
        assert text_of(events) == "t0.0 t0.1 t0.2 "
        assert d.calls[0].raw == raw
        assert p.calls[0].body == {
            "model": "anything",
            "prompt": "a",
            "max_tokens": 1,
            "stream": False,
            "x": 1.0,
        }
        assert p.calls[0].request_id == d.calls[0].request_id


async def test_an_aggregated_instance_serves_alone() -> None:
    async with fleet() as fleet_:
        one = await fleet_.engine("A")
        assert text_of(await fleet_.events()) == "t0.0 t0.1 t0.2 t0.3 "
        await fleet_.json()
        streamed, whole = one.calls
        assert len(streamed.request_id) == len(whole.request_id) == 32
        # With each chunk's ids another one can go on, should this one die.
        assert streamed.body["kv_transfer_params"]["continue_from"] == [[]]
        assert "kv_transfer_params" not in whole.body


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_choices_that_end_at_their_first_token_never_reach_d(path: str, stream: bool) -> None:
    async with pair() as (fleet_, p, d):
        p.stop_at = d.stop_at = {0: 1}
        if stream:
            events = await fleet_.events(path, stream_options={"include_usage": True})
            assert text_of(events) == "t0.0 "
            assert events[-3]["choices"][0]["finish_reason"] == "stop"
            assert events[-2]["usage"]["total_tokens"] == 6
            assert events[-1] == "[DONE]"
        else:
            body = await fleet_.json(path)
            assert body["choices"][0]["finish_reason"] == "stop"
            assert "token_ids" not in body["choices"][0]
            assert "kv_transfer_params" not in body
        assert d.served == 0


async def test_one_living_choice_is_enough_for_d() -> None:
    async with pair() as (fleet_, p, d):
        p.stop_at = d.stop_at = {0: 1}
        events = await fleet_.events(n=2)
        assert text_of(events, 0) == "t0.0 "
        assert text_of(events, 1) == "t1.0 t1.1 t1.2 t1.3 "
        finishes = [
            (c["index"], c["finish_reason"])
            for e in events[:-1]
            for c in e["choices"]
            if c["finish_reason"]
        ]
        assert finishes == [(0, "stop"), (1, "length")]
        assert d.served == 1


async def test_token_ids_are_all_there_when_asked_for() -> None:
    async with pair() as (fleet_, _, __):
        events = await fleet_.events(return_token_ids=True)
        ids = [i for e in events[:-1] for c in e["choices"] for i in c.get("token_ids", ())]
        assert ids == [0, 1, 2, 3]


async def test_the_clients_request_id_is_echoed_and_not_sent_on() -> None:
    async with pair() as (fleet_, p, d):
        fake = "___prefill_addr_1.2.3.4:5___decode_addr_1.2.3.4:6_" + "0" * 32
        async with await fleet_.post(headers={"X-Request-Id": fake}) as response:
            assert response.headers["X-Request-Id"] == fake
        assert fake not in (p.calls[0].request_id, d.calls[0].request_id)
        async with await fleet_.post() as response:
            assert response.headers["X-Request-Id"] == (await response.json())["id"]


async def test_one_line_per_request_has_the_id_of_ps_and_ds_lines(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "xpyd_router")

    async with pair(logs_json=True) as (fleet_, p, d):
        await fleet_.events()
        await until(lambda: fleet_.metric("xpyd_router_in_flight") == 0)
        fleet_.router.state.access_log.flush()
        [line] = map(orjson.loads, capfd.readouterr().err.splitlines())
        assert line["message"] == "POST /v1/completions 200"
        assert line["request"] == p.calls[0].uuid == d.calls[0].uuid
        assert line["prefill"] == p.beat.instance
        assert line["decode"] == d.beat.instance
        assert line["bytes"] > 0
        assert line["tries"] == 1
        labels = {"endpoint": "completions", "status": "200"}
        assert fleet_.metric("xpyd_router_requests_total", **labels) == 1


class Flood:
    """An engine that streams as fast as it is read, without end."""

    def __init__(self) -> None:
        self.written = 0

    async def __call__(self, engine: HttpEngine, call: Call, request: Any) -> Any:
        response = await start_stream(request)
        event = sse({"choices": [{"index": 0, "text": "x" * 60_000}]})
        while True:
            await response.write(event)
            self.written += len(event)


async def stalled_client(fleet_: Fleet) -> asyncio.StreamWriter:
    """A client that reads one line of its stream's head and then nothing."""
    port = fleet_.router.http_port
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
    body = b'{"model":"m","stream":true}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    await reader.readline()
    return writer


async def test_a_slow_client_slows_its_engine_down() -> None:
    async with fleet() as fleet_:
        one = await fleet_.engine("A")
        one.script = flood = Flood()
        writer = await stalled_client(fleet_)
        before = -1
        while flood.written != before:  # until it stands still: the buffers between are full
            before = flood.written
            await asyncio.sleep(0.3)
        assert flood.written < 64 * 1024 * 1024
        writer.transport.abort()
        await until(lambda: one.calls[0].is_closed)


async def test_a_client_that_stopped_reading_loses_its_place_on_the_engine() -> None:
    async with fleet(request_timeout_s=0.5) as fleet_:
        one = await fleet_.engine("A")
        one.script = Flood()
        writer = await stalled_client(fleet_)
        await until(lambda: one.calls[0].is_closed)
        await until(lambda: fleet_.metric("xpyd_router_in_flight") == 0)
        writer.transport.abort()


async def test_the_official_client_works() -> None:
    async with pair() as (fleet_, _, __), openai_client(fleet_) as client:
        messages: Any = [{"role": "user", "content": "hello"}]
        chat = await client.chat.completions.create(model="m", messages=messages, max_tokens=4)
        assert chat.choices[0].message.content == "t0.0 t0.1 t0.2 t0.3 "
        stream: Any = await client.chat.completions.create(
            model="m",
            messages=messages,
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
        )
        parts = [part async for part in stream]
        assert parts[0].choices[0].delta.role == "assistant"
        text = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
        assert text == "t0.0 t0.1 t0.2 t0.3 "
        assert parts[-1].usage.completion_tokens == 4
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="none", prompt="x")
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model="m", prompt="x", n=0)


def openai_client(fleet_: Fleet) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{fleet_.base}/v1", api_key="x")

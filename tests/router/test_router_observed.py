"""What operators see of requests: metrics per instance, the access log, headers on their way."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.router.fakes import (
    Call,
    Fleet,
    Generated,
    HttpEngine,
    answer,
    die,
    fleet,
    pair,
    sse,
    start_stream,
    until,
)
from xpyd_router.access_log import AccessLog, Trace, as_words
from xpyd_router.admission import AdmissionLimits

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
pytestmark = pytest.mark.usefixtures("both_ways")


async def idle(fleet_: Fleet) -> None:
    await until(lambda: fleet_.metric("xpyd_router_in_flight") == 0)


async def test_each_instance_has_its_calls_first_tokens_gaps_and_bytes() -> None:
    async with pair() as (fleet_, p, d):
        await fleet_.events()
        whole = await fleet_.json()
        await idle(fleet_)
        metric = fleet_.metric
        on_p = {"engine": p.beat.instance, "phase": "prefill"}
        on_d = {"engine": d.beat.instance, "phase": "decode"}
        assert metric("xpyd_router_engine_requests_total", **on_p) == 2
        assert metric("xpyd_router_engine_requests_total", **on_d) == 2
        assert metric("xpyd_router_engine_in_flight", **on_d) == 0
        assert metric("xpyd_router_engine_call_seconds_count", **on_d) == 2
        # A whole answer of D says nothing about its first token.
        assert metric("xpyd_router_engine_ttft_seconds_count", **on_p) == 2
        assert metric("xpyd_router_engine_ttft_seconds_count", **on_d) == 1
        sent = sum(len(call.raw) for call in d.calls)
        assert metric("xpyd_router_engine_sent_bytes_total", **on_d) == sent
        assert metric("xpyd_router_engine_received_bytes_total", **on_d) > len(orjson.dumps(whole))
        names = {"prefill": p.beat.instance, "decode": d.beat.instance}
        assert metric("xpyd_router_pairs_total", **names) == 2
        labels = {"endpoint": "completions"}
        assert metric("xpyd_router_prompt_tokens_total", **labels) == 10
        assert metric("xpyd_router_output_tokens_total", **labels) == 8


class Stepwise:
    """An engine that streams its next chunk when `steps` is released."""

    def __init__(self) -> None:
        self.steps = asyncio.Semaphore(0)

    async def __call__(self, engine: HttpEngine, call: Call, request: Any) -> Any:
        response = await start_stream(request)
        events = [sse(chunk) for chunk in Generated(engine, call).chunks()]
        for event in (*events, b"data: [DONE]\n\n"):
            await response.write(event)
            await self.steps.acquire()
        return response


async def test_the_gaps_of_a_stream_are_those_between_its_chunks() -> None:
    async with pair() as (fleet_, _, d):
        d.script = stepwise = Stepwise()
        on_d = {"engine": d.beat.instance, "phase": "decode"}
        async with await fleet_.post(stream=True) as response:
            seen = 0
            async for line in response.content:
                if line.startswith(b"data: "):
                    seen += 1
                    if seen > 1:  # the first is P's
                        stepwise.steps.release()
            await idle(fleet_)
        # Of four tokens P gave one; the choice's end is a chunk, too, and [DONE] is none.
        assert seen == 6
        assert fleet_.metric("xpyd_router_engine_itl_seconds_count", **on_d) == 3
        assert fleet_.metric("xpyd_router_engine_ttft_seconds_count", **on_d) == 1


class Heavy:
    """An engine that streams one chunk, and after `go` more than all buffers hold."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.written = 0

    async def __call__(self, engine: HttpEngine, call: Call, request: Any) -> Any:
        response = await start_stream(request)
        event = sse({"choices": [{"index": 0, "text": "x" * 60_000}]})
        await response.write(event)
        await self.go.wait()
        while self.written < 64 * 1024 * 1024:
            await response.write(event)
            self.written += len(event)
        await response.write(b"data: [DONE]\n\n")
        return response


async def test_a_gap_in_which_the_client_did_not_read_is_not_counted() -> None:
    async with fleet() as fleet_:
        one = await fleet_.engine("A")
        one.script = heavy = Heavy()
        async with await fleet_.post(stream=True) as response:
            data = await response.content.readline()
            heavy.go.set()
            before = -1
            while heavy.written != before:  # until it stands still: all buffers are full
                before = heavy.written
                await asyncio.sleep(0.5)
            data += await response.content.read()
        await idle(fleet_)
        on_a = {"engine": one.beat.instance, "phase": "aggregated"}
        gaps = fleet_.metric("xpyd_router_engine_itl_seconds_count", **on_a)
        # All but the first have a gap before them; some of these gaps the client made.
        assert 0 < gaps < data.count(b'"choices"') - 1


async def test_a_call_that_fails_or_is_given_up_is_in_flight_no_more() -> None:
    async with fleet() as fleet_:
        bad, _, d = [await fleet_.engine(kind) for kind in ("P", "P", "D")]
        bad.script = die
        for _ in range(2):
            await fleet_.json()
        d.script = answer(400, {"error": {"message": "no"}})
        async with await fleet_.post() as response:
            assert response.status == 400
        await idle(fleet_)
        on_bad = {"engine": bad.beat.instance, "phase": "prefill"}
        assert fleet_.metric("xpyd_router_engine_in_flight", **on_bad) == 0
        # It answers probes, so it may have been tried for each request.
        assert bad.served > 0
        assert fleet_.metric("xpyd_router_engine_requests_total", **on_bad) == bad.served
        assert fleet_.metric("xpyd_router_engine_retries_total", **on_bad) == bad.served
        on_d = {"engine": d.beat.instance, "phase": "decode"}
        assert fleet_.metric("xpyd_router_engine_in_flight", **on_d) == 0
        assert fleet_.metric("xpyd_router_engine_requests_total", **on_d) == 3
        errors = fleet_.metric(
            "xpyd_router_engine_errors_total", engine=bad.beat.instance, phase="prefill",
            cause="reset",
        )  # fmt: skip
        assert errors == bad.served


async def test_prometheus_can_read_all_of_it() -> None:
    async with pair() as (fleet_, _, __):
        await fleet_.events()
        async with fleet_.http.get(f"{fleet_.admin}/metrics") as response:
            text = await response.text()
        families = list(text_string_to_metric_families(text))
        names = [family.name for family in families]
        assert len(set(names)) == len(names)
        assert {"xpyd_router_requests", "xpyd_router_engine_itl_seconds"} <= set(names)


def lines_of(capfd: pytest.CaptureFixture[str], fleet_: Fleet) -> list[str]:
    fleet_.router.state.access_log.flush()
    return capfd.readouterr().err.splitlines()


async def test_a_line_has_all_phases_tokens_and_the_clients_ids(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "xpyd_router")

    async with pair(logs_json=True) as (fleet_, _, __):
        headers = {"traceparent": PARENT, "X-Request-Id": "mine"}
        events = await fleet_.events(headers=headers)
        whole = await fleet_.json(headers=headers)
        await idle(fleet_)
        streamed, at_once = map(orjson.loads, lines_of(capfd, fleet_))
        for line, response in ((streamed, events[0]["id"]), (at_once, whole["id"])):
            assert (line["path"], line["status"]) == ("/v1/completions", 200)
            assert line["trace"] == TRACE
            assert line["client_id"] == "mine"
            assert line["response"] == response
            assert line["model"] == "m"
            assert (line["prompt_tokens"], line["output_tokens"]) == (5, 4)
            parts = [line[f"{n}_seconds"] for n in ("queue", "prefill", "decode")]
            assert 0 <= sum(parts) <= line["seconds"] + 0.001
            assert min(parts[1:]) > 0
        assert 0 < streamed["first_byte_seconds"] <= streamed["seconds"]
        assert "first_byte_seconds" not in at_once


async def test_tokens_of_a_stream_that_passes_as_it_is_are_those_of_its_last_chunk(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "xpyd_router")

    async with fleet(logs_json=True) as fleet_:
        await fleet_.engine("P", is_ours=False)
        await fleet_.engine("D", is_ours=False)
        await fleet_.events(stream_options={"include_usage": True})
        await fleet_.events()
        await idle(fleet_)
        told, untold = map(orjson.loads, lines_of(capfd, fleet_))
        assert (told["prompt_tokens"], told["output_tokens"]) == (5, 4)
        assert "output_tokens" not in untold


@pytest.mark.parametrize(
    ("limits", "said"), [(AdmissionLimits(requests=1), [0, -1, 100]), (AdmissionLimits(), [])]
)
async def test_a_line_has_the_priority_that_admission_went_by(
    limits: AdmissionLimits,
    said: list[int],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO, "xpyd_router")

    async with pair(logs_json=True, limits=limits) as (fleet_, _, __):
        await fleet_.json()
        await fleet_.json(priority=-1)
        await fleet_.json(priority=-1, headers={"X-Xpyd-Priority": "Low"})
        await idle(fleet_)
        lines = [orjson.loads(line) for line in lines_of(capfd, fleet_)]
        assert len(lines) == 3
        assert [line["priority"] for line in lines if "priority" in line] == said


async def test_the_log_can_be_turned_off(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "xpyd_router")

    async with pair(access_log=False) as (fleet_, _, __):
        await fleet_.json()
        await idle(fleet_)
        assert not [line for line in lines_of(capfd, fleet_) if "router.access" in line]


async def test_what_a_client_chose_cannot_make_lines_or_fields(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "xpyd_router")
    written: list[bytes] = []
    log = AccessLog(is_json=False, wall_clock=lambda: 0.0, write=written.append)
    trace = Trace("completions", 0.0, model='a b"\n2026 x=1', client_id="x status=1")
    trace.sent_bytes = 10**6

    log.add(trace, 404, 1.0)
    log.flush()
    [line] = b"".join(written).splitlines()
    assert line.endswith(rb'model="a b\"\n2026 x=1" client_id="x status=1"')


def test_a_line_of_text_has_the_fields_of_json() -> None:
    full = Trace("completions", 0.0, model="m", client_id="c", trace_id="t", response_id="r")
    full.prefill_s, full.first_s, full.decode_s = 0.25, 0.5, 0.125
    full.priority = -1
    full.kv, full.kv_cause = "recomputed", "no_offer"
    full.prompt_tokens, full.output_tokens, full.failures = 3, 4, ["prefill:reset", "decode:lost"]
    full.prefill, full.decode, full.request, full.tries = "p-0", "d-0", "f" * 32, 2
    for trace in (full, Trace("completions", 0.0)):
        words = as_words(trace, 1.5).split()
        assert [word.partition("=")[0] for word in words] == list(trace.extra(1.5))
        for word, value in zip(words, trace.extra(1.5).values(), strict=True):
            text = word.partition("=")[2]
            assert float(text) == value if isinstance(value, float) else text == str(value)


async def test_trace_context_and_named_headers_reach_both_and_nothing_else() -> None:
    async with pair(forward_headers=("X-Tenant",)) as (fleet_, p, d):
        headers = {
            "traceparent": PARENT,
            "tracestate": "a=1",
            "x-tenant": "blue é",
            "Authorization": "Bearer secret",
            "Cookie": "a=b",
            "X-Request-Id": "mine",
        }
        await fleet_.events(headers=headers)
        for engine in (p, d):
            [call] = engine.calls
            own = {"host", "content-type", "content-length", "x-request-id", "x-xpyd-pair-mac"}
            assert set(call.headers) == own | {"traceparent", "tracestate", "x-tenant"}
            assert call.headers["traceparent"] == PARENT
            assert call.headers["x-tenant"] == "blue é"
            assert call.headers["x-request-id"] == call.request_id != "mine"


async def test_a_header_that_is_too_long_is_refused_before_any_engine() -> None:
    async with pair(forward_headers=("X-Tenant",)) as (fleet_, p, _):
        async with await fleet_.post(headers={"X-Tenant": "a" * 8000}) as response:
            assert response.status == 200
        too_long = {"X-Tenant": "a" * 8001, "X-Request-Id": "mine"}
        async with await fleet_.post(headers=too_long) as response:
            assert response.status == 431
            assert response.headers["X-Request-Id"] == "mine"
            assert "X-Tenant" in (await response.json())["error"]["message"]
        assert p.served == 1

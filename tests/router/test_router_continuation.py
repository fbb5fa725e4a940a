"""A D that dies in its stream: another goes on, and the client sees one whole answer."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from tests.router.fakes import (
    Call,
    Fleet,
    Generated,
    HttpEngine,
    Script,
    answer,
    fleet,
    serve_model,
    sse,
    start_stream,
    text_of,
)


def dies_after(events: int, cut: int = 0) -> Script:
    """An engine that streams `events` events and `cut` bytes of the next, and then dies; from its
    second call on it serves."""
    calls = 0

    async def script(engine: HttpEngine, call: Call, request: web.Request) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            return await serve_model(engine, call, request)
        response = await start_stream(request)
        chunks = list(Generated(engine, call).chunks())
        for chunk in chunks[:events]:
            await response.write(sse(chunk))
        if cut and events < len(chunks):
            await response.write(sse(chunks[events])[:cut])
        assert request.transport is not None
        request.transport.close()
        return response

    return script


def finishes(events: list[Any]) -> list[tuple[int, str]]:
    return [
        (c["index"], c["finish_reason"])
        for e in events
        if e != "[DONE]"
        for c in e["choices"]
        if c["finish_reason"]
    ]


@pytest.mark.parametrize(
    ("path", "cut"), [("completions", 0), ("chat/completions", 30), ("completions", 200)]
)
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"n": 2},
        {"n": 3, "return_token_ids": True},
        {"logprobs": True},
        {"stream_options": {"include_usage": True}},
        {"n": 2, "stream_options": {"include_usage": True}},
    ],
)
@pytest.mark.parametrize("events_before", [0, 1, 3, 4, 6, 8, 9])
async def test_the_answer_is_whole_wherever_d_dies(
    path: str, cut: int, body: dict[str, Any], events_before: int
) -> None:
    async with fleet() as fleet_:
        for kind in "PDD":
            engine = await fleet_.engine(kind)
            engine.stop_at = {1: 3}
        fleet_.engines[1].script = fleet_.engines[2].script = dies_after(events_before, cut)
        got = await fleet_.events(path, max_tokens=6, **body)
        choices = body.get("n", 1)
        for choice in range(choices):
            length = 3 if choice == 1 else 6
            want = "".join(f"t{choice}.{i} " for i in range(length))
            assert text_of(got, choice) == want
        assert sorted(finishes(got)) == [
            (choice, "stop" if choice == 1 else "length") for choice in range(choices)
        ]
        assert got.count("[DONE]") == 1
        assert got[-1] == "[DONE]"
        assert len({event["id"] for event in got[:-1]}) == 1
        roles = [e for e in got[:-1] if e["choices"] and "role" in e["choices"][0].get("delta", {})]
        assert len(roles) == (choices if path != "completions" else 0)
        ids = [i for e in got[:-1] for c in e["choices"] for i in c.get("token_ids", ())]
        if "return_token_ids" in body:
            assert sorted(ids) == [0, 1, 2, 3, 4, 5, 100, 101, 102, *range(200, 206)]
        else:
            assert ids == []
        usage = [e["usage"] for e in got[:-1] if e.get("usage")]
        if "stream_options" in body:
            assert usage == [
                {
                    "prompt_tokens": 5,
                    "completion_tokens": 9 if choices == 2 else 6,
                    "total_tokens": 14 if choices == 2 else 11,
                }
            ]
        else:
            assert usage == []


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("events_before", [0, 2, 5])
async def test_an_aggregated_stream_goes_on_at_another(path: str, events_before: int) -> None:
    async with fleet() as fleet_:
        one, other = await fleet_.engine("A"), await fleet_.engine("A")
        one.script = other.script = dies_after(events_before)
        got = await fleet_.events(path, max_tokens=6)
        assert text_of(got) == "".join(f"t0.{i} " for i in range(6))
        assert got.count("[DONE]") == 1
        roles = [e for e in got[:-1] if "role" in e["choices"][0].get("delta", {})]
        assert len(roles) == (1 if path != "completions" else 0)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("events_before", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, 2])
async def test_one_token_alone_on_p_is_answered_wherever_p_dies(
    path: str, events_before: int, n: int
) -> None:
    async with fleet() as fleet_:
        ps = [await fleet_.engine("P"), await fleet_.engine("P")]
        await fleet_.engine("D")
        ps[0].script = ps[1].script = dies_after(events_before)
        options = {"include_usage": True}
        got = await fleet_.events(path, max_tokens=1, n=n, stream_options=options)
        assert [text_of(got, choice) for choice in range(n)] == ["t0.0 ", "t1.0 "][:n]
        assert sorted(finishes(got)) == [(choice, "length") for choice in range(n)]
        assert [e for e in got if e == "[DONE]"] == ["[DONE]"] == got[-1:]
        assert len({event["id"] for event in got[:-1]}) == 1
        usage = [e["usage"] for e in got[:-1] if e.get("usage")]
        assert [one["completion_tokens"] for one in usage] == [n]


async def test_what_shows_the_prompt_is_asked_for_as_it_is() -> None:
    async with fleet() as fleet_:
        p, d = await fleet_.engine("P"), await fleet_.engine("D")
        for limit in (1, 6):
            await fleet_.events(max_tokens=limit, echo=True)
        assert [call.body.get("kv_transfer_params") for call in p.calls + d.calls] == [None] * 2


async def test_a_stream_that_failed_everywhere_ends_in_an_error_and_without_done() -> None:
    async with fleet() as fleet_:
        for kind in "PDDDD":
            engine = await fleet_.engine(kind)
            if kind == "D":
                engine.script = dies_after(1)
        got = await fleet_.events(max_tokens=100)
        assert got[-1]["error"]["code"] == "upstream_failed"
        assert "[DONE]" not in got
        text = text_of(got[:-1])
        count = len(text.split())
        assert text == "".join(f"t0.{i} " for i in range(count))
        assert count < 100


async def test_only_instances_of_the_same_compatibility_go_on() -> None:
    async with fleet() as fleet_:
        await fleet_.engine("P")
        d = await fleet_.engine("D")
        d.script = dies_after(1)
        others = [
            await fleet_.engine("P", compatibility="other"),
            await fleet_.engine("D", compatibility="other"),
        ]
        for other in others:
            other.script = answer(400, {"error": {"message": "x"}})
        while not d.calls:
            got = await fleet_.events()
        assert got[-1]["error"]


@pytest.mark.parametrize("kinds", ["AA", "PPD"])
@pytest.mark.parametrize("events_before", [0, 1, 2])
async def test_every_chunk_alone_has_the_running_usage_that_was_asked_for(
    kinds: str, events_before: int
) -> None:
    async with fleet() as fleet_:
        script = dies_after(events_before)
        for kind in kinds:
            engine = await fleet_.engine(kind)
            engine.script = serve_model if kind == "D" else script
        options = {"include_usage": True, "continuous_usage_stats": True}
        got = await fleet_.events("chat/completions", max_tokens=1, stream_options=options)
        assert text_of(got) == "t0.0 "
        assert [e["choices"][0]["delta"].get("role") for e in got[:1]] == ["assistant"]
        counts = [(e["usage"]["prompt_tokens"], e["choices"] == []) for e in got[:-1]]
        assert counts == [(5, False)] * (len(got) - 2) + [(5, True)]


def leaves_and_dies(fleet_: Fleet, state: str, events: int = 2) -> Script:
    """Streams `events` events, says that it is in `state`, and dies."""

    async def script(engine: HttpEngine, call: Call, request: web.Request) -> Any:
        response = await start_stream(request)
        for chunk in list(Generated(engine, call).chunks())[:events]:
            await response.write(sse(chunk))
        await fleet_.beat(engine, state=state)
        assert request.transport is not None
        request.transport.close()
        return response

    return script


@pytest.mark.parametrize(("state", "cuts"), [("Draining", 1), ("Gone", 1), ("Ready", 0)])
async def test_a_stream_that_a_drain_cut_and_another_finished_is_counted_as_continued(
    caplog: pytest.LogCaptureFixture, state: str, cuts: int
) -> None:
    caplog.set_level("INFO")
    async with fleet() as fleet_:
        for kind in "PDD":
            await fleet_.engine(kind)
        fleet_.engines[1].script = leaves_and_dies(fleet_, state)
        for _ in range(2):  # turns: one of the two meets it
            assert text_of(await fleet_.events(max_tokens=6)).count("t0.") == 6
        name = "xpyd_router_drain_cuts_total"
        assert fleet_.metric(name, outcome="continued") == cuts
        assert fleet_.metric(name, outcome="failed") == 0
        said = [r.message for r in caplog.records if "call failed" in r.message]
        assert [line.endswith("; its drain ended") for line in said] == [bool(cuts)]
        assert sum("continued elsewhere" in r.message for r in caplog.records) == cuts


async def test_a_stream_that_a_drain_cut_and_nobody_finished_is_counted_as_failed() -> None:
    async with fleet(max_tries=1) as fleet_:
        await fleet_.engine("P")
        d = await fleet_.engine("D")
        d.script = leaves_and_dies(fleet_, "Draining")
        await fleet_.events(max_tokens=6)
        name = "xpyd_router_drain_cuts_total"
        assert fleet_.metric(name, outcome="failed") == 1
        assert fleet_.metric(name, outcome="continued") == 0

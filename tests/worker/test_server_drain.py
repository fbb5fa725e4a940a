"""POST /drain, POST /reset_prefix_cache: who may ask; what the first answers. The process' side:
test_worker_ends.py."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.worker.server_fakes import KEY, ScriptedEngine, say, serving
from xpyd_core.calls import Caller, check_caller
from xpyd_core.errors import ApiError
from xpyd_core.keys import INSECURE_KEYS, call_mac

MINE = "my-inc"
BODY = {"incarnation": MINE}
OTHER_KEY = b"x" * 32


def status_of(
    *,
    keys: tuple[bytes, ...],
    peer: str | None = "127.0.0.1",
    own: str | None = "127.0.0.1",
    mac: str = "",
    headers: tuple[str, ...] = (),
    body: Any = BODY,
) -> int:
    caller = Caller(peer, own, mac, {"host", "content-type", *headers})
    try:
        check_caller(caller, body, purpose="drain", keys=keys, incarnation=MINE)
    except ApiError as error:
        return error.status
    return 202


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({"mac": call_mac(KEY, "drain", MINE)}, 202),
        ({"mac": call_mac(KEY, "drain", MINE), "peer": "203.0.113.9", "own": "10.0.0.5"}, 202),
        (
            {"mac": call_mac(OTHER_KEY, "drain", MINE)},
            202,
        ),  # the second key, while keys are rotated
        ({}, 403),
        ({"mac": call_mac(b"y" * 32, "drain", MINE)}, 403),
        ({"mac": call_mac(b"", "drain", MINE)}, 403),
        ({"mac": call_mac(KEY, "kv-release", MINE)}, 403),
        ({"mac": call_mac(KEY, "kv-probe", MINE)}, 403),
        ({"mac": call_mac(KEY, "reset_prefix_cache", MINE)}, 403),
        ({"mac": call_mac(KEY, "drain", "other")}, 403),
        # Right for another process: overheard there, or this one is a later start.
        ({"mac": call_mac(KEY, "drain", "other"), "body": {"incarnation": "other"}}, 409),
        ({"mac": call_mac(KEY, "drain", MINE), "body": {}}, 400),
        ({"mac": call_mac(KEY, "drain", MINE), "body": {"incarnation": 7}}, 400),
    ],
)
def test_with_a_key_whoever_has_it_may_drain_this_process(given: Any, status: int) -> None:
    assert status_of(keys=(KEY, OTHER_KEY), **given) == status


@pytest.mark.parametrize("keys", [(), INSECURE_KEYS])
@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({}, 202),
        ({"peer": "::1", "own": "::1", "body": {}}, 202),
        ({"peer": "10.0.0.5", "own": "10.0.0.5"}, 202),
        ({"peer": "127.1.0.4", "own": "127.1.0.5"}, 202),
        ({"peer": "10.0.0.6", "own": "10.0.0.5"}, 403),
        ({"peer": "10.0.0.6", "own": "127.0.0.1"}, 403),
        ({"peer": None, "own": None}, 403),
        ({"headers": ("origin",)}, 403),
        ({"headers": ("x-forwarded-for",)}, 403),
        ({"headers": ("forwarded",)}, 403),
        ({"headers": ("via",)}, 403),
        ({"headers": ("x-forwarded-proto",)}, 403),
        ({"headers": ("x-real-ip",)}, 403),
        ({"headers": ("sec-fetch-site",)}, 403),
    ],
)
def test_without_a_key_only_this_machine_may(
    keys: tuple[bytes, ...], given: Any, status: int
) -> None:
    assert status_of(keys=keys, **given) == status


async def test_drain_says_what_is_left_and_new_requests_get_503() -> None:
    engine = ScriptedEngine(say("x" * 20), step_s=0.01)
    async with serving(engine, keys=()) as server:
        body = {"prompt": "hi", "max_tokens": 30}
        running = asyncio.create_task(server.post("/v1/completions", body))
        await engine.submitted(1)
        for _ in range(2):
            answer = await server.client.post("/drain")
            assert answer.status_code == 202
            found = answer.json()
            assert (found["state"], found["requests"], found["idle"]) == ("Draining", 1, False)
            assert found["seconds_left"] == 12.3
        refused = await server.post("/v1/completions", {"prompt": "hi"})
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        assert (await running).json()["choices"][0]["text"] == "x" * 20
        left = (await server.client.post("/drain")).json()
        assert (left["requests"], left["idle"]) == (0, True)


async def test_drain_over_http_checks_the_mac_and_changes_nothing_without_it() -> None:
    async with serving() as server:
        answer = await server.post("/drain", BODY)
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "wrong_mac"
        assert server.api.lifecycle.state == "Ready"
        good = {"X-Xpyd-Mac": call_mac(KEY, "drain", MINE)}
        assert (await server.post("/drain", BODY, **good)).status_code == 202
        assert server.api.lifecycle.state == "Draining"


async def test_a_browser_page_on_this_machine_may_not_drain() -> None:
    async with serving(keys=()) as server:
        answer = await server.client.post("/drain", headers={"Origin": "http://evil.example"})
        assert (answer.status_code, server.api.lifecycle.state) == (403, "Ready")


async def test_the_prefix_cache_is_reset_by_those_who_may_drain() -> None:
    async with serving() as server:
        path = "/reset_prefix_cache"
        assert (await server.client.post(path)).status_code == 400
        for mac, status in (
            (call_mac(KEY, "drain", MINE), 403),
            (call_mac(KEY, "reset_prefix_cache", MINE), 200),
        ):
            answer = await server.post(path, BODY, **{"X-Xpyd-Mac": mac})
            assert answer.status_code == status
        assert answer.json() == {"success": True}
        other = {"X-Xpyd-Mac": call_mac(KEY, "reset_prefix_cache", "other")}
        assert (await server.post(path, {"incarnation": "other"}, **other)).status_code == 409
    async with serving(keys=()) as server:
        assert (await server.client.post(path)).json() == {"success": True}
        forwarded = {"X-Forwarded-For": "203.0.113.9"}
        assert (await server.client.post(path, headers=forwarded)).status_code == 403

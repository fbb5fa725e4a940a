"""The seam in kopf's HTTP: what is heard of a watch, and what kopf is told instead."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from yarl import URL

from xpyd_operator.controller.decision.kinds import POD, Obj
from xpyd_operator.controller.watch import WatchBody, WatchInterceptor, listed

GONE = {"type": "ERROR", "object": {"kind": "Status", "code": 410}}


class Content:
    """A body that comes in given pieces."""

    total_bytes = 7

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        assert size == 1024
        for piece in self._pieces:
            yield piece


def event(change: str, version: int) -> dict[str, Any]:
    metadata = {"name": "a", "resourceVersion": str(version)}
    return {"type": change, "object": {"kind": "Pod", "metadata": metadata}}


def line(told: dict[str, Any]) -> bytes:
    return json.dumps(told).encode() + b"\n"


def relay(*pieces: bytes) -> tuple[list[tuple[str, str]], list[list[dict[str, Any]]]]:
    """What was heard (change, version), and what kopf got, piece by piece."""
    heard: list[tuple[str, str]] = []

    def hear(change: str, obj: dict[str, Any]) -> None:
        heard.append((change, obj["metadata"]["resourceVersion"]))

    async def run() -> list[list[dict[str, Any]]]:
        stream = WatchBody(POD, cast("aiohttp.StreamReader", Content(pieces)), hear)
        got = [piece async for piece in stream.iter_chunked(1024)]
        return [[json.loads(one) for one in piece.splitlines()] for piece in got]

    return heard, asyncio.run(run())


def bookmark(version: int) -> dict[str, Any]:
    return {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}}


def test_events_are_heard_in_order_and_kopf_gets_one_bookmark_for_what_came_at_once() -> None:
    changes = [("ADDED", 5), ("MODIFIED", 6), ("DELETED", 9)]
    heard, told = relay(b"".join(line(event(*change)) for change in changes))
    assert heard == [("ADDED", "5"), ("MODIFIED", "6"), ("DELETED", "9")]
    assert told == [[bookmark(9)]]


@pytest.mark.parametrize("at", [1, 17, 40, -1])
def test_a_line_may_come_in_pieces(at: int) -> None:
    whole = line(event("ADDED", 5)) + line(event("MODIFIED", 6))
    heard, told = relay(whole[:at], whole[at:])
    assert heard == [("ADDED", "5"), ("MODIFIED", "6")]
    assert told[-1] == [bookmark(6)]


def test_a_line_that_was_cut_off_is_neither_heard_nor_passed() -> None:
    heard, told = relay(line(event("ADDED", 5)) + line(event("MODIFIED", 6))[:30])
    assert heard == [("ADDED", "5")]
    assert told == [[bookmark(5)]]


def test_a_bookmark_moves_kopf_on_and_is_no_event() -> None:
    heard, told = relay(line(event("BOOKMARK", 8)))
    assert heard == []
    assert told == [[bookmark(8)]]


@pytest.mark.parametrize("code", [410, 500, 403])
def test_kopf_gets_each_error_as_the_one_that_it_survives(code: int) -> None:
    error = {**GONE, "object": {**GONE["object"], "code": code}}
    heard, told = relay(line(event("ADDED", 5)) + line(error))
    assert heard == [("ADDED", "5")]
    (shown,) = told
    assert shown[0] == bookmark(5)
    assert (shown[1]["type"], shown[1]["object"]["code"]) == ("ERROR", 410)


def test_nothing_is_passed_for_a_piece_without_a_whole_line() -> None:
    assert relay(b"", b"\n", line(event("ADDED", 5))[:10]) == ([], [])


def test_all_else_of_a_body_is_the_streams_own() -> None:
    stream = WatchBody(POD, cast("aiohttp.StreamReader", Content(())), lambda change, obj: None)
    assert cast("Any", stream).total_bytes == 7


def test_a_list_says_where_it_is_from_and_whether_more_follows() -> None:
    pods = [{"metadata": {"name": "a", "namespace": "ns", "uid": "u"}}]
    answer = {"metadata": {"resourceVersion": "12", "continue": "more"}, "items": pods}
    part = listed(POD, "ns", answer, first=True)
    assert (part.version, part.first, part.last) == (12, True, False)
    assert [pod["kind"] for pod in part.objects] == ["Pod"]
    assert listed(POD, None, {"metadata": {"resourceVersion": "x"}}, first=False).version == -1


def intercepted(method: str, url: str, body: Obj) -> tuple[list[tuple[str, str, str]], list[Any]]:
    """What the interceptor of pods counts and sends of a request that is answered with `body`."""
    counted: list[tuple[str, str, str]] = []
    sent: list[Any] = []

    async def run() -> None:
        seam = WatchInterceptor(
            [POD], sent.append, count=lambda *what: counted.append(what), count_event=sent.append
        )
        answer = SimpleNamespace(
            status=200, headers={}, read=lambda: asyncio.sleep(0, json.dumps(body))
        )

        async def handler(request: object) -> object:
            return answer

        request = SimpleNamespace(method=method, url=URL(url))
        assert await seam(cast("Any", request), cast("Any", handler)) is cast("Any", answer)
        assert seam.untried() == ([] if counted else ["pods"])

    asyncio.run(run())
    return counted, sent


PODS = "http://api/api/v1/namespaces/ns/pods"


def test_a_list_of_its_kinds_is_counted_and_sent() -> None:
    counted, sent = intercepted("GET", PODS, {"metadata": {"resourceVersion": "3"}, "items": []})
    assert counted == [("list", "pods", "200")]
    assert [(part.kind, part.namespace, part.version) for part in sent] == [(POD, "ns", 3)]


@pytest.mark.parametrize(
    ("method", "url"),
    [
        ("PATCH", f"{PODS}/a"),
        ("GET", "http://api/healthz"),
        ("GET", "http://api/api/v1/namespaces/ns/configmaps"),
    ],
)
def test_requests_that_are_no_list_of_its_kinds_are_none_of_its_business(
    method: str, url: str
) -> None:
    assert intercepted(method, url, {}) == ([], [])

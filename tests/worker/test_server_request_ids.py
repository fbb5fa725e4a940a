"""X-Request-Id: the caller's own id is in answer, header and log; the router's pair id is not."""

from __future__ import annotations

import logging
import re

import pytest

from tests.worker.server_fakes import run, serving

UUID = "93923d63113b4b338973f24d19d4bf11"
PAIR = f"___prefill_addr_10.0.1.2:21001___decode_addr_10.0.1.3:22001_{UUID}"
PATH, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {PATH: {"prompt": "hi"}, CHAT: {"messages": [{"role": "user", "content": "hi"}]}}
HEX = re.compile(r"[0-9a-f]{32}")


@pytest.mark.parametrize(
    "name", [UUID, "order-17", "4bf92f35-77b3-4da6-a3ce-929d0e0e4736", "a" * 128]
)
@pytest.mark.parametrize(("path", "prefix"), [(PATH, "cmpl"), (CHAT, "chatcmpl")])
def test_the_callers_id_is_in_the_header_the_answers_id_and_the_log(
    path: str, prefix: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with serving() as server:
            answer = await server.post(path, BODIES[path], **{"X-Request-Id": name})
            assert answer.headers["X-Request-Id"] == name
            assert answer.json()["id"] == f"{prefix}-{name}"
            assert server.engine.requests[0].log_id == name
            stream = await server.post(
                path, {**BODIES[path], "stream": True}, **{"X-Request-Id": name}
            )
            assert stream.headers["X-Request-Id"] == name
            assert f'"id":"{prefix}-{name}"' in stream.text

    caplog.set_level(logging.INFO, "xpyd_worker.server.http.inference")
    run(test())
    done = [record for record in caplog.records if record.message == "request done"]
    assert [vars(record)["request"] for record in done] == [name, name]


@pytest.mark.parametrize(
    "name",
    [
        *(None, "", "a" * 129, "two words", 'quo"te', "semi;colon", "ümlaut".encode()),
        # Nearly a pair's: the addresses in it are not for clients.
        f"___prefill_addr_10.0.0.1:21001___decode_addr_10.0.0.2:21001_{'A' * 32}",
    ],
)
async def test_without_a_fit_id_a_fresh_one_is_made(name: str | bytes | None) -> None:
    async with serving() as server:
        headers = [] if name is None else [("X-Request-Id", name)]
        seen: set[str] = set()
        for _ in range(2):
            answer = await server.client.post(PATH, json={"prompt": "hi"}, headers=headers)
            fresh = answer.headers["X-Request-Id"]
            assert HEX.fullmatch(fresh)
            assert answer.status_code == 200
            seen.add(fresh)
        assert [request.log_id for request in server.engine.requests] == [
            *dict.fromkeys(request.log_id for request in server.engine.requests)
        ]
        assert {request.log_id for request in server.engine.requests} == seen


@pytest.mark.parametrize("stream", [False, True])
async def test_a_pair_id_is_nowhere_in_the_answer(stream: bool) -> None:
    async with serving(role="Prefill") as server:
        body = {"prompt": "hi", "max_tokens": 1, "stream": stream}
        answer = await server.post(PATH, body, **{"X-Request-Id": PAIR})
        assert answer.status_code == 200
        shown = answer.text + str(answer.headers.raw)
        assert UUID not in shown
        assert "10.0.1.2" not in shown
        assert "X-Request-Id" not in answer.headers
        assert server.engine.requests[0].log_id == UUID


async def test_refusals_carry_the_id_too() -> None:
    async with serving() as server:
        for path, body in ((PATH, {}), ("/v1/nothing", {}), (PATH, {"prompt": [300]})):
            answer = await server.post(path, body, **{"X-Request-Id": "order-17"})
            assert answer.status_code in (400, 404)
            assert answer.headers["X-Request-Id"] == "order-17"


async def test_one_id_twice_at_once_is_two_requests_in_the_engine() -> None:
    async with serving() as server:
        for _ in range(2):
            await server.post(PATH, {"prompt": "hi"}, **{"X-Request-Id": "order-17"})
        assert len({request.request_id for request in server.engine.requests}) == 2

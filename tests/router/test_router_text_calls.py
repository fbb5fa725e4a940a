"""/tokenize and /detokenize through the router, and what it says of models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.router.fakes import Fleet, HttpEngine, Script, answer, die, fleet, hang, until
from xpyd_router.http.text_calls import MAX_CALLS, SPARE_CALLS
from xpyd_router.keys.lines import line_of, new_key

pytestmark = pytest.mark.usefixtures("both_ways")
PATHS = ("/tokenize", "/detokenize")
TOKENIZED = {"count": 2, "max_model_len": 64, "tokens": [5, 6], "token_strs": None}


@asynccontextmanager
async def engines(kinds: str, script: Script, **config: Any) -> AsyncGenerator[Fleet]:
    async with fleet(**config) as made:
        for kind in kinds:
            # No call ends because beats are missed.
            (await made.engine(kind, period_ms=60_000)).script = script
        yield made


async def post(
    made: Fleet, data: bytes, path: str = "/tokenize", headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any], aiohttp.ClientResponse]:
    async with made.http.post(made.base + path, data=data, headers=headers) as response:
        return response.status, await response.json(), response


@pytest.mark.parametrize("path", PATHS)
async def test_any_instance_of_the_model_answers_in_turn_and_gets_the_clients_bytes(
    path: str,
) -> None:
    names = ("X-Tenant",)
    async with engines("PDA", answer(200, TOKENIZED), forward_headers=names) as made:
        raw = b'{ "model":"m", "prompt": "a b",  "x":1.0 }'
        headers = {"X-Request-Id": "mine", "X-Tenant": "blue", "X-Other": "1"}
        for _ in range(6):
            status, body, response = await post(made, raw, path, headers)
            assert (status, body) == (200, TOKENIZED)
            assert response.headers["X-Request-Id"] == "mine"
        assert [engine.served for engine in made.engines] == [2, 2, 2]
        call = made.engines[0].calls[0]
        assert (call.path, call.raw, call.request_id) == (path, raw, "")
        assert call.headers["x-tenant"] == "blue"
        assert "x-other" not in call.headers


async def test_one_side_without_the_other_is_enough() -> None:
    async with engines("D", answer(200, TOKENIZED)) as made:
        assert (await post(made, b'{"model":"m","prompt":"a"}'))[0] == 200


@pytest.mark.parametrize("script", [die, answer(500, {}), answer(503, {})])
async def test_another_instance_answers_for_one_that_fails(script: Script) -> None:
    async with engines("PD", answer(200, TOKENIZED)) as made:
        made.engines[0].script = script
        for _ in range(2):
            assert (await post(made, b'{"prompt":"a"}'))[:2] == (200, TOKENIZED)
        assert made.engines[1].served == 2


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        (die, 502, "upstream_failed"),
        (answer(500, {}), 502, "upstream_failed"),
        (answer(503, {}), 503, None),
        (hang, 504, "timeout"),
    ],
)
async def test_where_all_fail_the_client_gets_the_routers_error(
    script: Script, status: int, code: str | None
) -> None:
    async with engines("PD", script, prefill_timeout_s=0.2) as made:
        found, body, response = await post(made, b'{"prompt":"a"}')
        assert (found, body["error"]["code"]) == (status, code)
        assert ("Retry-After" in response.headers) == (status == 503)


async def test_an_engines_refusal_comes_back_without_its_address() -> None:
    async with engines("P", hang) as made:
        error = {"error": {"message": f"{made.engines[0].beat.http_address}: bad", "code": 9}}
        made.engines[0].script = answer(400, error)
        status, body, _ = await post(made, b'{"prompt":"a"}')
        assert (status, body) == (400, {"error": {"message": "engine: bad", "code": 9}})


@pytest.mark.parametrize(
    ("data", "status", "param"),
    [
        (b"{", 400, None),
        (b"[]", 400, None),
        (b'{"model": 1}', 400, "model"),
        (b'{"prompt": "\xff"}', 400, None),
        (b'{"model": "other"}', 404, "model"),
        (b'{"prompt": "' + b"x" * 70_000 + b'"}', 413, None),
    ],
)
async def test_bad_bodies_are_refused_before_any_engine(
    data: bytes, status: int, param: str | None
) -> None:
    async with engines("P", answer(200, TOKENIZED), max_body_bytes=65536) as made:
        found, body, _ = await post(made, data)
        assert (found, body["error"]["param"]) == (status, param)
        assert made.engines[0].served == 0


async def test_a_name_is_needed_only_where_there_are_several_models() -> None:
    async with engines("P", answer(200, TOKENIZED)) as made:
        assert (await post(made, b'{"prompt":"a"}'))[0] == 200
        (await made.engine("A", models=("n", "alias"))).script = answer(200, {"count": 9})
        status, body, _ = await post(made, b'{"prompt":"a"}')
        assert (status, body["error"]["param"]) == (400, "model")
        assert (await post(made, b'{"prompt":"a","model":"alias"}'))[1] == {"count": 9}


async def test_without_an_instance_it_is_to_be_tried_again() -> None:
    async with fleet() as made:
        status, body, response = await post(made, b'{"model":"m","prompt":"a"}')
        assert (status, body["error"]["code"]) == (503, "no_instances")
        assert response.headers["Retry-After"] == "3"


async def test_a_client_that_leaves_ends_the_engines_call() -> None:
    async with engines("P", hang) as made:
        call = asyncio.create_task(post(made, b'{"prompt":"a"}'))
        engine: HttpEngine = made.engines[0]
        await until(lambda: engine.served == 1)
        call.cancel()
        await until(lambda: engine.calls[0].is_closed)


async def test_only_so_many_are_open_at_a_time() -> None:
    every = aiohttp.TCPConnector(limit=0)
    async with engines("P", hang) as made, aiohttp.ClientSession(connector=every) as made.http:
        calls = [asyncio.create_task(post(made, b'{"prompt":"a"}')) for _ in range(MAX_CALLS)]
        await until(lambda: made.engines[0].served == MAX_CALLS)
        status, body, _ = await post(made, b'{"prompt":"a"}')
        assert (status, body["error"]["message"]) == (503, "too many texts are being tokenized")
        for call in calls:
            call.cancel()
        await until(lambda: all(each.is_closed for each in made.engines[0].calls))
        made.engines[0].script = answer(200, TOKENIZED)
        assert (await post(made, b'{"prompt":"a"}'))[0] == 200


async def test_a_flood_of_one_key_leaves_room_for_the_texts_of_another(tmp_path: Path) -> None:
    every, keys = aiohttp.TCPConnector(limit=0), (new_key(), new_key())
    lines = [line_of(name, key, {}) for name, key in zip("ab", keys, strict=True)]
    (tmp_path / "keys").write_text("\n".join(lines))
    mine, other = ({"x-api-key": key} for key in keys)
    config = {"api_key_file": tmp_path / "keys"}
    async with (
        engines("P", hang, **config) as made,
        aiohttp.ClientSession(connector=every) as made.http,
    ):

        async def ask(headers: dict[str, str]) -> int:
            return (await post(made, b'{"prompt":"a"}', headers=headers))[0]

        flood = [asyncio.create_task(ask(mine)) for _ in range(2 * MAX_CALLS)]
        refused = MAX_CALLS + SPARE_CALLS
        await until(lambda: sum(one.done() for one in flood) == refused)
        assert {one.result() for one in flood if one.done()} == {503}
        hung = list(made.engines[0].calls)
        made.engines[0].script = answer(200, TOKENIZED)
        assert await ask(other) == 200
        for call in flood:
            call.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        await until(lambda: all(each.is_closed for each in hung))
        assert await ask(mine) == 200


@pytest.mark.parametrize("path", PATHS)
async def test_other_methods_are_refused(path: str) -> None:
    async with fleet() as made, made.http.get(made.base + path) as response:
        assert response.status == 405
        assert set(response.headers["Allow"].split(", ")) == {"OPTIONS", "POST"}


async def test_models_have_the_shortest_context_of_their_instances() -> None:
    async with fleet() as made:
        await made.engine("P", max_model_len=4096)
        d = await made.engine("D", max_model_len=2048)
        await made.engine("A", models=("n",))

        async def lengths() -> dict[str, int | None]:
            async with made.http.get(f"{made.base}/v1/models") as response:
                return {m["id"]: m["max_model_len"] for m in (await response.json())["data"]}

        assert await lengths() == {"m": 2048, "n": None}
        await made.beat(d, max_model_len=1024)
        assert await lengths() == {"m": 1024, "n": None}
        async with made.http.get(f"{made.base}/v1/models/m") as response:
            assert (await response.json())["max_model_len"] == 1024


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_a_404_names_some_of_the_models(path: str) -> None:
    async with fleet() as made:
        await made.engine("A", models=("m", "org/n"))
        status, body, _ = await post(made, b'{"model":"x","prompt":"a"}', path)
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        assert body["error"]["message"] == "The model `x` does not exist. Served: `m`, `org/n`"
        await made.engine("A", models=tuple(f"z{index}" for index in range(20)))
        async with made.http.get(f"{made.base}/v1/models/x") as response:
            message = (await response.json())["error"]["message"]
        names = ", ".join(f"`{name}`" for name in ("m", "org/n", *(f"z{i}" for i in (0, 1, 10))))
        assert message.endswith(f"Served: {names}, `z11`, `z12`, `z13` and 14 more")

"""What the server adds to scheduling: priorities, drawn seeds, resetting the prefix cache."""

from __future__ import annotations

from tests.worker.server_fakes import ScriptedEngine, run, say, serving

BODY = {"model": "fake", "prompt": "p", "max_tokens": 2}


async def test_a_requests_priority_reaches_an_engine_that_has_them() -> None:
    async with serving(has_priorities=True) as server:
        for extra in ({}, {"priority": None}, {"priority": -3}):
            assert (await server.post("/v1/completions", BODY | extra)).status_code == 200
        chat = {"messages": [{"role": "user", "content": "p"}], "priority": 4}
        assert (await server.post("/v1/chat/completions", chat)).status_code == 200
        assert [r.priority for r in server.engine.requests] == [0, 0, -3, 4]


async def test_a_priority_where_the_engine_has_none_is_refused_with_the_fix() -> None:
    async with serving() as server:
        answer = await server.post("/v1/completions", BODY | {"priority": 1})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "priority"
        assert "--scheduling-policy priority" in error["message"]
        assert (await server.post("/v1/completions", BODY | {"priority": 0})).status_code == 200


def test_with_a_seed_the_server_draws_the_same_seeds_at_each_start() -> None:
    async def drawn(seed: int | None) -> list[int]:
        async with serving(seed=seed) as server:
            for extra in ({}, {}, {"seed": 5}, {}):
                await server.post("/v1/completions", BODY | extra)
            return [r.sampling.seed for r in server.engine.requests]

    async def test() -> None:
        first, again, other = await drawn(1), await drawn(1), await drawn(2)
        assert first == again
        assert len({*first, *other}) == 7
        assert first[2] == other[2] == 5
        assert all(0 <= seed < 2**64 for seed in first)
        assert set(await drawn(None)) & set(await drawn(None)) == {5}

    run(test())


async def test_a_reset_of_the_prefix_cache_says_whether_it_is_empty_now() -> None:
    engine = ScriptedEngine(script=say("x"), silent=True)
    async with serving(engine, keys=()) as server:
        answer = await server.post("/reset_prefix_cache", {})
        assert (answer.status_code, answer.json()) == (200, {"success": True})
        engine.living["somebody"] = {0}
        assert (await server.post("/reset_prefix_cache", {})).json() == {"success": False}
        assert (await server.client.get("/reset_prefix_cache")).status_code == 405
        server.bridge.fail()
        assert (await server.post("/reset_prefix_cache", {})).status_code == 500


async def test_before_the_model_is_there_a_reset_waits_like_a_request() -> None:
    async with serving(ready=False) as server:
        assert (await server.post("/reset_prefix_cache", {})).status_code == 503

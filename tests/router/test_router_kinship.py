"""What policies know requests by reaches them: sessions and prompts through HTTP."""

from __future__ import annotations

from typing import Any

from tests.router.fakes import Fleet, HttpEngine, fleet


async def homes(fleet_: Fleet, engines: list[HttpEngine], *bodies: dict[str, Any]) -> list[int]:
    """Which of `engines` each request reaches."""
    found: list[int] = []
    for body in bodies:
        before = [engine.served for engine in engines]
        await fleet_.json(**body)
        (one,) = [i for i, engine in enumerate(engines) if engine.served > before[i]]
        found.append(one)
    return found


async def test_a_session_of_the_body_or_the_header_stays_on_its_pair() -> None:
    async with fleet(policy="SessionAffinity") as fleet_:
        ps = [await fleet_.engine("P") for _ in range(2)]
        ds = [await fleet_.engine("D") for _ in range(2)]
        for engines in (ps, ds):
            seen: set[int] = set()
            for session in range(16):
                name = f"talk {session}"
                of_body = [{"prompt_cache_key": name}, {"user": name}, {"user": name}]
                of_head = {"user": f"user {session}", "headers": {"X-Session-Id": name}}
                found = await homes(fleet_, engines, *of_body, of_head)
                assert len(set(found)) == 1
                seen.update(found)
            assert seen == {0, 1}


async def test_a_conversation_goes_where_it_began_until_that_one_leaves() -> None:
    async with fleet(policy="LeastLoaded", prefill_policy="PrefixAware") as fleet_:
        ps = [await fleet_.engine("P") for _ in range(3)]
        await fleet_.engine("D")
        texts = [letter * 400 for letter in "abc"]
        first = await homes(fleet_, ps, *({"prompt": text} for text in texts))
        assert sorted(first) == [0, 1, 2]
        for turn in range(2, 4):
            again = await homes(fleet_, ps, *({"prompt": text * turn} for text in texts))
            assert again == first
        await fleet_.beat(ps[first[0]], state="Gone")
        assert (await homes(fleet_, ps, {"prompt": texts[0]}))[0] in first[1:]


async def test_what_a_cache_has_is_no_load_of_p_and_all_figures_end_at_nothing() -> None:
    async with fleet(policy="LeastLoaded", prefill_policy="PrefixAware") as fleet_:
        p, _ = await fleet_.engine("P"), await fleet_.engine("D")
        loads = fleet_.router.state.loads
        seen: list[int] = []
        serve = p.script

        async def look(engine: HttpEngine, call: Any, request: Any) -> Any:
            seen.append(max(load.own.prompt_tokens for load in loads if load.key.http in name))
            return await serve(engine, call, request)

        name = f"127.0.0.1:{p.port}"
        p.script = look
        for _ in range(2):
            await fleet_.json(prompt="a" * 4000)
        assert seen[0] > 1000
        assert seen[1] < 150
        assert all(load.own == (0, 0, 0) for load in loads)

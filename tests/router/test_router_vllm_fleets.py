"""Fleets of several vLLM behind this router: prefixes, drains, new versions, for each dialect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from tests.router.chat_templates import DEMO_MODEL, files_of
from tests.router.fakes import Fleet, HttpEngine, answer, fleet, text_of, until
from tests.router.test_router_dialects import Pinned, expected, nothing_is_open
from tests.router.vllm_engines import Vllm, silent_vllm, vllm_engine
from xpyd_core.tokenizer_files import TokenizerFiles, encode_tokenizer_files
from xpyd_router.fleet.listed import parse_listed
from xpyd_worker.runner.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("uv_loop")
DIALECTS = ("nixl", "nixl-push", "pair-id")


@dataclass
class Vllms:
    """A router, and vLLMs that beat to it or are in its list."""

    fleet: Fleet
    p: list[HttpEngine]
    d: list[HttpEngine]
    pinned: Pinned
    models: list[Vllm] = field(default_factory=list[Vllm])

    async def completes(self, prompt: str, **body: Any) -> None:
        """Ask for a stream; the answer must be what one vLLM alone says."""
        events = await self.fleet.events(prompt=prompt, max_tokens=4, **body)
        assert events[-1] == "[DONE]", events[-1]
        assert text_of(events) == expected(prompt, 4)

    async def goes_to(self, prompt: str) -> int:
        """Which P gets it."""
        before = [len(one.calls) for one in self.p]
        await self.completes(prompt)
        (index,) = (i for i, one in enumerate(self.p) if len(one.calls) > before[i])
        return index


@contextlib.asynccontextmanager
async def listed_vllms(dialect: str, ps: int, ds: int, **config: Any) -> AsyncGenerator[Vllms]:
    """In a list: they send no heartbeats."""
    async with contextlib.AsyncExitStack() as stack:
        pinned, texts = Pinned(), list[str]()
        engines: dict[str, list[HttpEngine]] = {"P": [], "D": []}
        models: list[Vllm] = []
        for number, kind in enumerate("P" * ps + "D" * ds):
            engine, model = await silent_vllm(stack, kind, pinned)
            model.pushes = dialect == "nixl-push"
            models.append(model)
            engines[kind].append(engine)
            kv = f",kv=127.0.0.1:{31001 + number}" if dialect == "pair-id" else ""
            texts.append(f"{kind}=http://127.0.0.1:{engine.port},dialect={dialect}{kv}")
        config = {"heartbeat_interval_s": 0.2, "pair_wait_s": 60.0, **config}
        made = await stack.enter_async_context(
            fleet(static_instances=parse_listed(texts), **config)
        )
        await until(lambda: len(made.router.state.fleet.instances) == ps + ds)
        yield Vllms(made, engines["P"], engines["D"], pinned, models)


@contextlib.asynccontextmanager
async def beating_vllms(
    dialect: str, ps: int, ds: int, files: bytes | None = None, **config: Any
) -> AsyncGenerator[Vllms]:
    """With heartbeats, as our plugin sends them."""
    async with fleet(**{"pair_wait_s": 60.0, **config}) as made:
        pinned, models = Pinned(), list[Vllm]()
        engines: dict[str, list[HttpEngine]] = {"P": [], "D": []}
        for number, kind in enumerate("P" * ps + "D" * ds):
            said = {"incarnation": f"i{number}", "compatibility": "k", "period_ms": 60_000}
            blocks = {"total_blocks": 64, "block_tokens": 128}
            engine, model = await vllm_engine(
                made, kind, pinned, dialect=dialect, files=files, **said, **blocks
            )
            models.append(model)
            engines[kind].append(engine)
        yield Vllms(made, engines["P"], engines["D"], pinned, models)


Vllms_ = Callable[..., contextlib.AbstractAsyncContextManager[Vllms]]
every_fleet = pytest.mark.parametrize("dialect", DIALECTS)
found = pytest.mark.parametrize("vllms", [listed_vllms, beating_vllms], ids=["listed", "beating"])


@every_fleet
@found
@pytest.mark.parametrize("is_exact", [False, True], ids=["text", "exact"])
async def test_prompts_that_begin_alike_go_to_the_p_that_has_their_beginning(
    dialect: str, vllms: Vllms_, is_exact: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With --exact-prefixes, too: none of these engines has files to give."""
    config = {"policy": "PrefixAware", "exact_prefixes": is_exact}
    async with vllms(dialect, 2, 1, **config) as made:
        first, other = "a long story of one fox " * 12, "another one, of a dog. " * 12
        homes = [await made.goes_to(first), await made.goes_to(other)]
        assert sorted(homes) == [0, 1]
        for turn in ("first", "second", "third"):
            assert await made.goes_to(first + turn) == homes[0]
            assert await made.goes_to(other + turn) == homes[1]
        if is_exact:
            await until(lambda: "--exact-prefixes" in caplog.text)
        said = [one for one in caplog.records if "tokenizer files" in one.getMessage()]
        assert len(said) == is_exact


async def test_a_vllm_with_our_plugin_has_its_prefixes_compared_by_blocks_of_its_own() -> None:
    """A prompt as ids goes where its text went, also in the blocks of 128 that vLLM has on a CPU.

    The fakes' answers are by bytes, not by ids of this tokenizer: here only the way counts.
    """
    tokenizer = Tokenizer.load(DEMO_MODEL)
    document: TokenizerFiles = files_of(tokenizer, block_size=128)
    files = encode_tokenizer_files(document)
    config = {"policy": "PrefixAware", "exact_prefixes": True}
    async with beating_vllms("pair-id", 2, 1, files, **config) as made:
        while not made.fleet.metric("xpyd_router_token_counts_total", result="exact"):
            await made.fleet.json(prompt="x", max_tokens=2)
            await asyncio.sleep(0.05)

        async def home(prompt: Any) -> int:
            before = [len(one.calls) for one in made.p]
            async with await made.fleet.post(prompt=prompt, max_tokens=2) as response:
                await response.read()
            (index,) = (i for i, one in enumerate(made.p) if len(one.calls) > before[i])
            return index

        texts = [f"Story {n}: the quick brown fox jumps over it. " * 25 for n in range(6)]
        homes = [await home(text) for text in texts]
        assert set(homes) == {0, 1}
        for text, at in zip(reversed(texts), reversed(homes), strict=True):
            assert await home(tokenizer.encode(text, add_special_tokens=True)) == at


class Load:
    """Streams that come at a pace of their own, whatever became of those before."""

    def __init__(self, made: Vllms) -> None:
        self.made = made
        self.tasks: list[asyncio.Task[None]] = []

    async def send(self, count: int) -> None:
        for _ in range(count):
            prompt = f"prompt number {len(self.tasks)}, of a length that no other one has"
            self.tasks.append(asyncio.create_task(self.made.completes(prompt)))
            await asyncio.sleep(0.005)


def view_of(made: Vllms) -> Any:
    return made.fleet.router.state.fleet


def instance_at(made: Vllms, engine: HttpEngine) -> Any:
    address = f"127.0.0.1:{engine.port}"
    return next(one for one in view_of(made).instances if one.key.http == address)


@every_fleet
@found
async def test_an_instance_is_cordoned_and_comes_back_under_load(
    dialect: str, vllms: Vllms_
) -> None:
    async with vllms(dialect, 2, 2) as made:
        load = Load(made)
        await load.send(10)
        for engine in (made.p[0], made.d[1]):
            view_of(made).cordon(instance_at(made, engine).key, is_cordoned=True)
        await asyncio.gather(*load.tasks)
        before = made.p[0].served, made.d[1].served
        await load.send(20)
        await asyncio.gather(*load.tasks)
        assert (made.p[0].served, made.d[1].served) == before
        for engine in (made.p[0], made.d[1]):
            view_of(made).cordon(instance_at(made, engine).key, is_cordoned=False)
        await load.send(20)
        await asyncio.gather(*load.tasks)
        assert made.p[0].served > before[0]
        assert made.d[1].served > before[1]
        assert made.pinned == {}


@every_fleet
@found
@pytest.mark.parametrize("kind", ["P", "D"])
async def test_an_instance_that_is_taken_away_under_load_loses_no_request(
    dialect: str, vllms: Vllms_, kind: str
) -> None:
    """It finishes what it has and takes nothing new, as vLLM does with --shutdown-timeout."""
    async with vllms(dialect, 2, 2) as made:
        load = Load(made)
        await load.send(20)
        leaving = (made.p if kind == "P" else made.d)[0]

        async def refuse(*_: Any) -> web.Response:
            return web.json_response({"error": {"message": "shutting down"}}, status=503)

        leaving.script = refuse
        if leaving.beat.incarnation:
            await made.fleet.beat(leaving, state="Draining")
        await load.send(20)
        if leaving.beat.incarnation:
            await made.fleet.beat(leaving, state="Gone")
        await leaving.stop()
        await load.send(20)
        await asyncio.gather(*load.tasks)
        assert leaving.served > 0


@every_fleet
@found
@pytest.mark.parametrize("kind", ["P", "D"])
@pytest.mark.parametrize("is_stream", [True, False], ids=["streamed", "whole"])
async def test_what_a_vllm_that_ends_aborts_is_served_by_another_one(
    dialect: str, vllms: Vllms_, kind: str, is_stream: bool
) -> None:
    """It answers 200 to prompts of ids that come too late, and says `abort` in the body."""
    async with vllms(dialect, 2, 2) as made:
        leaving = made.models[0 if kind == "P" else 2]
        leaving.aborts_after = 0
        for number in range(6):
            prompt = f"prompt number {number} of six"
            if is_stream:
                await made.completes(prompt)
                continue
            body = await made.fleet.json(prompt=prompt, max_tokens=4)
            (choice,) = body["choices"]
            assert choice["text"] == expected(prompt, 4)
            assert choice["finish_reason"] == "length"
        engine = (made.p if kind == "P" else made.d)[0]
        assert engine.calls
        assert instance_at(made, engine).standing == "Good", "to end is no fault"


TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "f"}}]}


@every_fleet
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("status", [400, 500])
async def test_what_a_p_cannot_say_of_a_cut_call_of_a_tool_d_says(
    dialect: str, is_stream: bool, status: int
) -> None:
    """vLLM 0.18 and some others parse the call, which ends at P's one token."""
    async with beating_vllms(dialect, 1, 1) as made:
        (p,), (d,) = made.p, made.d
        works, p.script = p.script, answer(status, {"error": {"message": "Invalid JSON: EOF"}})
        for _ in range(12):
            wanted = {"max_tokens": 3, "stream": is_stream, "tool_choice": "required", **TOOLS}
            async with await made.fleet.post("chat/completions", **wanted) as response:
                assert response.status == 200
                text = await response.text()
            assert expected("user: hello\n", 3).split()[-1] in text
        assert len(p.calls) == len(d.calls) == 12
        p.script = works
        await made.fleet.json("chat/completions", max_tokens=3)
        assert len(p.calls) == 13, "P is as good as before"
        assert nothing_is_open(made.fleet)


async def test_what_d_refuses_of_a_chat_with_tools_is_the_clients_answer() -> None:
    async with beating_vllms("nixl", 1, 1) as made:
        for engine, name in ((made.p[0], "P"), (made.d[0], "D")):
            engine.script = answer(400, {"error": {"message": f"of {name}"}})
        for body, name in ((TOOLS, "D"), ({}, "P")):
            async with await made.fleet.post("chat/completions", **body) as response:
                assert (response.status, f"of {name}" in await response.text()) == (400, True)


@pytest.mark.parametrize("dialect", ["nixl", "nixl-push"])
@found
async def test_while_a_rollout_changes_vllms_version_only_equal_ones_are_pairs(
    dialect: str, vllms: Vllms_
) -> None:
    """First D restarts with another version, then P. In between a pair of the old one serves, and
    where there is none requests wait."""
    async with vllms(dialect, 2, 2) as made:

        async def restart(engine: HttpEngine, version: str) -> None:
            engine.pages["/version"] = {"version": version}
            if engine.beat.incarnation:
                said = {"incarnation": f"{engine.beat.incarnation}x", "compatibility": version}
                await made.fleet.beat(engine, **said)
            await until(lambda: version in instance_at(made, engine).beat.compatibility)

        new = "0.33.0"
        load = Load(made)
        await load.send(10)
        await asyncio.gather(*load.tasks)
        await restart(made.d[0], new)
        before = made.d[0].served
        await load.send(10)
        await asyncio.gather(*load.tasks)
        assert made.d[0].served == before, "no P has its version"
        await restart(made.p[0], new)
        await load.send(20)
        await asyncio.gather(*load.tasks)
        assert made.d[0].served > before
        old_pair = made.p[1].served
        await restart(made.d[1], new)  # the old P has no partner left
        await load.send(10)
        await asyncio.gather(*load.tasks)
        assert made.p[1].served == old_pair
        await restart(made.p[0], "0.34.0")  # now there is no pair at all
        await load.send(5)
        await asyncio.sleep(0)
        assert not any(task.done() for task in load.tasks[-5:])
        await restart(made.p[1], new)
        await asyncio.gather(*load.tasks)
        assert made.pinned == {}

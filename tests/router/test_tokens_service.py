"""Counting for the router: files fetched from engines as they come and go, estimates meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from tests.router.chat_templates import CHATML, DEMO_MODEL, files_of, save_byte_level
from tests.router.fakes import until
from xpyd_core.messages import Heartbeat
from xpyd_core.request_id import Address
from xpyd_core.tokenizer_files import MAX_BYTES, PATH, TokenizerFiles, encode_tokenizer_files
from xpyd_router.fleet.registry import Registry
from xpyd_router.fleet.view import FleetView
from xpyd_router.metrics import RouterMetrics
from xpyd_router.request.client_request import InferenceRequest, parse_request
from xpyd_router.tokens.process import ChildLimits, TokenChild
from xpyd_router.tokens.service import FetchFailed, NoFiles, Prompted, Tokens, fetch
from xpyd_router.upstream.client import Dialer
from xpyd_worker.runner.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("uv_loop")

LIMITS = ChildLimits(wait_s=60)


def ask(**fields: Any) -> InferenceRequest:
    body = {"model": "m", "prompt": "hello hello hello hello hello", **fields}
    is_chat = "messages" in fields
    return parse_request("chat/completions" if is_chat else "completions", orjson.dumps(body))


def prompt_of(asked: InferenceRequest) -> str:
    return orjson.loads(bytes(asked.prompt))


@dataclass
class Fleet:
    """Tokens over a fleet whose engines' answers are made here, in virtual time."""

    view: FleetView
    tokens: Tokens
    metrics: RouterMetrics
    clock: list[float]
    answers: dict[int, Any] = field(default_factory=dict)
    """Port of an engine -> its files, or what fetching from it raises."""
    fetched: list[int] = field(default_factory=list)
    incarnations: Any = field(default_factory=itertools.count)

    async def fetch(self, to: Address, path: str, *, max_bytes: int) -> bytes:
        assert (path, max_bytes) == ("/tokenizer", MAX_BYTES)
        self.fetched.append(to.port)
        found = self.answers[to.port]
        if isinstance(found, BaseException):
            raise found
        return encode_tokenizer_files(found)

    def beat(self, port: int, found: Any, key: str = "k", model: str = "m", **more: Any) -> None:
        self.answers[port] = found
        said = {"incarnation": str(next(self.incarnations)), "models": (model,), **more}
        self.view.apply(
            Heartbeat(
                type="A",
                http_address=f"127.0.0.1:{port}",
                zmq_address="127.0.0.1:21001",
                compatibility=key,
                **said,
            )
        )

    def counted(self, result: str) -> float:
        return self.metrics.token_counts.labels(result)._value.get()

    def loads(self, result: str) -> float:
        return self.metrics.tokenizer_loads.labels(result)._value.get()

    async def count(self, asked: InferenceRequest) -> Prompted:
        return await self.tokens.count(asked.model, asked.raw, asked.prompt, asked.shape)

    async def exact(self, asked: InferenceRequest) -> Prompted:
        """Ask until the count is exact; time goes on meanwhile."""
        while not (found := await self.count(asked)).is_exact:
            self.clock[0] += 1
            await asyncio.sleep(0.01)
        return found

    @property
    def child(self) -> TokenChild:
        child = self.tokens.child_with("k")
        assert child is not None
        return child


@contextlib.asynccontextmanager
async def fleet(limits: ChildLimits = LIMITS) -> AsyncGenerator[Fleet]:
    clock = [0.0]
    view = FleetView(Registry(period_s=1e6, missed_beats=3), lambda: clock[0])
    metrics = RouterMetrics()

    async def fetch_made(to: Address, path: str, *, max_bytes: int) -> bytes:
        return await made.fetch(to, path, max_bytes=max_bytes)

    tokens = Tokens(
        fleet=view, fetch=fetch_made, metrics=metrics, clock=lambda: clock[0], limits=limits
    )
    made = Fleet(view, tokens, metrics, clock)
    running = asyncio.create_task(tokens.run())
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.wait([running])
        await tokens.close()


def demo_files(**changes: Any) -> TokenizerFiles:
    return files_of(Tokenizer.load(DEMO_MODEL), **changes)


async def test_until_there_are_files_tokens_are_estimated_then_counted() -> None:
    async with fleet() as made:
        asked = ask()
        assert await made.count(asked) == Prompted(8, (), False)
        assert made.counted("unknown") == 1
        made.beat(1, demo_files(block_size=2))
        found = await made.exact(asked)
        ids = Tokenizer.load(DEMO_MODEL).encode(prompt_of(asked), add_special_tokens=True)
        assert (found.tokens, len(found.hashes)) == (len(ids), len(ids) // 2)
        assert made.counted("exact") == 1
        chat = ask(messages=[{"role": "user", "content": "hello"}])
        assert (await made.count(chat)).is_exact
        assert (made.fetched, made.loads("loaded")) == ([1], 1)


async def test_what_cannot_be_counted_is_estimated_and_the_reason_counted() -> None:
    async with fleet(ChildLimits(wait_s=60, max_body_bytes=2000)) as made:
        made.beat(1, demo_files())
        await made.exact(ask())
        refused = await made.count(ask(prompt=[10**6, 1, 1]))
        assert refused == Prompted(3, (), False)
        assert await made.count(ask(prompt="x" * 4000)) == Prompted(1000, (), False)
        assert not (await made.count(ask(model="other"))).is_exact
        assert [made.counted(r) for r in ("refused", "long", "unknown")][:2] == [1, 1]


async def test_an_engine_that_does_not_give_its_files_is_passed_over_for_the_next() -> None:
    async with fleet() as made:
        made.beat(1, FetchFailed("status 503"))
        await until(lambda: made.fetched == [1])
        made.beat(2, demo_files(tokenizer="{}"))
        made.beat(3, demo_files())
        await made.exact(ask())
        assert made.fetched == [1, 2, 3]
        results = [made.loads(r) for r in ("fetch", "unreadable", "loaded")]
        assert results == [1, 1, 1]


@pytest.mark.parametrize("is_asked", [True, False], ids=["status 404", "no incarnation"])
async def test_engines_without_files_are_estimated_and_one_line_says_so(
    is_asked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet() as made:
        more = {} if is_asked else {"incarnation": ""}
        for port in (1, 2):
            made.beat(port, NoFiles("status 404"), **more)
        if is_asked:
            await until(lambda: made.fetched == [1, 2])
        await until(lambda: "--exact-prefixes" in caplog.text)
        for _ in range(5):
            made.clock[0] += 1000
            made.beat(3, NoFiles("status 404"), "")  # wakes it
            assert await made.count(ask()) == Prompted(8, (), False)
            await asyncio.sleep(0)
        assert made.fetched == ([1, 2] if is_asked else [])
        assert made.loads("absent") == len(made.fetched)
        (record,) = caplog.records
        assert "127.0.0.1:1" in record.getMessage() or not is_asked
        made.beat(4, demo_files(), "of ours")
        assert (await made.exact(ask())).is_exact


async def test_files_are_fetched_anew_when_their_engine_has_restarted(tmp_path: Path) -> None:
    other = files_of(Tokenizer.load(save_byte_level(tmp_path, CHATML)))
    async with fleet() as made:
        made.beat(1, demo_files())
        before = await made.exact(ask())
        made.beat(1, other)
        while (found := await made.exact(ask())).tokens == before.tokens:
            made.clock[0] += 1
        expected = Tokenizer.load(tmp_path).encode(prompt_of(ask()), add_special_tokens=True)
        assert found.tokens == len(expected) != before.tokens


async def test_two_checkpoints_of_one_name_are_counted_by_either_and_others_by_their_own(
    tmp_path: Path,
) -> None:
    async with fleet() as made:
        made.beat(1, FetchFailed("no"), "old")
        made.beat(2, demo_files(), "new")
        first = await made.exact(ask())
        own = files_of(Tokenizer.load(save_byte_level(tmp_path, CHATML)))
        made.beat(3, own, "third", "m3")
        assert (await made.exact(ask(model="m3"))).tokens != first.tokens
        assert (await made.count(ask())).tokens == first.tokens


async def test_a_child_that_is_killed_is_replaced_and_nothing_is_lost() -> None:
    async with fleet() as made:
        made.beat(1, demo_files())
        await made.exact(ask())
        made.child.kill()
        found = await asyncio.gather(*(made.count(ask()) for _ in range(20)))
        assert {one.tokens for one in found if not one.is_exact} <= {8}
        await made.exact(ask())
        assert made.fetched == [1, 1]


async def test_a_template_that_kills_children_is_tried_more_and_more_rarely() -> None:
    async with fleet(ChildLimits(wait_s=60, answer_s=0.3)) as made:
        made.beat(1, demo_files(chat_templates={"default": "{{ 7 ** (7 ** 77) }}"}))
        await made.exact(ask())
        chat = ask(messages=[{"role": "user", "content": "hello"}])
        waits: list[float] = []
        for _ in range(3):
            assert not (await made.count(chat)).is_exact
            began = made.clock[0]
            await made.exact(ask())
            waits.append(made.clock[0] - began)
        assert waits[0] >= 1
        assert waits[1] >= 2
        assert waits[2] >= 4


async def test_fetch_takes_a_200_of_bounded_length_and_nothing_else() -> None:
    async def big(_: web.Request) -> web.Response:
        return web.Response(body=b"x" * 1000)

    async def away(_: web.Request) -> web.Response:
        raise web.HTTPFound("/big")

    app = web.Application()
    app.router.add_get("/big", big)
    app.router.add_get("/away", away)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        to = Address("127.0.0.1", runner.addresses[0][1])
        assert await fetch(to, "/big", max_bytes=1000, dialer=Dialer("127.0.0.1")) == b"x" * 1000
        for path, limit in (("/big", 999), ("/away", 1000), ("/none", 1000)):
            with pytest.raises(FetchFailed) as failed:
                await fetch(to, path, max_bytes=limit, dialer=Dialer("127.0.0.1"))
            assert "127.0.0.1" not in str(failed.value)
            assert isinstance(failed.value, NoFiles) == (path == "/none")
        await runner.cleanup()
        with pytest.raises(FetchFailed):
            await fetch(to, "/big", max_bytes=1000, dialer=Dialer("127.0.0.1"))


def test_the_routers_own_process_loads_no_tokenizer_library() -> None:
    code = "import sys, xpyd_router.tokens.service; print('tokenizers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == b"False\n"
    assert PATH == "/tokenizer"

"""What takes long of texts is done on the text threads: many prompts, echo, prompt_logprobs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.worker.server_fakes import ByteTokenizer, Running, ScriptedEngine, say, serving, until
from xpyd_core.bodies import BodyBudget
from xpyd_worker.server.service import TextThreads


class Watched(ByteTokenizer):
    """Counts how much each call was given to do, on the text threads and elsewhere."""

    def __init__(self) -> None:
        self.on_threads: dict[str, int] = {}
        self.elsewhere: dict[str, int] = {}

    def _count(self, call: str, size: int) -> None:
        is_text = threading.current_thread().name.startswith("text")
        counts = self.on_threads if is_text else self.elsewhere
        counts[call] = counts.get(call, 0) + size

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self._count("encode", len(text))
        return super().encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        self._count("decode", len(ids))
        return super().decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        self._count("token_text", 1)
        return super().token_text(token_id)


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = [65] * 3000
SCORED = {"prompt": LONG, "max_tokens": 1}
MESSAGES = [{"role": "user", "content": "x" * 2000}]
CASES = [
    ("encode", 20_000, COMPLETIONS, {"prompt": ["x" * 100] * 200}),
    ("encode", 15_100, COMPLETIONS, {"prompt": ["x" * 100, "y" * 15_000]}),
    ("decode", 6000, COMPLETIONS, {"prompt": [LONG, LONG], "echo": True, "max_tokens": 1}),
    ("token_text", 2999, COMPLETIONS, {**SCORED, "prompt_logprobs": 0}),
    ("token_text", 3000, COMPLETIONS, {**SCORED, "echo": True, "logprobs": 0}),
    ("token_text", 3000, COMPLETIONS, {**SCORED, "echo": True, "logprobs": 0, "stream": True}),
    ("token_text", 2000, CHAT, {"messages": MESSAGES, "prompt_logprobs": 0, "max_tokens": 1}),
]


async def ok(server: Running, path: str, body: Any) -> str:
    answer = await server.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.text


@pytest.mark.parametrize(("call", "size", "path", "body"), CASES)
async def test_what_takes_long_is_not_done_on_the_loop(
    call: str, size: int, path: str, body: Any
) -> None:
    tokenizer = Watched()
    async with serving(tokenizer=tokenizer, max_model_len=20_000, max_requests=256) as server:
        await ok(server, path, body)
    assert tokenizer.on_threads.get(call, 0) >= size
    assert tokenizer.elsewhere.get(call, 0) < 100


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": ["x", "y"], "echo": True, "logprobs": 1}),
        (COMPLETIONS, {"prompt": [[65], "y"], "echo": True, "prompt_logprobs": 1}),
        (COMPLETIONS, {"prompt": [65], "echo": True, "logprobs": 1, "stream": True}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 1}),
    ],
)
async def test_what_is_short_needs_no_hop_to_a_thread(path: str, body: Any) -> None:
    tokenizer = Watched()
    async with serving(tokenizer=tokenizer) as server:
        await ok(server, path, body)
    assert tokenizer.on_threads == {}
    assert tokenizer.elsewhere


async def test_many_prompts_have_their_own_tokens_in_order() -> None:
    engine = ScriptedEngine(say("!"))
    async with serving(engine, max_model_len=70_000, max_requests=256) as server:
        prompts: list[Any] = ["a" * 66_000, *(f"{i} " * 300 for i in range(40)), [66, 67]]
        await ok(server, COMPLETIONS, {"prompt": prompts, "max_tokens": 1})
        found = [bytes(request.prompt).decode() for request in engine.requests]
        assert found == [*prompts[:-1], "BC"]


async def test_an_answer_that_was_computed_is_written_however_many_texts_wait() -> None:
    threads, go_on = TextThreads(threads=1, max_jobs=1), threading.Event()
    waiting = asyncio.create_task(threads.run(go_on.wait))
    await asyncio.sleep(0)
    writing = [asyncio.create_task(threads.finish(lambda: "answer")) for _ in range(3)]
    await asyncio.sleep(0)
    go_on.set()
    assert await asyncio.gather(waiting, *writing) == [True, *["answer"] * 3]
    threads.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})],
)
async def test_a_long_body_is_read_on_the_text_threads_and_a_short_one_here(
    path: str, body: Any
) -> None:
    async with serving() as server:
        assert server.api.service is not None
        threads, go_on = TextThreads(threads=1, max_jobs=1), threading.Event()
        server.api.service = replace(server.api.service, threads=threads)
        waiting = asyncio.create_task(threads.run(go_on.wait))
        await asyncio.sleep(0)
        long = {**body, "user": "x" * 2**20}
        try:
            await ok(server, path, body)
            assert (await server.post(path, long)).status_code == 503
        finally:
            # Also when it fails: the loop's end waits for the thread.
            go_on.set()
            await waiting
        await ok(server, path, long)
        threads.close()


async def test_ids_beyond_the_context_are_counted_and_not_looked_at() -> None:
    async with serving() as server:
        for prompt in ([65] * 199 + [-1], [[65], [65] * 199 + [-1]]):
            answer = await server.post(COMPLETIONS, {"prompt": prompt})
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"
            assert "your prompt has 200 tokens" in answer.json()["error"]["message"]


async def test_a_body_stays_charged_until_no_thread_reads_it_though_its_client_has_left() -> None:
    bodies = BodyBudget(100 * 2**20)
    async with serving(bodies=bodies) as server:
        service = server.api.service
        assert service is not None
        threads, reading, go_on = TextThreads(threads=1), threading.Event(), threading.Event()

        class Slow(TextThreads):
            async def run(self, work: Any, **options: Any) -> Any:
                def slowly() -> Any:
                    reading.set()
                    assert go_on.wait(60)
                    return work()

                return await threads.run(slowly, **options)

        server.api.service = replace(service, threads=Slow())
        sent = asyncio.create_task(server.post(COMPLETIONS, {"prompt": "x", "user": "x" * 2**20}))
        try:
            await until(reading.is_set)
            sent.cancel()
            await until(lambda: server.api.admission.requests == 0)
            assert bodies.used_bytes > 8 * 2**20
        finally:
            go_on.set()
        await until(lambda: bodies.used_bytes == 0)
        threads.close()

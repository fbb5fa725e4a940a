"""/tokenize and /detokenize, /version, /load, /ping: as vLLM has them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.worker.server_fakes import (
    EOS,
    ByteTokenizer,
    Running,
    ScriptedEngine,
    serving,
    until,
)
from xpyd_core import __version__
from xpyd_core.errors import ApiError
from xpyd_worker.runner.tokenizer import Tokenizer
from xpyd_worker.server.service import TextThreads

CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": "hi"}, "hi"),
        ({"prompt": ""}, ""),
        ({"prompt": "x" * 9000}, "x" * 9000),  # on a thread, and above the context
        ({"messages": CHAT, "model": "alias"}, "user:hi\n"),
        ({"messages": [{"role": "user", "content": "y" * 5000}]}, "user:" + "y" * 5000 + "\n"),
    ],
)
async def test_tokens_and_their_count_come_back(body: Any, text: str) -> None:
    async with serving() as server:
        answer = await server.post("/tokenize", body)
        tokens = list(text.encode())
        assert answer.json() == {
            "count": len(tokens),
            "max_model_len": 200,
            "tokens": tokens,
            "token_strs": None,
        }
        back = await server.post("/detokenize", {"tokens": tokens})
        assert back.json() == {"prompt": text}
        assert server.engine.requests == []


class Strict(ByteTokenizer):
    """Shows what it was asked for."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [EOS if add_special_tokens else 0]

    def apply_chat_template(
        self,
        messages: Any,
        *,
        add_generation_prompt: bool,
        add_special_tokens: bool = False,
        **more: Any,
    ) -> list[int]:
        return [int(add_generation_prompt), int(add_special_tokens)]


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "a"}, [EOS]),
        ({"prompt": "a", "add_special_tokens": False}, [0]),
        ({"messages": CHAT}, [1, 0]),
        ({"messages": CHAT, "add_generation_prompt": False}, [0, 0]),
        ({"messages": CHAT, "add_special_tokens": True}, [1, 1]),
    ],
)
async def test_special_tokens_and_the_generation_prompt_are_as_asked(
    body: Any, tokens: list[int]
) -> None:
    async with serving(tokenizer=Strict()) as server:
        assert (await server.post("/tokenize", body)).json()["tokens"] == tokens


async def test_token_strs_are_how_the_vocabulary_writes_the_tokens() -> None:
    async with serving() as server:
        body = {"prompt": "hi", "return_token_strs": True}
        assert (await server.post("/tokenize", body)).json()["token_strs"] == ["h", "i"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "yes"}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "x" * (4 * 1024 * 1024 + 1)}, 400, "prompt"),
        ("/tokenize", {"messages": CHAT, "chat_template": "x"}, 400, "chat_template"),
        (
            "/tokenize",
            {"messages": CHAT, "continue_final_message": True},
            400,
            "continue_final_message",
        ),
        ("/tokenize", {"messages": [{"role": "assistant", "content": "x"}]}, 400, "messages"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [258]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
async def test_bad_input_names_the_field(path: str, body: Any, status: int, param: str) -> None:
    async with serving() as server:
        answer = await server.post(path, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_the_demo_models_tokens_and_pieces_give_its_text_back() -> None:
    tokenizer = Tokenizer.load(Path(__file__).parents[2] / "examples" / "demo-model")
    text = "San Francisco is a city é😀"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    pieces = [tokenizer.token_piece(token_id) for token_id in ids]
    assert [tokenizer._rust.token_to_id(piece) for piece in pieces] == ids
    assert tokenizer.token_piece(10**6) == ""


class Spy:
    """The library's tokenizer; notes which of its calls were used."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.used: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.used.append(name)
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("repeat", [1, 400])
def test_long_texts_go_by_the_calls_that_let_other_threads_run(repeat: int) -> None:
    tokenizer = Tokenizer.load(Path(__file__).parents[2] / "examples" / "demo-model")
    text = "hello world, é😀 " * repeat
    ids = tokenizer._rust.encode(text, add_special_tokens=True).ids
    spy = tokenizer._rust = Spy(tokenizer._rust)
    assert tokenizer.encode(text, add_special_tokens=True) == ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    is_long = repeat > 1
    assert spy.used == (["encode_batch_fast", "decode_batch"] if is_long else ["encode", "decode"])


class Slow(ByteTokenizer):
    """Holds long texts until it is told to go on."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.go_on = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) > 4096:
            self.entered.release()
            assert self.go_on.wait(10)
        return super().encode(text, add_special_tokens=add_special_tokens)


async def _entered(tokenizer: Slow) -> None:
    assert await asyncio.to_thread(tokenizer.entered.acquire, timeout=10)


async def test_short_requests_are_served_while_a_long_text_is_encoded() -> None:
    slow = Slow()
    async with serving(tokenizer=slow) as server:
        long = asyncio.create_task(server.post("/tokenize", {"prompt": "x" * 5000}))
        await _entered(slow)
        answer = await server.post("/v1/completions", {"prompt": "hi", "max_tokens": 2})
        assert answer.status_code == 200
        slow.go_on.set()
        assert (await long).json()["count"] == 5000


async def test_a_client_that_leaves_while_its_prompt_is_encoded_leaves_nothing() -> None:
    slow = Slow()
    async with serving(tokenizer=slow, max_model_len=100_000) as server:
        admission = server.api.admission
        body = {"prompt": "x" * 5000, "max_tokens": 5}
        asking = asyncio.create_task(server.post("/v1/completions", body))
        await _entered(slow)
        assert (admission.requests, admission.preparing) == (1, 1)
        asking.cancel()
        await _gone(server)
        assert (admission.preparing, admission.bodies.used_bytes) == (0, 0)
        slow.go_on.set()
        assert server.engine.requests == []


async def _gone(server: Running) -> None:
    await until(lambda: not server.api.admission.requests)


async def test_prompts_that_are_being_encoded_count_as_waiting() -> None:
    slow = Slow()
    async with serving(tokenizer=slow, max_requests=1, max_model_len=100_000) as server:
        body = {"prompt": "x" * 5000, "max_tokens": 2}
        first = asyncio.create_task(server.post("/v1/completions", body))
        await _entered(slow)
        refused = await server.post("/v1/completions", {"prompt": "hi"})
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        slow.go_on.set()
        assert (await first).status_code == 200
        assert (await server.post("/v1/completions", {"prompt": "hi"})).status_code == 200


async def test_more_long_texts_than_may_wait_are_refused() -> None:
    threads, go_on = TextThreads(threads=1, max_jobs=2), threading.Event()
    jobs = [asyncio.create_task(threads.run(go_on.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as refused:
        await threads.run(go_on.wait)
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
    jobs[1].cancel()  # it had not begun: its place is free
    await asyncio.wait([jobs[1]])
    jobs[1] = asyncio.create_task(threads.run(lambda: True))
    await asyncio.sleep(0)
    go_on.set()
    assert await asyncio.gather(*jobs) == [True, True]
    threads.close()


async def test_version_ping_and_load_answer() -> None:
    engine = ScriptedEngine(silent=True)
    async with serving(engine) as server:
        assert (await server.client.get("/version")).json() == {"version": __version__}
        for method in ("GET", "POST"):
            assert (await server.client.request(method, "/ping")).status_code == 200
        assert (await server.client.get("/load")).json() == {
            "server_load": 0,
            "state": "Ready",
            "running": 0,
            "waiting": 0,
            "free_blocks": 7,
            "total_blocks": 10,
            "incarnation": "my-inc",
        }
        asking = asyncio.create_task(server.post("/v1/completions", {"prompt": "hi"}))
        await engine.submitted(1)
        assert (await server.client.get("/load")).json()["server_load"] == 1
        asking.cancel()
        await _gone(server)
        assert (await server.client.get("/load")).json()["server_load"] == 0


async def test_before_the_model_is_there_ping_is_503_and_load_says_starting() -> None:
    async with serving(ready=False) as server:
        assert (await server.client.get("/ping")).status_code == 503
        assert (await server.client.get("/load")).json()["state"] == "Starting"
        assert (await server.post("/tokenize", {"prompt": "a"})).status_code == 503

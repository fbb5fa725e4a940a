"""`xpyd bench serve` against a server that says what it was asked; the commands end to end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from xpyd_core.cli import main
from xpyd_core.errors import UserError
from xpyd_tools.bench.client import Target, first_model, run_load, send_streaming, split_url
from xpyd_tools.bench.load import LoadRequest

MODEL = Path(__file__).parents[2] / "examples/demo-model"
ENGINE = [
    "--model",
    str(MODEL),
    "--dtype",
    "float32",
    "--threads",
    "1",
    "--kv-cache-memory",
    "16Mi",
]


@dataclass
class Server:
    """Answers with as many tokens as asked, two in the last chunk; or as `answer` says."""

    answer: bytes | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    together: int = 0
    most_together: int = 0
    hold: asyncio.Event | None = None
    three: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        body = await reader.readexactly(length)
        self.heads.append(head)
        self.together += 1
        self.most_together = max(self.together, self.most_together)
        if self.together == 3:
            self.three.set()
        if self.hold is not None:
            await self.hold.wait()
        else:
            await asyncio.sleep(0)
        if head.startswith("GET"):
            writer.write(b'HTTP/1.1 200 OK\r\n\r\n{"data": [{"id": "first"}, {"id": "second"}]}')
        else:
            self.bodies.append(json.loads(body))
            writer.write(self.answer if self.answer is not None else _stream(self.bodies[-1]))
        self.together -= 1
        writer.close()


def _stream(body: dict[str, Any]) -> bytes:
    count = body["max_tokens"]
    chunks = [{"choices": [{"text": "", "token_ids": [5]}]} for _ in range(count - 2)]
    chunks.append({"choices": [{"text": "ab", "token_ids": [6, 7]}]})
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
    data = [json.dumps(one) for one in [*chunks, {"choices": [], "usage": usage}]]
    events = "".join(f"data: {one}\n\n" for one in [*data, "[DONE]"])
    return b"HTTP/1.1 200 OK\r\n\r\n" + events.encode()


@asynccontextmanager
async def serving(server: Server, **members: Any) -> AsyncIterator[Target]:
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    async with listening:
        given = {"members": {}, "timeout_s": 20.0, "model": "m", **members}
        yield Target("127.0.0.1", port, False, "/v1/completions", **given)


def test_a_request_carries_its_members_and_its_tokens_are_counted() -> None:
    async def go() -> None:
        server = Server()
        async with serving(server, members={"temperature": 0.0}, api_key="k") as target:
            sample = await send_streaming(target, LoadRequest((1, 2, 3), 6))
            assert await first_model(target) == "first"
        assert sample.error == ""
        assert (sample.input_tokens, sample.output_tokens) == (3, 6)
        assert 0 < sample.ttft_s <= sample.e2e_s
        assert server.bodies == [
            {
                "model": "m",
                "prompt": [1, 2, 3],
                "max_tokens": 6,
                "stream": True,
                "stream_options": {"include_usage": True},
                "temperature": 0.0,
            }
        ]
        assert "Authorization: Bearer k" in server.heads[0]

    asyncio.run(go())


def test_reasoning_and_tool_calls_are_tokens_too() -> None:
    said: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning": "hm"},
        {"reasoning_content": "hm"},
        {"tool_calls": [{"index": 0}]},
        {"content": "x"},
    ]
    chunks = [f"data: {json.dumps({'choices': [{'delta': one}]})}\n\n" for one in said]
    events = "".join([*chunks, "data: [DONE]\n\n"]).encode()

    async def go() -> None:
        async with serving(Server(b"HTTP/1.1 200 OK\r\n\r\n" + events)) as target:
            sample = await send_streaming(target, LoadRequest((1, 2, 3), 6))
        assert (sample.error, sample.output_tokens) == ("", 4)

    asyncio.run(go())


def test_a_base_urls_path_stands_before_every_path() -> None:
    async def go() -> None:
        server = Server()
        async with serving(server, prefix="/llm") as target:
            assert (await send_streaming(target, LoadRequest((1,), 3))).error == ""
            assert await first_model(target) == "first"
        lines = [head.partition("\r\n")[0] for head in server.heads]
        assert lines == ["POST /llm/v1/completions HTTP/1.1", "GET /llm/v1/models HTTP/1.1"]

    asyncio.run(go())


def test_no_more_are_under_way_than_allowed() -> None:
    async def go() -> None:
        server = Server(hold=asyncio.Event())
        async with serving(server) as target:
            requests = [LoadRequest((n,), 3) for n in range(1, 9)]
            load = asyncio.create_task(run_load(target, requests, [0.0] * 8, max_concurrency=3))
            await asyncio.wait_for(server.three.wait(), 20)
            assert server.hold is not None
            server.hold.set()
            samples = await load
        assert server.most_together == 3
        assert [one.error for one in samples] == [""] * 8

    asyncio.run(go())


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 500 Oops\r\n\r\nbroken", "BadAnswer: HTTP 500: broken"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: [DONE]\n\n", "BadAnswer: no token came"),
        (
            b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": [{"text": "a"}]}\n\n',
            "BadAnswer: the stream ended early",
        ),
        (
            b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {"message": "dead"}}\n\n',
            "BadAnswer: {'message': 'dead'}",
        ),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {no json\n\n", "JSONDecodeError: "),
        (b"", "BadAnswer: HTTP 0: "),
    ],
)
def test_an_answer_that_is_no_answer_is_a_failure_with_its_reason(
    answer: bytes, error: str
) -> None:
    async def go() -> None:
        async with serving(Server(answer)) as target:
            sample = await send_streaming(target, LoadRequest((1,), 3))
            assert sample.error.startswith(error)

    asyncio.run(go())


def test_a_server_that_says_nothing_is_given_up_in_time() -> None:
    async def go() -> None:
        server = Server(hold=asyncio.Event())
        async with serving(server, timeout_s=0.05) as target:
            sample = await send_streaming(target, LoadRequest((1,), 3))
            assert sample.error == "no answer within 0.05 s"
            assert server.hold is not None
            server.hold.set()

    asyncio.run(go())


def test_a_base_url_is_split_or_refused() -> None:
    assert split_url("http://a:8000") == ("a", 8000, False, "")
    assert split_url("https://b/") == ("b", 443, True, "")
    assert split_url("http://a/llm/") == ("a", 80, False, "/llm")
    assert split_url("http://a/llm/b c/v1") == ("a", 80, False, "/llm/b%20c")
    assert split_url("http://a/v1/") == ("a", 80, False, "")
    for wrong in ("a:8000", "http://", "http://a:99999", "ftp://a", "http://a/?x=1", "http://a/#x"):
        with pytest.raises(UserError, match="--base-url"):
            split_url(wrong)


def test_serve_measures_a_server_and_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    async def go() -> int:
        async with serving(server) as target:
            url = f"http://{target.host}:{target.port}"
            words = "--num-prompts 5 --input-len 8 --output-len 4 --goodput e2e:60000 --output json"
            argv = ["bench", "serve", "--base-url", url, *words.split()]
            return await asyncio.to_thread(main, argv)

    server = Server()
    assert asyncio.run(go()) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["failed"], found["output_tokens"]) == (5, 0, 20)
    assert found["goodput"] == found["requests_per_s"]
    assert len(server.bodies) == 6  # one of them to warm up
    assert {body["model"] for body in server.bodies} == {"first"}
    assert all(body["ignore_eos"] for body in server.bodies)


@pytest.mark.slow
def test_latency_and_throughput_run_the_engine_in_this_process(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = "--batch-size 2 --num-iters 2 --num-iters-warmup 1 --output-len 3 --output json"
    assert main(["bench", "latency", *ENGINE, *words.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["batch_size"], found["batches"]) == (2, 2)
    assert 0 < found["latency_ms"]["p50"] <= found["latency_ms"]["p99"]
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": "The file"}\n{"prompt": [300, 301], "output_tokens": 5}\n')
    words = f"--dataset {file} --num-prompts 3 --output-len 2 --output json"
    assert main(["bench", "throughput", *ENGINE, *words.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["output_tokens"]) == (3, 9)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serve --request-rate 0", "--request-rate, --burstiness: expected a number above 0"),
        ("serve --burstiness -1", "--request-rate, --burstiness: expected a number above 0"),
        ("serve --num-prompts 0", "--num-prompts: expected at least 1"),
        ("serve --extra-body []", "--extra-body: expected a JSON object"),
        ("serve --vocabulary 9", "--vocabulary 9: expected FIRST:END"),
        ("serve --endpoint /v1/chat/completions", "needs --dataset with messages"),
        ("latency --model none --batch-size 0", "--batch-size: expected at least 1"),
    ],
)
def test_a_wrong_flag_is_named(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words.split()]) == 2
    assert message in capsys.readouterr().err

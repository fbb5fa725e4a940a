"""The router's processor time for Messages and Responses, beside the same request as a chat.

The engines are the router benchmark's stand-ins, one P and one D of them for each request. A turn
asks one body again and again, some at once; all APIs have their turns one behind the other.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.engine.contender import ContenderFailed
from bench.router.interpreter import fastest
from bench.router.mocks import engines
from bench.router.programs import programs
from bench.router.routers import Router, running
from bench.router.shape import Row

APIS = ("chat", "messages", "responses")
_PATHS = {"chat": "chat/completions", "messages": "messages", "responses": "responses"}
SIZES = {"short": 500, "200k": 200_000}
TOKENS = 32
"""Of a stream: as many events of the engine."""
_SOME, _SOME_STREAMS = 8, 32
_WARM_UP = 40
_ANSWER_S = 30.0
_TOOLS = 8
_TURN_CHARACTERS = 4000


@dataclass(frozen=True)
class Case:
    """A body of this size, answered whole or as a stream; `wire` as bench.router's rows have it:
    engines as vLLM's, whose streams pass as they come, or as ours, which can be continued."""

    size: str
    is_stream: bool
    wire: str

    @property
    def name(self) -> str:
        """For people and the JSON."""
        return f"{self.size} {'stream' if self.is_stream else 'whole'}, {self.wire}"


CASES = tuple(
    Case(size, is_stream, wire)
    for wire in ("xpyd", "vllm")
    for size in SIZES
    for is_stream in (False, True)
)


@dataclass(frozen=True)
class Cost:
    """Processor time of one request of a turn, in seconds."""

    case: str
    api: str
    number: int
    cpu_s: float


def body(api: str, case: Case) -> bytes:
    """The same conversation in this API's form. A long one is an agent's: tools, their calls and
    results, texts."""
    is_long = SIZES[case.size] > _TURN_CHARACTERS
    turns = _turns(SIZES[case.size]) if is_long else [("user", _text(SIZES[case.size], 1))]
    tools = [_tool(number) for number in range(_TOOLS)] if is_long else []
    made: dict[str, Any] = {"model": "m", "stream": case.is_stream}
    if api == "chat":
        made |= {"max_tokens": TOKENS, "messages": [_as_chat(*turn) for turn in turns]}
        if case.is_stream:
            made["stream_options"] = {"include_usage": True}
        if tools:
            made["tools"] = [{"type": "function", "function": one} for one in tools]
    elif api == "messages":
        made |= {"max_tokens": TOKENS, "messages": [_as_message(*turn) for turn in turns]}
        if tools:
            made["tools"] = [
                {k if k != "parameters" else "input_schema": v for k, v in one.items()}
                for one in tools
            ]
    else:
        made |= {"max_output_tokens": TOKENS, "input": [_as_item(*turn) for turn in turns]}
        if tools:
            made["tools"] = [{"type": "function", **one} for one in tools]
    return json.dumps(made).encode()


def _text(characters: int, seed: int) -> str:
    chance = random.Random(seed)
    words = ("the file", 'says "yes"', "in line", "42\n", "of module", "which calls", "réponse")
    made = ""
    while len(made) < characters:
        made += chance.choice(words) + " "
    return made[:characters]


def _turns(characters: int) -> list[tuple[str, str]]:
    """User, a call, its result, and an answer, again and again."""
    roles = ("user", "call", "result", "assistant")
    count = characters // _TURN_CHARACTERS
    made = [(roles[n % 4], _text(_TURN_CHARACTERS, n)) for n in range(count // 4 * 4)]
    return [*made, ("user", "What is next?")]


def _tool(number: int) -> dict[str, Any]:
    properties = {"text": {"type": "string"}, "line": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["text"]}
    return {"name": f"tool_{number}", "description": _text(300, number), "parameters": schema}


def _as_chat(role: str, text: str) -> dict[str, Any]:
    if role == "call":
        function = {"name": "tool_1", "arguments": json.dumps({"text": text})}
        call = {"id": "call_1", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if role == "result":
        return {"role": "tool", "tool_call_id": "call_1", "content": text}
    return {"role": role, "content": text}


def _as_message(role: str, text: str) -> dict[str, Any]:
    if role == "call":
        block = {"type": "tool_use", "id": "call_1", "name": "tool_1", "input": {"text": text}}
        return {"role": "assistant", "content": [block]}
    if role == "result":
        block = {"type": "tool_result", "tool_use_id": "call_1", "content": text}
        return {"role": "user", "content": [block]}
    return {"role": role, "content": text}


def _as_item(role: str, text: str) -> dict[str, Any]:
    if role == "call":
        arguments = json.dumps({"text": text})
        return {
            "type": "function_call",
            "call_id": "call_1",
            "name": "tool_1",
            "arguments": arguments,
        }
    if role == "result":
        return {"type": "function_call_output", "call_id": "call_1", "output": text}
    return {"type": "message", "role": role, "content": text}


def measure(
    rounds: int, requests: int, folder: Path, say: Callable[[str], None]
) -> tuple[list[Cost], str]:
    """All cases in turns, and the version of the Python that runs the router. NotHere without a C
    compiler; ContenderFailed where the router does not answer."""
    cores = sorted(os.sched_getaffinity(0))
    python = fastest()
    found: list[Cost] = []
    os.sched_setaffinity(0, cores[1:] or cores)
    try:
        with engines(programs().engine) as mocks:
            for wire in dict.fromkeys(case.wire for case in CASES):
                row = Row(f"xpyd-{wire}", "xpyd", wire="xpyd" if wire == "xpyd" else "vllm")
                with running(row, mocks, folder, cores=str(cores[0]), python=python.path) as router:
                    for number in range(-1, rounds):
                        for case in (one for one in CASES if one.wire == wire):
                            costs = _turn(router, case, number, requests if number >= 0 else 0)
                            if number >= 0:
                                found += costs
                                said = ", ".join(f"{c.api} {c.cpu_s * 1e6:.0f} us" for c in costs)
                                say(f"round {number + 1}, {case.name}: {said}")
    finally:
        os.sched_setaffinity(0, cores)
    return found, python.version


def _turn(router: Router, case: Case, number: int, requests: int) -> list[Cost]:
    """Each API once, another first in each round; 0 `requests`: to warm up."""
    shift = number % len(APIS)
    found: list[Cost] = []
    count = max(_SOME, requests or _WARM_UP)
    for api in (*APIS[shift:], *APIS[:shift]):
        data = _request(api, body(api, case))
        before_s = router.cpu_s()
        asyncio.run(_ask_all(router.port, data, count, is_stream=case.is_stream))
        found.append(Cost(case.name, api, number, (router.cpu_s() - before_s) / count))
    return sorted(found, key=lambda cost: APIS.index(cost.api))


def _request(api: str, data: bytes) -> bytes:
    head = (
        f"POST /v1/{_PATHS[api]} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def _ask_all(port: int, data: bytes, count: int, *, is_stream: bool) -> None:
    """`count` requests on some connections that stay open."""
    some = min(count, _SOME_STREAMS if is_stream else _SOME)
    each = [count // some + (n < count % some) for n in range(some)]
    await asyncio.gather(*(_ask_some(port, data, n, is_stream=is_stream) for n in each))


async def _ask_some(port: int, data: bytes, count: int, *, is_stream: bool) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        for _ in range(count):
            writer.write(data)
            await asyncio.wait_for(_answer(reader, is_stream=is_stream), _ANSWER_S)
    finally:
        writer.close()


async def _answer(reader: asyncio.StreamReader, *, is_stream: bool) -> None:
    """Read one whole answer. ContenderFailed for any but a 200 in the form that was asked for."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    is_chunked = b"transfer-encoding: chunked" in head
    if b" 200 " not in head.partition(b"\r\n")[0] or is_chunked != is_stream:
        raise ContenderFailed(f"the router answered {head!r} {await reader.read(500)!r}")
    if is_chunked:
        await reader.readuntil(b"\r\n0\r\n\r\n")
    else:
        length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))

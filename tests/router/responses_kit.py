"""What tests of Responses share: requests read, streams of chats played, answers of chats."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import orjson

from xpyd_router.request.client_request import parse_request
from xpyd_router.translations.responses import Responses
from xpyd_router.translations.responses_store import ResponseStore
from xpyd_router.translations.seam import ChatReader, Translation

Json = dict[str, Any]
HEX = "0123456789abcdef"
NOW_S = 1234


def api(store_bytes: int = 0) -> Responses:
    store = ResponseStore(store_bytes) if store_bytes else None
    return Responses(store, lambda: NOW_S)


def read(served: Responses | None = None, **fields: Any) -> Translation:
    body = {"model": "m", "input": "Hi", **fields}
    return (served or api()).read(json.dumps(body).encode())


def chat_of(**fields: Any) -> Json:
    """The chat of a request, which the router can serve."""
    chat = read(**fields).chat.raw
    parse_request("chat/completions", chat)
    return orjson.loads(chat)


def messages_of(*items: Json, **fields: Any) -> list[Json]:
    return chat_of(input=list(items), **fields)["messages"]


FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
OTHER = {"type": "function", "name": "g", "description": "G"}


def chunk(delta: Json, finish: str | None = None, **choice: Any) -> bytes:
    made = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **choice}
    head = {"id": f"chatcmpl-{HEX}", "object": "chat.completion.chunk", "created": 7, "model": "m"}
    return b"data: " + orjson.dumps({**head, "choices": [made], "usage": None}) + b"\n\n"


USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 7,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 3},
}
ROLE = chunk({"role": "assistant", "content": ""})
ENDING = b"data: " + orjson.dumps({"id": "x", "choices": [], "usage": USAGE}) + b"\n\n"
DONE = b"data: [DONE]\n\n"


def call_chunk(index: int, text: str, **head: Any) -> bytes:
    name = {"name": head.pop("name")} if "name" in head else {}
    function = {**name, "arguments": text}
    return chunk({"tool_calls": [{"index": index, **head, "function": function}]})


MIXED = [
    ROLE,
    *(chunk({"reasoning_content": text}) for text in ("Let me ", 'th"ink')),
    *(chunk({"content": text}) for text in ("He", "l\\lo ", "wörld\n")),
    call_chunk(0, "", id="call_1", type="function", name="f"),
    *(call_chunk(0, text) for text in ('{"a":', ' "b"}')),
    call_chunk(1, "", id="call_2", type="function", name="g"),
    call_chunk(1, "{}"),
    chunk({}, "tool_calls"),
    ENDING,
    DONE,
]


def streamed(data: bytes, cuts: list[int] | None = None, **fields: Any) -> list[Json]:
    """The events of a chat's stream that comes in these cuts."""
    reader = ChatReader(read(stream=True, **fields).events(), dict)
    places = sorted({0, len(data), *(cuts or [])})
    came = b"".join([reader.feed(data[a:b]) for a, b in pairwise(places)])
    return parsed(came)


def parsed(came: bytes) -> list[Json]:
    found: list[Json] = []
    for event in came.split(b"\n\n")[:-1]:
        name, data = event.split(b"\n")
        payload = orjson.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + payload["type"].encode()
        found.append(payload)
    return found


def text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


OUTPUT = [
    {
        "id": f"rs_{HEX}_0",
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": 'Let me th"ink'}],
    },
    {
        "id": f"msg_{HEX}_1",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [text_part("Hel\\lo wörld\n")],
    },
    *(
        {
            "id": f"fc_{HEX}_{index}",
            "type": "function_call",
            "status": "completed",
            "call_id": f"call_{index - 1}",
            "name": name,
            "arguments": arguments,
        }
        for index, name, arguments in ((2, "f", '{"a": "b"}'), (3, "g", "{}"))
    ),
]


def whole_chat(finish: str = "tool_calls", **message: Any) -> Json:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    head = {"id": f"chatcmpl-{HEX}", "object": "chat.completion", "created": 7, "model": "m"}
    return {**head, "choices": [choice], "usage": USAGE}

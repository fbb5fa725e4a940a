"""Streams of chats, Messages and Responses, read as strictly as clients may, as one kind of whole.

Each reader raises AssertionError where the events are not those of one answer: a second head or
end, a delta behind the end, a call whose id comes twice, a number that is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Json = dict[str, Any]
Part = tuple[str, ...]
"""`(reasoning, text)`, `(text, text)` or `(call, name, arguments)`."""
_FINISHES = {
    "end_turn": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "incomplete": "length",
}


class Whole(NamedTuple):
    """An answer: parts and finish of each choice, and its tokens. Those of the reasoning are in the
    output's, too."""

    choices: tuple[tuple[tuple[Part, ...], str], ...]
    prompt_tokens: int
    output_tokens: int
    reasoning_tokens: int


@dataclass
class _Choice:
    """A choice whose deltas are joined. Parts come one after another."""

    parts: list[list[str]] = field(default_factory=list[list[str]])
    calls: int = 0
    has_role: bool = False
    finish: str = ""

    def say(self, kind: str, text: str) -> None:
        if not self.parts or self.parts[-1][0] != kind:
            self.parts.append([kind, ""])
        self.parts[-1][1] += text

    def call(self, delta: Json) -> None:
        function = delta["function"]
        if delta["index"] == self.calls:
            assert delta["id"], delta
            assert delta["type"] == "function", delta
            self.parts.append(["call", function["name"], function.get("arguments", "")])
            self.calls += 1
            return
        assert delta["index"] == self.calls - 1, delta
        assert not {"id", "type"} & delta.keys(), delta
        assert "name" not in function, delta
        self.parts[-1][2] += function["arguments"]

    def take(self, choice: Json) -> None:
        delta = choice["delta"]
        assert not self.finish, f"behind the end: {choice}"
        assert ("role" in delta) is not self.has_role, choice
        self.has_role = True
        assert delta.get("reasoning") == delta.get("reasoning_content"), delta
        for kind, name in (("reasoning", "reasoning"), ("text", "content")):
            if delta.get(name):
                self.say(kind, delta[name])
        for call in delta.get("tool_calls", ()):
            self.call(call)
        self.finish = choice["finish_reason"] or ""

    def whole(self) -> tuple[tuple[Part, ...], str]:
        assert self.finish, "no finish_reason"
        return tuple(map(tuple, self.parts)), self.finish


def _payloads(data: bytes, *, named: bool) -> list[Json]:
    found: list[Json] = []
    *events, rest = data.split(b"\n\n")
    assert rest == b"", f"half an event: {rest!r}"
    for event in events:
        if event.startswith(b":"):
            continue
        name, line = event.split(b"\n") if named else (b"", event)
        payload = json.loads(line.removeprefix(b"data: "))
        assert not named or name == b"event: " + payload["type"].encode()
        found.append(payload)
    return found


def chat_stream(data: bytes) -> Whole:
    """The stream of a chat that asked for its usage."""
    assert data.endswith(b"data: [DONE]\n\n"), data[-300:]
    *chunks, last = _payloads(data.removesuffix(b"data: [DONE]\n\n"), named=False)
    assert len({(one["id"], one["created"], one["model"]) for one in [*chunks, last]}) == 1
    choices: dict[int, _Choice] = {}
    for chunk in chunks:
        assert chunk["choices"], chunk
        for choice in chunk["choices"]:
            choices.setdefault(choice["index"], _Choice()).take(choice)
    assert last["choices"] == [], last
    assert sorted(choices) == list(range(len(choices)))
    wholes = tuple(choices[index].whole() for index in sorted(choices))
    return Whole(wholes, *_chat_tokens(last["usage"]))


def chat(data: bytes) -> Whole:
    """A chat that is not streamed."""
    body = json.loads(data)
    made: list[tuple[tuple[Part, ...], str]] = []
    for index, choice in enumerate(body["choices"]):
        assert choice["index"] == index
        message, parts = choice["message"], list[Part]()
        for kind, name in (("reasoning", "reasoning"), ("text", "content")):
            if message.get(name):
                parts.append((kind, message[name]))
        for call in message.get("tool_calls", ()):
            parts.append(("call", call["function"]["name"], call["function"]["arguments"]))
        made.append((tuple(parts), choice["finish_reason"]))
    return Whole(tuple(made), *_chat_tokens(body["usage"]))


def _chat_tokens(usage: Json) -> tuple[int, int, int]:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], usage
    details = usage["completion_tokens_details"]
    return usage["prompt_tokens"], usage["completion_tokens"], details["reasoning_tokens"]


def messages_stream(data: bytes) -> Whole:
    """The stream of a message."""
    events = [one for one in _payloads(data, named=True) if one["type"] != "ping"]
    start, *middle, delta, stop = events
    kinds = [one["type"] for one in (start, delta, stop)]
    assert kinds == ["message_start", "message_delta", "message_stop"], kinds
    assert start["message"]["content"] == []
    parts: list[list[str]] = []
    is_open = False
    for event in middle:
        kind = event["type"].removeprefix("content_block_")
        assert is_open is not (kind == "start"), event
        is_open = kind != "stop"
        if kind == "start":
            assert event["index"] == len(parts), event
            parts.append(_block(event["content_block"]))
        else:
            assert event["index"] == len(parts) - 1, event
            if kind != "stop":
                parts[-1][-1] += _block_delta(parts[-1][0], event["delta"])
    assert not is_open
    usage = delta["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    finish = _FINISHES[delta["delta"]["stop_reason"]]
    thought = usage["output_tokens_details"]["thinking_tokens"]
    return Whole(((tuple(map(tuple, parts)), finish),), prompt, usage["output_tokens"], thought)


def _block(block: Json) -> list[str]:
    match block["type"]:
        case "tool_use":
            assert block["id"]
            assert block["input"] == {}
            return ["call", block["name"], ""]
        case "thinking":
            return ["reasoning", block["thinking"]]
        case _:
            assert block["type"] == "text", block
            return ["text", block["text"]]


def _block_delta(kind: str, delta: Json) -> str:
    if delta["type"] == "signature_delta":
        assert kind == "reasoning"
        return ""
    name, member = {
        "call": ("input_json_delta", "partial_json"),
        "reasoning": ("thinking_delta", "thinking"),
        "text": ("text_delta", "text"),
    }[kind]
    assert delta["type"] == name, delta
    return delta[member]


def responses_stream(data: bytes) -> Whole:
    """The stream of a response, which is what its last event says."""
    events = _payloads(data, named=True)
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    kinds = [one["type"].removeprefix("response.") for one in events]
    assert kinds[:2] == ["created", "in_progress"]
    response = events[-1]["response"]
    assert response["status"] == kinds[-1]
    assert len({one["response"]["id"] for one in events if "response" in one}) == 1
    parts = [_item(one) for one in response["output"]]
    joined = [""] * len(parts)
    added, done = list[int](), list[Json]()
    for event, kind in zip(events[2:-1], kinds[2:-1], strict=True):
        assert "response" not in event, event
        at = event["output_index"]
        if kind == "output_item.added":
            added.append(at)
        elif kind == "output_item.done":
            done.append(event["item"])
        elif kind.endswith(".delta"):
            assert at == len(done) == len(added) - 1, event
            joined[at] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == joined[at]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == joined[at]
        else:
            assert kind in ("content_part.added", "content_part.done"), kind
    assert added == list(range(len(parts)))
    assert done == response["output"]
    assert joined == [part[-1] for part in parts]
    calls = any(part[0] == "call" for part in parts)
    ended = "tool_calls" if calls else "stop"
    usage = response["usage"]
    finish = _FINISHES.get(response["status"], ended)
    thought = usage["output_tokens_details"]["reasoning_tokens"]
    return Whole(((tuple(parts), finish),), usage["input_tokens"], usage["output_tokens"], thought)


def _item(item: Json) -> Part:
    if item["type"] == "function_call":
        assert item["call_id"]
        return ("call", item["name"], item["arguments"])
    kind = {"reasoning": "reasoning", "message": "text"}[item["type"]]
    return (kind, "".join(part["text"] for part in item["content"]))


Reader = Callable[[bytes], Whole]
STREAMS: Sequence[Reader] = (chat_stream, messages_stream, responses_stream)

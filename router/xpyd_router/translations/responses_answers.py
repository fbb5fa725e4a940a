"""OpenAI's Responses: a chat's answer as a response, as its events, and errors. Pure.

Texts stay as they came, escaped for JSON: the text of a whole item is its pieces, joined. Items
have ids made of the response's, so that nothing here is random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import orjson

from xpyd_router.translations.responses_items import assistant, call_of, object_of
from xpyd_router.translations.seam import ChatError, Json, hex_of

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""The chat's finish_reason: why the response is not complete."""
_PARAMS = {
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""What a field of the chat is called in the client's request."""
_NO_USAGE = b"null"


def refusal_body(error: ChatError) -> bytes:
    """The body of an answer that says `error`."""
    message, param = error.message, error.param
    if param is not None:
        place, colon, rest = message.partition(": ")
        if place.startswith(param):
            message = f"{_own(place)}{colon}{rest}".replace("'image_url'", "'input_image'")
        param = _own(param)
    said = {"message": message, "type": error.type, "param": param, "code": error.code}
    return orjson.dumps({"error": said})


def _own(place: str) -> str:
    """A place in the chat as one in the client's request. Messages are not its items."""
    if place.startswith("messages"):
        return "input"
    for chat, own in _PARAMS.items():
        if place == chat or place.startswith((chat + "[", chat + ".")):
            return own + place[len(chat) :]
    return place.replace("].function.", "].", 1) if place.startswith("tools[") else place


def usage_of(usage: Json) -> bytes:
    """The response's usage, of a chat's; null where there is none."""
    if not usage:
        return _NO_USAGE
    prompt, output = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    cached = _count(usage.get("prompt_tokens_details"), "cached_tokens")
    thought = _count(usage.get("completion_tokens_details"), "reasoning_tokens")
    return orjson.dumps(
        {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": prompt + output,
        }
    )


def _count(found: object, name: str) -> int:
    value = cast(Json, found).get(name) if isinstance(found, dict) else None
    return value if isinstance(value, int) else 0


class Asked(NamedTuple):
    """What a response repeats of its request, and what the answers need of it."""

    tail: bytes
    """Members of the response object, as JSON without braces."""
    summarizes: bool
    """The reasoning is shown as a summary."""
    shows_logprobs: bool
    clock: Callable[[], float]
    """Unix seconds."""
    keep: Callable[[Finished], None] | None
    """Called with the response once it is whole; None where it is not kept."""


class Finished(NamedTuple):
    """A whole response."""

    response_id: str
    body: bytes
    messages: tuple[bytes, ...]
    """What the model wrote, as messages of a chat."""
    calls: tuple[str, ...]
    """Ids of its tool calls."""


@dataclass(slots=True)
class Item:
    """An output item. Texts are the insides of JSON strings."""

    kind: str
    item_id: str
    index: int
    is_summary: bool
    """Reasoning that is shown as a summary."""
    call_id: str = ""
    name: str = ""
    pieces: list[bytes] = field(default_factory=list[bytes])
    logprobs: list[Any] = field(default_factory=list[Any])

    @property
    def text(self) -> bytes:
        """All of its text, a JSON string."""
        return b'"' + b"".join(self.pieces) + b'"'

    @property
    def place(self) -> bytes:
        """The member of an event that says which item is meant."""
        return b'"output_index":%d' % self.index

    @property
    def at(self) -> bytes:
        """Members of an event that say where in the item its text belongs."""
        inside = b',"summary_index":0' if self.is_summary else b',"content_index":0'
        if self.kind == "function_call":
            inside = b""
        return b'"item_id":"%b","output_index":%d%b' % (self.item_id.encode(), self.index, inside)

    @property
    def events(self) -> str:
        """What the names of the events of its text begin with."""
        if self.kind == "message":
            return "response.output_text"
        if self.kind == "function_call":
            return "response.function_call_arguments"
        return "response.reasoning_summary_text" if self.is_summary else "response.reasoning_text"

    @property
    def part_events(self) -> str:
        """The same of its part, of an item that has parts."""
        return "response.reasoning_summary_part" if self.is_summary else "response.content_part"

    def part(self, text: bytes) -> bytes:
        """Its only part, with `text`."""
        if self.kind == "reasoning":
            kind = b"summary_text" if self.is_summary else b"reasoning_text"
            return b"".join((b'{"type":"', kind, b'","text":', text, b"}"))
        scores = orjson.dumps(self.logprobs) if self.logprobs else b"[]"
        head = b'{"type":"output_text","text":'
        return b"".join((head, text, b',"annotations":[],"logprobs":', scores, b"}"))

    def shown(self, status: str, *, is_empty: bool = False) -> bytes:
        """The item as JSON; `is_empty`: as it begins."""
        head = f'{{"id":"{self.item_id}","type":"{self.kind}","status":"{status}"'.encode()
        part = b"" if is_empty else self.text
        if self.kind == "function_call":
            name, call_id = orjson.dumps(self.name), orjson.dumps(self.call_id)
            called = b',"call_id":%b,"name":%b,"arguments":' % (call_id, name)
            return b"".join((head, called, part or b'""', b"}"))
        part = part and self.part(part)
        if self.kind == "message":
            return b"".join((head, b',"role":"assistant","content":[', part, b"]}"))
        summary, content = (part, b"") if self.is_summary else (b"", part)
        return b"".join((head, b',"summary":[', summary, b'],"content":[', content, b"]}"))


class Response:
    """A response in the making: its items, and the object that shows them."""

    def __init__(self, asked: Asked, chat: Json) -> None:
        self.asked = asked
        digits = hex_of(str(chat.get("id") or ""))
        self.response_id = "resp_" + digits
        self._inside_ids = orjson.dumps(digits)[1:-1].decode()
        self._created = int(chat.get("created") or 0)
        self._model = str(chat.get("model") or "")
        self.items: list[Item] = []
        self.reason = "stop"
        """The chat's finish_reason."""
        self.stop: object = None
        """The chat's stop_reason."""
        self.usage: Json = {}

    def add(self, kind: str, prefix: str, call_id: str = "", name: str = "") -> Item:
        """A new item."""
        index = len(self.items)
        is_summary = kind == "reasoning" and self.asked.summarizes
        item = Item(kind, f"{prefix}_{self._inside_ids}_{index}", index, is_summary, call_id, name)
        self.items.append(item)
        return item

    @property
    def status(self) -> str:
        """Of the response that has ended."""
        return "incomplete" if self.reason in _INCOMPLETE else "completed"

    def status_of(self, item: Item) -> str:
        """Of an item of the response that has ended: only the last can have been cut off. A stop
        string leaves half of a call, which nobody may run."""
        if item is not self.items[-1]:
            return "completed"
        is_stopped = self.reason == "stop" and isinstance(self.stop, str)
        return "incomplete" if is_stopped and item.kind == "function_call" else self.status

    def shown(self, status: str, error: Json | None = None) -> bytes:
        """The response object. `error`: why it failed."""
        has_ended = status != "in_progress"
        output: list[bytes] = []
        if has_ended:
            for item in self.items:
                said = "incomplete" if error is not None else self.status_of(item)
                output.append(item.shown(said))
        reason = _INCOMPLETE.get(self.reason) if status == "incomplete" else None
        completed = int(self.asked.clock()) if status == "completed" else None
        details: Json = {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "completed_at": completed,
            "error": error,
            "incomplete_details": reason and {"reason": reason},
            "model": self._model,
        }
        pieces = [orjson.dumps(details)[:-1], b',"output":[', b",".join(output), b'],"usage":']
        pieces += (usage_of(self.usage) if has_ended else _NO_USAGE, b",", self.asked.tail, b"}")
        return b"".join(pieces)

    def end(self) -> bytes:
        """The whole response, which is kept where the router keeps responses."""
        body = self.shown(self.status)
        if self.asked.keep is not None:
            calls = [item.call_id for item in self.items if item.kind == "function_call"]
            messages = tuple(self._messages())
            self.asked.keep(Finished(self.response_id, body, messages, tuple(calls)))
        return body

    def _messages(self) -> list[bytes]:
        said, thought, called = b"", list[bytes](), list[bytes]()
        made: list[bytes] = []
        for item in self.items:
            if item.kind == "function_call":
                called.append(call_of(item.call_id, item.name, item.text))
                continue
            if said or called:
                made.append(object_of(assistant(said, thought, called)))
                said, thought, called = b"", [], []
            if item.kind == "message":
                said = item.text
            else:
                thought.append(item.text)
        return [*made, object_of(assistant(said, thought, called))]


def response_of(asked: Asked, answer: Json) -> bytes:
    """The response of a whole chat."""
    choice = cast(Json, answer["choices"][0])
    message = cast(Json, choice["message"])
    made = Response(asked, answer)
    if thought := _text_in(message, "reasoning_content") or _text_in(message, "reasoning"):
        made.add("reasoning", "rs").pieces.append(thought)
    calls = cast("list[Json]", message.get("tool_calls") or [])
    text = _text_in(message, "content")
    if text or not (made.items or calls):
        item = made.add("message", "msg")
        item.pieces.append(text)
        if asked.shows_logprobs:
            item.logprobs += logprobs_in(choice)
    for call in calls:
        function = cast(Json, call.get("function") or {})
        name = str(function.get("name") or "")
        item = made.add("function_call", "fc", str(call.get("id") or ""), name)
        item.pieces.append(_text_in(function, "arguments"))
    made.reason = str(choice.get("finish_reason") or "stop")
    made.stop = choice.get("stop_reason")
    made.usage = cast(Json, answer.get("usage") or {})
    return made.end()


def _text_in(found: Json, name: str) -> bytes:
    """The text of this member, inside its quotes; empty where it is none."""
    text = found.get(name)
    return orjson.dumps(text)[1:-1] if isinstance(text, str) else b""


def logprobs_in(choice: Json) -> list[Json]:
    """The log probabilities of a chat's choice, as Responses has them."""
    said = choice.get("logprobs")
    entries = cast(Json, said).get("content") if isinstance(said, dict) else None
    return [_logprob(entry) for entry in cast("list[Json]", entries or [])]


def _logprob(entry: Json) -> Json:
    top = cast("list[Json]", entry.get("top_logprobs") or [])
    return {**_score(entry), "top_logprobs": [_score(one) for one in top]}


def _score(entry: Json) -> Json:
    """A token's; the bytes of some are not known."""
    shown = {"token": entry.get("token"), "logprob": entry.get("logprob")}
    return {**shown, "bytes": entry.get("bytes") or []}


def _failed(error: ChatError) -> Json:
    """Responses has few codes; engines' failures are the server's."""
    code = "rate_limit_exceeded" if error.type == "rate_limit_error" else "server_error"
    if error.type == "invalid_request_error":
        code = "invalid_prompt"
    return {"code": code, "message": error.message}


class ResponseEvents:
    """seam.Events of Responses. One item is open at a time."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._made = Response(asked, {})
        self._count = 0
        """Events so far."""
        self._open: Item | None = None
        self._head = self._tail = b""
        """A delta of the open item around its number and its text."""
        self._calls: dict[int, Item] = {}
        self._logprobs: list[Json] = []
        """Of the text that follows."""

    def begin(self, chunk: Json, usage: Json) -> bytes:
        """See seam.Events."""
        self._made = Response(self._asked, chunk)
        shown = b'"response":' + self._made.shown("in_progress")
        created = self._event("response.created", shown)
        return created + self._event("response.in_progress", shown)

    def content(self, text: bytes) -> bytes:
        """See seam.Events."""
        item = self._open
        if item is None or item.kind != "message":
            return self._begin("message", "msg") + self.content(text)
        if self._logprobs:
            return self._scored(item, text)
        return self._delta(item, text)

    def logprobs(self, choice: Json) -> None:
        """See seam.Events."""
        self._logprobs += logprobs_in(choice)

    def reasoning(self, text: bytes) -> bytes:
        """See seam.Events."""
        item = self._open
        if item is None or item.kind != "reasoning":
            return self._begin("reasoning", "rs") + self.reasoning(text)
        return self._delta(item, text)

    def tool_call(self, index: int, call_id: str, name: str) -> bytes:
        """See seam.Events."""
        begun = self._begin("function_call", "fc", call_id, name)
        self._calls[index] = self._made.items[-1]
        return begun

    def arguments(self, index: int, text: bytes) -> bytes:
        """See seam.Events."""
        item = self._calls[index]
        if item is not self._open:
            return b""  # engines write one call behind the other
        return self._delta(item, text)

    def finish(self, reason: str, stop_reason: object) -> bytes:
        """See seam.Events."""
        self._made.reason, self._made.stop = reason, stop_reason
        begun = b"" if self._made.items else self._begin("message", "msg")
        return begun + self._close(self._made.status_of(self._made.items[-1]))

    def usage(self, usage: Json) -> bytes:
        """See seam.Events."""
        self._made.usage = usage
        return b""

    def end(self) -> bytes:
        """See seam.Events."""
        body = self._made.end()
        return self._event(f"response.{self._made.status}", b'"response":', body)

    def fail(self, error: ChatError) -> bytes:
        """See seam.Events."""
        body = self._made.shown("failed", _failed(error))
        return self._event("response.failed", b'"response":', body)

    def ping(self) -> bytes:
        """See seam.Events. Responses has none; every reader of events skips a comment."""
        return b": ping\n\n"

    def _scored(self, item: Item, text: bytes) -> bytes:
        """A delta with log probabilities: of its tokens, and those before that showed no text."""
        scores, self._logprobs = self._logprobs, []
        item.logprobs += scores
        item.pieces.append(text)
        shown = (item.at, b',"delta":"', text, b'","logprobs":', orjson.dumps(scores))
        return self._event("response.output_text.delta", *shown)

    def _delta(self, item: Item, text: bytes) -> bytes:
        item.pieces.append(text)
        number, self._count = self._count, self._count + 1
        return b"".join((self._head, b'%d,"delta":"' % number, text, self._tail))

    def _event(self, kind: str, *members: bytes) -> bytes:
        """An event; `members` joined are JSON without braces."""
        number, self._count = self._count, self._count + 1
        head = f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{number},'.encode()
        return b"".join((head, *members, b"}\n\n"))

    def _begin(self, kind: str, prefix: str, call_id: str = "", name: str = "") -> bytes:
        closed = self._close("completed")
        item = self._open = self._made.add(kind, prefix, call_id, name)
        shown = item.shown("in_progress", is_empty=True)
        begun = self._event("response.output_item.added", item.place, b',"item":', shown)
        at = item.at
        if kind != "function_call":
            part = item.part(b'""')
            begun += self._event(item.part_events + ".added", at, b',"part":', part)
        delta = item.events + ".delta"
        head = f'event: {delta}\ndata: {{"type":"{delta}",'.encode()
        self._head = head + at + b',"sequence_number":'
        self._tail = b'","logprobs":[]}\n\n' if kind == "message" else b'"}\n\n'
        return closed + begun

    def _close(self, status: str) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        at, text, done = item.at, item.text, item.events + ".done"
        if item.kind == "function_call":
            closed = self._event(done, at, b',"arguments":', text)
        else:
            scores = b""
            if item.kind == "message":
                scores = b',"logprobs":' + orjson.dumps(item.logprobs)
            closed = self._event(done, at, b',"text":', text, scores)
            closed += self._event(item.part_events + ".done", at, b',"part":', item.part(text))
        shown = item.shown(status)
        return closed + self._event("response.output_item.done", item.place, b',"item":', shown)

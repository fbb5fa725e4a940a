"""The seam between an API and the chat path: what a translation is, and how it reads a chat.

`http` calls an Api with the client's body, serves the Translation's `chat`, and gives back what
`whole` or the Events of a stream make of the answer. ChatReader calls these Events; a chunk of the
usual form goes through it without being parsed. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import orjson
from msgspec import Meta

from xpyd_core.errors import ProtocolError
from xpyd_router.request.answers import DONE, EventSplitter, chunk_of, event_data
from xpyd_router.request.client_request import ChatBody

Json = dict[str, Any]


class ChatError(NamedTuple):
    """A refusal or a failure, as the chat path says it in OpenAI's format."""

    status: int
    """0 in a stream, whose status was 200."""
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None


class Events(Protocol):
    """Writes a streamed answer in the API's form. Each method returns what the client gets, which
    may be nothing. Texts are the inside of JSON strings, escaped as they came, and never empty.
    """

    def begin(self, chunk: Json, usage: Json) -> bytes:
        """The chat's first chunk: id, created, model. `usage` has prompt_tokens where they are
        known this early, else it is empty."""
        ...

    def content(self, text: bytes) -> bytes:
        """More text of the answer."""
        ...

    def reasoning(self, text: bytes) -> bytes:
        """More text of the reasoning."""
        ...

    def tool_call(self, index: int, call_id: str, name: str) -> bytes:
        """A tool call begins; its arguments follow. `index` counts the calls of the answer."""
        ...

    def arguments(self, index: int, text: bytes) -> bytes:
        """More JSON text of the arguments of this tool call."""
        ...

    def finish(self, reason: str, stop_reason: object) -> bytes:
        """The choice has ended. `stop_reason`: the text or the token that ended it, else None."""
        ...

    def logprobs(self, choice: Json) -> None:
        """What follows of `content` has log probabilities: those of the chat's `choice`. Only
        where the chat asked for them."""
        ...

    def usage(self, usage: Json) -> bytes:
        """The chat's usage; behind `finish` where the chat asked for it."""
        ...

    def end(self) -> bytes:
        """The chat's stream is whole."""
        ...

    def fail(self, error: ChatError) -> bytes:
        """The chat's stream has failed; nothing follows."""
        ...

    def ping(self) -> bytes:
        """Nothing has come for a while, between `begin` and the end."""
        ...


class Translation(Protocol):
    """One request."""

    chat: ChatBody
    """The chat. A streamed one should ask for usage."""

    def whole(self, answer: Json) -> bytes:
        """The answer's body, of the chat's (`chat_answer`)."""
        ...

    def events(self) -> Events:
        """What writes the answer's stream. Called once, where the chat is streamed."""
        ...


class Api(Protocol):
    """An API whose requests are translated. Knows nothing of one request."""

    name: str
    """Its path behind /v1/: also the endpoint of metrics and access log."""
    id_prefix: str
    """What its response ids begin with, before 32 hex digits."""
    id_header: bytes
    """The header that has the request's id besides X-Request-Id; empty for none."""
    count_path: str
    """Behind `name`: the path that counts the tokens of a prompt."""

    def read(self, body: bytes, owner: str = "") -> Translation:
        """The request in `body`, of the client key with the name `owner`, which what is kept is
        bound to; ApiError 400 that names the field and what is allowed."""
        ...

    def refusal(self, error: ChatError, request_id: str) -> bytes:
        """The body of an answer that says `error`."""
        ...

    def tokenize_body(self, body: bytes, owner: str = "") -> bytes:
        """The body of /tokenize for a request to `count_path`; ApiError 400 for a wrong one."""
        ...

    def count_body(self, tokens: int) -> bytes:
        """The body of the answer to it."""
        ...


def tokens_of(body: bytes) -> int:
    """The count in an answer of /tokenize; ProtocolError where it has none."""
    try:
        return int(orjson.loads(body)["count"])
    except (orjson.JSONDecodeError, LookupError, TypeError, ValueError) as error:
        raise ProtocolError("an engine's answer has no count of tokens") from error


def hex_of(chat_id: str) -> str:
    """The digits of a chat's id, for the id of the API's own answer."""
    return chat_id.rpartition("-")[2]


def chat_answer(body: bytes) -> Json:
    """An engine's whole chat; ProtocolError where it is none."""
    try:
        answer = orjson.loads(body)
        message = answer["choices"][0]["message"]
    except (orjson.JSONDecodeError, LookupError, TypeError) as error:
        raise ProtocolError("an engine's answer is no chat completion") from error
    if not isinstance(message, dict):
        raise ProtocolError("an engine's answer has no message")
    return answer


def error_of(status: int, body: bytes) -> ChatError:
    """The error in `body`: OpenAI's object, or whatever else an engine answered."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        found = None
    return _error(status, found) or ChatError(status, body.decode("utf-8", "replace")[:2000])


def _error(status: int, document: object) -> ChatError | None:
    inner = cast(Json, document).get("error") if isinstance(document, dict) else None
    if not isinstance(inner, dict):
        return None
    said = cast(Json, inner)
    kind, param, code = said.get("type"), said.get("param"), said.get("code")
    return ChatError(
        status,
        str(said.get("message") or "the request failed"),
        kind if isinstance(kind, str) else "server_error",
        param if isinstance(param, str) else None,
        code if isinstance(code, str) else None,
    )


_INSIDE = re.compile(rb'(?:[^"\\\n]|\\.)*+')
"""The inside of a JSON string."""
_Piece = tuple[bytes, str, Callable[[bytes], bytes]]
"""The key that the text has in the chunk, the text, and what takes it."""


class ChatReader:
    """Reads a chat's stream, of one choice, for `events`.

    Chunks of one kind differ in the text only. So what is before the text and behind it is kept,
    and of a chunk that has the same there the text is cut out. `usage` says what is known of the
    prompt when the stream begins.
    """

    def __init__(self, events: Events, usage: Callable[[], Json]) -> None:
        self._events = events
        self._usage = usage
        self._splitter = EventSplitter()
        self._has_begun = False
        self._calls: set[int] = set()
        self._before = self._behind = b""
        self._least_bytes = 0
        self._take: Callable[[bytes], bytes] = events.content

    def feed(self, data: bytes) -> bytes:
        """What the client gets of the stream's next bytes, in any cut."""
        before, behind = self._before, self._behind
        if (
            before
            and data.startswith(before)
            and data.endswith(behind)
            and len(data) > self._least_bytes
        ):
            text = data[len(before) : -len(behind)]
            if text.find(b'"') < 0 or _INSIDE.fullmatch(text):
                return self._take(text)
        return b"".join([self._event(event) for event in self._splitter.push(data)])

    def _event(self, event: bytes) -> bytes:
        if event == DONE:
            return self._events.end()
        chunk = chunk_of(event)
        if chunk is None:
            failed = _error(0, _document(event))
            return b"" if failed is None else self._events.fail(failed)
        shown: list[bytes] = []
        if not self._has_begun:
            self._has_begun = True
            shown.append(self._events.begin(chunk, self._usage()))
        ours = [choice for choice in chunk["choices"] if not choice.get("index")]
        shown += [self._choice(choice, event) for choice in ours]
        if isinstance(usage := chunk.get("usage"), dict):
            shown.append(self._events.usage(cast(Json, usage)))
        return b"".join(shown)

    def _choice(self, choice: Json, event: bytes) -> bytes:
        shown: list[bytes] = []
        has_logprobs = choice.get("logprobs") is not None
        if has_logprobs:
            self._events.logprobs(choice)
        delta = choice.get("delta")
        pieces = self._pieces(cast(Json, delta), shown) if isinstance(delta, dict) else []
        shown += [take(orjson.dumps(text)[1:-1]) for _, text, take in pieces]
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            shown.append(self._events.finish(reason, choice.get("stop_reason")))
        elif len(pieces) == len(shown) == 1 and not has_logprobs:
            self._learn(event, *pieces[0])
        return b"".join(shown)

    def _pieces(self, delta: Json, shown: list[bytes]) -> list[_Piece]:
        """The texts of a delta. What begins a tool call goes to `shown` behind the texts before."""
        events, found = self._events, list[_Piece]()
        for key in ("reasoning_content", "reasoning"):
            if isinstance(text := delta.get(key), str) and text:
                found.append((b'"%b":"' % key.encode(), text, events.reasoning))
                break  # some engines send it by both names
        if isinstance(text := delta.get("content"), str) and text:
            found.append((b'"content":"', text, events.content))
        calls = delta.get("tool_calls")
        for call in cast("list[object]", calls) if isinstance(calls, list) else []:
            if not isinstance(call, dict):
                continue
            said = cast(Json, call)
            index, function = said.get("index") or 0, cast(Json, said.get("function") or {})
            if index not in self._calls:
                self._calls.add(index)
                shown += [take(orjson.dumps(text)[1:-1]) for _, text, take in found]
                found.clear()
                name = str(function.get("name") or "")
                shown.append(events.tool_call(index, str(said.get("id") or ""), name))
            if isinstance(text := function.get("arguments"), str) and text:
                found.append((b'"arguments":"', text, partial(events.arguments, index)))
        return found

    def _learn(self, event: bytes, key: bytes, text: str, take: Callable[[bytes], bytes]) -> None:
        """Keep what is around the text of `event`, if its text is found by its key."""
        start = event.find(key) + len(key)
        match = _INSIDE.match(event, start)
        if start < len(key) or match is None:
            return
        end = match.end()
        try:
            is_it = orjson.loads(b'"' + event[start:end] + b'"') == text
        except orjson.JSONDecodeError:
            return
        if is_it:
            self._before, self._behind, self._take = event[:start], event[end:], take
            self._least_bytes = start + len(event) - end


def _document(event: bytes) -> object:
    try:
        return orjson.loads(event_data(event))
    except orjson.JSONDecodeError:
        return None


def field(text: str, **schema: Any) -> Meta:  # noqa: ANN401 - any JSON value
    """A member of a client's body, as the OpenAPI document shows it; `schema` replaces what msgspec
    writes of its type."""
    return Meta(description=text, extra_json_schema={"x-checked-by": "router", **schema})

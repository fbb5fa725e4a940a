"""The client of `xpyd bench serve`: streamed requests, the times of their tokens, a load of many.

Plain asyncio, one connection for each request. `EventParser` is sans I/O and knows enough of
HTTP/1.1 for the answer to one request: a status, headers, and a body that is chunked, of a given
length or up to the connection's end. The client imports neither torch nor an HTTP library: it runs
on the same cores as the server that it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast
from urllib.parse import quote, urlsplit

import orjson

from xpyd_core.errors import UserError
from xpyd_tools.bench.load import LoadRequest
from xpyd_tools.bench.summary import Sample, token_gaps

_MAX_HEAD_BYTES = 64 * 1024


class BadAnswer(Exception):
    """No HTTP answer, or another one than a stream of events."""


class EventParser:
    """`feed` bytes as they come, get the data of the events that are complete."""

    def __init__(self, *, events: bool = True) -> None:
        """Without `events` the body is kept as it is, like that of any status but 200."""
        self._events = events
        self.status = 0
        """0 until the head has come."""
        self.ended = False
        """The body is complete. Without a length the connection's end says so."""
        self._input = bytearray()
        self._body = bytearray()
        self._chunked = False
        self._left: int | None = None  # of the chunk, or of the body

    def feed(self, data: bytes) -> list[bytes]:
        """The `data:` of each event that is now complete. BadAnswer."""
        self._input += data
        if self.status == 0 and not self._read_head():
            return []
        while self._take():
            pass
        if self.status != 200 or not self._events:
            return []
        *lines, rest = self._body.split(b"\n")
        self._body = bytearray(rest)
        return [bytes(line[5:].strip()) for line in lines if line.startswith(b"data:")]

    @property
    def text(self) -> str:
        """The body of an answer that is no stream of events."""
        return self._body.decode(errors="replace")

    def _read_head(self) -> bool:
        end = self._input.find(b"\r\n\r\n")
        if end < 0:
            if len(self._input) > _MAX_HEAD_BYTES:
                raise BadAnswer("the answer's head does not end")
            return False
        first, *rest = bytes(self._input[:end]).split(b"\r\n")
        del self._input[: end + 4]
        words = first.split(b" ", 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise BadAnswer(f"no HTTP answer: {first[:40]!r}")
        self.status = int(words[1])
        headers = {
            name.strip().lower(): value.strip().lower()
            for name, _, value in (line.partition(b":") for line in rest)
        }
        self._chunked = headers.get(b"transfer-encoding") == b"chunked"
        if not self._chunked and headers.get(b"content-length", b"").isdigit():
            self._left = int(headers[b"content-length"])
        return True

    def _take(self) -> bool:
        """Move what has come of the body; whether there may be more to move."""
        if self.ended or not self._input:
            return False
        if self._left is None and self._chunked:
            return self._take_chunk_size()
        size = len(self._input) if self._left is None else min(self._left, len(self._input))
        self._body += self._input[:size]
        del self._input[:size]
        if self._left is not None:
            self._left -= size
            if self._left == 0:
                self.ended = not self._chunked
                self._left = None if self._chunked else 0
        return bool(self._input)

    def _take_chunk_size(self) -> bool:
        # The line's end of the chunk before comes before the size.
        start = 2 if self._input.startswith(b"\r\n") else 0
        end = self._input.find(b"\r\n", start)
        if end < 0:
            return False
        line = bytes(self._input[start:end]).split(b";")[0].strip()
        try:
            size = int(line, 16)
        except ValueError as error:
            raise BadAnswer(f"no chunk size: {line[:40]!r}") from error
        del self._input[: end + 2]
        self.ended = size == 0
        self._left = size or None
        return not self.ended


_READ_BYTES = 256 * 1024
_SHOWN_CHARACTERS = 200
CHAT = "/v1/chat/completions"
# What a server that is gone, or speaks something else, leads to.
_FOREIGN = (OSError, BadAnswer, ValueError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True)
class Target:
    """Where requests go, and what each carries besides its prompt."""

    host: str
    port: int
    tls: bool
    endpoint: str
    model: str
    members: Mapping[str, Any]
    """Fields of the body: temperature, ignore_eos, ..."""
    timeout_s: float
    api_key: str = ""
    prefix: str = ""
    """The beginning of every path, without a slash at its end."""

    def body(self, request: LoadRequest) -> bytes:
        """The JSON body for one prompt."""
        prompt = {"messages" if self.endpoint == CHAT else "prompt": request.prompt}
        return orjson.dumps(
            {
                "model": self.model,
                **prompt,
                "max_tokens": request.output_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self.members,
            }
        )

    def head(self, method: str, path: str, length: int) -> bytes:
        """The request's line and headers."""
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (
            f"{method} {self.prefix}{path} HTTP/1.1\r\nHost: {host}:{self.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n{key}"
            "Accept-Encoding: identity\r\nConnection: close\r\n\r\n"
        ).encode()


class BaseUrl(NamedTuple):
    """Where a server's paths begin."""

    host: str
    port: int
    tls: bool
    prefix: str


def split_url(url: str) -> BaseUrl:
    """The parts of a base URL. A path goes before those of the API, whose /v1 it may have at its
    end, as OpenAI's clients are given it. UserError."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    is_http = parts.scheme in ("http", "https") and parts.hostname is not None
    if not is_http or port == -1 or parts.query or parts.fragment:
        raise UserError(f"--base-url {url}: expected http://HOST:PORT or http://HOST:PORT/PREFIX")
    tls = parts.scheme == "https"
    prefix = quote(parts.path.rstrip("/").removesuffix("/v1"), safe="/%:@!$&'()*+,;=~-._")
    return BaseUrl(parts.hostname or "", port or (443 if tls else 80), tls, prefix.rstrip("/"))


# What tokens become; engines with reasoning parsers say it in a member of its own.
_SAID = ("content", "text", "reasoning_content", "reasoning", "tool_calls")


@dataclass
class _Times:
    """Takes the events of one answer."""

    _sent_s: float
    _input_tokens: int
    _arrivals: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    _ids: int = 0
    _usage: int = 0
    _done: bool = False

    def take(self, data: bytes, now: float) -> None:
        """One event's data."""
        if data == b"[DONE]":
            self._done = True
            return
        chunk = cast("dict[str, Any]", orjson.loads(data))
        if chunk.get("error"):
            raise BadAnswer(str(chunk["error"])[:_SHOWN_CHARACTERS])
        usage = chunk.get("usage")
        if usage:
            self._usage = int(usage["completion_tokens"])
            self._input_tokens = int(usage["prompt_tokens"])
        choices = cast("list[dict[str, Any]]", chunk.get("choices") or [])
        for choice in choices:
            # Where ids are named, they say how many tokens came; else the server's own count.
            ids = choice.get("token_ids")
            self._ids += len(ids or ())
            delta = cast("dict[str, Any]", choice.get("delta") or choice)
            if ids or any(delta.get(name) for name in _SAID):
                self._arrive(now, len(ids or "1"))

    def _arrive(self, now: float, tokens: int) -> None:
        if self._arrivals and self._arrivals[-1][0] == now:
            tokens += self._arrivals.pop()[1]
        self._arrivals.append((now, tokens))

    def sample(self) -> Sample:
        """The request, done."""
        arrivals = self._arrivals
        if not self._done or not arrivals:
            raise BadAnswer("the stream ended early" if arrivals else "no token came")
        return Sample(
            self._sent_s,
            ttft_s=arrivals[0][0] - self._sent_s,
            gaps_s=token_gaps(arrivals),
            e2e_s=arrivals[-1][0] - self._sent_s,
            input_tokens=self._input_tokens,
            output_tokens=self._ids or self._usage or sum(count for _, count in arrivals),
        )


async def send_streaming(target: Target, request: LoadRequest) -> Sample:
    """Send one request and read it to its end. A failure goes into the sample's `error`."""
    body = target.body(request)
    known = len(request.prompt) if isinstance(request.prompt, tuple) else 0
    sent_s = time.perf_counter()
    times = _Times(sent_s, known)
    try:
        async with asyncio.timeout(target.timeout_s):
            await _exchange(target, target.head("POST", target.endpoint, len(body)) + body, times)
        return times.sample()
    except TimeoutError:
        return Sample(sent_s, error=f"no answer within {target.timeout_s:g} s")
    except _FOREIGN as error:
        return Sample(sent_s, error=f"{type(error).__name__}: {error}")


async def first_model(target: Target) -> str:
    """The server's first model. UserError when it does not say."""
    try:
        async with asyncio.timeout(target.timeout_s):
            parser = await _exchange(target, target.head("GET", "/v1/models", 0), None)
        return str(orjson.loads(parser.text)["data"][0]["id"])
    except _FOREIGN as error:
        address = f"{target.host}:{target.port}{target.prefix}"
        raise UserError(f"--base-url: {address} does not name its models: {error}") from error


async def _exchange(target: Target, request: bytes, times: _Times | None) -> EventParser:
    """Events go to `times`; without it the whole body stays in the parser."""
    tls = ssl.create_default_context() if target.tls else None
    reader, writer = await asyncio.open_connection(target.host, target.port, ssl=tls)
    parser = EventParser(events=times is not None)
    try:
        writer.write(request)
        await writer.drain()
        while not parser.ended:
            data = await reader.read(_READ_BYTES)
            if not data:
                break
            now = time.perf_counter()
            for event in parser.feed(data):
                if times is not None:
                    times.take(event, now)
    finally:
        writer.close()
    if parser.status != 200:
        raise BadAnswer(f"HTTP {parser.status}: {parser.text[:_SHOWN_CHARACTERS]}")
    return parser


async def run_load(
    target: Target,
    requests: Sequence[LoadRequest],
    times_s: Sequence[float],
    *,
    max_concurrency: int | None = None,
    done: Callable[[Sample], None] = lambda _: None,
) -> list[Sample]:
    """Send `requests[i]` at `times_s[i]` from now on (ascending), later where `max_concurrency` are
    under way. The samples are in the requests' order; `done` is called with each as it ends."""
    turn = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()

    async def one(request: LoadRequest) -> Sample:
        async with turn:
            sample = await send_streaming(target, request)
        done(sample)
        return sample

    start_s = time.perf_counter()
    tasks: list[asyncio.Task[Sample]] = []
    async with asyncio.TaskGroup() as group:
        for request, at_s in zip(requests, times_s, strict=True):
            wait_s = start_s + at_s - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.append(group.create_task(one(request)))
    return [task.result() for task in tasks]

"""One streamed request of OpenAI's completions or chat API, and the times of its tokens.

Plain asyncio, a connection for each request. It knows neither the load nor the figures.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from urllib.parse import quote, urlsplit

import orjson

from xpyd_core.errors import UserError
from xpyd_worker.bench.events import BadAnswer, EventParser
from xpyd_worker.bench.figures import Sample, token_gaps
from xpyd_worker.bench.prompts import Ask

_READ_BYTES = 256 * 1024
_SHOWN_CHARACTERS = 200
CHAT = "/v1/chat/completions"
# What a server that is gone, or speaks something else, leads to.
_FOREIGN = (OSError, BadAnswer, ValueError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True)
class Target:
    """Where requests go, and what each carries beside its prompt."""

    host: str
    port: int
    tls: bool
    endpoint: str
    model: str
    members: Mapping[str, Any]
    """Of the body: temperature, ignore_eos, ..."""
    timeout_s: float
    api_key: str = ""
    prefix: str = ""
    """Of every path, without a slash at its end."""

    def body(self, ask: Ask) -> bytes:
        """The JSON body for one prompt."""
        prompt = {"messages" if self.endpoint == CHAT else "prompt": ask.prompt}
        return orjson.dumps(
            {
                "model": self.model,
                **prompt,
                "max_tokens": ask.output_tokens,
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


class _Times:
    """Takes the events of one answer."""

    def __init__(self, sent_s: float, input_tokens: int) -> None:
        self._sent_s = sent_s
        self._arrivals: list[tuple[float, int]] = []
        self._input_tokens = input_tokens
        self._ids = 0
        self._usage = 0
        self._done = False

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
            text = delta.get("content") or delta.get("text")
            if ids or text:
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


async def ask_streaming(target: Target, ask: Ask) -> Sample:
    """Send one request and read it to its end. What goes wrong stands in the sample's `error`."""
    body = target.body(ask)
    known = len(ask.prompt) if isinstance(ask.prompt, tuple) else 0
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

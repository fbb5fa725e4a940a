"""`xpyd chat`: a conversation with a fleet, or with any OpenAI endpoint, streamed to the terminal.

Standard library only. One-shot where a message is given or standard input is no terminal.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO, cast
from urllib.parse import urlsplit

from xpyd_core.errors import UserError

TIMEOUT_S = 600.0
"""Longest silence of the server: a cold prefill of a long prompt on a slow machine."""
_MAX_LINE_BYTES = 1 << 20
_MAX_ERROR_BYTES = 64 << 10


@dataclass
class Conversation:
    """One endpoint, one model, and the messages so far."""

    url: str
    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    api_key: str = field(default="", repr=False)
    """What the endpoint knows its client by; empty: it asks for none."""
    ca_file: Path | None = None
    """Authorities that the endpoint's certificate must come from; None: SSL_CERT_FILE's, or the
    system's."""
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    on_reasoning: Callable[[str], None] | None = None
    """Gets what the model thinks, which is no part of the answer."""

    def ask(self, text: str) -> Iterator[str]:
        """Send `text`; yields the answer's pieces as they arrive and keeps them as a message."""
        if not self.model:
            self.model = first_model(self)
        self.messages.append({"role": "user", "content": text})
        body: dict[str, Any] = {"model": self.model, "messages": self.messages, "stream": True}
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        if self.temperature is not None:
            body["temperature"] = self.temperature
        answer: list[str] = []
        try:
            for thought, piece in _stream(self, body):
                if thought and self.on_reasoning is not None:
                    self.on_reasoning(thought)
                if piece:
                    answer.append(piece)
                    yield piece
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                self.messages.pop()


def run_chat(conversation: Conversation, message: str | None, *, stdin: TextIO, out: TextIO) -> int:
    """Print one answer to `message` (or to what stdin holds), or talk until Ctrl-D.

    A terminal shows the reasoning, too, less bright.
    """
    if out.isatty():

        def show(thought: str) -> None:
            out.write(f"\033[2m{thought}\033[0m")
            out.flush()

        conversation.on_reasoning = show
    if message is None and not stdin.isatty():
        message = stdin.read()
    if message is not None:
        if not message.strip():
            raise UserError("nothing to say: give a MESSAGE, or pipe one in")
        if not _say(conversation, message, out):
            raise KeyboardInterrupt  # who started this command ignores a second one
        return 0
    with suppress(ImportError):
        import_module("readline")  # input() then has line editing and history
    out.write("Ctrl-C stops an answer, Ctrl-D leaves.\n")
    while True:
        try:
            text = input("> ")
        except EOFError:
            out.write("\n")
            return 0
        except KeyboardInterrupt:
            out.write("\n")
            continue
        if text.strip():
            try:
                _say(conversation, text, out)
            except UserError as error:
                out.write(f"{error}\n")


def _say(conversation: Conversation, text: str, out: TextIO) -> bool:
    """Print the answer as it comes; False: stopped by Ctrl-C."""
    finished = True
    with closing(cast("Any", conversation.ask(text))) as pieces:
        try:
            for piece in pieces:
                out.write(piece)
                out.flush()
        except KeyboardInterrupt:
            finished = False
    out.write("\n")
    out.flush()
    return finished


def first_model(asker: Conversation) -> str:
    """The first model that the endpoint names."""
    url = asker.url
    with closing(_connect(asker)) as connection:
        answer = _send(connection, "GET", "models", None, asker)
        listed = _json(answer.read(_MAX_LINE_BYTES)).get("data")
    for entry in cast("list[Any]", listed) if isinstance(listed, list) else []:
        if isinstance(entry, dict) and "id" in entry:
            return str(cast("dict[str, Any]", entry)["id"])
    raise UserError(f"{url} names no model; say --model")


def _stream(asker: Conversation, body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Pieces of reasoning and of the answer."""
    with closing(_connect(asker)) as connection:
        answer = _send(connection, "POST", "chat/completions", body, asker)
        while line := _read_line(answer, asker.url):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = _json(data)
            if "error" in event:
                raise UserError(f"the answer broke off: {_message(event)}")
            choices: list[dict[str, Any]] = event.get("choices") or []
            for choice in choices:
                delta: dict[str, Any] = choice.get("delta") or {}
                thought = delta.get("reasoning_content") or delta.get("reasoning")
                yield str(thought or ""), str(delta.get("content") or "")


def _read_line(answer: http.client.HTTPResponse, url: str) -> bytes:
    try:
        return answer.readline(_MAX_LINE_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"{url}: the answer broke off: {error}") from error


def _connect(asker: Conversation) -> http.client.HTTPConnection:
    parts = urlsplit(asker.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"--url {asker.url!r}: expected http://HOST:PORT or https://HOST:PORT")
    if parts.scheme == "http":
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_S)
    try:
        context = ssl.create_default_context(cafile=asker.ca_file)
    except OSError as error:  # ssl.SSLError is one
        raise UserError(f"--ca-file: cannot use {asker.ca_file}: {error}") from error
    return http.client.HTTPSConnection(
        parts.hostname, parts.port, timeout=TIMEOUT_S, context=context
    )


def _base(url: str) -> str:
    """The path before /v1, which may be given or not."""
    return urlsplit(url).path.rstrip("/").removesuffix("/v1")


def _send(
    connection: http.client.HTTPConnection,
    method: str,
    what: str,
    body: dict[str, Any] | None,
    asker: Conversation,
) -> http.client.HTTPResponse:
    url, api_key, path = asker.url, asker.api_key, f"{_base(asker.url)}/v1/{what}"
    payload = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    try:
        connection.request(method, path, payload, headers)
        answer = connection.getresponse()
        if answer.status == 200:
            return answer
        text = answer.read(_MAX_ERROR_BYTES)
    except ssl.SSLCertVerificationError as error:
        raise UserError(
            f"{url}: its certificate is refused: {error.verify_message} (--ca-file or SSL_CERT_FILE"
            " names the authority; the certificate must have the URL's name or address)"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(f"{url} does not answer: {reason}") from error
    try:
        words = _message(_json(text))
    except UserError:
        words = text.decode("utf-8", "replace")[:200]
    hint = " (give --api-key, or set XPYD_API_KEY)" if answer.status == 401 and not api_key else ""
    raise UserError(f"{url} answered {answer.status}: {words}{hint}")


def _message(answer: dict[str, Any]) -> str:
    error = answer.get("error")
    if isinstance(error, dict):
        return str(cast("dict[str, Any]", error).get("message"))
    return str(error)


def _json(data: bytes) -> dict[str, Any]:
    try:
        read: object = json.loads(data)
    except ValueError:
        read = None
    if not isinstance(read, dict):
        shown = data[:80].decode("utf-8", "replace")
        raise UserError(f"not the JSON of an OpenAI endpoint: {shown!r}")
    return cast("dict[str, Any]", read)

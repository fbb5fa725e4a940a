"""Answers of JSON schemas: a schema that is new, the same again, and as many tokens without one.

Each contender is asked the same, one request after another. The plain answer follows the one with
a grammar and has as many tokens, so that a ratio is of two neighbours.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from bench.agents.schemas import Shape, renamed, response_format
from bench.engine.contender import ContenderFailed, Server
from bench.environments import cache, environment

MAX_TOKENS = 256
AT_ONCE = 8
_LEAST_TOKENS = 16
"""Of an answer whose time between tokens counts."""
_REQUEST_S = 60.0
_EVENT_END = b"\n\n"
JSON_SCHEMA = "4.26.0"
_PIN = f"jsonschema[format-nongpl]=={JSON_SCHEMA}"
_JUDGE_S = 300.0
_JUDGE = """
import json, sys
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import validator_for
def fits(schema, text):
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))
    except (ValueError, ValidationError):
        return False
    return True
print(json.dumps([fits(*json.loads(line)) for line in sys.stdin]))
"""


@dataclass
class Answer:
    """A streamed chat. `at_s` are the times at which text came, since the request was sent."""

    status: int = 0
    error: str = ""
    text: str = ""
    finish: str = ""
    tokens: int = 0
    total_s: float = 0.0
    at_s: list[float] = field(default_factory=list[float])

    @property
    def itl_s(self) -> float | None:
        """Mean time between two tokens; None where there are few, or most came together: of a
        server that is behind the events say nothing."""
        if self.tokens < _LEAST_TOKENS or 2 * len(self.at_s) < self.tokens:
            return None
        return (self.at_s[-1] - self.at_s[0]) / (self.tokens - 1)

    @property
    def ttft_s(self) -> float | None:
        """To the first text; None where none came."""
        return self.at_s[0] if self.at_s else None


def ask(port: int, members: Mapping[str, Any], *, deadline_s: float = _REQUEST_S) -> Answer:
    """Ask for a chat that is streamed. ContenderFailed where nobody answers."""
    body = {
        "model": "bench",
        "messages": [{"role": "user", "content": "What is in the red box? Say it as JSON."}],
        "stream": True,
        "stream_options": {"include_usage": True},
        **members,
    }
    answer = Answer()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=deadline_s)
    data = json.dumps(body).encode()
    begun_s = time.perf_counter()
    try:
        connection.request(
            "POST", "/v1/chat/completions", data, {"Content-Type": "application/json"}
        )
        came = connection.getresponse()
        answer.status = came.status
        if came.status != 200:
            answer.error = came.read().decode(errors="replace")
        else:
            _read(came, answer, begun_s)
    except (OSError, http.client.HTTPException) as error:
        raise ContenderFailed(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
        answer.total_s = time.perf_counter() - begun_s
    return answer


def _read(came: http.client.HTTPResponse, answer: Answer, begun_s: float) -> None:
    rest = b""
    while data := came.read1(1 << 16):
        now_s = time.perf_counter() - begun_s
        *events, rest = (rest + data).split(_EVENT_END)
        for event in events:
            if event.startswith(b"data: {"):
                _take(json.loads(event[6:]), answer, now_s)


def _take(chunk: dict[str, Any], answer: Answer, now_s: float) -> None:
    if "error" in chunk:
        # vLLM begins a stream before it has looked at the schema.
        answer.status = chunk["error"].get("code") or 500
        answer.error = json.dumps(chunk)
        return
    if chunk.get("usage"):
        answer.tokens = chunk["usage"]["completion_tokens"]
    for choice in chunk["choices"]:
        if text := choice["delta"].get("content"):
            answer.text += text
            answer.at_s.append(now_s)
        answer.finish = choice.get("finish_reason") or answer.finish


@dataclass(frozen=True)
class Asked:
    """One schema at one contender in one round. `plain` is None where there was no answer."""

    contender: str
    shape: str
    group: str
    number: int
    new: Answer
    again: Answer
    plain: Answer | None


def ending(answer: Answer) -> str:
    """How it ended: `refused`, `failed`, `cut` at max_tokens, or `whole`."""
    if 400 <= answer.status < 500:
        return "refused"
    if answer.status != 200 or answer.error or not answer.finish:
        return "failed"
    return "cut" if answer.finish == "length" else "whole"


def valid(pairs: Sequence[tuple[Mapping[str, Any], str]]) -> list[bool]:
    """Whether each text is a value of the schema beside it, formats included, as `jsonschema` says.
    NotHere."""
    folder = environment(cache() / f"bench-agents/{JSON_SCHEMA}", _PIN, timeout_s=_JUDGE_S)
    done = subprocess.run(
        [str(folder / "bin/python"), "-c", _JUDGE],
        input="".join(json.dumps(pair) + "\n" for pair in pairs),
        capture_output=True,
        text=True,
        timeout=_JUDGE_S,
        check=True,
    )
    return json.loads(done.stdout)


def ask_schema(server: Server, name: str, shape: Shape, number: int, seed: int) -> Asked:
    """A new schema, the same schema, and no schema."""
    schema = renamed(shape.schema, f"{shape.name} {number}")
    sampling = {"temperature": 1.0, "seed": seed}
    members = {**sampling, "max_tokens": MAX_TOKENS, "response_format": response_format(schema)}
    new, again = (ask(server.port, members) for _ in range(2))
    plain = None
    if again.tokens:
        members = {**sampling, "max_tokens": again.tokens, "ignore_eos": True}
        plain = ask(server.port, members)
    return Asked(name, shape.name, shape.group, number, new, again, plain)


def ask_at_once(
    server: Server, shapes: Sequence[Shape], number: int
) -> tuple[list[Answer], list[Answer]]:
    """AT_ONCE answers of as many known schemas, and as many plain ones as long as they are."""
    asked: list[dict[str, Any]] = [
        {
            "temperature": 1.0,
            "seed": number,
            "max_tokens": MAX_TOKENS // 2,
            "response_format": response_format(shape.schema),
        }
        for shape in shapes[:AT_ONCE]
    ]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(lambda one: ask(server.port, {**one, "max_tokens": 1}), asked))
        bound = list(threads.map(lambda one: ask(server.port, one), asked))
        plain = [
            {"temperature": 1.0, "seed": number, "max_tokens": one.tokens or 1, "ignore_eos": True}
            for one in bound
        ]
        return bound, list(threads.map(lambda one: ask(server.port, one), plain))

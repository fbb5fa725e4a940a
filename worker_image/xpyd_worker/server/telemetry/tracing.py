"""What a trace says of one request: values, made when it is over. How it is exported: otel.py.

No span is open while a request runs; its times are in its RequestTimes anyway. So tracing costs a
request nothing until its end, and nothing at all without --otlp-traces-endpoint.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from xpyd_worker.server.bridge import RequestTimes
from xpyd_worker.server.openai.answers import AnswerId
from xpyd_worker.server.openai.generation import Generation, Usage
from xpyd_worker.server.openai.params import Options

Operation = Literal["chat", "text_completion"]
Outcome = Literal["request done", "request failed", "client left"]
# W3C trace context, level 2: a traceparent has 55 characters, later versions may have more; a
# tracestate need not be passed on above 512.
_MAX_TRACEPARENT = 256
_MAX_TRACESTATE = 512


@dataclass(frozen=True)
class FinishedTrace:
    """One request that is over. `ended_s` - `begun_s` is the whole handler, tokenizing included.
    `error`: a word for what went wrong; "" for nothing. `prompts`: of each, when it was submitted,
    left the queue, had its first and its last token; None for what it did not come to."""

    trace: RequestTrace
    ended_s: float
    outcome: Outcome
    error: str
    head: AnswerId
    options: Options
    usage: Usage
    finish_reasons: tuple[str, ...]
    prompts: tuple[RequestTimes, ...]


@dataclass(frozen=True)
class RequestTrace:
    """One request that has begun. `traceparent` and `tracestate` are the caller's headers."""

    operation: Operation
    request_id: str
    traceparent: str
    tracestate: str
    begun_s: float

    @classmethod
    def begin(
        cls, operation: Operation, request_id: str, *, parent: str, state: str
    ) -> RequestTrace:
        """The request whose head has just come, with its two headers of trace context."""
        if len(parent) > _MAX_TRACEPARENT:
            parent = ""
        if len(state) > _MAX_TRACESTATE:
            state = ""
        return cls(operation, request_id, parent, state, time.monotonic())

    def end(
        self, outcome: Outcome, options: Options, generation: Generation, head: AnswerId
    ) -> FinishedTrace:
        """The request is over now."""
        return FinishedTrace(
            self,
            time.monotonic(),
            outcome,
            _error(outcome, generation),
            head,
            options,
            generation.usage,
            generation.finish_reasons,
            tuple(generation.times),
        )


def _error(outcome: Outcome, generation: Generation) -> str:
    match outcome:
        case "request done":
            return ""
        case "client left":
            return "client_left"
        case "request failed":
            # OpenTelemetry's word where there is none: a client that did not read, for example.
            return generation.failure or "_OTHER"

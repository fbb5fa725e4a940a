"""OpenTelemetry spans over OTLP/HTTP; the one module that knows its packages (extra `otel`).

    SERVER "chat MODEL" --- queue --- prefill --- decode      (one set for each prompt)

Attributes follow the gen_ai semantic conventions, and vLLM's gen_ai.latency.* where those have no
name. Sampling, batching, headers and resource come from the standard OTEL_* variables, which the
SDK reads itself. A collector that is away costs a bounded queue (OTEL_BSP_MAX_QUEUE_SIZE).
"""

from __future__ import annotations

import logging
import threading
import time
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import (
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from xpyd_core import __version__
from xpyd_worker.server.bridge import RequestTimes
from xpyd_worker.server.telemetry.tracing import FinishedTrace

_log = logging.getLogger(__name__)
_SERVICE = "xpyd-worker"
_OTLP_PATH = "/v1/traces"


def traces_url(endpoint: str) -> str:
    """Where spans are posted: `endpoint`, with OTLP's own path where it has none."""
    parts = urlsplit(endpoint)
    return urlunsplit(parts._replace(path=_OTLP_PATH)) if parts.path in ("", "/") else endpoint


class OtlpTracer:
    """Takes requests that are over. Loop only; never waits for a collector: the SDK's own thread
    sends."""

    def __init__(self, endpoint: str, *, instance: str, role: str) -> None:
        """`instance` names this process where OTEL_RESOURCE_ATTRIBUTES does not. `role` tells the
        two spans apart that a request has in a fleet."""
        own = Resource.create(
            {SERVICE_NAME: _SERVICE, SERVICE_INSTANCE_ID: instance, "xpyd.role": role}
        )
        self._provider = TracerProvider(
            resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(endpoint=traces_url(endpoint))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("xpyd_worker", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, finished: FinishedTrace) -> None:
        """Make the spans of one request."""
        # From the monotonic clock to Unix time, by the difference of the two clocks now.
        offset_ns = time.time_ns() - time.monotonic_ns()
        trace, head = finished.trace, finished.head
        carrier = {"traceparent": trace.traceparent, "tracestate": trace.tracestate}
        span = self._tracer.start_span(
            f"{trace.operation} {head.model}",
            context=self._propagator.extract({k: v for k, v in carrier.items() if v}, Context()),
            kind=SpanKind.SERVER,
            start_time=_at(trace.begun_s, offset_ns),
        )
        if span.is_recording():
            span.set_attributes(_attributes(finished))
            if finished.error:
                span.set_attribute("error.type", finished.error)
            if finished.outcome == "request failed":
                span.set_status(Status(StatusCode.ERROR))
            for phases in finished.prompts:
                self._phases(span, phases, finished.ended_s, offset_ns)
        span.end(_at(finished.ended_s, offset_ns))

    def _phases(self, parent: Span, phases: RequestTimes, ended_s: float, offset_ns: int) -> None:
        context = set_span_in_context(parent, Context())
        marks = (
            ("queue", phases.submitted_s, phases.started_s),
            ("prefill", phases.started_s, phases.first_token_s),
            ("decode", phases.first_token_s, phases.last_token_s),
        )
        for name, begin_s, end_s in marks:
            if begin_s is None:
                return
            span = self._tracer.start_span(
                name, context=context, start_time=_at(begin_s, offset_ns)
            )
            # What a request was in when it was given up lasted until then.
            span.end(_at(ended_s if end_s is None else end_s, offset_ns))

    def close(self, deadline_s: float) -> None:
        """Send what is left, within the deadline. Blocks: call it on a thread."""
        # The SDK sends what is left with its own retries and deadlines, which are longer.
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(deadline_s)
        if closing.is_alive():
            _log.warning("the collector did not take the last spans within %g s", deadline_s)


def _at(monotonic_s: float, offset_ns: int) -> int:
    return int(monotonic_s * 1e9) + offset_ns


def _attributes(finished: FinishedTrace) -> dict[str, AttributeValue]:
    options, usage, head = finished.options, finished.usage, finished.head
    found: dict[str, AttributeValue] = {
        "gen_ai.operation.name": finished.trace.operation,
        "gen_ai.provider.name": "xpyd",
        "gen_ai.request.id": finished.trace.request_id,
        "gen_ai.request.model": head.model,
        "gen_ai.response.model": head.model,
        "gen_ai.response.id": head.id,
        "gen_ai.response.finish_reasons": finished.finish_reasons,
        "gen_ai.request.temperature": options.temperature,
        "gen_ai.request.top_p": options.top_p,
        "gen_ai.request.choice.count": options.n,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.latency.e2e": finished.ended_s - finished.trace.begun_s,
    }
    if options.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = options.max_tokens
    first = [p for p in finished.prompts if p.first_token_s is not None]
    if first:
        submitted = min(phases.submitted_s for phases in finished.prompts)
        earliest = min(p.first_token_s for p in first if p.first_token_s is not None)
        found["gen_ai.latency.time_to_first_token"] = earliest - submitted
    started = [p.started_s - p.submitted_s for p in finished.prompts if p.started_s is not None]
    if started:
        found["gen_ai.latency.time_in_queue"] = max(0.0, max(started))
    return found

"""Spans over OTLP/HTTP: a real receiver on loopback, which decodes what it is sent."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.ranks.kit.worker import started
from tests.worker.server_fakes import Running, ScriptedEngine, run, say, serving
from xpyd_core.errors import UserError
from xpyd_worker.config import WorkerConfig
from xpyd_worker.config_check import check_config
from xpyd_worker.server.telemetry.otel import OtlpTracer, traces_url

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=abc"}
PATH, CHAT = "/v1/completions", "/v1/chat/completions"
CLOSE_S = 10.0


class Receiver:
    """Collects the spans of every POST, with the resource that they came with."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resource: dict[str, Any] = {}
        self.paths: set[str] = set()
        self.headers: set[str | None] = set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.paths.add(self.path)
                receiver.headers.add(self.headers["X-Tenant"])
                receiver._take(body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name
                del format, args

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def _take(self, body: bytes) -> None:
        for one in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource.update(attributes(one.resource))
            for scope in one.scope_spans:
                self.spans.extend(scope.spans)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(CLOSE_S)
        self._server.server_close()


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()
    try:
        yield receiver
    finally:
        receiver.close()


def attributes(of: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in of.attributes:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        found[item.key] = (
            [one.string_value for one in value.values] if kind == "array_value" else value
        )
    return found


def traced(receiver: Receiver, requests: Any, engine: ScriptedEngine | None = None) -> list[Any]:
    """The spans of what `requests(server)` asked, as the receiver has them at the tracer's end."""

    async def test() -> None:
        tracer = OtlpTracer(receiver.url, instance="chat-decode-0", role="Decode")
        try:
            async with serving(engine, tracer=tracer) as server:
                await requests(server)
                while server.api.admission.requests:  # noqa: ASYNC110 - the task's end records
                    await asyncio.sleep(0.01)
        finally:
            await asyncio.to_thread(tracer.close, CLOSE_S)

    run(test())
    return receiver.spans


def by_name(spans: list[Any]) -> dict[str, Any]:
    return {span.name: span for span in spans}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_continues_the_callers_trace_and_has_its_phases(stream: bool) -> None:
    async def ask(server: Running) -> None:
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 4,
            "temperature": 0.5,
            "stream": stream,
        }
        headers = {**SAMPLED, "X-Request-Id": "order-17"}
        answer = await server.post(CHAT, body, **headers)
        assert answer.status_code == 200

    with receiving() as receiver:
        spans = traced(receiver, ask, ScriptedEngine(say("hello"), step_s=0.002))
    assert receiver.paths == {"/v1/traces"}
    assert receiver.resource["service.name"] == "xpyd-worker"
    assert receiver.resource["service.instance.id"] == "chat-decode-0"
    assert receiver.resource["xpyd.role"] == "Decode"
    found = by_name(spans)
    assert len(spans) == 4
    root = found["chat fake"]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert (root.kind, root.trace_state) == (2, "vendor=abc")
    phases = [found[name] for name in ("queue", "prefill", "decode")]
    assert all(span.parent_span_id == root.span_id for span in phases)
    assert all(span.trace_id == root.trace_id for span in spans)
    edges = [root.start_time_unix_nano]
    for span in phases:
        edges += [span.start_time_unix_nano, span.end_time_unix_nano]
    assert sorted(edges) == edges
    assert edges[-1] <= root.end_time_unix_nano
    assert phases[0].end_time_unix_nano == phases[1].start_time_unix_nano
    assert phases[1].end_time_unix_nano == phases[2].start_time_unix_nano
    named = attributes(root)
    assert named["gen_ai.operation.name"] == "chat"
    assert named["gen_ai.request.id"] == "order-17"
    assert named["gen_ai.request.model"] == named["gen_ai.response.model"] == "fake"
    assert named["gen_ai.response.id"] == "chatcmpl-order-17"
    assert named["gen_ai.response.finish_reasons"] == ["length"]
    assert (named["gen_ai.usage.input_tokens"], named["gen_ai.usage.output_tokens"]) == (8, 4)
    assert (named["gen_ai.request.max_tokens"], named["gen_ai.request.temperature"]) == (4, 0.5)
    assert 0 < named["gen_ai.latency.time_to_first_token"] < named["gen_ai.latency.e2e"]
    assert "error.type" not in named


def test_each_prompt_has_its_phases_and_without_a_parent_a_trace_is_begun() -> None:
    async def ask(server: Running) -> None:
        await server.post(PATH, {"prompt": ["one", "three"], "max_tokens": 3})

    with receiving() as receiver:
        spans = traced(receiver, ask)
    names = sorted(span.name for span in spans)
    assert names == [*["decode"] * 2, *["prefill"] * 2, *["queue"] * 2, "text_completion fake"]
    root = by_name(spans)["text_completion fake"]
    assert root.parent_span_id == b""
    assert attributes(root)["gen_ai.usage.input_tokens"] == 8


def test_a_caller_that_does_not_sample_gets_no_spans() -> None:
    async def ask(server: Running) -> None:
        parent = f"00-{TRACE}-{PARENT}-00"
        await server.post(PATH, {"prompt": "hi"}, traceparent=parent)

    with receiving() as receiver:
        assert traced(receiver, ask) == []


@pytest.mark.parametrize("parent", ["junk", f"00-{TRACE}-{PARENT}", "0" * 5000])
def test_a_broken_traceparent_begins_a_new_trace(parent: str) -> None:
    async def ask(server: Running) -> None:
        answer = await server.post(PATH, {"prompt": "hi"}, traceparent=parent)
        assert answer.status_code == 200

    with receiving() as receiver:
        spans = traced(receiver, ask)
    assert by_name(spans)["text_completion fake"].parent_span_id == b""


def test_a_client_that_leaves_the_queue_leaves_a_span_of_its_wait() -> None:
    async def ask(server: Running) -> None:
        asking = asyncio.create_task(server.post(PATH, {"prompt": "hi"}))
        await server.engine.submitted(1)
        asking.cancel()

    with receiving() as receiver:
        spans = traced(receiver, ask, ScriptedEngine(silent=True))
    found = by_name(spans)
    assert set(found) == {"text_completion fake", "queue"}
    assert attributes(found["text_completion fake"])["error.type"] == "client_left"


@pytest.mark.parametrize("fail_after", [0, 2])
@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("internal", "engine_failed"),
        ("busy", "busy"),
        ("too_long", "context_length_exceeded"),
        ("kv_failed", "kv_transfer_failed"),
        ("grammar", "grammar_failed"),
        ("", "stopping"),
    ],
)
def test_a_failed_request_has_an_error_status_and_says_why(
    kind: Any, word: str, fail_after: int
) -> None:
    async def ask(server: Running) -> None:
        answer = await server.post(PATH, {"prompt": "hi", "stream": True})
        assert '"error"' in answer.text

    engine = ScriptedEngine(fail_after=fail_after, error="" if fail_after else "x", error_kind=kind)
    with receiving() as receiver:
        spans = traced(receiver, ask, engine)
    root = by_name(spans)["text_completion fake"]
    assert (root.status.code, attributes(root)["error.type"]) == (2, word)


def test_when_the_engine_is_gone_spans_say_so() -> None:
    async def ask(server: Running) -> None:
        asking = asyncio.create_task(server.post(PATH, {"prompt": "hi"}))
        await server.engine.submitted(1)
        server.bridge.fail()
        assert (await asking).status_code == 500

    with receiving() as receiver:
        spans = traced(receiver, ask, ScriptedEngine(silent=True))
    assert attributes(by_name(spans)["text_completion fake"])["error.type"] == "engine_failed"


def test_the_standard_variables_name_service_headers_and_sampler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-fleet")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=seven")

    async def ask(server: Running) -> None:
        await server.post(PATH, {"prompt": "hi"})

    with receiving() as receiver:
        assert traced(receiver, ask)
        assert receiver.headers == {"seven"}
        assert receiver.resource["service.name"] == "chat-fleet"
        assert receiver.resource["deployment.environment.name"] == "test"
        receiver.spans.clear()
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
        assert traced(receiver, ask) == []


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otlp/v1/traces", "https://c/otlp/v1/traces"),
    ],
)
def test_an_endpoint_without_a_path_gets_otlps_own(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.parametrize("endpoint", ["collector:4317", "grpc://collector:4317"])
def test_an_endpoint_that_is_no_http_url_is_refused(endpoint: str) -> None:
    with pytest.raises(UserError, match=r"--otlp-traces-endpoint.*not gRPC"):
        check_config(WorkerConfig(model="m", otlp_traces_endpoint=endpoint))


def _worker(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    script = (
        f"import sys; {code}; from xpyd_core.cli import main;"
        "status = main(['worker', '--model', 'm', '--host', '127.0.0.9', '--port', '0',"
        f" *{flags!r}]);"
        "print(status, any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_flag_without_the_extra_says_what_to_install() -> None:
    done = _worker("sys.modules['opentelemetry'] = None", "--otlp-traces-endpoint", "http://c:4318")
    assert done.stdout.split()[0] == "2"
    assert "pip install 'xpyd[otel]'" in done.stderr


def test_without_the_flag_nothing_of_opentelemetry_is_imported() -> None:
    done = _worker("pass")
    assert done.stdout.split() == ["2", "False"]  # 2: there is no model of that name
    assert "is not a folder" in done.stderr


def test_a_collector_that_does_not_answer_keeps_nobody_from_ending() -> None:
    # The SDK's own thread goes on, and complains into a log that this test's end has closed.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracer = OtlpTracer(
            f"http://127.0.0.1:{silent.getsockname()[1]}", instance="i", role="Decode"
        )
        tracer._tracer.start_span("last").end()
        closing = threading.Thread(target=tracer.close, args=(0.05,))
        closing.start()
        # The exporter itself would wait for 10 s.
        closing.join(5)
        assert not closing.is_alive()


@pytest.mark.slow  # it starts a worker
def test_a_worker_that_ends_sends_its_last_spans_before(tmp_path: Path) -> None:
    with receiving() as receiver:
        with started(tmp_path, f"--otlp-traces-endpoint={receiver.url}") as worker:
            body = {"prompt": "The", "max_tokens": 1}
            assert worker.client.post(PATH, json=body).status_code == 200
            worker.process.send_signal(signal.SIGTERM)
            assert worker.process.wait(60) == 0
        assert {span.name.partition(" ")[0] for span in receiver.spans} >= {"text_completion"}

"""A fleet for tests of the router: fake engines that speak the contract, real beats, a real router.

Engines are small aiohttp servers on 127.0.0.x with free ports; what one does is a `script` that a
test may replace. Everything runs in one event loop, and every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import orjson
import zmq
import zmq.asyncio
from aiohttp import web
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.tls_kit import bridged, of_engines, tls_if_asked
from xpyd_core.keys import beat_mac, read_keys
from xpyd_core.messages import Heartbeat, encode_heartbeat
from xpyd_router.config import RouterConfig
from xpyd_router.cross_site import CrossSite
from xpyd_router.fleet.health import HealthRules
from xpyd_router.http.server import Serving
from xpyd_router.router import open_router

PATIENCE_S = 120.0
"""For the whole of a test: a router of processes took 54 s to start on a machine that was full."""
_instance_numbers = itertools.count(1)
server: contextvars.ContextVar[str] = contextvars.ContextVar("server", default="direct")
"""`direct`: answers go straight to the transport; `plain`: through ASGI's send."""
Loop = Callable[[], asyncio.AbstractEventLoop]


def run(
    work: Coroutine[Any, Any, None],
    loop: Loop | None = None,
    patience_s: float | None = PATIENCE_S,
) -> None:
    """Run one test's coroutine under a deadline. `loop` makes another loop than asyncio's own."""

    async def bounded() -> None:
        async with asyncio.timeout(patience_s):
            await work

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds; the test's deadline bounds it."""
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.005)


@dataclass
class Call:
    """One inference request that an engine got."""

    path: str
    request_id: str
    raw: bytes
    body: dict[str, Any]
    headers: dict[str, str]
    is_closed: bool = False
    """The handler was cancelled: the router closed the connection."""

    @property
    def uuid(self) -> str:
        return self.request_id[-32:]


Script = Callable[["HttpEngine", Call, web.Request], Awaitable[web.StreamResponse]]


class Generated:
    """What the contract's engine says to one call.

    Token t of choice c is the text `t<c>.<t> `, its id 100 * c + t.
    """

    def __init__(self, engine: HttpEngine, call: Call) -> None:
        self.body = body = call.body
        self.params = params = body.get("kv_transfer_params") or {}
        self.is_chat = call.path.endswith("chat/completions")
        prompts = body.get("prompt")
        several = isinstance(prompts, list) and prompts and not isinstance(prompts[0], int)
        self.prompts = len(prompts) if several else 1
        self.choices = int(body.get("n") or 1) * self.prompts
        is_stream = body.get("stream") or False
        chat = "chat.completion.chunk" if is_stream else "chat.completion"
        self.object = chat if self.is_chat else "text_completion"
        self.limit = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        self.before = [list(ids) for ids in params.get("continue_from") or [[]] * self.choices]
        self.is_decode = "emit_from" in params
        self.emit_from = params.get("emit_from") or [len(ids) for ids in self.before]
        self.stop_at = engine.stop_at or {}
        self.not_sent = engine.not_sent
        generated = sum(len(self.ids(choice)) for choice in range(self.choices))
        self.usage = {
            "prompt_tokens": 5,
            "completion_tokens": generated,
            "total_tokens": 5 + generated,
        }
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        self.document = {
            "id": params.get("response_id") or f"{prefix}-{call.request_id}",
            "object": self.object,
            "created": params.get("created") or 1234,
            "model": body["model"],
        }

    def ids(self, choice: int) -> list[int]:
        ids = list(self.before[choice])
        while len(ids) < self.limit and not (ids and self.stop_at.get(choice) == len(ids)):
            ids.append(100 * choice + len(ids))
        return ids

    def finish(self, choice: int) -> str:
        return "stop" if self.stop_at.get(choice) == len(self.ids(choice)) else "length"

    def piece(self, choice: int, ids: list[int], *, delta: bool) -> dict[str, Any]:
        text = "".join(f"t{i // 100}.{i % 100} " for i in ids)
        out: dict[str, Any] = {"index": choice, "finish_reason": None, "logprobs": None}
        if self.body.get("logprobs"):
            out["logprobs"] = {"tokens": [str(i) for i in ids]}
        if not self.is_chat:
            out["text"] = text
        elif delta:
            out["delta"] = {"content": text}
        else:
            out["message"] = {"role": "assistant", "content": text}
        if self.body.get("return_token_ids") or (delta and self.is_decode):
            out["token_ids"] = ids
        return out

    def whole(self) -> dict[str, Any]:
        pieces: list[dict[str, Any]] = []
        for choice in range(self.choices):
            ids = self.ids(choice)[self.emit_from[choice] :]
            piece = self.piece(choice, ids, delta=False)
            pieces.append({**piece, "finish_reason": self.finish(choice)})
        answer = {**self.document, "choices": pieces, "usage": self.usage}
        if self.params and not self.is_decode:
            answer["kv_transfer_params"] = {
                "transfer": ["none" if self.not_sent else "granted"] * self.prompts,
                "reason": [self.not_sent] * self.prompts,
                "decode_incarnation": "d-inc",
                "prompt_digest": ["ab" * 32] * self.prompts,
            }
        return answer

    def running(self) -> dict[str, Any]:
        """continuous_usage_stats, as if all had been generated at once."""
        is_asked = (self.body.get("stream_options") or {}).get("continuous_usage_stats")
        return {"usage": self.usage} if is_asked else {}

    def chunks(self) -> Iterator[dict[str, Any]]:
        for position in range(self.limit):
            for choice in range(self.choices):
                ids = self.ids(choice)
                if self.emit_from[choice] <= position < len(ids):
                    piece = self.piece(choice, [ids[position]], delta=True)
                    yield {**self.document, "choices": [piece], **self.running()}
        for choice in range(self.choices):
            piece = self.piece(choice, [], delta=True)
            piece |= {"finish_reason": self.finish(choice), "logprobs": None}
            yield {**self.document, "choices": [piece], **self.running()}
        if (self.body.get("stream_options") or {}).get("include_usage"):
            yield {**self.document, "choices": [], "usage": self.usage}


def sse(payload: object) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


async def start_stream(request: web.Request, **headers: str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
    await response.prepare(request)
    return response


async def serve_model(engine: HttpEngine, call: Call, request: web.Request) -> web.StreamResponse:
    """The contract's engine."""
    generated = Generated(engine, call)
    headers = {"X-Xpyd-Kv": engine.said_of_kv} if engine.said_of_kv else {}
    if not generated.body.get("stream"):
        return web.json_response(generated.whole(), headers=headers)
    response = await start_stream(request, **headers)
    for chunk in generated.chunks():
        await response.write(sse(chunk))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def hang(engine: HttpEngine, call: Call, request: web.Request) -> web.StreamResponse:
    """An engine that never answers."""
    await asyncio.Event().wait()
    raise AssertionError


async def begin_and_hang(
    engine: HttpEngine, call: Call, request: web.Request
) -> web.StreamResponse:
    """An engine that streams its first chunk and then nothing."""
    response = await start_stream(request)
    await response.write(sse(next(Generated(engine, call).chunks())))
    await asyncio.Event().wait()
    raise AssertionError


async def begin_and_die(engine: HttpEngine, call: Call, request: web.Request) -> web.StreamResponse:
    """An engine whose process dies in its stream."""
    response = await start_stream(request)
    await response.write(sse(next(Generated(engine, call).chunks())))
    return await die(engine, call, request)


async def die(engine: HttpEngine, call: Call, request: web.Request) -> web.StreamResponse:
    """An engine whose process dies before it answers."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def answer(status: int, body: Any, **headers: str) -> Script:
    """An engine that answers just this."""

    async def script(_: HttpEngine, __: Call, ___: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status, headers=headers)

    return script


@dataclass
class HttpEngine:
    """The HTTP side of a fake engine. `beat` is what it sends of itself."""

    beat: Heartbeat
    port: int
    script: Script = serve_model
    stop_at: dict[int, int] | None = None
    """Choice -> number of tokens after which it ends with `stop`."""
    calls: list[Call] = field(default_factory=list)
    releases: list[tuple[str, str]] = field(default_factory=list)
    said_of_kv: str = ""
    """D: the header that says what became of the KV."""
    not_sent: str = ""
    """P: why it sends no KV."""
    files: bytes | None = None
    """What it answers to GET /tokenizer."""
    pages: dict[str, Any] = field(default_factory=dict[str, Any])
    """What it answers to other GETs, by path."""
    runner: web.AppRunner | None = None
    health_status: int | None = 200
    """What /health answers; None: nothing, ever."""
    probes: int = 0

    @property
    def served(self) -> int:
        return len(self.calls)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        call = Call(
            request.path,
            request.headers.get("X-Request-Id", ""),
            raw,
            orjson.loads(raw),
            {name.lower(): value for name, value in request.headers.items()},
        )
        self.calls.append(call)
        try:
            return await self.script(self, call, request)
        except (asyncio.CancelledError, ConnectionError):
            call.is_closed = True
            raise

    async def health(self, request: web.Request) -> web.Response:
        self.probes += 1
        if self.health_status is None:
            await asyncio.Event().wait()
        return web.json_response({}, status=self.health_status or 500)

    async def tokenizer(self, request: web.Request) -> web.Response:
        if self.files is None:
            raise web.HTTPNotFound
        return web.Response(body=self.files, content_type="application/json")

    async def page(self, request: web.Request) -> web.Response:
        if request.path not in self.pages:
            raise web.HTTPNotFound
        return web.json_response(self.pages[request.path])

    async def release(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.releases.append((body["uuid"], request.headers.get("X-Xpyd-Mac", "")))
        return web.json_response({})

    async def start(self) -> None:
        """Listen on a free port."""
        app = web.Application()
        app.router.add_post("/v1/completions", self.handle)
        app.router.add_post("/v1/chat/completions", self.handle)
        app.router.add_post("/tokenize", self.handle)
        app.router.add_post("/detokenize", self.handle)
        app.router.add_post("/kv/release", self.release)
        app.router.add_get("/health", self.health)
        app.router.add_get("/tokenizer", self.tokenizer)
        app.router.add_get("/{path:.*}", self.page)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0, ssl_context=of_engines.get()).start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        if self.runner is not None:
            for site in tuple(self.runner.sites):
                await site.stop()
            for _ in range(5):  # a probe that was just accepted becomes one of the runner's
                await asyncio.sleep(0)
            await self.runner.cleanup()
            self.runner = None


@dataclass
class Fleet:
    """A router and the engines that beat to it. `key` signs their beats; None: they have none."""

    router: Serving
    http: aiohttp.ClientSession
    dealer: zmq.asyncio.Socket
    stack: contextlib.AsyncExitStack
    key: bytes | None
    engines: list[HttpEngine] = field(default_factory=list)
    tls_port: int = 0  # the router's own; `router.http_port` may be a bridge's (tls_kit)

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.router.http_port}"

    @property
    def admin(self) -> str:
        return self.base.replace(str(self.router.http_port), str(self.router.admin_port))

    async def engine(
        self, kind: str, *, is_ours: bool = True, files: bytes | None = None, **beat: Any
    ) -> HttpEngine:
        """Start an engine of `kind` P, D or A and let it beat once."""
        number = next(_instance_numbers)
        engine = HttpEngine(Heartbeat(type=kind, http_address="x:1", zmq_address="x:1"), 0)
        engine.files = files  # an engine that has none when it is asked is not asked again
        await engine.start()
        self.stack.push_async_callback(engine.stop)
        ours = {
            "instance": f"{kind.lower()}-{number}",
            "incarnation": f"inc-{number}",
            "continuation": 1,
            "compatibility": "k",
            "models": ("m",),
        }
        engine.beat = Heartbeat(
            type=kind,
            http_address=f"127.0.0.1:{engine.port}",
            zmq_address=f"127.0.0.1:{20000 + number}",
            **({**ours, **beat} if is_ours else beat),
        )
        self.engines.append(engine)
        await self.beat(engine)
        return engine

    async def beat(self, engine: HttpEngine, **changes: Any) -> None:
        """Send one beat and wait until the router has taken it."""
        engine.beat = replace_beat(engine.beat, changes)
        taken = self.taken()
        frame = encode_heartbeat(engine.beat)
        if self.key is not None:
            frame = encode_heartbeat(replace_beat(engine.beat, {"sent_us": now_us()}))
        await self.dealer.send_multipart(
            [frame] if self.key is None else [frame, beat_mac(self.key, frame)]
        )
        await until(lambda: self.taken() > taken)

    def taken(self) -> float:
        """Messages that the discovery port has taken, of whatever outcome."""
        samples = self.router.state.metrics.heartbeats.collect()[0].samples
        return sum(s.value for s in samples if s.name.endswith("_total"))

    def metric(self, name: str, **labels: str) -> float:
        """One sample of the router's metrics; 0 where it is not there yet."""
        text = self.router.state.metrics.render(()).decode()
        pairs = ",".join(f'{k}="{v}"' for k, v in sorted(labels.items()))
        want = "{" + pairs + "}" if labels else ""
        for line in text.splitlines():
            if line.startswith(f"{name}{want} "):
                return float(line.rpartition(" ")[2])
        return 0.0

    async def post(self, path: str = "completions", **body: Any) -> aiohttp.ClientResponse:
        """POST a completion of the model `m` with defaults for what a test does not care for."""
        headers = body.pop("headers", None)
        chat = {"messages": [{"role": "user", "content": "hello"}]}
        asked = {"prompt": "San Francisco is a"} if path == "completions" else chat
        content = {"model": "m", "max_tokens": 4, **asked, **body}
        return await self.http.post(f"{self.base}/v1/{path}", json=content, headers=headers)

    async def json(self, path: str = "completions", **body: Any) -> dict[str, Any]:
        """The JSON answer of a POST that must succeed."""
        async with await self.post(path, **body) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def events(self, path: str = "completions", **body: Any) -> list[Any]:
        """The events of a streamed POST: JSON values, and the text `[DONE]`."""
        async with await self.post(path, stream=True, **body) as response:
            assert response.status == 200, await response.text()
            return parse_events(await response.read())


def now_us() -> int:
    """Unix time in microseconds, for `sent_us`."""
    return time.time_ns() // 1000


def replace_beat(beat: Heartbeat, changes: dict[str, Any]) -> Heartbeat:
    return Heartbeat(**{name: getattr(beat, name) for name in beat.__struct_fields__} | changes)


def parse_events(data: bytes) -> list[Any]:
    assert data.endswith(b"\n\n")
    payloads = [event.removeprefix(b"data: ") for event in data.split(b"\n\n")[:-1]]
    return ["[DONE]" if p == b"[DONE]" else orjson.loads(p) for p in payloads]


def text_of(events: list[Any], choice: int = 0) -> str:
    """The text that a client joins from a stream's chunks."""
    out = ""
    for event in events:
        for item in event["choices"] if event != "[DONE]" else ():
            if item["index"] == choice:
                out += item["text"] if "text" in item else item["delta"].get("content") or ""
    return out


def beating(stack: contextlib.AsyncExitStack, discovery_port: int) -> zmq.asyncio.Socket:
    """A socket by which engines beat to this port of 127.0.0.1; `stack` closes it."""
    context = zmq.asyncio.Context()
    stack.callback(context.destroy, 0)
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{discovery_port}")
    return dealer


@contextlib.asynccontextmanager
async def fleet(**config: Any) -> AsyncGenerator[Fleet]:
    """A router on free ports of 127.0.0.1, serving, with no engines yet."""
    defaults = RouterConfig(
        policy="RoundRobin",  # who is called next is known
        health=HealthRules(slow_start_s=0.0),  # for the same reason
        port=0,
        admin_port=0,
        cross_site=CrossSite(hosts=("x",)),
        discovery_port=0,
        kv_insecure="kv_key_file" not in config,
        pair_wait_s=0.0,
        drain_s=0.0,
        request_timeout_s=PATIENCE_S,
    )
    async with contextlib.AsyncExitStack() as stack:
        protocol = HttpToolsProtocol if server.get() == "plain" else None
        config = {**tls_if_asked(stack), **config}
        router = await stack.enter_async_context(open_router(replace(defaults, **config), protocol))
        serving = asyncio.create_task(router.run())

        async def stop() -> None:
            router.stop()
            await serving

        stack.push_async_callback(stop)
        tls_port = router.http_port
        router.state.http_port = await stack.enter_async_context(bridged(tls_port))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        dealer = beating(stack, router.discovery_port)
        path = config.get("kv_key_file")
        yield Fleet(router, http, dealer, stack, path and read_keys(path)[0], tls_port=tls_port)


@contextlib.asynccontextmanager
async def pair(**config: Any) -> AsyncGenerator[tuple[Fleet, HttpEngine, HttpEngine]]:
    """A fleet of one P and one D of ours."""
    async with fleet(**config) as made:
        yield made, await made.engine("P"), await made.engine("D")

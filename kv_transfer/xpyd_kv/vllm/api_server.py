"""The plugin in the process of vLLM's API server: its routes, and an `Instance` that beats.

    VLLM_PLUGINS=xpyd vllm serve ...

vLLM makes the plugin before its HTTP server listens and gives it the engine's client behind that.
The routes are a plain ASGI application, since vLLM's web framework is not one of ours. Who may ask:
xpyd_core.calls. Answers of a D say what became of the KV, in a header (docs/adr/0059).
"""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from xpyd_core.bodies import refuse
from xpyd_core.calls import Caller, check_caller, check_probe, check_probe_answer, check_release
from xpyd_core.errors import ApiError, UserError
from xpyd_core.kv_outcome import HEADER
from xpyd_core.pod_env import read_pod_env
from xpyd_core.request_id import parse_pair_id
from xpyd_core.tokenizer_files import PATH
from xpyd_kv.vllm import engine_api
from xpyd_kv.vllm.instance import EngineClient, Instance

ROUTES = {
    "/live": "GET",
    PATH: "GET",
    "/drain": "POST",
    "/kv/release": "POST",
    "/kv/probe": "POST",
}
"""Path to method."""
_MAX_BODY_BYTES = 64 * 1024
_MAC_HEADER = b"x-xpyd-mac"
_ID_HEADER = b"x-request-id"
_KV_HEADER = HEADER.lower().encode()

Scope = Mapping[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class _Call:
    """A request: its header lines by lower-case name, and where it comes from."""

    headers: Mapping[bytes, bytes]
    body: Mapping[str, Any]
    caller: Caller


@dataclass(frozen=True)
class _Answer:
    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()


class SideApi:
    """The ASGI application of all ROUTES; 503 until `instance` is there."""

    def __init__(self) -> None:
        self.instance: Instance | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            answer = await self._answer(scope, receive)
        except ApiError as error:
            wait = error.retry_after_s
            more = ((b"retry-after", str(wait).encode()),) if wait is not None else ()
            answer = _Answer(error.status, error.body(), more)
        headers = [(b"content-type", b"application/json"), *answer.headers]
        headers.append((b"content-length", str(len(answer.body)).encode()))
        start = {"type": "http.response.start", "status": answer.status, "headers": headers}
        await send(start)
        await send({"type": "http.response.body", "body": answer.body})

    async def _answer(self, scope: Scope, receive: Receive) -> _Answer:
        instance = self.instance
        if instance is None:
            raise ApiError(503, "the engine is starting", code="starting")
        path = cast(str, scope["path"])[len(cast(str, scope.get("root_path", ""))) :]
        if path == "/live":
            live = instance.live()
            return _json(live, 200 if live["status"] != "failed" else 503)
        if path == PATH:
            return await self._files(instance, scope)
        call = await _read(scope, receive)
        mac = call.caller.mac
        if path == "/drain":
            check_caller(
                call.caller,
                call.body,
                purpose="drain",
                keys=instance.keys,
                incarnation=instance.incarnation,
            )
            return _json(instance.drain(), 202)
        try:
            if path == "/kv/release":
                uuid = check_release(call.body, mac, keys=instance.keys)
                await instance.release(uuid)
                return _json({"released": uuid})
            address = check_probe(call.body, mac, keys=instance.keys, role=instance.role)
            return _json(check_probe_answer(await instance.probe(str(address))))
        except OSError as error:
            raise ApiError(503, "the engine does not answer", code="no_answer") from error

    async def _files(self, instance: Instance, scope: Scope) -> _Answer:
        files = await instance.files()
        if files is None:
            raise ApiError(404, "this instance gives no tokenizer files")
        tag = ((b"etag", files.etag.encode()),)
        asked = dict(cast("list[tuple[bytes, bytes]]", scope["headers"])).get(b"if-none-match", b"")
        if files.is_known(asked.decode("latin-1")):
            return _Answer(304, b"", tag)
        return _Answer(200, files.body, tag)


def _json(document: object, status: int = 200) -> _Answer:
    return _Answer(status, json.dumps(document).encode())


async def _read(scope: Scope, receive: Receive) -> _Call:
    """The request. ApiError 400 for a body that is no JSON object, 413 for a long one."""
    pieces = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client has gone")
        pieces += message.get("body", b"")
        if len(pieces) > _MAX_BODY_BYTES:
            raise ApiError(413, f"the body has more than {_MAX_BODY_BYTES} bytes")
        if not message.get("more_body"):
            break
    try:
        body: object = json.loads(pieces or b"{}")
    except ValueError as error:
        raise refuse("body", "expected JSON") from error
    if not isinstance(body, dict):
        raise refuse("body", "expected a JSON object")
    headers = dict(cast("list[tuple[bytes, bytes]]", scope["headers"]))
    peer, own = scope.get("client"), scope.get("server")
    caller = Caller(
        peer=peer[0] if peer else None,
        own=own[0] if own else None,
        mac=headers.get(_MAC_HEADER, b"").decode("latin-1"),
        headers={name.decode("latin-1") for name in headers},
    )
    return _Call(headers, cast("dict[str, Any]", body), caller)


class KvHeader:
    """ASGI middleware of a D: what became of a request's KV is known when its first token is there.
    vLLM sends a stream's head before that, so the head is held until then."""

    def __init__(self, app: Application, api: SideApi) -> None:
        self._app, self._api = app, api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        instance, uuid = self._api.instance, _pair_uuid(scope)
        if instance is None or instance.role != "Decode" or not uuid:
            return await self._app(scope, receive, send)
        head: Message | None = None

        async def send_with_word(message: Message) -> None:
            nonlocal head
            if message["type"] == "http.response.start" and message["status"] == 200:
                head = message
                return
            if head is not None:
                started, head = head, None
                if word := await instance.kv_word(uuid):
                    lines = [*started.get("headers", ()), (_KV_HEADER, word.encode())]
                    started = {**started, "headers": lines}
                await send(started)
            await send(message)

        await self._app(scope, receive, send_with_word)


def _pair_uuid(scope: Scope) -> str:
    """The uuid of the pair id that the request brings; '' for others."""
    if scope["type"] != "http":
        return ""
    lines = cast("list[tuple[bytes, bytes]]", scope["headers"])
    given = next((value for name, value in lines if name == _ID_HEADER), b"")
    pair = parse_pair_id(given.decode("latin-1")) if given else None
    return pair.uuid if pair is not None else ""


class App(Protocol):
    """vLLM's FastAPI application, as far as it is used."""

    # ASGI's applications have no common base.
    def add_middleware(self, middleware_class: Any, **options: Any) -> None: ...  # noqa: ANN401

    def add_route(self, path: str, route: Any, methods: list[str]) -> None: ...  # noqa: ANN401


class XpydPlugin:
    """vLLM's EndpointPlugin: see vllm/plugins/endpoint_plugins/interface.py."""

    name = "xpyd"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._api = SideApi()
        self._task: asyncio.Task[None] | None = None

    def attach_router(self, app: App) -> None:
        """Add the routes, and the header of a D's answers."""
        for path, method in ROUTES.items():
            app.add_route(path, self._api, methods=[method])
        app.add_middleware(KvHeader, api=self._api)

    async def init_state(
        self, engine_client: EngineClient | None, state: object, args: Namespace
    ) -> None:
        """Begin to beat; vLLM's server listens soon after. UserError for settings with which no
        router would find this instance."""
        if engine_client is None:
            raise UserError("VLLM_PLUGINS: xpyd needs an engine; a render server has none")
        engine_api.log()  # in vLLM's form from here on, in this process, too
        instance = Instance(engine_client, args, read_pod_env())
        await instance.find_engine()
        instance.hold_signals()
        self._api.instance = instance
        self._task = asyncio.get_running_loop().create_task(instance.run())

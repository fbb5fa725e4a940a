"""The plugin in the process of vLLM's API server: its routes, and an `Instance` that beats.

    VLLM_PLUGINS=xpyd vllm serve ...

vLLM makes the plugin before its HTTP server listens and gives it the engine's client behind that.
The routes are a plain ASGI application, since vLLM's web framework is not one of ours. Who may ask:
xpyd_core.calls.
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
from xpyd_core.pod_env import read_pod_env
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

Scope = Mapping[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


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


class App(Protocol):
    """vLLM's FastAPI application, as far as it is used."""

    def add_route(self, path: str, route: Any, methods: list[str]) -> None: ...  # noqa: ANN401 - ASGI


class XpydPlugin:
    """vLLM's EndpointPlugin: see vllm/plugins/endpoint_plugins/interface.py."""

    name = "xpyd"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._api = SideApi()
        self._task: asyncio.Task[None] | None = None

    def attach_router(self, app: App) -> None:
        """Add the routes."""
        for path, method in ROUTES.items():
            app.add_route(path, self._api, methods=[method])

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
        self._api.instance = instance
        self._task = asyncio.get_running_loop().create_task(instance.run())

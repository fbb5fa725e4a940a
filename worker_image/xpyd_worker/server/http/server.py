"""The Quart app on uvicorn: routes, deadlines for heads and writes, listening sockets.

uvicorn waits without limit for a client that does not read, and for the first head of a connection.
A client that does not read would keep its request's KV blocks; a few thousand connections without a
head would use up the file limit. So each write and each head has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, cast

import uvicorn
from quart import Quart
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

import xpyd_core.listen
from xpyd_core import tokenizer_files
from xpyd_core.http_head import Chunks, head_fault, with_one_slash
from xpyd_core.keys import Keys
from xpyd_core.tls_connection import TlsServer
from xpyd_worker.server.http.admin import Admin
from xpyd_worker.server.http.bodies import (
    MAX_BODY_BYTES,
    AsgiApp,
    ChargedBodies,
    Message,
    Receive,
    Scope,
    Send,
    register_errors,
)
from xpyd_worker.server.http.inference import Api
from xpyd_worker.server.request_ids import register_request_ids

HEAD_DEADLINE_S = 30.0


class HeadDeadlineProtocol(HttpToolsProtocol):
    """uvicorn's protocol; a head that is not whole `HEAD_DEADLINE_S` after the connection was made,
    or after its first byte, closes the connection, and one that is wrong is refused, as is a body
    in too many `Chunks`."""

    head_deadline_s = HEAD_DEADLINE_S
    _fault = ""
    _head_timer: asyncio.TimerHandle | None = None

    # uvicorn narrows asyncio's BaseTransport in the same way.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        spoken = cast("ssl.SSLObject | None", transport.get_extra_info("ssl_object"))
        self._is_certified = spoken is not None and bool(spoken.getpeercert(binary_form=True))
        self._chunks = Chunks()
        self._expect_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast("Scope", self.scope)[_CERTIFIED] = self._is_certified
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._forget_head()
        assert self.parser is not None
        self._fault = head_fault(self.parser.get_http_version(), self.headers)
        if self._fault:
            raise ValueError  # what the parser then raises leads to send_400_response
        before = cast("RequestResponseCycle | None", self.cycle)
        if before is None or before.response_complete:
            self._chunks = Chunks()  # with pipelining a read has chunks of several bodies
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """See httptools."""
        self._fault = self._chunks.begin()
        if self._fault:
            raise ValueError

    def on_body(self, body: bytes) -> None:
        self._chunks.size += len(body)
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        # uvicorn calls it for what its parser refuses.
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is not None and cycle.more_body and (cycle.response_started or self.pipeline):
            self.transport.close()  # another request's answer, or this one's, would be before it
        else:
            super().send_400_response(self._fault or msg)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)
        # uvicorn forgets it only where the client closed, not where it reset the connection.
        self._unset_keepalive_if_required()

    def _expect_head(self) -> None:
        self._forget_head()
        self._head_timer = self.loop.call_later(self.head_deadline_s, self._close_late)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_late(self) -> None:
        self._head_timer = None
        self.transport.close()


WRITE_DEADLINE_S = 120.0
_KEEP_ALIVE_S = 75  # above the idle time of clients' pools, so that the client closes first
_BACKLOG = 4096


class WriteDeadline:
    """ASGI middleware: a write that takes longer than `deadline_s` ends the request. Also takes
    the second slash off a path."""

    def __init__(self, app: AsgiApp, deadline_s: float = WRITE_DEADLINE_S) -> None:
        self._app = app
        self._deadline_s = deadline_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline_s = self._deadline_s

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(deadline_s):
                await send(message)

        await self._app(with_one_slash(scope), receive, send_in_time)


_CERTIFIED = "xpyd_certified"
"""In a request's scope: whether its client has shown a certificate."""
_OPEN = ("/health", "/live", "/metrics")
_REFUSAL = (
    b'{"error": {"message": "this engine answers clients with a certificate alone", '
    b'"type": "permission_error", "param": null, "code": 403}}'
)


class OnlyCertified:
    """ASGI middleware: who shows no certificate gets probes and metrics alone.

    Kubelet and Prometheus have no certificate, so TLS itself cannot require one.
    """

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["method"] in ("GET", "HEAD") and scope["path"] in _OPEN
        if scope[_CERTIFIED] or is_open:
            await self._app(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": _REFUSAL})


class Server(uvicorn.Server):
    """uvicorn's server; the signals stay main's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the handlers as they are."""
        yield


def make_server(
    app: object, tls: TlsServer | None = None, *, only_certified: bool = False
) -> Server:
    """A server for `app` (a Quart app), over `tls` where there is one, with `OnlyCertified` before
    it if so; run it by `await serve(sockets=[...])`."""
    inner = cast("AsgiApp", app)

    def connection(**given: object) -> asyncio.Protocol:
        """uvicorn's parameters of a connection's protocol."""
        make = partial(cast("Callable[..., asyncio.Protocol]", HeadDeadlineProtocol), **given)
        return make() if tls is None else tls.wrap(make)

    config = uvicorn.Config(
        WriteDeadline(OnlyCertified(inner) if only_certified else inner),
        http=cast("type[asyncio.Protocol]", connection),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="warning",
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
        server_header=False,
        date_header=False,
    )
    return Server(config)


def listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets, the one on `host` first; OSError when the address is taken."""
    return xpyd_core.listen.listen(host, port, backlog=_BACKLOG)


def create_app(api: Api, admin: Admin, *, signed_by: Keys | None) -> Quart:
    """The Quart app over both. `signed_by`: the keys whose MAC a pair id needs; None: it needs
    none."""
    app = Quart("xpyd_worker", static_folder=None)
    # Quart's own place for middleware, whose two types of an ASGI app do not fit each other.
    charged: Any = ChargedBodies(cast("AsgiApp", app.asgi_app), api.admission.bodies)
    app.asgi_app = charged
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
    # A stream may take longer than any fixed time; what is bounded is each write (WriteDeadline).
    app.config["RESPONSE_TIMEOUT"] = None
    register_request_ids(app, signed_by)
    register_errors(app)
    get, post = ["GET"], ["POST"]
    for path, handler, methods in (
        ("/v1/completions", api.completions, post),
        ("/v1/chat/completions", api.chat, post),
        ("/v1/models", api.models, get),
        ("/v1/models/<path:name>", api.model, get),
        (tokenizer_files.PATH, admin.tokenizer_files, get),
        ("/tokenize", admin.tokenize, post),
        ("/detokenize", admin.detokenize, post),
        ("/health", admin.health, get),
        ("/ping", admin.health, [*get, *post]),
        ("/live", admin.live, get),
        ("/load", admin.load, get),
        ("/version", admin.version, get),
        ("/metrics", admin.show_metrics, get),
        ("/reset_prefix_cache", admin.reset_prefix_cache, post),
        ("/drain", admin.drain, post),
        ("/scale_elastic_ep", admin.scale, post),
        ("/is_scaling_elastic_ep", admin.is_scaling, post),
        ("/kv/release", admin.release, post),
        ("/kv/probe", admin.probe, post),
    ):
        app.add_url_rule(path, path, view_func=handler, methods=methods)
    return app
